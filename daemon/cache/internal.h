/* Shared by the files of this room only. */
#ifndef UCMD_CACHE_INTERNAL_H
#define UCMD_CACHE_INTERNAL_H

#include "daemon/base/table.h"
#include "daemon/cache/cache.h"
#include "proto/backoff.h"

#include <uv.h>

/* Fills and reads under way at once; more are -EBUSY. */
#define CACHE_MAX_FILLS (1u << 20)
#define CACHE_MAX_FETCHES (1u << 16)
#define CACHE_MAX_WRITES (1u << 16)
#define RECORD_RETRY_MIN_MS 5000u
#define RECORD_RETRY_MAX_MS 60000u
/* Bytes handed to the tier for writing at once: enough for any disk's queue, little to lose. */
#define CACHE_WRITE_WINDOW (64u << 20)

enum write_to { WRITE_NVME, WRITE_SHARE, WRITE_TARGETS };

struct block_queue {
    block_ref *entries; /* a ring of cap */
    uint32_t head, n, cap;
};

/* Write-behind to one target. */
struct write_target {
    struct block_queue queue;   /* in the order in which they became complete */
    struct block_queue stalled; /* blocks of namespaces that may not be written now */
    uint64_t writing_bytes;     /* of parts whose write is under way */
    bool full; /* it refused an operation, and has not said since that it takes more */
    bool pump; /* the idle callback pumps */
};

/* Blocks by their policy_prev and policy_next: what came last in front. */
struct block_list {
    block_ref front, back;
    uint64_t n;
};

struct cache {
    struct cache_config config;
    const struct tier_ops *tier_ops;
    struct tier *tier;
    const struct share_ops *share_ops;
    struct share *share;
    struct block_list below, shared; /* nothing of these lies in DRAM; in any tier here */
    struct arena *arena;
    struct table fills, fetches, writes;
    struct write_target write[WRITE_TARGETS];
    struct list durables;         /* of cache_durable.link: wait for room in the tier's queue */
    struct list stalled_durables; /* likewise, of namespaces that may not be written now */
    struct list fills_by_age;     /* that no copy is writing, oldest progress first */
    struct list room, yielded;    /* of cache_room.link */
    struct list calm;             /* of cache_calm.link */
    uv_idle_t idle;               /* runs while somebody waits for the next turn of the loop */
    bool idle_on, wake, closing, no_writes;
    bool searching;       /* for room, and not at its end: goes on in the next turn of the loop */
    uint64_t *blockers;   /* room.c: for each extent the owner of a slot that kept it from moving */
    uint64_t stuck;       /* blocks that a search has not looked at since something was released */
    uint32_t fruitless;   /* searches for room in the index, since something was released */
    uint64_t sweep;       /* of `below`, still to be looked at by cache_list_sweep */
    bool torn;            /* not every part of a block was restored, as the index was full */
    uint64_t dirty_bytes; /* in DRAM, not on NVMe, and waiting to be written there */
    uint32_t share_busy;
    uint32_t tier_busy;
    uint32_t unverified;  /* parts in DRAM whose copy of an earlier run is to be read first */
    uint32_t copies;      /* users held by copies, reads and writes: what can make room */
    uint32_t restored_ns; /* namespace of the part that the tier found last */
    struct backoff record_retry;     /* of namespace records that failed */
    bool loading;                    /* the snapshot of the run before */
    struct snapshot_load *load;      /* while loading; later what a stop left unloaded */
    struct snapshot_write *snapshot; /* while it is written, at the stop */
    struct cache_stats stats;
};

struct snapshot_part;

struct block *cache_block(struct cache *c, block_ref ref, struct ns **ns);

/* Where no root of the shared tier is needed. */
static inline bool part_whole_here(const struct part *p)
{
    return p->dram == PART_DRAM_READY || p->nvme == PART_NVME_READY;
}

/* What a dump is writing anew does not lie on a share for as long. */
static inline bool part_whole(const struct part *p)
{
    return part_whole_here(p) || (part_on_share(p) && p->dram != PART_DRAM_FILLING);
}

