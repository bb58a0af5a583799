/* Shared by the files of this module only. */
#ifndef UCMD_CACHE_INTERNAL_H
#define UCMD_CACHE_INTERNAL_H

#include "daemon/base/chore.h"
#include "daemon/base/table.h"
#include "daemon/cache/cache.h"
#include "daemon/cache/extend.h"
#include "daemon/cache/space.h"
#include "daemon/cache/span.h"
#include "daemon/cache/write.h"
#include "daemon/index/policy.h"

#include <assert.h>
#include <uv.h>

/* Operations under way at once; more are -EBUSY. */
#define CACHE_MAX_PENDING_WRITES (1u << 20)
#define CACHE_MAX_PENDING_READS (1u << 16)

/* What the cache puts off until the next iteration of the event loop, in the order in which it runs
 * then. */
enum cache_chore {
    CHORE_COMPACT,
    CHORE_SPACE, /* waiters for space try again */
    CHORE_OTHER, /* other waiters do */
    CHORE_WAITERS,
    CHORE_SECRETS,
    CHORE_WRITE_NVME, /* + enum write_to */
    CHORE_WRITE_SHARED,
    CHORE_SWEEP,
    CHORE_REGROUP,
    CHORE_TRIM,
    CHORE_PRESSURE,
    CHORES,
};

/* Called for parts that a dump has published; NULL: nothing is. */
struct cache_watchers {
    void (*published_cb)(void *ctx, struct ns *ns, block_ref ref, uint32_t part);
    void *published_ctx;
};

struct cache {
    struct cache_config config;
    /* Write-back hears of blocks that are used; NULL: there is nothing below DRAM. */
    void (*used_cb)(struct cache *c, struct ns *ns, const block_ref *refs, uint32_t n);
    const struct tier_ops *tier_ops;
    struct tier *tier;     /* NULL: none */
    struct shared *shared; /* NULL: none */
    struct arena *arena;
    uint32_t tier_busy, shared_busy; /* operations under way */
    /* of parts: copies, reads and writes, whose end may free a slot; no lasting ones */
    uint32_t users;
    uint32_t granted; /* slots that are nobody's part, by cache_slot_grant */
    struct table pending_writes, pending_reads;
    struct list pending_writes_by_age; /* those that no copy is writing, oldest progress first */
    struct cache_stats stats;
    struct cache_leased leased;
    uint64_t deletions;
    uint64_t releases; /* how often something was released */
    struct cache_watchers watch;
    struct list followers; /* struct cache_follower */
    /* Postponed work, and waiters. */
    struct chores chores;
    struct chore chore[CHORES];
    struct list waits[WAITS];  /* of cache_retry.link */
    struct list firsts;        /* of those that wait for a slot, those with `first` */
    const struct list *trying; /* which of them does so now; an address only */
    struct list woken;         /* of WAIT_OTHER, those that are about to try again */
    unsigned handles;          /* that are open */
    /* To the tiers below. */
    struct write_target write[WRITE_TARGETS];
    /* blocks for the shared tier whose namespace's secret is awaited */
    struct block_queue without_secret;
    uint32_t with_secret; /* of them, those to look at again: the last ones */
    bool no_writes;
    uint64_t dirty_bytes; /* in DRAM, not on NVMe, and waiting to be written there */
    struct cache_durables durables;
    struct cache_records records;
    /* Which block leaves. */
    struct cache_space space;
    struct cache_compact compact;
    struct cache_quotas quotas;
    struct cache_lists lists;
    struct cache_copier copier;
    struct cache_mover *mover; /* NULL: nobody */
    uint32_t moving;           /* parts that are claimed to move */
    bool restoring;            /* parts of an earlier run come into DRAM */
};

static inline bool cache_compact_late(const struct cache *c)
{
    return uv_now(c->config.loop) - c->compact.progress_ms > CACHE_COMPACT_PATIENCE_MS;
}

/* The block, and its namespace. */
struct block *cache_block(struct cache *c, block_ref ref, struct ns **ns);

static inline struct part *cache_part(struct cache *c, block_ref ref, uint32_t part)
{
    struct block *b = index_block(c->config.index, ref);

    assert(part < index_ns(c->config.index, b->ns)->identity.parts);
    return &b->part[part];
}

