/* Shared by the files of this room only. */
#ifndef UCMD_CACHE_INTERNAL_H
#define UCMD_CACHE_INTERNAL_H

#include "daemon/base/table.h"
#include "daemon/cache/cache.h"

#include <uv.h>

/* Fills and reads under way at once; more are -EBUSY. */
#define CACHE_MAX_FILLS (1u << 20)
#define CACHE_MAX_FETCHES (1u << 16)
#define CACHE_MAX_WRITES (1u << 16)
/* Bytes handed to the tier for writing at once: enough for any disk's queue, little to lose. */
#define CACHE_WRITE_WINDOW (64u << 20)

struct write_queue {
    block_ref *ring;
    uint32_t head, n, cap;
};

struct cache {
    struct cache_config config;
    const struct tier_ops *tier_ops;
    struct tier *tier;
    struct arena *arena;
    struct table fills, fetches, writes;
    struct list durables;     /* of cache_durable.link: the tier takes nothing now */
    struct list fills_by_age; /* oldest progress first */
    struct list room;
    struct list calm; /* of cache_calm.link */
    uv_idle_t idle;   /* runs while `room` is to be woken or writes are to be pumped */
    bool idle_on, wake, pump, closing, no_writes;
    struct write_queue queue;
    uint64_t writing_bytes, dirty_bytes;
    uint32_t tier_busy;
    uint32_t doubted;          /* parts in DRAM whose copy of an earlier run is to be read first */
    uint32_t copies;           /* users held by copies, reads and writes: what can make room */
    uint32_t restored_ns;      /* namespace of the part that the tier found last */
    struct cache_adopt *adopt; /* while parts of the arena's file are taken over */
    struct cache_keep *keep;   /* while they are listed for the next run */
    struct cache_stats stats;
};

struct block *cache_block(struct cache *c, block_ref ref, struct ns **ns);

static inline bool part_whole(const struct part *p)
{
    return p->dram == PART_DRAM_READY || p->nvme == PART_NVME_READY;
}

static inline uint64_t part_owner(block_ref ref, uint32_t part)
{
    return (uint64_t)ref << 16 | part;
}

/* The only writers of a part's state: they keep every count that depends on it. */
void part_set_dram(struct cache *c, block_ref ref, uint32_t part, enum part_dram dram,
                   uint32_t slot);
void part_set_nvme(struct cache *c, block_ref ref, uint32_t part, enum part_nvme nvme,
                   const struct tier_place *place);
void part_use(struct cache *c, struct part *p);
void part_unuse(struct cache *c, struct part *p);

/* Nothing reads, writes or fills any of its parts. */
bool block_idle(const struct block *b, const struct ns *ns);
/* Frees the slots of its READY parts; none of them may have a user. */
void block_leave_dram(struct cache *c, block_ref ref, bool evicted);

/* The part's copy on the tier is gone or not to be trusted. */
void cache_nvme_lost(struct cache *c, block_ref ref, uint32_t part, bool forget);
/* After anything of the block was released: carries out a doomed block's end, removes an empty one.
 */
void cache_settle(struct cache *c, block_ref ref);
/* Drops the block from every tier. It must be idle. */
void cache_discard(struct cache *c, block_ref ref);

/* A slot, on the node if that costs nothing; evicts what must go. 0 when everything is in use. */
slot_ref cache_slot(struct cache *c, uint64_t bytes, uint64_t owner, int node);

/* Later in this turn of the loop: wake who waits for room, write what waits. */
void cache_released(struct cache *c);

/* Submits a part that lies in DRAM only. 0, -EAGAIN, or another -errno: it will not be written. */
int cache_part_write(struct cache *c, block_ref ref, uint32_t part);
/* Who waits for the part that is being written. */
struct list *cache_write_waiters(struct cache *c, const struct part *p);

/* durable.c: waiters (emptied) go on when their part was written; those that the tier had no room
 * for try again. */
void cache_durables_written(struct list *waiters, int status);
void cache_durables_retry(struct cache *c);
/* The part was dumped while its copy of an earlier run had not turned up yet: once recovery is over
 * that is read, and written anew if it is not whole. */
void cache_doubt(struct cache *c, block_ref ref, uint32_t part);

void cache_write_later(struct cache *c, block_ref ref);
/* The block has just become complete, or is used again: it is written in its turn if it is worth
 * that. */
void cache_write_stored(struct cache *c, block_ref ref);
void cache_write_used(struct cache *c, block_ref ref);
void cache_write_pump(struct cache *c);

/* adopt.c */
/* An extent may have become ready. */
void cache_adopt_grew(struct cache *c);
/* What is still to be taken over of the namespace is not wanted. */
void cache_adopt_forget(struct cache *c, const struct ns *ns);

/* restore.c */
/* Parts of earlier runs may still turn up: what was dumped since waits, or there might be a second
 * copy, newer and not durable, of what is. */
bool cache_recovering(struct cache *c);
void cache_recovered_cb(void *ctx);
uint64_t cache_restore_cb(void *ctx, const struct tier_found *found);
bool cache_describe_cb(void *ctx, uint64_t owner, struct tier_described *out);

/* naming.c */
bool cache_named_cb(void *ctx, const uint8_t *fingerprint);
/* Makes the namespace known to later starts; its blocks are written when that has ended. */
void cache_ns_keep(struct cache *c, struct ns *ns);
/* False: its blocks have to wait; the end of what they wait for pumps the writes. */
bool cache_ns_writable(const struct ns *ns);

/* Drops the block's fills, those that a copy is writing when it has ended. */
void cache_fills_break(struct cache *c, block_ref ref);
/* Drops the oldest fill that no copy is writing. False when there is none. */
bool cache_fill_reclaim(struct cache *c);

#endif
