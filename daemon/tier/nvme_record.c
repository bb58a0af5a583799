/* A record: what its headers should say, what the index knows of it, and its end. */
#include "daemon/tier/nvme.h"

#include <string.h>

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
        .sequence = s->record_sequences[record],
        .checksum = d->checksum,
        .encrypted = d->encrypted,
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

    return h->encrypted == io->place.encrypted &&
           nvme_record_belongs(h, t->devices[s->file].file.uuid, s->number, record, s->sequence) &&
           h->checksum == io->place.checksum && h->payload_bytes == io->bytes &&
           h->part == io->name.part && h->sequence == s->record_sequences[record] &&
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

void nvme_forget(struct tier *t, const struct tier_place *place, uint64_t bytes)
{
    struct segment *s;
    uint32_t record;

    if (segment_find(&t->segments, place->loc, bytes, &s, &record) < 0)
        return; /* dropped already, its segment has been reused */
    segment_forget(&t->segments, s, record);
    t->metrics->nvme_bytes_used = t->segments.used_bytes;
}
