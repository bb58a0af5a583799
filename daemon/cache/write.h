/* Parts on their way to the tiers below; for the files of this module only. */
#ifndef UCMD_CACHE_WRITE_H
#define UCMD_CACHE_WRITE_H

#include "daemon/base/fair.h"
#include "daemon/cache/cache.h"
#include "proto/backoff.h"

#include <uv.h>

/* Bytes that a target of write-back has at once: enough for any disk's queue, little to lose. */
#define CACHE_WRITE_WINDOW (64u << 20)
/* Between two tries to write the record of a namespace. */
#define RECORD_RETRY_MIN_MS 5000u
#define RECORD_RETRY_MAX_MS 10000u

enum write_to { WRITE_NVME, WRITE_SHARED, WRITE_TARGETS };

struct block_queue {
    block_ref *entries; /* a ring of cap */
    uint32_t head, n, cap;
};

/* A tenant's blocks that wait to be written, in the order in which they became complete. If there
 * are more tenants than lanes, some share one, as in base/fair.h. */
struct write_lane {
    struct list link; /* in write_target.turns */
    bool waits;       /* it is there */
    struct fair_who who;
    struct block_queue queue;
};

/* Write-back to one target: tenants take turns by their weights. */
struct write_target {
    struct fair_queue turns;            /* of write_lane.link */
    struct write_lane lane[FAIR_LANES]; /* memory of those that nobody has used is not touched */
    uint32_t n;                         /* that wait, in all lanes */
    struct block_queue stalled;         /* blocks of namespaces that may not be written now */
    uint64_t writing_bytes;             /* of parts whose write is under way */
    bool full; /* it refused an operation: the next waits until one has ended, or it says so */
};

/* write_part.c: durable parts */
struct cache_durables {
    struct list waiting; /* of cache_durable.link: for the tier */
    struct list stalled; /* likewise, of namespaces that may not be written now */
    uint32_t unverified; /* parts in DRAM whose copy of an earlier run is still to be read */
};

/* ns_record.c */
struct cache_records {
    struct backoff retry; /* of those that failed */
    uv_timer_t timer;
    uint32_t n; /* that are being written */
};

/* ---- queue.c ---- */

/* 0, -ENOMEM, or -ENOSPC: the queue is as long as it may be. */
int queue_push(struct block_queue *q, block_ref ref);
int queue_push_front(struct block_queue *q, block_ref ref);
/* The queue must not be empty. */
block_ref queue_pop_last(struct block_queue *q);
/* A block of that tenant waits; front: before its others. 0 or -errno of its queue. */
int writes_push(struct write_target *t, const struct tenant *of, block_ref ref, bool front);
/* The next block, which leaves its queue, and the lane that it was in. Something must wait. */
block_ref writes_pop(struct write_target *t, struct write_lane **lane);
/* So many bytes of what was popped of the lane are being written; 0: nothing is. Once for each
 * writes_pop. */
void writes_charge(struct write_target *t, struct write_lane *lane, uint64_t bytes);
void writes_free(struct write_target *t);
extern const uint16_t write_flags[WRITE_TARGETS]; /* of a block that waits */
uint64_t *write_dropped(struct cache *c, enum write_to to);
/* The bytes of the block that lie in DRAM and not on NVMe: dirty while it waits. */
uint64_t cache_block_dirty(const struct block *b, const struct ns *ns);
/* Whether it waits from now on. */
void cache_queued_set(struct cache *c, enum write_to to, block_ref ref, bool queued);
/* The block that `ref` named when it was queued may be gone, and another have its number. If that
 * one waits too, it has its turn early. */
bool cache_still_waits(struct cache *c, enum write_to to, block_ref ref);
/* The block is not written: a queue is full. */
void cache_write_give_up(struct cache *c, enum write_to to, block_ref ref);
/* What a target has of a part. */
enum part_below { COPY_NONE, COPY_WRITING, COPY_THERE };
enum part_below part_below(const struct part *p, enum write_to to);
/* How many of its parts a write would bring to the target: they have no copy there, nor is one
 * under way. */
uint32_t cache_parts_missing(const struct block *b, const struct ns *ns, enum write_to to);
/* A part is on the shared tier: those after it may follow. */
void cache_write_next_part(struct cache *c, block_ref ref, uint32_t part);
/* A namespace may be written again: what was stalled waits in front of its queue. */
void cache_writes_unstall(struct cache *c);
/* A secret has come, or is unavailable: its blocks are put back in the next iterations. */
void cache_writes_with_secret(struct cache *c);
/* What was stalled waits in front of its queue again. */
void cache_write_unstall(struct cache *c, enum write_to to, block_ref ref);

/* ---- write_back.c ---- */

/* The block has just become complete, and there is such a tier: it is written in its turn if it is
 * worth that. */
void cache_write_stored(struct cache *c, block_ref ref, enum write_to to);
/* These blocks were used, all of namespace ns: where blocks are written at their second use only
 * they may be worth writing now. 0 among them is passed over. */
void cache_write_touched(struct cache *c, struct ns *ns, const block_ref *refs, uint32_t n);
/* Its copy on NVMe turned out bad: what DRAM has of it takes its place. */
void cache_write_again(struct cache *c, block_ref ref);
/* A part of the block was read from the shared tier. */
void cache_write_fetched(struct cache *c, block_ref ref);
/* Begin some writes. */
bool cache_write_nvme_run(void *ctx);
bool cache_write_nvme_ready(const void *ctx);
bool cache_write_shared_run(void *ctx);
bool cache_write_shared_ready(const void *ctx);
bool cache_writes_secret(struct cache *c); /* some of these; are there more? */
bool cache_secrets_run(void *ctx);
bool cache_secrets_ready(const void *ctx);
/* Empties the queues at a stop. Unstall first. */
void cache_writes_abandon(struct cache *c);

/* ---- write_part.c: 0, -EAGAIN (not now), or another -errno: it will not be written ---- */

/* durable: see cache_quota_below. */
int cache_nvme_write(struct cache *c, block_ref ref, uint32_t part, bool durable);
int cache_shared_write(struct cache *c, block_ref ref, uint32_t part);

void cache_durables_retry(struct cache *c);
/* The part was dumped before its copy of an earlier run turned up. Once recovery is over that copy
 * is read, and written again if it is not whole. */
void cache_unverified(struct cache *c, block_ref ref, uint32_t part);

/* ---- ns_record.c ---- */

/* Begins to write the namespace's record, unless there is one, or the last try failed a moment ago.
 * Its blocks wait until the try has ended. There must be a tier. */
void cache_ns_record(struct cache *c, struct ns *ns);
void cache_ns_records_init(struct cache *c);
/* False: its blocks have to wait. The end of what they wait for calls cache_writes_unstall. */
bool cache_ns_writable(const struct ns *ns);

#endif
