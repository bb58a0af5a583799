/* A record: its checksums, what its headers should say, how the index comes to know it, what that knows of it, and its end. */
#include "daemon/tier/nvme.h"

#include "daemon/base/kill_point.h"
#include "daemon/format/checksum.h"

#include <stdlib.h>
#include <string.h>

/* ---- checksums ---- */

void nvme_sums_reserve(struct tier_io *io)
{
    bool wanted = nvme_sums_kept(io);

    /* Without memory the record has none. */
    io->scratch[NVME_IO_SUMS] =
        wanted ? malloc(io->bytes / io->shard_bytes * sizeof(uint64_t)) : NULL;
}

void nvme_sums_drop(struct tier_io *io)
{
    free(io->scratch[NVME_IO_SUMS]);
    io->scratch[NVME_IO_SUMS] = NULL;
}

uint64_t nvme_sum_bytes(const struct tier_io *io)
{
    return io->op == TIER_READ_SHARDS ? io->shards * io->shard_bytes : io->bytes;
}

uint64_t nvme_sum(const struct tier_io *io)
{
    if (nvme_sealed(io))
        return nvme_sealed_sum(io);
    if (io->op == TIER_READ_SHARDS)
        return nvme_shards_wrong(io);
    if (io->scratch[NVME_IO_SUMS])
        return checksum_pieces(io->data, io->bytes, io->shard_bytes, io->scratch[NVME_IO_SUMS]);
    return checksum_of(io->data, io->bytes);
}

/* ---- headers ---- */

void nvme_record_header_of(const struct tier *t, const struct segment *s, uint32_t record,
                           const struct tier_described *d, struct nvme_record_header *out)
{
    *out = (struct nvme_record_header){
        .key_bytes = d->name.key_bytes,
        .part = d->name.part,
        .segment = s->number,
        .record = record,
        .payload_bytes = d->bytes,
        .generation = s->sequence,
        .sequence = s->sequences[record],
        .checksum = d->checksum,
        .sealed = d->sealed,
    };
    memcpy(out->uuid, t->devices[s->file].file.uuid, sizeof(out->uuid));
    memcpy(out->fingerprint, d->name.fingerprint, sizeof(out->fingerprint));
    memcpy(out->key, d->name.key, d->name.key_bytes);
    out->key_id[0] = (uint8_t)s->tags[record]; /* all that a checkpoint has of it */
    out->key_id[1] = (uint8_t)(s->tags[record] >> 8);
}

bool nvme_record_is(const struct tier *t, const struct tier_io *io,
                    const struct nvme_record_header *h)
{
    const struct segment *s = io->scratch[NVME_IO_SEGMENT];
    uint32_t record = (uint32_t)(uintptr_t)io->scratch[NVME_IO_RECORD];

    return h->sealed == io->place.sealed &&
           nvme_record_belongs(h, t->devices[s->file].file.uuid, s->number, record, s->sequence) &&
           h->checksum == io->place.checksum && h->payload_bytes == io->bytes &&
           h->part == io->name.part && h->sequence == s->sequences[record] &&
           (io->name.key_bytes == 0 || /* a check knows the owner only */
            (h->key_bytes == io->name.key_bytes &&
             memcmp(h->key, io->name.key, h->key_bytes) == 0 &&
             memcmp(h->fingerprint, io->name.fingerprint, sizeof(h->fingerprint)) == 0));
}

void nvme_segment_header_of(const struct tier *t, const struct segment *s,
                            struct nvme_segment_header *out)
{
    *out = (struct nvme_segment_header){
        .segment = s->number,
        .sequence = s->sequence,
        .stride = (uint64_t)s->stride_pages * NVME_PAGE,
    };
    memcpy(out->uuid, t->devices[s->file].file.uuid, sizeof(out->uuid));
}

bool nvme_describe(const struct tier *t, const struct segment *s, uint32_t record,
                   struct tier_described *out)
{
    return s->states[record] == RECORD_LIVE && s->owners[record] != 0 &&
           t->callbacks.describe_cb(t->callbacks.ctx, s->owners[record], out);
}

bool nvme_offer(struct tier *t, struct segment *s, uint32_t record,
                const struct nvme_record_header *h, struct tier_duplicate *other)
{
    const struct nvme_ns_record *known = ns_records_find(&t->ns_records, h->fingerprint);
    struct tier_name name = {.key_bytes = h->key_bytes, .part = h->part};
    struct tier_found found = {
        .name = &name,
        .bytes = h->payload_bytes,
        .sequence = h->sequence,
        .place = {.loc = segment_loc(&t->segments, s, record),
                  .checksum = h->checksum,
                  .sealed = h->sealed},
        .duplicate = other,
    };
    uint64_t owner = 0;

    *other = (struct tier_duplicate){.owner = 0};
    KILL_POINT("recover-record");
    s->unknown |= !known && t->ns_records.unread;
    if (known && !h->sealed && !nvme_plain_allowed(t, known)) {
        t->recovery.plain++;
    } else if (known && h->sequence >= known->from_sequence) {
        memcpy(name.fingerprint, h->fingerprint, sizeof(name.fingerprint));
        memcpy(name.key, h->key, h->key_bytes);
        found.identity = known->identity;
        found.identity_bytes = known->identity_bytes;
        found.ns_record_unsynced = t->ns_records.unsynced;
        owner = t->callbacks.restore_cb(t->callbacks.ctx, &found);
    }
    if (owner == 0)
        return false;
    segment_tag_set(s, record, h->sealed ? segment_tag(h->key_id) : 0);
    segment_restore(&t->segments, s, record, owner, h->sequence);
    t->metrics->nvme_recovered_parts++;
    t->metrics->nvme_bytes_used = t->segments.used_bytes;
    return true;
}

void nvme_forget(struct tier *t, const struct tier_place *place, uint64_t bytes)
{
    struct segment *s;
    uint32_t record;

    if (segment_find(&t->segments, place->loc, bytes, &s, &record) < 0)
        return; /* dropped already, its segment has been reused */
    segment_forget(&t->segments, s, record);
    t->metrics->nvme_bytes_used = t->segments.used_bytes;
}
