/* Reads of some shards of a record, and the checksums of shards in its header.
 *
 * Such a read is two operations, side by side: the record's header, and the pages that the shards lie in. They are one where these
 * pages follow the header. What is read counts if the header is the one of this part and this write of it, and the shards agree
 * with its checksums of them. Whatever else is found changes nothing: the caller reads the whole part, which has the last word. */
#include "daemon/tier/nvme.h"

#include "daemon/base/log.h"
#include "daemon/format/checksum.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- checksums ---- */

void nvme_sums_reserve(struct tier_io *io)
{
    bool wanted = io->bytes > CHECKSUM_SMALL && nvme_shards_fit(io->bytes, io->shard_bytes);

    /* Without memory the record has none. */
    io->scratch[NVME_IO_SUMS] =
        wanted ? malloc(io->bytes / io->shard_bytes * sizeof(uint64_t)) : NULL;
}

void nvme_sums_drop(struct tier_io *io)
{
    free(io->scratch[NVME_IO_SUMS]);
    io->scratch[NVME_IO_SUMS] = NULL;
}

void nvme_sums_of(const struct tier_io *io, struct nvme_record_header *out)
{
    out->shard_sums = io->scratch[NVME_IO_SUMS];
    out->shard_bytes = out->shard_sums ? io->shard_bytes : 0;
}

/* How many of the shards differ from the header's checksums of them. */
static uint64_t shards_wrong(const struct tier_io *io)
{
    const uint8_t *header = io->data, *at = header + tier_shards_at(io->shard_bytes, io->shard);
    uint64_t wrong = 0;

    for (uint32_t i = 0; i < io->shards; i++, at += io->shard_bytes)
        wrong += checksum_of(at, io->shard_bytes) != nvme_shard_sum(header, io->shard + i);
    return wrong;
}

uint64_t nvme_sum_bytes(const struct tier_io *io)
{
    return io->op == TIER_READ_SHARDS ? io->shards * io->shard_bytes : io->bytes;
}

uint64_t nvme_sum(const struct tier_io *io)
{
    if (io->op == TIER_READ_SHARDS)
        return shards_wrong(io);
    if (io->scratch[NVME_IO_SUMS])
        return checksum_pieces(io->data, io->bytes, io->shard_bytes, io->scratch[NVME_IO_SUMS]);
    return checksum_of(io->data, io->bytes);
}

/* ---- a read ---- */

static uintptr_t count(const struct tier_io *io, unsigned which)
{
    return (uintptr_t)io->scratch[which];
}

void nvme_shards_begin(struct tier_io *io)
{
    bool follow = tier_shards_begin(io->shard_bytes, io->shard) == 0;

    io->scratch[NVME_IO_TO_BEGIN] = io->scratch[NVME_IO_TO_END] =
        (void *)(uintptr_t)(follow ? 1 : 2);
    io->scratch[NVME_IO_STATUS] = NULL;
}

bool nvme_shards_next(struct tier_io *io, struct iovec *to, uint64_t *from)
{
    uint64_t begin = tier_shards_begin(io->shard_bytes, io->shard);
    uint64_t room = tier_shards_room(io->shard_bytes, io->shard, io->shards);
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

/* 0: it is this part's, as this run knows it, and has checksums of such shards. */
static int header_check(const struct tier *t, const struct tier_io *io)
{
    const struct segment *s = io->scratch[NVME_IO_SEGMENT];
    uint32_t record = (uint32_t)count(io, NVME_IO_RECORD);
    struct nvme_record_header h;

    if (nvme_record_header_decode(io->data, &h) < 0 ||
        !nvme_record_belongs(&h, t->devices[s->file].file.uuid, s->number, record, s->sequence) ||
        memcmp(h.fingerprint, io->name.fingerprint, sizeof(h.fingerprint)) != 0 ||
        h.key_bytes != io->name.key_bytes || memcmp(h.key, io->name.key, h.key_bytes) != 0 ||
        h.part != io->name.part || h.payload_bytes != io->bytes ||
        h.checksum != io->place.checksum || h.shard_bytes != io->shard_bytes)
        return -ENODATA;
    return 0;
}

bool nvme_shards_arrived(const struct tier *t, struct tier_io *io, int *status)
{
    uintptr_t left = count(io, NVME_IO_TO_END) - 1;

    io->scratch[NVME_IO_TO_END] = (void *)left;
    if (*status < 0)
        io->scratch[NVME_IO_STATUS] = (void *)(uintptr_t) - *status;
    if (left > 0)
        return false;
    *status = -(int)count(io, NVME_IO_STATUS);
    if (*status == 0)
        *status = header_check(t, io);
    return true;
}

int nvme_shards_verify(struct tier *t, struct tier_io *io, uint64_t wrong)
{
    struct segment *s = io->scratch[NVME_IO_SEGMENT];

    if (wrong > 0) {
        log_warn("tier", "shards-differ", "path=%s loc=%#llx shard=%u of=%u: the part is read",
                 t->devices[s->file].file.path, (unsigned long long)io->place.loc, io->shard,
                 io->shards);
        return -EBADMSG;
    }
    s->used[count(io, NVME_IO_RECORD)] |= !io->check;
    t->metrics->nvme_reads++;
    t->metrics->nvme_read_bytes += tier_shards_room(io->shard_bytes, io->shard, io->shards);
    return 0;
}
