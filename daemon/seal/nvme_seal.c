/* Records of tenants with keys: sealed in the threads that compute checksums, and opened there.
 *
 * The payload is sealed in fragments, a layer a fragment where the record has checksums of layers,
 * else as a whole. Their tags stand in the header's page, which has a tag of its own. That one is
 * computed on the event loop, over 4 KiB, since it covers the place, which the record gets last. A
 * read brings the page with the payload and opens that where it lies. docs/design/encryption.md
 * says what is bound to what. */
#include "daemon/tier/nvme.h"

#include "daemon/base/log.h"
#include "daemon/seal/seal.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define MODULE "tier"
#define PAGE_PIECE UINT32_MAX /* the page's own number; the payload's begin at 0 */
#define NO_KEYS_MS 10000u
#define SEALED_BYTES (64ull << 20) /* of memory that sealed writes wait in for their disk */

struct nvme_sealed {
    struct seal_key *key;
    struct seal_box box;
    struct nvme_record_header header;
    /* Of a read: the header's; of a write: its tags are. Owned by the io's memory for
     * TIER_READ_LAYERS. */
    uint8_t *page;
    void *cipher;    /* of a write: what goes to storage; NULL: it lies in the io's own memory */
    uint64_t padded; /* of cipher, counted in tier.sealed_bytes; 0: it has, or will have, none */
    int status;      /* of the thread */
    bool page_owned;
};

static struct nvme_sealed *sealed_of(const struct tier_io *io)
{
    return io->scratch[NVME_IO_SEALED];
}

bool nvme_sealed(const struct tier_io *io)
{
    return sealed_of(io) != NULL;
}

static struct nvme_sealed *sealed_new(struct tier_io *io, uint8_t *page)
{
    struct nvme_sealed *x = calloc(1, sizeof(*x));

    if (!x)
        return NULL;
    x->page = page ? page : aligned_alloc(NVME_PAGE, NVME_PAGE);
    x->page_owned = !page;
    if (!x->page) {
        free(x);
        return NULL;
    }
    io->scratch[NVME_IO_SEALED] = x;
    return x;
}

void nvme_sealed_drop(struct tier *t, struct tier_io *io)
{
    struct nvme_sealed *x = sealed_of(io);

    if (!x)
        return;
    io->scratch[NVME_IO_SEALED] = NULL;
    seal_box_close(&x->box);
    if (x->key)
        seal_key_drop(t->callbacks.seal, x->key);
    seal_memory_give(x->cipher, x->padded);
    t->sealed_bytes -= x->padded;
    if (x->page_owned)
        free(x->page);
    free(x);
}

/* The namespace's key with this id, NULL: the current one. */
static int key_take(struct tier *t, const uint8_t *fingerprint, const uint8_t *id,
                    struct seal_key **out)
{
    const struct nvme_ns_record *r = ns_records_find(&t->ns_records, fingerprint);
    uint64_t now_ms = uv_now(t->loop);

    if (t->callbacks.seal && r && nvme_ns_has_secret(r))
        return seal_key_take(t->callbacks.seal,
                             &(struct seal_space){.fingerprint = r->fingerprint,
                                                  .identity = r->identity,
                                                  .identity_bytes = r->identity_bytes,
                                                  .salt = r->secret,
                                                  .salt_bytes = sizeof(r->secret)},
                             id, out);
    t->metrics->seal_key_missing++;
    if (now_ms >= t->tell_no_keys_ms) {
        t->tell_no_keys_ms = now_ms + NO_KEYS_MS;
        log_warn(
            MODULE, "key-missing", "reason=\"%s\"",
            t->callbacks.seal
                ? "the namespace's record has no secret: it was purged, or could not be written"
                : "encryption.tenants is empty, and there are encrypted parts");
    }
    return -ENOKEY;
}

bool nvme_seal_wanted(const struct tier *t, const uint8_t *fingerprint)
{
    const struct nvme_ns_record *r = ns_records_find(&t->ns_records, fingerprint);

    return r && seal_wanted_by(t->callbacks.seal, r->identity, r->identity_bytes);
}

bool nvme_key_awaited(const struct tier *t, const uint8_t *fingerprint)
{
    const struct nvme_ns_record *r = ns_records_find(&t->ns_records, fingerprint);

    return r && seal_awaited_by(t->callbacks.seal, r->identity, r->identity_bytes);
}

