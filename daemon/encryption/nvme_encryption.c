/* Records of tenants with keys: encrypted in the threads that compute checksums, and opened there.
 *
 * The payload is encrypted in fragments, a layer a fragment where the record has checksums of
 * layers, else as a whole. Their tags stand in the header's page, which has a tag of its own. That
 * one is computed on the event loop, over 4 KiB, since it covers the place, which the record gets
 * last. A read brings the page with the payload and opens that where it lies.
 * docs/design/encryption.md says what is bound to what. */
#include "daemon/tier/nvme.h"

#include "daemon/base/log.h"
#include "daemon/encryption/encryption.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define MODULE "tier"
#define PAGE_PIECE UINT32_MAX /* the page's own number; the payload's begin at 0 */
#define NO_KEYS_MS 10000u
#define ENCRYPTED_BYTES (64ull << 20) /* of memory that encrypted writes wait in for their disk */

struct nvme_encrypted {
    struct encryption_key *key;
    struct encryption_box box;
    struct nvme_record_header header;
    /* A read's header page, or the page of a write's tags. Owned by the io's memory for
     * TIER_READ_LAYERS. */
    uint8_t *page;
    void *cipher;    /* of a write: what goes to storage; NULL: it lies in the io's own memory */
    uint64_t padded; /* of cipher, counted in tier.encrypted_bytes; 0: it has, or will have, none */
    int status;      /* of the thread */
    bool page_owned;
};

static struct nvme_encrypted *encrypted_of(const struct tier_io *io)
{
    return io->scratch[NVME_IO_ENCRYPTED];
}

bool nvme_encrypted(const struct tier_io *io)
{
    return encrypted_of(io) != NULL;
}

static struct nvme_encrypted *encrypted_new(struct tier_io *io, uint8_t *page)
{
    struct nvme_encrypted *x = calloc(1, sizeof(*x));

    if (!x)
        return NULL;
    x->page = page ? page : aligned_alloc(NVME_PAGE, NVME_PAGE);
    x->page_owned = !page;
    if (!x->page) {
        free(x);
        return NULL;
    }
    io->scratch[NVME_IO_ENCRYPTED] = x;
    return x;
}

void nvme_encrypted_drop(struct tier *t, struct tier_io *io)
{
    struct nvme_encrypted *x = encrypted_of(io);

    if (!x)
        return;
    io->scratch[NVME_IO_ENCRYPTED] = NULL;
    encryption_box_close(&x->box);
    if (x->key)
        encryption_key_drop(t->callbacks.encryption, x->key);
    encryption_memory_give(x->cipher, x->padded);
    t->encrypted_bytes -= x->padded;
    if (x->page_owned)
        free(x->page);
    free(x);
}

/* The namespace's key with this id, NULL: the current one. */
static int key_take(struct tier *t, const uint8_t *fingerprint, const uint8_t *id,
                    struct encryption_key **out)
{
    const struct nvme_ns_record *r = ns_records_find(&t->ns_records, fingerprint);
    uint64_t now_ms = uv_now(t->loop);

    if (t->callbacks.encryption && r && nvme_ns_has_secret(r))
        return encryption_key_take(t->callbacks.encryption,
                                   &(struct encryption_space){.fingerprint = r->fingerprint,
                                                              .identity = r->identity,
                                                              .identity_bytes = r->identity_bytes,
                                                              .salt = r->secret,
                                                              .salt_bytes = sizeof(r->secret)},
                                   id, out);
    t->metrics->encryption_key_missing++;
    if (now_ms >= t->tell_no_keys_ms) {
        t->tell_no_keys_ms = now_ms + NO_KEYS_MS;
        log_warn(
            MODULE, "key-missing", "reason=\"%s\"",
            t->callbacks.encryption
                ? "the namespace's record has no secret: it was purged, or could not be written"
                : "encryption.tenants is empty, and there are encrypted parts");
    }
    return -ENOKEY;
}

