/* Shared by the files of this room only. */
#ifndef UCMD_CACHE_INTERNAL_H
#define UCMD_CACHE_INTERNAL_H

#include "daemon/base/chore.h"
#include "daemon/base/table.h"
#include "daemon/cache/cache.h"
#include "daemon/cache/span.h"
#include "daemon/index/policy.h"
#include "proto/backoff.h"

#include <uv.h>

/* Operations under way at once; more are -EBUSY. */
#define CACHE_MAX_FILLS (1u << 20)
#define CACHE_MAX_FETCHES (1u << 16)
#define CACHE_SHARD_SUM_BITS 16
/* Bytes that a target of write-behind has at once: enough for any disk's queue, little to lose. */
#define CACHE_WRITE_WINDOW (64u << 20)
/* Between two tries to write the record of a namespace. */
#define RECORD_RETRY_MIN_MS 5000u
#define RECORD_RETRY_MAX_MS 10000u

enum write_to { WRITE_NVME, WRITE_SHARE, WRITE_TARGETS };

struct block_queue {
    block_ref *entries; /* a ring of cap */
    uint32_t head, n, cap;
};

/* A tenant's blocks that wait to be written, in the order in which they became complete. Of more tenants than there are lanes
 * some share one, as in base/fair_queue.h. */
struct write_lane {
    struct fair_flow flow;
    struct block_queue queue;
};

/* Write-behind to one target: tenants take turns by their weights. */
struct write_target {
    struct fair fair;
    struct write_lane
        lane[FAIR_FLOWS_MAX];   /* memory of those that nobody has used is not touched */
    uint32_t n;                 /* that wait, in all lanes */
    struct block_queue stalled; /* blocks of namespaces that may not be written now */
    uint64_t writing_bytes;     /* of parts whose write is under way */
    bool full; /* it refused an operation: no more before one has ended, or it says so */
};

/* What the cache puts off until the next turn of the loop, in the order in which it runs then. */
enum cache_chore {
    CHORE_COMPACT,
    CHORE_SPACE, /* who waits for space tries again */
    CHORE_OTHER, /* who waits for something else does */
    CHORE_TURN,
    CHORE_SEEDS,
    CHORE_WRITE_NVME, /* + enum write_to */
    CHORE_WRITE_SHARE,
    CHORE_WINDOWS,
    CHORE_SWEEP,
    CHORE_HINTS,
    CHORE_REGROUP,
    CHORE_TRIM,
    CHORE_PRESSURE,
    CHORES,
};