/* Losing its slot loses nothing. What is only presumed may turn out not to be there. */
static inline bool part_backed(const struct part *p)
{
    return p->nvme == PART_NVME_READY || p->share == PART_SHARE_KNOWN;
}

static inline struct tier_place part_place(const struct part *p)
{
    return (struct tier_place){part_loc(p), p->checksum};
}

static inline uint64_t part_owner(block_ref ref, uint32_t part)
{
    return (uint64_t)ref << 16 | part;
}

/* The only writers of a part's state: they keep every count that depends on it. */
/* number: of the slot (READY), the fill (FILLING) or the fetch (FETCHING). */
void part_set_dram(struct cache *c, block_ref ref, uint32_t part, enum part_dram dram,
                   uint32_t number);
/* READY at `place`, or NONE with NULL. */
void part_set_nvme(struct cache *c, block_ref ref, uint32_t part, const struct tier_place *place);
void part_set_nvme_writing(struct cache *c, block_ref ref, uint32_t part, uint32_t write);
void part_set_share(struct cache *c, block_ref ref, uint32_t part, enum part_share share,
                    share_root_id root);
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
/* Drops the block from every tier here, and forgets what lies on a share. It must be idle. */
void cache_discard(struct cache *c, block_ref ref);

/* lists.c */
/* After the block's state changed: puts it into the list where it belongs, or takes it out. */
void cache_list_place(struct cache *c, block_ref ref);
/* Out of its list, if it is in one, as the policy has the same links. */
void cache_list_unlink(struct cache *c, block_ref ref);
/* Blocks of one prefix were used, head first; those that are 0 or in no list are passed over. */
void cache_list_touch(struct cache *c, const block_ref *refs, uint32_t n);
/* The oldest of the list that may goes. False: those that were looked at are all held or used. */
bool cache_list_drop(struct cache *c, struct block_list *l);
/* During recovery, in a full index: a block goes that lies on NVMe only and was written before what
 * has this number. False: none was found. */
bool cache_list_drop_older(struct cache *c, uint64_t sequence);
/* After that, and once all is taken over that was kept in DRAM: blocks that were restored in part
 * go, by cache_list_sweep in each turn until it says false. */
void cache_list_sweep_begin(struct cache *c);
bool cache_list_sweep(struct cache *c);
/* What may make way for a new block in a full index: what lies on a share only, what left DRAM
 * first of the rest, and what is coldest there. */
enum index_room { INDEX_ROOM_SHARED, INDEX_ROOM_BELOW, INDEX_ROOM_DRAM };
/* A new block; 0 when there is no room. */
block_ref cache_insert(struct cache *c, struct ns *ns, const uint8_t *key, enum index_room room);
/* room.c: the coldest block in DRAM that nobody holds, uses or waits to write to the tier goes from
 * all. False: none may. */
bool cache_coldest_drop(struct cache *c);

/* A slot, on the node if that costs nothing; evicts what must leave. 0, or
 * - -EBUSY: everything is in use, or lies nowhere else while the arena has more room in a moment;
 * - -EFBIG: no extent is as long.
 * owner: part_owner(), or 0 for a slot that holds no part. */
int cache_slot(struct cache *c, uint64_t bytes, uint64_t owner, int node, slot_ref *out);
/* The block's state changed, and it may be one that may leave now. */
void cache_reconsider(struct cache *c, block_ref ref);
/* cache.c: a search for room looked at as many blocks as it may in one turn of the loop: those who
 * wait for room try again in the next. */
void cache_search_later(struct cache *c);

/* Later in this turn of the loop: wake who waits for room, write what waits. */
void cache_released(struct cache *c);

/* fetch.c: fills in everything of an operation but op, place and done. slot: 0 for none. */
void cache_tier_io(struct cache *c, struct tier_io *io, block_ref ref, uint32_t part,
                   slot_ref slot);

/* queue.c. Push returns 0, -ENOMEM, or -ENOSPC: the queue is as long as it may be. Pop needs one
 * that is not empty; unpop follows a pop. */
int queue_push(struct block_queue *q, block_ref ref);
int queue_push_front(struct block_queue *q, block_ref ref);
block_ref queue_pop(struct block_queue *q);
block_ref queue_pop_last(struct block_queue *q);
void queue_unpop(struct block_queue *q, block_ref ref);