bool nvme_encryption_wanted(const struct tier *t, const uint8_t *fingerprint)
{
    const struct nvme_ns_record *r = ns_records_find(&t->ns_records, fingerprint);

    return r && encryption_wanted_by(t->callbacks.encryption, r->identity, r->identity_bytes);
}

bool nvme_key_awaited(const struct tier *t, const uint8_t *fingerprint)
{
    const struct nvme_ns_record *r = ns_records_find(&t->ns_records, fingerprint);

    return r && encryption_awaited_by(t->callbacks.encryption, r->identity, r->identity_bytes);
}

bool nvme_plaintext_allowed(const struct tier *t, const struct nvme_ns_record *r)
{
    return encryption_plaintext_allowed(t->callbacks.encryption) ||
           !encryption_wanted_by(t->callbacks.encryption, r->identity, r->identity_bytes);
}

/* ---- writes ---- */

int nvme_encrypted_write_begin(struct tier *t, struct tier_io *io)
{
    struct encryption_key *key;
    struct nvme_encrypted *x;
    int rc = key_take(t, io->name.fingerprint, NULL, &key);

    if (rc < 0)
        return rc;
    x = encrypted_new(io, NULL);
    if (!x) {
        encryption_key_drop(t->callbacks.encryption, key);
        return -ENOMEM;
    }
    x->key = key;
    x->header = (struct nvme_record_header){
        .encrypted = true,
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
    encrypted_of(io)->padded = nvme_padded(io->bytes);
    t->encrypted_bytes += encrypted_of(io)->padded;
    checksum_push(&t->checksums, io, false);
    nvme_iteration_want(t, NVME_TURN_GATHERED);
}

static bool room(const struct tier *t, const struct tier_io *io)
{
    return t->encrypted_bytes == 0 ||
           t->encrypted_bytes + nvme_padded(io->bytes) <= ENCRYPTED_BYTES;
}

void nvme_encrypted_push(struct tier *t, struct tier_io *io)
{
    if (list_empty(&t->to_encrypt) && room(t, io))
        push(t, io);
    else
        list_push_back(&t->to_encrypt, &io->link);
}

void nvme_encrypted_pump(struct tier *t)
{
    while (!list_empty(&t->to_encrypt)) {
        struct tier_io *io = LIST_ENTRY(t->to_encrypt.next, struct tier_io, link);

        if (!room(t, io))
            return;
        list_remove(&io->link);
        push(t, io);
    }
}

static int box_begin(struct nvme_encrypted *x, bool encrypting)
{
    uint8_t context[NVME_ENCRYPTED_CONTEXT];

    return encryption_box_begin(&x->box, x->key->secret, context,
                                nvme_encrypted_context(&x->header, context), encrypting);
}

static uint64_t fragment_bytes(const struct nvme_record_header *h)
{
    return h->layer_bytes > 0 ? h->layer_bytes : h->payload_bytes;
}

/* A moved part has memory of its own, and is encrypted in place. */
static int write_encryption(struct tier_io *io, struct nvme_encrypted *x)
{
    uint64_t bytes = fragment_bytes(&x->header);
    uint8_t *from = io->data, *to = from;
    int rc = encryption_random(x->header.salt, sizeof(x->header.salt));

    if (rc == 0 && !io->scratch[NVME_IO_MOVED]) {
        to = x->cipher = encryption_memory_take(x->padded);
        rc = to ? 0 : -ENOMEM;
    }
    if (rc == 0)
        rc = box_begin(x, true);
    for (uint32_t i = 0; rc == 0 && i < nvme_encrypted_fragments(&x->header); i++)
        rc = encryption_box_encrypt(&x->box, i, NULL, 0, from + i * bytes, to + i * bytes, bytes,
                                    nvme_encrypted_tag(x->page, i));
    if (rc == 0) /* not what lay in the memory before */
        memset(to + io->bytes, 0, nvme_padded(io->bytes) - io->bytes);
    return rc;
}

void *nvme_encrypted_data(const struct tier_io *io)
{
    const struct nvme_encrypted *x = encrypted_of(io);

    return x && x->cipher ? x->cipher : io->data;
}

int nvme_encrypted_status(const struct tier_io *io)
{
    return nvme_encrypted(io) ? encrypted_of(io)->status : 0;
}

static void page_aad(const uint8_t *page, struct encryption_aad aad[2])
{
    struct nvme_encrypted_range range[2];

    nvme_encrypted_ranges(page, range);
    for (unsigned i = 0; i < 2; i++)
        aad[i] = (struct encryption_aad){range[i].bytes, range[i].n};
}

void nvme_encrypted_header(struct tier_io *io, struct nvme_record_header *placed,
                           uint8_t page[NVME_PAGE])
{
    struct nvme_encrypted *x = encrypted_of(io);
    struct encryption_aad aad[2];

    placed->encrypted = true;
    placed->layer_bytes = x->header.layer_bytes;
    memcpy(placed->key_id, x->header.key_id, sizeof(placed->key_id));
    memcpy(placed->salt, x->header.salt, sizeof(placed->salt));
    nvme_encrypted_encode(placed, page);
    memcpy(nvme_encrypted_tag(page, 0), nvme_encrypted_tag(x->page, 0),
           (size_t)NVME_TAG_BYTES * nvme_encrypted_fragments(placed));
    page_aad(page, aad);
    x->status = encryption_box_encrypt(&x->box, PAGE_PIECE, aad, 2, NULL, NULL, 0,
                                       nvme_encrypted_page_tag(page));
    encryption_box_close(&x->box);
    io->place.checksum = nvme_encrypted_finish(page);
    io->place.encrypted = true;
    if (x->status < 0)
        memset(page, 0, NVME_PAGE); /* the record's write goes on, and fails */
}

/* ---- reads ---- */

int nvme_encrypted_read_begin(struct tier_io *io)
{
    return encrypted_new(io, io->op == TIER_READ_LAYERS ? io->data : NULL) ? 0 : -EAGAIN;
}

unsigned nvme_encrypted_read_next(const struct tier_io *io, struct iovec to[2])
{
    to[0] = (struct iovec){.iov_base = encrypted_of(io)->page, .iov_len = NVME_PAGE};
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

int nvme_encrypted_arrived(struct tier *t, struct tier_io *io)
{
    struct nvme_encrypted *x = encrypted_of(io);
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

static int read_open(struct tier_io *io, struct nvme_encrypted *x)
{
    bool layers = io->op == TIER_READ_LAYERS;
    uint64_t bytes = fragment_bytes(&x->header);
    uint8_t *at = layers ? x->page + tier_layers_at(io->layer_bytes, io->layer) : io->data;
    uint32_t first = layers ? io->layer : 0,
             n = layers ? io->layers : nvme_encrypted_fragments(&x->header);
    struct encryption_aad aad[2];
    int rc = box_begin(x, false);

    page_aad(x->page, aad);
    if (rc == 0)
        rc = encryption_box_decrypt(&x->box, PAGE_PIECE, aad, 2, NULL, NULL, 0,
                                    nvme_encrypted_page_tag(x->page));
    for (uint32_t i = 0; rc == 0 && i < n; i++)
        rc = encryption_box_decrypt(&x->box, first + i, NULL, 0, at + i * bytes, at + i * bytes,
                                    bytes, nvme_encrypted_tag(x->page, first + i));
    return rc;
}

uint64_t nvme_encrypted_sum(const struct tier_io *const_io)
{
    struct tier_io *io = (struct tier_io *)const_io;
    struct nvme_encrypted *x = encrypted_of(io);

    x->status = io->op == TIER_WRITE ? write_encryption(io, x) : read_open(io, x);
    if (io->op == TIER_READ_LAYERS)
        return x->status < 0;
    return x->status == 0 ? io->place.checksum : ~io->place.checksum;
}