struct cache {
    struct cache_config config;
    const struct tier_ops *tier_ops;
    struct tier *tier;   /* NULL: none */
    struct share *share; /* NULL: none */
    struct arena *arena;
    uint32_t tier_busy, share_busy; /* operations under way */
    uint32_t users; /* of parts: copies, reads and writes, whose end may free a slot; no holds */
    uint64_t dooms;
    void (*published_cb)(void *ctx, struct ns *ns, block_ref ref, uint32_t part); /* or NULL */
    void *published_ctx;
    void (*changed_cb)(void *ctx, const struct ns *ns, const uint8_t *key, uint8_t was, uint8_t is);
    void *changed_ctx;
    struct table fills, fetches;
    struct list fills_by_age; /* those that no copy is writing, oldest progress first */
    struct cache_stats stats;
    struct chores chores;
    struct chore chore[CHORES];
    unsigned handles;         /* that are open */
    struct list waits[WAITS]; /* of cache_retry.link */
    struct list woken;        /* of WAIT_OTHER, those that are about to try again */
    /* Write-behind. */
    struct write_target write[WRITE_TARGETS];
    struct block_queue unseeded; /* blocks for the shared tier whose namespace's seed is awaited */
    uint32_t seeded;             /* of them, those to look at again: the last ones */
    bool no_writes;
    uint64_t dirty_bytes;         /* in DRAM, not on NVMe, and waiting to be written there */
    struct list durables;         /* of cache_durable.link: wait for the tier */
    struct list stalled_durables; /* likewise, of namespaces that may not be written now */
    uint32_t unverified; /* parts in DRAM whose copy of an earlier run is still to be read */
    struct backoff record_retry; /* of namespace records that failed */
    uv_timer_t record_timer;
    uint32_t records; /* that are being written */
    /* Moving parts into windows. */
    struct {
        void (*copy)(void *ctx, struct cache_copy *k); /* NULL: nobody copies */
        void *ctx;
        struct list ops; /* struct relocation */
        uint32_t n, most;
    } relocations;
    struct {
        uint32_t looks; /* in this turn of the loop */
        uint64_t
            change; /* counts turns, and what was released: what was in vain may not be any more */
        uint64_t
            untaken; /* the change since which nothing could be taken from others for `group` */
        const struct arena_group *group;
    } window_search;
    /* Reads of some shards. */
    struct {
        struct cache_stage *stage; /* the one that pieces are taken of; NULL: none */
        uint32_t pieces;           /* in use, of all stages */
        uint16_t sums[1u << CACHE_SHARD_SUM_BITS];
    } shards;
    uint32_t taking; /* 1 + the window extent that is emptied for another group, or 0 */
    uint32_t taken;  /* where the search for such an extent goes on */
    /* Tables of hints. */
    struct {
        struct list all;  /* struct ns_hints */
        struct list kept; /* tables that ended, and that workers may still have */
        uint32_t n;
    } hints;
    /* Making space. */
    bool searching;     /* a search for a slot goes on in the next turn of the loop */
    uint64_t *blockers; /* space.c: for each extent the owner of a slot that kept it from moving */
    uint32_t emptying;  /* 1 + the extent that changes its slot size, or 0 */
    /* An extent that is emptied of blocks that stay: compact.c. */
    struct {
        uint64_t slot_bytes; /* that are wanted; 0: none is */
        uint32_t extent;     /* 1 + its number; 0: one is sought, from `cursor` on, among `left` */
        uint32_t cursor, left;
        struct list moves; /* struct slot_move */
        uint32_t n;        /* of them */
        uint64_t bytes;
        uint64_t progress_ms; /* by uv_now: of the last part that moved */
        struct deadline alarm;
        uint64_t vain;     /* `releases` when the last one was given up; */
        uint64_t pause_ms; /* the last one in vain was followed by */
        uint64_t again_ms; /* by uv_now: no other one earlier */
        uint32_t failed;   /* 1 + the one that was given up */
    } compact;
    struct {
        bool guaranteed;  /* some tenant has been guaranteed DRAM */
        struct list open; /* of policy_group.open: of tenants that hold more than is guaranteed */
        uint32_t place;   /* where the walk that brings blocks into their groups goes on */
        uint64_t cursor;
    } quotas;
    struct cache_leased leased;
    uint64_t releases;  /* how often something was released */
    uint32_t fruitless; /* searches for space in the index since something was released */
    struct block_list below, shared; /* blocks with nothing in DRAM: some part on NVMe; none */
    uint64_t shared_index_bytes;     /* what those of `shared` count as in the index */
    uint64_t sweep; /* blocks of `below` that cache_list_sweep still has to look at */
    bool torn;      /* recovery left out parts of some blocks, as the index was full */
    /* An earlier run. */
    bool loading;                    /* the snapshot of the run before */
    struct snapshot_load *load;      /* while loading; later what a stop left unloaded */
    struct snapshot_write *snapshot; /* while it is written, at the stop */
};

struct snapshot_part;
struct part_op;

struct block *cache_block(struct cache *c, block_ref ref, struct ns **ns);
struct part *cache_part(struct cache *c, block_ref ref, uint32_t part);

static inline bool part_whole_local(const struct part *p)
{
    return p->dram == PART_DRAM_READY || p->nvme == PART_NVME_READY;
}

/* While a dump writes a part anew, the shared tier's copy does not count. */
static inline bool part_whole(const struct part *p)
{
    return part_whole_local(p) || (part_on_share(p) && p->dram != PART_DRAM_FILLING);
}

/* Losing its slot loses nothing. A PRESUMED part may turn out not to be there. */
static inline bool part_backed(const struct part *p)
{
    return p->nvme == PART_NVME_READY || p->share == PART_SHARE_KNOWN;
}

/* What decides which of its blocks are written to NVMe: both forms of a block count for the plain one's
 * namespace. */
static inline struct admission *ns_admission(struct ns *ns)
{
    return ns->base ? &ns->base->admission : &ns->admission;
}

static inline struct tier_place part_place(const struct part *p)
{
    return (struct tier_place){part_loc(p), p->checksum, p->sealed};
}