bool nvme_plaintext_allowed(const struct tier *t, const struct nvme_ns_record *r)
{
    return seal_plaintext_allowed(t->callbacks.seal) ||
           !seal_wanted_by(t->callbacks.seal, r->identity, r->identity_bytes);
}

/* ---- writes ---- */

int nvme_sealed_write_begin(struct tier *t, struct tier_io *io)
{
    struct seal_key *key;
    struct nvme_sealed *x;
    int rc = key_take(t, io->name.fingerprint, NULL, &key);

    if (rc < 0)
        return rc;
    x = sealed_new(io, NULL);
    if (!x) {
        seal_key_drop(t->callbacks.seal, key);
        return -ENOMEM;
    }
    x->key = key;
    x->header = (struct nvme_record_header){
        .sealed = true,
        .key_bytes = io->name.key_bytes,
        .part = io->name.part,
        .payload_bytes = io->bytes,
        .sequence = (uintptr_t)io->scratch[NVME_IO_SEQUENCE],
    };
    if (nvme_sums_kept(io) && io->bytes / io->layer_bytes <= NVME_FRAGMENTS_MAX)
        x->header.layer_bytes = io->layer_bytes;
    memcpy(x->header.fingerprint, io->name.fingerprint, sizeof(x->header.fingerprint));
    memcpy(x->header.key, io->name.key, io->name.key_bytes);
    memcpy(x->header.key_id, key->id, sizeof(x->header.key_id));
    return 0;
}

static void push(struct tier *t, struct tier_io *io)
{
    sealed_of(io)->padded = nvme_padded(io->bytes);
    t->sealed_bytes += sealed_of(io)->padded;
    checksum_push(&t->checksums, io, false);
    nvme_iteration_want(t, NVME_TURN_GATHERED);
}

static bool room(const struct tier *t, const struct tier_io *io)
{
    return t->sealed_bytes == 0 || t->sealed_bytes + nvme_padded(io->bytes) <= SEALED_BYTES;
}

void nvme_sealed_push(struct tier *t, struct tier_io *io)
{
    if (list_empty(&t->to_seal) && room(t, io))
        push(t, io);
    else
        list_push_back(&t->to_seal, &io->link);
}

void nvme_sealed_pump(struct tier *t)
{
    while (!list_empty(&t->to_seal)) {
        struct tier_io *io = LIST_ENTRY(t->to_seal.next, struct tier_io, link);

        if (!room(t, io))
            return;
        list_remove(&io->link);
        push(t, io);
    }
}

static int box_begin(struct nvme_sealed *x, bool sealing)
{
    uint8_t context[NVME_SEALED_CONTEXT];

    return seal_box_begin(&x->box, x->key->secret, context,
                          nvme_sealed_context(&x->header, context), sealing);
}

static uint64_t fragment_bytes(const struct nvme_record_header *h)
{
    return h->layer_bytes > 0 ? h->layer_bytes : h->payload_bytes;
}

/* What is moved lies in memory of its own, and is sealed where it lies. */
static int write_seal(struct tier_io *io, struct nvme_sealed *x)
{
    uint64_t bytes = fragment_bytes(&x->header);
    uint8_t *from = io->data, *to = from;
    int rc = seal_random(x->header.salt, sizeof(x->header.salt));

    if (rc == 0 && !io->scratch[NVME_IO_MOVED]) {
        to = x->cipher = seal_memory_take(x->padded);
        rc = to ? 0 : -ENOMEM;
    }
    if (rc == 0)
        rc = box_begin(x, true);
    for (uint32_t i = 0; rc == 0 && i < nvme_sealed_fragments(&x->header); i++)
        rc = seal_box_seal(&x->box, i, NULL, 0, from + i * bytes, to + i * bytes, bytes,
                           nvme_sealed_tag(x->page, i));
    if (rc == 0) /* not what lay in the memory before */
        memset(to + io->bytes, 0, nvme_padded(io->bytes) - io->bytes);
    return rc;
}

void *nvme_sealed_data(const struct tier_io *io)
{
    const struct nvme_sealed *x = sealed_of(io);

    return x && x->cipher ? x->cipher : io->data;
}

int nvme_sealed_status(const struct tier_io *io)
{
    return nvme_sealed(io) ? sealed_of(io)->status : 0;
}

static void page_aad(const uint8_t *page, struct seal_aad aad[2])
{
    struct nvme_sealed_range range[2];

    nvme_sealed_ranges(page, range);
    for (unsigned i = 0; i < 2; i++)
        aad[i] = (struct seal_aad){range[i].bytes, range[i].n};
}

