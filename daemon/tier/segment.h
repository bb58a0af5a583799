/* Which record of which segment of which file is free, in use, or reclaimable. RAM only, no I/O.
 *
 * A segment is FREE, then OPEN for records of one stride, then CLOSED, and FREE again when its last
 * live record is gone. A withheld one is not FREE for anybody. Every file has its own open segment
 * for each stride that is being written. So writes, and later reads of blocks written together,
 * spread over the devices.
 *
 * Promises:
 * - A record is handed out once a generation.
 * - A segment with reads or writes under way is never reused.
 * - Finding a victim looks at a bounded number of candidates.
 *
 * Thread: the event loop only. */
#ifndef UCMD_TIER_SEGMENT_H
#define UCMD_TIER_SEGMENT_H

#include "daemon/format/nvme_format.h"
#include "daemon/tier/tier.h"

enum segment_state { SEGMENT_FREE, SEGMENT_OPEN, SEGMENT_CLOSED };
/* On disk, a segment's records count only together with its header. */
enum segment_header { SEGMENT_HEADER_NOT_YET, SEGMENT_HEADER_WRITTEN, SEGMENT_HEADER_FAILED };
enum record_state { RECORD_EMPTY, RECORD_WRITING, RECORD_LIVE, RECORD_DEAD };

struct segment {
    struct list link;  /* in the file's free or open list, in a list of closed ones, or in none */
    uint64_t sequence; /* of its present opening */
    /* Records of them, then as many of the next three; none while FREE. 0: a record that nobody
     * can read now, kept until the segment is reclaimed */
    uint64_t *owners;
    uint64_t *record_sequences; /* of the writes, */
    uint64_t newest;            /* and of the last one that it got */
    uint8_t *states;
    uint8_t *used;         /* 1: read since it was written, and not only checked */
    uint16_t *tags;        /* of the keys that encrypted them; 0: in the clear */
    uint32_t file, number; /* number: in its file */
    uint32_t stride_pages, records, next, live;
    uint32_t reads, writes; /* under way */
    uint32_t covered;       /* recovery: so many records a checkpoint covers, from the first on */
    uint32_t scans;         /* recovery: records whose headers are still to be seen */
    uint32_t seen_to;       /* recovery: after the last record that this opening wrote */
    bool unknown;           /* it may hold more than is known: no checkpoint covers it */
    uint8_t header;         /* enum segment_header */
    uint8_t state, rank;    /* rank: which list of closed ones */
    bool withheld;          /* neither opened nor reclaimed */
    bool quarantined;       /* withheld, by this start and by later ones */
    bool leaving;           /* segment_take has dropped some of it, and held it as if read */
};

struct segment_file {
    struct segment *segments;
    uint32_t count, open_count, free_count;
    bool writable;
    struct list free, open; /* open: the least recently used first */
    uint32_t quarantined;   /* segments in quarantine */
};

/* Live records that one key has encrypted, or one of the few whose ids have the same tag. */
struct segment_keyed {
    uint64_t records, bytes;
};
#define SEGMENT_TAGS (1u << 16)

/* 16 bits of a key's id, never 0: what a record remembers of it in memory and in a checkpoint. */
static inline uint16_t segment_tag(const uint8_t key_id[8])
{
    uint16_t tag = (uint16_t)(key_id[0] | key_id[1] << 8);

    return tag ? tag : 1;
}

#define SEGMENT_RANKS 4 /* closed segments, by how much of them is live; the oldest first */

struct segment_table {
    uint64_t segment_bytes, sequence; /* sequence: of the next opening */
    uint64_t capacity_bytes, used_bytes;
    uint32_t files;
    struct segment_file *file;
    struct list closed[SEGMENT_RANKS];
    struct segment *leaving;     /* that segment_reclaim has begun with, or NULL */
    struct segment_keyed *keyed; /* by tag; [0]: all that are encrypted */
};

/* counts: segments of each file, 0 for one that can't be used. 0 or -ENOMEM. */
int segment_table_init(struct segment_table *t, uint64_t segment_bytes, uint64_t sequence,
                       const uint64_t *counts, uint32_t files);
void segment_table_close(struct segment_table *t);

/* No more writes to this file; what lies there stays readable. */
void segment_file_stop(struct segment_table *t, uint32_t file);
/* A sync failed: what lies there may not survive, as if its segments' headers had failed. Later
 * writes go to other segments. */
void segment_file_distrust(struct segment_table *t, uint32_t file);
/* It takes writes again. */
void segment_file_start(struct segment_table *t, uint32_t file);
/* Does any file take writes? */
bool segment_writable(const struct segment_table *t);

