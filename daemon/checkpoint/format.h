/* The bytes of ucmd.index: what lay in which record when the checkpoint was written. Pure
 * functions, any thread. docs/design/storage-format.md has the terms.
 *
 * The file is a series of spans without gaps, written under another name, synced after ucmd.cache,
 * and renamed. A reader stops at the first span that does not pass. A span:
 *
 *   at 0     magic "UCMI"
 *   at 4     u32 format version, 1
 *   at 8     u32 number of the segment
 *   at 12    u32 `from`, the first record of the span
 *   at 16    16 bytes: UUID of the cache file
 *   at 32    u64 `sequence` of the segment
 *   at 40    u32 stride, in pages
 *   at 44    u32 `to`, one past the last record
 *   at 48    u32 number of entries, at most 2048 and to - from
 *   at 52    4 zeros
 *   at 56    entries of 96 bytes, and then u64 checksum of the span so far
 *
 * An entry:
 *
 *   at 0     u32 record
 *   at 4     u32 payload_bytes
 *   at 8     u64 `sequence`
 *   at 16    u64 checksum of the payload; encrypted: the first 8 bytes of the page's tag
 *   at 24    u32 key_bytes; encrypted: bit 31 is set, and bits 8 to 23 are the first two bytes of
 *            the key's id (01 00 for 00 00)
 *   at 28    u32 part
 *   at 32    32 bytes: key
 *   at 64    32 bytes: fingerprint
 *
 * A span counts only if the segment's header has the same `sequence` and stride. `from` must be
 * where the segment's previous span ended (0 for the first). Records from `from` to before `to`
 * without an entry hold nothing. A reader must look at the records after a segment's last span. So
 * a checkpoint of any age leads to the same parts as none.
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
/* Decodes entry i of a span that passed its checks. False: no record could have this entry. */
bool checkpoint_entry_decode(const uint8_t *p, uint32_t i, struct nvme_record_header *out);
/* Head and checksum, when the entries are there. */
void checkpoint_span_finish(uint8_t *p, const struct checkpoint_span *r);
/* 0; -EAGAIN: the span goes on after n bytes; -EBADMSG. */
int checkpoint_span_decode(const uint8_t *p, size_t n, struct checkpoint_span *out);

#endif