void nvme_sealed_header(struct tier_io *io, struct nvme_record_header *placed,
                        uint8_t page[NVME_PAGE])
{
    struct nvme_sealed *x = sealed_of(io);
    struct seal_aad aad[2];

    placed->sealed = true;
    placed->layer_bytes = x->header.layer_bytes;
    memcpy(placed->key_id, x->header.key_id, sizeof(placed->key_id));
    memcpy(placed->salt, x->header.salt, sizeof(placed->salt));
    nvme_sealed_encode(placed, page);
    memcpy(nvme_sealed_tag(page, 0), nvme_sealed_tag(x->page, 0),
           (size_t)NVME_TAG_BYTES * nvme_sealed_fragments(placed));
    page_aad(page, aad);
    x->status =
        seal_box_seal(&x->box, PAGE_PIECE, aad, 2, NULL, NULL, 0, nvme_sealed_page_tag(page));
    seal_box_close(&x->box);
    io->place.checksum = nvme_sealed_finish(page);
    io->place.sealed = true;
    if (x->status < 0)
        memset(page, 0, NVME_PAGE); /* the record's write goes on, and fails */
}

/* ---- reads ---- */

int nvme_sealed_read_begin(struct tier_io *io)
{
    return sealed_new(io, io->op == TIER_READ_LAYERS ? io->data : NULL) ? 0 : -EAGAIN;
}

unsigned nvme_sealed_read_next(const struct tier_io *io, struct iovec to[2])
{
    to[0] = (struct iovec){.iov_base = sealed_of(io)->page, .iov_len = NVME_PAGE};
    to[1] = (struct iovec){.iov_base = io->data, .iov_len = nvme_padded(io->bytes)};
    return 2;
}

/* No key: the caller forgets the part, but its bytes stay until their segment's turn comes, and the
 * next start finds them again. */
static void record_keep(struct tier *t, const struct tier_io *io)
{
    struct segment *s = io->scratch[NVME_IO_SEGMENT];
    uint32_t record = (uint32_t)(uintptr_t)io->scratch[NVME_IO_RECORD];

    if (s->states[record] != RECORD_LIVE)
        return;
    s->owners[record] = 0;
    s->unknown = true;
    ns_records_keep(&t->ns_records,
                    io->name.fingerprint); /* or its secret may go before the key comes */
}

int nvme_sealed_arrived(struct tier *t, struct tier_io *io)
{
    struct nvme_sealed *x = sealed_of(io);
    int rc = nvme_record_header_decode(x->page, &x->header);

    if (rc < 0 || !nvme_record_is(t, io, &x->header))
        return -EBADMSG;
    if (ns_records_purged(&t->ns_records, x->header.fingerprint, x->header.sequence))
        return -ESTALE; /* the secret of its key is gone, or goes now: its bytes are not wrong */
    rc = key_take(t, x->header.fingerprint, x->header.key_id, &x->key);
    if (rc == -ENOKEY && io->op == TIER_READ && !io->check)
        record_keep(t, io);
    return rc;
}

static int read_open(struct tier_io *io, struct nvme_sealed *x)
{
    bool layers = io->op == TIER_READ_LAYERS;
    uint64_t bytes = fragment_bytes(&x->header);
    uint8_t *at = layers ? x->page + tier_layers_at(io->layer_bytes, io->layer) : io->data;
    uint32_t first = layers ? io->layer : 0,
             n = layers ? io->layers : nvme_sealed_fragments(&x->header);
    struct seal_aad aad[2];
    int rc = box_begin(x, false);

    page_aad(x->page, aad);
    if (rc == 0)
        rc = seal_box_open(&x->box, PAGE_PIECE, aad, 2, NULL, NULL, 0,
                           nvme_sealed_page_tag(x->page));
    for (uint32_t i = 0; rc == 0 && i < n; i++)
        rc = seal_box_open(&x->box, first + i, NULL, 0, at + i * bytes, at + i * bytes, bytes,
                           nvme_sealed_tag(x->page, first + i));
    return rc;
}

uint64_t nvme_sealed_sum(const struct tier_io *const_io)
{
    struct tier_io *io = (struct tier_io *)const_io;
    struct nvme_sealed *x = sealed_of(io);

    x->status = io->op == TIER_WRITE ? write_seal(io, x) : read_open(io, x);
    if (io->op == TIER_READ_LAYERS)
        return x->status < 0;
    return x->status == 0 ? io->place.checksum : ~io->place.checksum;
}
