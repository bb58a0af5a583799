/* The bytes of ucmd.index: what lay in which record when the checkpoint was written. Pure
 * functions, any thread; docs/design/storage-format.md is their text.
 *
 * Promise: a span passes only when all of it agrees with its checksum and its numbers are within
 * their bounds. */
#ifndef UCMD_CHECKPOINT_FORMAT_H
#define UCMD_CHECKPOINT_FORMAT_H

#include "daemon/format/nvme_format.h"

#include <stdbool.h>
#include <stddef.h>

#define CHECKPOINT_RECORDS 2048u /* of a segment in one span */
#define CHECKPOINT_HEAD_BYTES 56u
#define CHECKPOINT_ENTRY_BYTES 96u
#define CHECKPOINT_TAIL_BYTES 8u

/* Records [from, to) of a segment: those that are not among the entries hold nothing. */
struct checkpoint_span {
    uint8_t uuid[NVME_UUID_BYTES];
    uint32_t segment, from, to, entries;
    uint64_t sequence, stride; /* of the segment's opening */
};

static inline size_t checkpoint_span_bytes(uint32_t entries)
{
    return CHECKPOINT_HEAD_BYTES + (size_t)entries * CHECKPOINT_ENTRY_BYTES + CHECKPOINT_TAIL_BYTES;
}

/* Entry i of the span at p. Segment and generation are the span's. */
void checkpoint_entry_encode(uint8_t *p, uint32_t i, const struct nvme_record_header *in);
/* Of a span that passed. False: the entry is none that a record could have. */
bool checkpoint_entry_decode(const uint8_t *p, uint32_t i, struct nvme_record_header *out);
/* Head and checksum, when the entries are there. */
void checkpoint_span_finish(uint8_t *p, const struct checkpoint_span *r);
/* 0; -EAGAIN: the span goes on after n bytes; -EBADMSG. */
int checkpoint_span_decode(const uint8_t *p, size_t n, struct checkpoint_span *out);

#endif