/* So few segments of the writable files are free that some should be emptied ahead of need. */
bool segment_short(const struct segment_table *t);
/* Would segment_reserve find a record without reclaim, and leave `keep` segments free? */
bool segment_has_space(const struct segment_table *t, uint32_t file, uint64_t stride,
                       uint32_t keep);
/* A record of `stride` bytes or somewhat more in `file`, in an open segment or a free one. 0;
 * -ENOSPC when a segment must be reclaimed first; -ENOMEM. The record is WRITING, counts in
 * segment->writes.
 */
int segment_reserve(struct segment_table *t, uint32_t file, uint64_t stride, uint64_t owner,
                    struct segment **out, uint32_t *record);
/* May the next record of this stride follow `record` of `s` directly? */
bool segment_has_next(const struct segment *s, uint32_t record, uint64_t stride);
/* Which key has encrypted the record, before it is live; 0: it is in the clear. */
void segment_tag_set(struct segment *s, uint32_t record, uint16_t tag);
/* The write has ended: the record is LIVE or, if it failed, DEAD and the segment closed. */
void segment_written(struct segment_table *t, struct segment *s, uint32_t record, bool ok);

/* The free segment has records from an earlier run. It becomes closed, with no live record, and is
 * held as if read until segment_read_end; until then segment_restore adds what is live. 0; -EINVAL
 * when it is not free or the stride can't be; -ENOMEM. */
int segment_adopt(struct segment_table *t, uint32_t file, uint32_t number, uint64_t sequence,
                  uint64_t stride, struct segment **out);
void segment_restore(struct segment_table *t, struct segment *s, uint32_t record, uint64_t owner,
                     uint64_t sequence);

/* All records of earlier runs were added: of those that lie there segment_victim knows which are
 * the oldest. */
void segment_restored(struct segment_table *t);
/* The record is being written, with that sequence. */
void segment_sequence_set(struct segment *s, uint32_t record, uint64_t sequence);

/* It may hold parts that are not known: nothing is written to it until the next start, and no
 * checkpoint covers it. */
void segment_withhold(struct segment_table *t, struct segment *s);

/* Record of a place that is live and of this generation, and not shorter than `bytes`. 0 or
 * -ESTALE.
 */
int segment_find(const struct segment_table *t, uint64_t loc, uint64_t bytes, struct segment **out,
                 uint32_t *record);
void segment_read_begin(struct segment *s);
void segment_read_end(struct segment_table *t, struct segment *s);
void segment_forget(struct segment_table *t, struct segment *s, uint32_t record);

/* It is never written to again; what is live in it may be read until it goes by itself. False: it
 * is in quarantine already. */
bool segment_quarantine(struct segment_table *t, struct segment *s);

/* Makes one segment of a writable file free, by dropping at most `most` live records. *dropped: so
 * many it dropped, also when it failed. 0; -ENOSPC; -EAGAIN: the next call goes on. */
int segment_reclaim(struct segment_table *t, const struct tier_callbacks *callbacks, uint32_t most,
                    uint64_t *dropped);

/* The segment to be reclaimed next, of a writable file and with nothing in use; NULL when there is
 * none: of the least warm ones the oldest. The caller may move parts out of it before segment_take.
 * sparse, or NULL: the caller would move all; *sparse: that takes less space than it frees, and
 * nothing is lost. Those go first, the emptiest before. */
struct segment *segment_victim(struct segment_table *t, const struct tier_callbacks *callbacks,
                               bool *sparse);
/* Drops what is left in it, if nothing is in use; it is free when its last read has ended, unless a
 * drop was refused. False: it has dropped `most` records, and has to be called again. */
bool segment_take(struct segment_table *t, struct segment *s,
                  const struct tier_callbacks *callbacks, uint32_t most, uint64_t *dropped);

uint64_t segment_offset(const struct segment_table *t, const struct segment *s);
/* Offset of the record's header in the file. */
uint64_t segment_record_offset(const struct segment_table *t, const struct segment *s,
                               uint32_t record);
uint64_t segment_loc(const struct segment_table *t, const struct segment *s, uint32_t record);

/* ---- between segment.c and segment_reclaim.c ---- */

static inline uint64_t segment_stride(const struct segment *s)
{
    return (uint64_t)s->stride_pages * NVME_PAGE;
}

/* Strides that may be open in the file at a time. */
uint32_t segment_open_max(const struct segment_file *f);
/* Puts it at the end of the list where it belongs, or takes it out. */
void segment_list(struct segment_table *t, struct segment *s);
/* The record was live. */
void segment_record_kill(struct segment_table *t, struct segment *s, uint32_t record);

#endif
