/* Reads of some layers of a record of the NVMe tier: what a gather needs of it.
 *
 * Such a read is two parallel operations: the record's header, and the pages of the layers; or one,
 * if these pages follow the header. The result is valid if the header belongs to this part and this
 * write of it, and the layers match its checksums. Anything else changes nothing: the caller then
 * reads the whole part, which decides.
 *
 * A header's checksums of layers are kept for a while, so that later reads of other layers of the
 * part need no header. They are kept by the payload's checksum, which the index has for the part,
 * so they stay right whatever is stored there now. */
#include "daemon/tier/nvme.h"

#include "daemon/base/log.h"
#include "daemon/format/checksum.h"

#include <errno.h>
#include <stdlib.h>

uint64_t nvme_layers_wrong(const struct tier_io *io)
{
    const uint8_t *header = io->data, *at = header + tier_layers_at(io->layer_bytes, io->layer);
    uint64_t wrong = 0;

    for (uint32_t i = 0; i < io->layers; i++, at += io->layer_bytes)
        wrong += checksum_of(at, io->layer_bytes) != nvme_layer_sum(header, io->layer + i);
    return wrong;
}

static uintptr_t count(const struct tier_io *io, unsigned which)
{
    return (uintptr_t)io->scratch[which];
}

static struct nvme_known *known_at(const struct tier *t, const struct tier_io *io)
{
    return &t->known[io->place.loc * UINT64_C(0x9e3779b97f4a7c15) >> (64 - NVME_KNOWN_BITS)];
}

/* The checksums that the header has of these layers go where a read would bring them. False: they
 * are not known. */
static bool known_use(const struct tier *t, struct tier_io *io)
{
    const struct nvme_known *k = t->known ? known_at(t, io) : NULL;

    if (!k || !k->sums || k->loc != io->place.loc || k->checksum != io->place.checksum ||
        k->bytes != io->bytes || k->layer_bytes != io->layer_bytes)
        return false;
    for (uint32_t i = io->layer; i < io->layer + io->layers; i++)
        nvme_layer_sum_set(io->data, i, k->sums[i]);
    return true;
}

static void known_drop(struct tier *t, struct nvme_known *k)
{
    if (!k->sums)
        return;
    t->known_bytes -= k->bytes / k->layer_bytes * sizeof(*k->sums);
    free(k->sums);
    k->sums = NULL;
}

/* Some of the others go, in the order of their places. */
static void known_bound(struct tier *t)
{
    while (t->known_bytes > t->known_most) {
        known_drop(t, &t->known[t->known_next]);
        t->known_next = (t->known_next + 1) & ((1u << NVME_KNOWN_BITS) - 1);
    }
}

/* The header is this part's. Without memory nothing is known. */
static void known_add(struct tier *t, const struct tier_io *io)
{
    uint32_t n = (uint32_t)(io->bytes / io->layer_bytes);
    struct nvme_known *k;
    uint64_t *sums;

    if (!t->known)
        t->known = calloc((size_t)1 << NVME_KNOWN_BITS, sizeof(*t->known));
    sums = t->known ? malloc(n * sizeof(*sums)) : NULL;
    if (!sums)
        return;
    for (uint32_t i = 0; i < n; i++)
        sums[i] = nvme_layer_sum(io->data, i);
    k = known_at(t, io);
    known_drop(t, k);
    t->known_bytes += n * sizeof(*sums);
    *k = (struct nvme_known){io->place.loc, io->place.checksum, io->bytes, io->layer_bytes, sums};
    known_bound(t);
}

void nvme_known_close(struct tier *t)
{
    for (size_t i = 0; t->known && i < (size_t)1 << NVME_KNOWN_BITS; i++)
        free(t->known[i].sums);
    free(t->known);
}

void nvme_layers_begin(const struct tier *t, struct tier_io *io)
{
    bool follow = tier_layers_begin(io->layer_bytes, io->layer) == 0;
    bool known = !follow && !io->place.encrypted && known_use(t, io);

    io->scratch[NVME_IO_KNOWN] = known ? io : NULL;
    io->scratch[NVME_IO_TO_BEGIN] = io->scratch[NVME_IO_TO_END] =
        (void *)(uintptr_t)(follow || known ? 1 : 2);
    io->scratch[NVME_IO_STATUS] = NULL;
}

bool nvme_layers_next(struct tier_io *io, struct iovec *to, uint64_t *from)
{
    uint64_t begin = tier_layers_begin(io->layer_bytes, io->layer);
    uint64_t room = tier_layers_room(io->layer_bytes, io->layer, io->layers);
    uintptr_t left = count(io, NVME_IO_TO_BEGIN) - 1;

    io->scratch[NVME_IO_TO_BEGIN] = (void *)left;
    if (left > 0) {
        *to = (struct iovec){.iov_base = io->data, .iov_len = NVME_PAGE};
        *from = 0;
    } else if (begin == 0) {
        *to = (struct iovec){.iov_base = io->data, .iov_len = room};
        *from = 0;
    } else {
        *to = (struct iovec){.iov_base = (char *)io->data + NVME_PAGE, .iov_len = room - NVME_PAGE};
        *from = NVME_PAGE + begin;
    }
    return left == 0;
}

/* 0: it is this part's, as this run knows it, and has checksums of such layers. */
static int header_check(const struct tier *t, const struct tier_io *io)
{
    struct nvme_record_header h;

    return nvme_record_header_decode(io->data, &h) == 0 && nvme_record_is(t, io, &h) &&
                   h.layer_bytes == io->layer_bytes
               ? 0
               : -ENODATA;
}

bool nvme_layers_arrived(struct tier *t, struct tier_io *io, int *status)
{
    uintptr_t left = count(io, NVME_IO_TO_END) - 1;

    io->scratch[NVME_IO_TO_END] = (void *)left;
    if (*status < 0)
        io->scratch[NVME_IO_STATUS] = (void *)(uintptr_t) - *status;
    if (left > 0)
        return false;
    *status = -(int)count(io, NVME_IO_STATUS);
    if (*status < 0 || io->scratch[NVME_IO_KNOWN])
        return true;
    *status = header_check(t, io);
    if (*status == 0 && !io->place.encrypted)
        known_add(t, io);
    return true;
}

int nvme_layers_verify(struct tier *t, struct tier_io *io, uint64_t wrong)
{
    struct segment *s = io->scratch[NVME_IO_SEGMENT];

    if (wrong > 0) {
        log_warn("tier", "layers-differ", "path=%s loc=%#llx layer=%u of=%u: the part is read",
                 t->devices[s->file].file.path, (unsigned long long)io->place.loc, io->layer,
                 io->layers);
        return -EBADMSG;
    }
    s->used[count(io, NVME_IO_RECORD)] |= !io->check;
    t->metrics->nvme_reads++;
    t->metrics->nvme_read_bytes += tier_layers_room(io->layer_bytes, io->layer, io->layers) -
                                   (io->scratch[NVME_IO_KNOWN] ? NVME_PAGE : 0);
    return 0;
}