/* A part as the owner of a slot or of a place on NVMe. */
static inline uint64_t part_owner(block_ref ref, uint32_t part)
{
    return (uint64_t)ref << 16 | part;
}

static inline block_ref owner_block(uint64_t owner)
{
    return (block_ref)(owner >> 16);
}

static inline uint32_t owner_part(uint64_t owner)
{
    return owner & 0xffff;
}

/* ---- cache.c ---- */

/* Only these write a part's state; they keep every count that depends on it.
 * number: of the slot (READY), the fill (FILLING) or the fetch (FETCHING). */
void part_set_dram(struct cache *c, block_ref ref, uint32_t part, enum part_dram dram,
                   uint32_t number);
/* READY at `place`, or NONE with NULL. */
void part_set_nvme(struct cache *c, block_ref ref, uint32_t part, const struct tier_place *place);
void part_set_nvme_writing(struct cache *c, block_ref ref, uint32_t part, struct part_op *write);
void part_set_share(struct cache *c, block_ref ref, uint32_t part, enum part_share share,
                    share_root_id root);
void part_use(struct cache *c, struct part *p);
void part_unuse(struct cache *c, struct part *p);

/* Somebody wants to know when the status of a block changes. */
static inline bool cache_followed(const struct ns *ns)
{
    return ns->hints || ns->tenant->events;
}
/* What may have changed it is over: it was `was` before. Of a namespace that is followed. */
void cache_status_changed(struct cache *c, struct ns *ns, block_ref ref, uint8_t was);

/* Workers miss the block's parts in their windows from now on. */
void block_retract(struct cache *c, block_ref ref);

/* No part of it is being read, written or filled. */
bool block_idle(const struct block *b, const struct ns *ns);

/* ---- hints.c ---- */

/* The block's status has changed. Of a namespace with a table of hints. */
void cache_hints_changed(struct cache *c, struct ns *ns, block_ref ref, uint8_t was, uint8_t is);
bool cache_hints_run(void *ctx); /* fills some */
/* No table is in use. */
void cache_hints_close(struct cache *c);

/* ---- turn.c ---- */

int cache_chores_init(struct cache *c);
static inline void cache_wake(struct cache *c, enum cache_chore chore)
{
    chore_wake(&c->chore[chore]);
}
/* Something was released. In the next turn of the loop those who wait for space try again, and writes
 * begin. */
void cache_released(struct cache *c);
/* Less is under way, and nothing was released: if nothing is left, who waits for space has to know. */
void cache_less_under_way(struct cache *c);
/* Who waits for write-behind may go on. */
void cache_less_dirty(struct cache *c);

/* ---- fill.c ---- */

struct cache_fill {
    struct list link, link_age;
    struct cache_fills *fills;
    block_ref ref;
    uint32_t part, number, shards;
    slot_ref slot;
    uint32_t done;    /* shards whose bytes are in the slot */
    uint32_t copying; /* shards claimed and not yet reported */
    bool broken;      /* dropped when the last copy has ended */
    uint64_t claimed[];
};

/* Whether all of these shards are claimed; no others are the part's. */
bool fill_claimed(const struct cache_fill *f, uint32_t shard, uint32_t n);
/* Drops the block's fills; a fill that a copy is writing goes when the copy has ended. */
void cache_fills_break(struct cache *c, block_ref ref);
/* Drops the oldest fill that no copy is writing. False: there is none. */
bool cache_fill_reclaim(struct cache *c);

/* ---- fetch.c ---- */

/* One read or write of a part, from its start to its end. */
struct part_op {
    union {
        struct tier_io tier;
        struct share_io share;
    } io;
    struct cache *cache;
    block_ref ref;
    uint32_t part;
    bool shared;         /* which of io */
    struct list waiters; /* of a fetch: cache_wait.link; of a write to NVMe: cache_durable.link */
    /* Of a fetch. */
    uint32_t number;
    slot_ref slot;
    uint64_t begun_ns; /* of a read from NVMe: when it was submitted */
    uint8_t priority;
    bool small;
    bool failed; /* reported; a thread of the shared tier may still write into the slot */
};
struct part_op *part_op_new(struct cache *c, block_ref ref, uint32_t part); /* NULL: no memory */
/* Submits a read into the span, or a write of it, to the shared tier. */
int part_op_share(struct part_op *op, const struct span *span, bool write,
                  void (*done_cb)(struct share_io *io, int status),
                  void (*released_cb)(struct share_io *io));