/* ---- write_behind.c ---- */

/* The block has just become complete: it is written in its turn if it is worth that. */
void cache_write_stored(struct cache *c, block_ref ref, enum write_to to);
/* The block was used: with admission by reuse it may be worth writing now. */
void cache_write_used(struct cache *c, block_ref ref);
/* Its copy on NVMe turned out bad: what DRAM has of it takes its place. */
void cache_write_again(struct cache *c, block_ref ref);
/* A part of the block was read from the shared tier. */
void cache_write_fetched(struct cache *c, block_ref ref);
/* A part is on the shared tier: those behind it may follow. */
void cache_write_next_part(struct cache *c, block_ref ref, uint32_t part);
/* Something waits, and the target may take it. */
bool cache_write_waits(const struct cache *c, enum write_to to);
/* Begins some writes. True: there is more for the next turn of the loop. */
bool cache_write_pump(struct cache *c, enum write_to to);
/* A namespace may be written again: what was stalled waits in front of its queue. */
void cache_writes_unstall(struct cache *c);

/* ---- write_part.c: 0, -EAGAIN (not now), or another -errno: it will not be written ---- */

int cache_nvme_write(struct cache *c, block_ref ref, uint32_t part);
int cache_share_write(struct cache *c, block_ref ref, uint32_t part);
/* The durables that wait for the write of a part to NVMe to end. */
struct list *cache_write_waiters(struct cache *c, const struct part *p);

/* ---- durable.c ---- */

/* The write that these waited for ended; empties the list. */
void cache_durables_written(struct cache *c, struct list *waiters, int status);
void cache_durables_retry(struct cache *c);
/* The part was dumped before its copy of an earlier run turned up. Once recovery is over that copy
 * is read, and written anew if it is not whole. */
void cache_unverified(struct cache *c, block_ref ref, uint32_t part);

/* ---- snapshot_load.c ---- */

/* An extent may have become ready. */
void cache_snapshot_load_grew(struct cache *c);
/* What is still to be loaded of the namespace is not wanted. */
void cache_snapshot_load_drop(struct cache *c, const struct ns *ns);
/* Calls `each` for every part that was not loaded because the load was stopped, hottest first. Its
 * bytes are where they were. ns is its namespace; part->ns is the number in the old snapshot. */
void cache_snapshot_unloaded(struct cache *c,
                             void (*each)(void *ctx, struct ns *ns,
                                          const struct snapshot_part *part),
                             void *ctx);
/* Frees what is known of these. */
void cache_snapshot_forget(struct cache *c);

/* shared.c */
/* Of the blocks that lie on a share only the oldest go until there are as few as have to be. None
 * that is held. */
void cache_shared_trim(struct cache *c);
/* Nothing of the block is thought to lie on a share any more. */
void cache_shared_forget(struct cache *c, block_ref ref);
/* Names one of its parts for the share. */
struct block_file_id cache_shared_id(struct cache *c, block_ref ref, uint32_t part);

/* restore.c */
/* Parts of earlier runs may still turn up: what was dumped since waits, or there might be a second
 * copy, newer and not durable, of what is. */
bool cache_recovering(struct cache *c);
void cache_recovered_cb(void *ctx);
uint64_t cache_restore_cb(void *ctx, const struct tier_found *found);
bool cache_describe_cb(void *ctx, uint64_t owner, struct tier_described *out);

/* naming.c */
bool cache_ns_known_cb(void *ctx, const uint8_t *fingerprint);
/* Makes the namespace known to later starts, unless it is, or could not be made so a moment ago;
 * its blocks are written when that has ended. There must be a tier. */
void cache_ns_record(struct cache *c, struct ns *ns);
/* False: its blocks have to wait; the end of what they wait for pumps the writes. */
bool cache_ns_writable(const struct ns *ns);

/* Drops the block's fills, those that a copy is writing when it has ended. */
void cache_fills_break(struct cache *c, block_ref ref);
/* Drops the oldest fill that no copy is writing. False: there is none. */
bool cache_fill_reclaim(struct cache *c);

#endif