/* While a dump writes a part again, the shared tier's copy does not count. */
bool part_whole(const struct part *p);

static inline struct tier_place part_place(const struct part *p)
{
    return (struct tier_place){part_loc(p), p->checksum, p->encrypted};
}

static inline uint32_t owner_part(uint64_t owner)
{
    return owner & 0xffff;
}

/* ---- part.c ---- */

/* Only these write a part's state; they keep every count that depends on it.
 * number: of the slot (READY), the pending write (PENDING_WRITE) or the pending read
 * (PENDING_READ). */
void part_set_dram(struct cache *c, block_ref ref, uint32_t part, enum part_dram dram,
                   uint32_t number);
/* READY at `place`, or NONE with NULL. */
void part_set_nvme(struct cache *c, block_ref ref, uint32_t part, const struct tier_place *place);
void part_set_nvme_writing(struct cache *c, block_ref ref, uint32_t part, struct part_op *write);
void part_set_shared(struct cache *c, block_ref ref, uint32_t part, enum part_shared shared,
                     shared_root_id root);

static inline void part_ref(struct cache *c, struct part *p)
{
    assert(p->users < UINT16_MAX);
    p->users++;
    c->users++;
}

static inline void part_unref(struct cache *c, struct part *p)
{
    assert(p->users > 0);
    p->users--;
    c->users--;
}

/* From now on no lookup finds it, and readers of granted slots miss its parts. */
void block_mark_deleting(struct cache *c, block_ref ref);

/* ---- wait.c ---- */

static inline void cache_wake(struct cache *c, enum cache_chore chore)
{
    chore_wake(&c->chore[chore]);
}
/* Less is under way, and nothing was released: if nothing is left, waiters for a release must
 * fail. */
void cache_less_under_way(struct cache *c);
/* Waiters for write-back may continue. */
void cache_less_dirty(struct cache *c);
/* Chores: waiters try again. */
bool cache_space_run(void *ctx);
bool cache_space_ready(const void *ctx);
bool cache_other_run(void *ctx);
bool cache_other_ready(const void *ctx);
bool cache_iteration_run(void *ctx);
bool cache_iteration_ready(const void *ctx);
bool cache_pressure_run(void *ctx);
bool cache_pressure_ready(const void *ctx);

/* ---- pending_write.c ---- */

struct pending_write {
    struct list link, link_age;
    struct pending_writes *pending_writes;
    block_ref ref;
    uint32_t part, number, layers;
    slot_ref slot;
    uint32_t done;    /* layers whose bytes are in the slot */
    uint32_t copying; /* layers claimed and not yet reported */
    bool broken;      /* dropped when the last copy has ended */
    uint64_t claimed[];
};

/* ---- ref.c ---- */

/* After a reference or lease ended: removes a block that is marked for deletion, or of which too
 * little is left. The caller calls cache_released, once for all. */
void cache_settle(struct cache *c, block_ref ref, const struct block *b);

/* Drops it; no copy is writing it. The caller calls cache_released. */
void pending_write_abort(struct cache *c, struct pending_write *f);
/* Drops the block's pending writes; a pending write that a copy is writing goes when the copy has
 * ended. */
void pending_writes_break(struct cache *c, block_ref ref);
/* Drops the oldest pending write that no copy is writing. False: there is none. */
bool pending_write_reclaim(struct cache *c);

/* Frees the slots of its READY parts; none of them may have a user. */
void block_drop_dram(struct cache *c, block_ref ref, bool evicted);
/* Drops what NVMe has of it. */
void block_drop_nvme(struct cache *c, block_ref ref);
/* Nothing of the block is believed to lie on the shared tier any more. */
void cache_shared_forget(struct cache *c, block_ref ref);
/* The part's copy on NVMe is gone, or not to be trusted. forget: the tier does not know yet. */
void cache_nvme_lost(struct cache *c, block_ref ref, uint32_t part, bool forget);
/* Removes the block from DRAM and NVMe, and forgets its files on the shared tier. It must be
 * idle. */
void cache_discard(struct cache *c, block_ref ref);

#endif