/* What the tier stores beside a part. */
struct tier_name cache_tier_name(struct cache *c, block_ref ref, uint32_t part);
/* Fills in an operation on a whole part but for done_cb. span: NULL for none. */
void cache_tier_io(struct cache *c, struct tier_io *io, enum tier_op op, block_ref ref,
                   uint32_t part, const struct span *span);
int cache_tier_submit(struct cache *c, struct tier_io *io);
/* Counts a read of the block for a request, which has ended and brought so many bytes. */
void cache_tier_read(struct cache *c, block_ref ref, const struct tier_io *io, uint64_t bytes);

/* As cache_get, of a part that is not in DRAM, into a slot of the group's window. -EAGAIN, -ENOSPC: also
 * cache_window_slot. */
int cache_get_window(struct cache *c, block_ref ref, uint32_t part, struct arena_group *group,
                     uint8_t priority, struct cache_wait *w);

/* ---- relocate.c ---- */

/* Relocations that wait for something go on if they can. */
void cache_relocations_pump(struct cache *c);

/* ---- window.c: slots in windows ---- */

/* A slot of the group's window; blocks that nobody uses leave it, or make an extent of another group free, if
 * they must. -EAGAIN: an extent comes, see arena_alloc_window. -ENOSPC: none may be had. Or another -errno. */
int cache_window_slot(struct cache *c, struct arena_group *group, uint64_t bytes, uint64_t owner,
                      slot_ref *out);
/* More is lent than the budget. */
bool cache_window_over(const struct cache *c);
/* Relocations go on, and an extent that is taken from its group is emptied. */
bool cache_windows_run(void *ctx);
bool cache_windows_ready(const void *ctx);

/* ---- evict.c ---- */

/* Frees the slots of its READY parts; none of them may have a user. */
void block_drop_dram(struct cache *c, block_ref ref, bool evicted);
/* The part's copy on NVMe is gone, or not to be trusted. forget: the tier does not know yet. */
void cache_nvme_lost(struct cache *c, block_ref ref, uint32_t part, bool forget);
/* One lease less, without settling the block. True: it was the last one. */
bool cache_lease_end(struct cache *c, block_ref ref);
/* After a use or lease ended: removes a block that is doomed, or of which too little is left. */
void cache_settle(struct cache *c, block_ref ref);
/* Removes the block from DRAM and NVMe, and forgets its files on the shared tier. It must be
 * idle. */
void cache_discard(struct cache *c, block_ref ref);

/* ---- lists.c ---- */

/* After the block's state changed: puts it into the list where it belongs, or takes it out. */
void cache_list_update(struct cache *c, block_ref ref);
/* Takes it out of its list, if it is in one: the policy needs the links. */
void cache_list_unlink(struct cache *c, block_ref ref);
/* Blocks of one prefix were used, head first; 0 and blocks in no list are passed over. */
void cache_list_touch(struct cache *c, const block_ref *refs, uint32_t n);
/* Drops the oldest block of the list that may be dropped. False: of those at its end none may. */
bool cache_list_drop(struct cache *c, struct block_list *l);
/* During recovery, in a full index: drops a block that lies on NVMe only and was written before
 * `sequence`. False: none was found. */
bool cache_list_drop_older(struct cache *c, uint64_t sequence);
/* When recovery and the load of the snapshot are over: drops blocks that lack parts, some in each
 * turn of the loop. */
void cache_list_sweep_begin(struct cache *c);
bool cache_list_sweep_run(void *ctx);
bool cache_list_sweep_ready(const void *ctx);
/* Which blocks may be dropped for a new one in a full index: those on the shared tier only, also
 * those that left DRAM, also the coldest in DRAM. */
enum index_space { INDEX_SPACE_SHARED, INDEX_SPACE_BELOW, INDEX_SPACE_DRAM };
/* A new block; 0 when the index stays full. */
block_ref cache_insert(struct cache *c, struct ns *ns, const uint8_t *key, enum index_space from);

/* ---- index_part.c ---- */

/* A new block of ns takes the place of its tenant's own ones only. */
bool cache_index_gives(struct cache *c, const struct ns *ns);
/* Drops one of them. False: none may be dropped. */
bool cache_index_give(struct cache *c, const struct ns *ns);

/* ---- space.c ---- */

/* Drops the block, which nobody uses, from DRAM and NVMe. */
void cache_drop(struct cache *c, block_ref ref);

/* Drops the coldest block in DRAM that is not held, used or waiting to be written to NVMe. False:
 * none may be dropped. */
bool cache_coldest_drop(struct cache *c);
/* A slot, on the node if that costs nothing; evicts what must leave. keep: nothing that waits to be written
 * leaves for it. 0, or
 * - -EBUSY: everything is in use, or lies nowhere else while the arena has more space in a moment;
 * - -EFBIG: no extent is as long;
 * - -EDQUOT: the owner's tenant gets no more, and nothing of its own may leave now.
 * owner: part_owner(), or 0 for a slot that holds no part. */
int cache_slot(struct cache *c, uint64_t bytes, uint64_t owner, int node, bool keep, slot_ref *out);
/* The block in a slot of this owner may leave DRAM now without loss, or is not waiting to be written; and
 * leaves. */
bool cache_owner_may_leave(struct cache *c, uint64_t owner);
void cache_owner_evict(struct cache *c, uint64_t owner);
/* The block's state changed, and it may be one that may leave now. */
void cache_reconsider(struct cache *c, block_ref ref);

/* A slot for a part that moves out of a closed extent; blocks leave for it that may leave for anybody's. 0: there is none now. */
slot_ref cache_slot_beside(struct cache *c, uint64_t bytes, uint64_t owner, int node);

/* ---- compact.c: extents emptied of blocks that stay ---- */

/* Nothing else gives a slot of that size: an extent may be emptied for it. True: that is under way, and who waits for space will be
 * told. */
bool cache_compact(struct cache *c, uint64_t slot_bytes);
bool cache_compact_run(void *ctx);
bool cache_compact_ready(const void *ctx);
void cache_compact_disarm(struct cache *c); /* its alarm */

/* ---- quota.c: what tenants are guaranteed, and get at most ---- */

/* Whether the part has a slot of ordinary DRAM, or fills one. */
bool cache_quota_slot(struct cache *c, const struct part *p);
/* A namespace's tenant has so much more of these slots; less: the negative number. */
void cache_quota_count(struct cache *c, struct ns *ns, uint64_t more_bytes);
/* Its blocks stay in DRAM whoever else wants the space. */
bool cache_quota_keeps(const struct tenant *t);
/* Its blocks stay on NVMe. */
bool cache_quota_keeps_below(const struct tenant *t);
/* The groups among which a search may choose, the one with the coldest candidate first: of more than these, some,
 * in turn. Returns their number. */
#define QUOTA_GROUPS 17u
uint32_t cache_quota_groups(struct cache *c, struct policy_group *out[QUOTA_GROUPS]);
bool cache_quota_regroup_run(void *ctx); /* brings some blocks into their groups */

/* ---- quota_below.c: what tenants get of NVMe at most ---- */

/* Makes room for a part of the tenant's, of its own blocks there. 0, or -EDQUOT: none may go now. durable: for a part that
 * somebody waits for. */
int cache_quota_below(struct cache *c, struct tenant *t, uint64_t bytes, bool durable);
bool cache_quota_trim_run(void *ctx); /* drops some of what tenants have too much */

/* ---- queue.c ---- */

/* 0, -ENOMEM, or -ENOSPC: the queue is as long as it may be. */
int queue_push(struct block_queue *q, block_ref ref);
int queue_push_front(struct block_queue *q, block_ref ref);
/* The queue must not be empty. */
block_ref queue_pop(struct block_queue *q);
block_ref queue_pop_last(struct block_queue *q);
/* A block of that tenant waits; front: before its others. 0 or -errno of its queue. */
int writes_push(struct write_target *t, const struct tenant *of, block_ref ref, bool front);
/* The next block, which leaves its queue, and the lane that it was in. Something must wait. */
block_ref writes_pop(struct write_target *t, struct write_lane **lane);
/* So many bytes of what was popped of the lane are being written; 0: nothing is. Once for each writes_pop. */
void writes_charge(struct write_target *t, struct write_lane *lane, uint64_t bytes);
void writes_free(struct write_target *t);

/* ---- write_behind.c ---- */

/* The block has just become complete: it is written in its turn if it is worth that. */
void cache_write_stored(struct cache *c, block_ref ref, enum write_to to);
/* These blocks of ns were used: with admission by reuse they may be worth writing now. 0 among them is
 * passed over. */
void cache_write_used(struct cache *c, struct ns *ns, const block_ref *refs, uint32_t n);
/* Its copy on NVMe turned out bad: what DRAM has of it takes its place. */
void cache_write_again(struct cache *c, block_ref ref);
/* A part of the block was read from the shared tier. */
void cache_write_fetched(struct cache *c, block_ref ref);
/* A part is on the shared tier: those behind it may follow. */
void cache_write_next_part(struct cache *c, block_ref ref, uint32_t part);
/* Something waits, and the target may take it. */
bool cache_write_waits(const struct cache *c, enum write_to to);
/* Begin some writes. */
bool cache_write_nvme_run(void *ctx);
bool cache_write_nvme_ready(const void *ctx);
bool cache_write_share_run(void *ctx);
bool cache_write_share_ready(const void *ctx);
/* A namespace may be written again: what was stalled waits in front of its queue. */
void cache_writes_unstall(struct cache *c);
/* A seed has come, or can't be had: its blocks are put back in the next turns. */
void cache_writes_seeded(struct cache *c);
bool cache_writes_seed(struct cache *c); /* some of these; are there more? */
bool cache_seeds_run(void *ctx);
bool cache_seeds_ready(const void *ctx);
/* How many of its parts a write would bring to the target: they have no copy there, nor is one under
 * way. */
uint32_t cache_parts_missing(const struct block *b, const struct ns *ns, enum write_to to);
/* Empties the queues at a stop. Unstall first. */
void cache_writes_abandon(struct cache *c);

/* ---- write_part.c: 0, -EAGAIN (not now), or another -errno: it will not be written ---- */

/* durable: see cache_quota_below. */
int cache_nvme_write(struct cache *c, block_ref ref, uint32_t part, bool durable);
int cache_share_write(struct cache *c, block_ref ref, uint32_t part);

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
/* Skips the namespace's parts that the snapshot has not loaded yet. */
void cache_snapshot_load_drop(struct cache *c, const struct ns *ns);
/* Calls `each` for every part that was not loaded because the load was stopped, hottest first. Its
 * bytes are where they were. ns is its namespace; part->ns is the number in the old snapshot. */
void cache_snapshot_unloaded(struct cache *c,
                             void (*each)(void *ctx, struct ns *ns,
                                          const struct snapshot_part *part),
                             void *ctx);
/* Frees what is known of these. */
void cache_snapshot_forget(struct cache *c);

/* ---- shared.c ---- */

/* Drops the oldest of too many blocks that lie on the shared tier only, but none that is held. */
void cache_shared_trim(struct cache *c);
/* Nothing of the block is believed to lie on the shared tier any more. */
void cache_shared_forget(struct cache *c, block_ref ref);
/* The name of a part's file. */
struct block_file_id cache_shared_id(struct cache *c, block_ref ref, uint32_t part);
/* Its files have no names yet: cache_writes_seeded says when that is over. */
bool cache_seed_awaited(const struct cache *c, const struct ns *ns);

/* ---- recovery.c ---- */

/* Parts of earlier runs may still turn up. What was dumped since waits: its copy of an earlier run
 * may have been promised, and a newer one that is not durable must not take its place. */
bool cache_recovering(const struct cache *c);
/* For tier_callbacks. */
void cache_recovered_cb(void *ctx);
uint64_t cache_restore_cb(void *ctx, const struct tier_found *found);
bool cache_describe_cb(void *ctx, uint64_t owner, struct tier_described *out);

/* ---- ns_record.c ---- */

/* Begins to write the namespace's record, unless there is one, or the last try failed a moment ago.
 * Its blocks wait until the try has ended. There must be a tier. */
void cache_ns_record(struct cache *c, struct ns *ns);
void cache_ns_records_init(struct cache *c);
/* False: its blocks have to wait. The end of what they wait for calls cache_writes_unstall. */
bool cache_ns_writable(const struct ns *ns);
bool cache_ns_known_cb(void *ctx, const uint8_t *fingerprint); /* for tier_callbacks */

/* shards.c */
/* Who waits for the whole part, for want of a slot, waits no more. No effect on others. */
void cache_shards_cancel(struct cache_wait *w);

#endif
