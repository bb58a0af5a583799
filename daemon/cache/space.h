/* Which block leaves for a new one, in DRAM and in the index; for the files of this module only. */
#ifndef UCMD_CACHE_SPACE_H
#define UCMD_CACHE_SPACE_H

#include "daemon/base/deadline.h"
#include "daemon/cache/cache.h"
#include "daemon/index/policy.h"

/* space.c */
struct cache_space {
    bool searching;     /* a search for a slot goes on in the next iteration of the event loop */
    uint64_t *blockers; /* for each slab the owner of a slot that kept it from moving */
    uint32_t emptying;  /* 1 + the slab that changes its slot size, or 0 */
};

/* compact.c: a slab that is emptied of blocks that stay. */
struct cache_compact {
    uint64_t slot_bytes; /* that are wanted; 0: none is */
    uint32_t slab;       /* 1 + its number; 0: one is sought, from `cursor` on, among `left` */
    uint32_t cursor, left;
    struct list moves; /* struct compact_move */
    uint32_t n;        /* of them */
    uint64_t bytes;
    uint64_t progress_ms; /* by uv_now: of the last part that moved */
    struct deadline alarm;
    uint64_t vain;     /* cache.releases when the last one was given up; */
    uint64_t pause_ms; /* after the last fruitless one */
    uint64_t again_ms; /* by uv_now: no other one earlier */
    uint32_t failed;   /* 1 + the one that was given up */
};

/* quota.c */
struct cache_quotas {
    bool guaranteed;  /* some tenant has been guaranteed DRAM */
    struct list open; /* of policy_group.open: of tenants that hold more than is guaranteed */
    uint32_t place;   /* where the walk that brings blocks into their groups goes on */
    uint64_t cursor;
};

struct cache_lists {
    struct block_list below, shared; /* blocks with nothing in DRAM: some part on NVMe; none */
    uint64_t shared_index_bytes;     /* what those of `shared` count as in the index */
    uint64_t sweep;                  /* blocks of `below` that the sweep still has to look at */
    bool torn;          /* recovery left out parts of some blocks, as the index was full */
    uint32_t fruitless; /* searches for space in the index since something was released */
};

/* ---- part.c: lists of blocks that have nothing in DRAM ---- */

#define BLOCK_LISTED (BLOCK_BELOW | BLOCK_SHARED_ONLY)

/* After the block's state changed: puts it into the list where it belongs, or takes it out. */
void cache_list_update(struct cache *c, block_ref ref);
/* Takes it out of its list, if it is in one: the policy needs the links. */
void cache_list_unlink(struct cache *c, block_ref ref);
/* As if it had been used last. No effect on blocks in no list. */
void cache_list_front(struct cache *c, block_ref ref);
/* ---- part.c: what may leave DRAM ---- */

/* The lists of the policy. */
enum {
    LIST_CANDIDATES = POLICY_CANDIDATES,
    /* In use, or nowhere else while it is leased, pinned, or being written. */
    LIST_HELD,
    /* Nowhere else, and waits to be written: leaves when nothing else may. */
    LIST_UNWRITTEN,
    /* Nowhere else, while the arena still grows. */
    LIST_ONLY_COPY,
    /* Leased or pinned with a copy below: may leave DRAM, but not the index. */
    LIST_KEPT,
    /* Blocks of another slot size than was wanted, in a slab that could not be emptied. */
    LIST_STUCK,
    /* Blocks only in granted slots, which are of no use to others. The granter empties them. */
    LIST_GROUPS,
};
_Static_assert((int)LIST_GROUPS < (int)POLICY_LISTS, "the policy has too few lists");

/* No part of it is being read, written or filled. */
bool block_idle(const struct block *b, const struct ns *ns);

/* The context in which a block may be evicted, or not. */
struct leave {
    struct cache *cache;
    bool lose;   /* those that lie nowhere else may leave though they wait to be written */
    bool spare;  /* the arena has space in a moment: what lies nowhere else stays */
    bool drop;   /* the block is to leave all tiers */
    bool groups; /* those in slots of groups may leave, too */
};
/* The list where the block belongs; LIST_CANDIDATES: it may leave. */
unsigned cache_leave_list(const struct leave *l, block_ref ref);
/* The owner's slot can't be emptied now. */
bool cache_leave_blocked(const struct leave *l, uint64_t owner);
/* The block's state changed, and it may be one that may leave now. */
void cache_reconsider(struct cache *c, block_ref ref);
/* The arena has more space in a moment. */
bool cache_arena_grows(const struct cache *c);

/* ---- ref.c ---- */

/* Nobody holds, uses or pinned it. */
bool cache_may_drop(struct cache *c, block_ref ref);
/* Drops the oldest block of the list that may be dropped. False: of those at its end none may. */
bool cache_list_drop(struct cache *c, struct block_list *l);
/* Drops the oldest of too many blocks that lie on the shared tier only, but none that is held. */
void cache_shared_trim(struct cache *c);
/* The same, so that there is room for so much more in the index. False: they would be too many. */
bool cache_shared_room(struct cache *c, uint64_t more_bytes);

/* ---- index_space.c ---- */

/* Which blocks may be dropped for a new one in a full index: those on the shared tier only, also
 * those that left DRAM, also the coldest in DRAM. */
enum index_space { INDEX_SPACE_SHARED, INDEX_SPACE_BELOW, INDEX_SPACE_DRAM };
/* A new block; 0 when the index stays full. In cache.c. */
block_ref cache_insert(struct cache *c, struct ns *ns, const uint8_t *key, enum index_space from);
/* Drops one for it. False: none may be. */
bool cache_index_drop(struct cache *c, const struct ns *ns, enum index_space from);
/* Looks at some blocks of the tenant, in its namespaces in turn, from where the last sample ended,
 * and has look_cb choose one of them. Redis samples so, too ("Key eviction", redis.io): no list is
 * kept in order for that. */
struct cache_sample {
    struct cache *cache;
    bool below; /* in: of namespaces with something on NVMe */
    bool any;   /* look_cb's own, as is the rest: what DRAM has, too, may be chosen */
    unsigned heat;
    uint64_t written;
    block_ref best; /* 0: none yet */
};
void cache_sample(struct cache *c, const struct tenant *t, struct tenant_cursor *at,
                  bool (*look_cb)(struct cache_sample *s, const struct ns *ns, block_ref ref),
                  struct cache_sample *s);
/* During recovery, in a full index: drops a block that lies on NVMe only and was written before
 * `sequence`. False: none was found. */
bool cache_list_drop_older(struct cache *c, uint64_t sequence);
/* When recovery and the load of the snapshot are over: drops blocks that lack parts, some in each
 * iteration of the event loop. */
void cache_list_sweep_begin(struct cache *c);
bool cache_list_sweep_run(void *ctx);
bool cache_list_sweep_ready(const void *ctx);

/* ---- space.c ---- */

/* Drops the block, which nobody uses, from DRAM and NVMe. */
void cache_drop(struct cache *c, block_ref ref);

/* Drops the coldest block in DRAM that is not held, used or waiting to be written to NVMe. False:
 * none may be dropped. */
bool cache_coldest_drop(struct cache *c);
/* A slot, on the node if that costs nothing; evicts what must leave. keep: nothing that waits to be
 * written leaves for it. 0, or
 * - -EBUSY: everything is in use, or lies nowhere else while the arena has more space in a moment;
 * - -EFBIG: no slab is as long;
 * - -EDQUOT: the owner's tenant has reached its maximum, and none of its own blocks may leave now.
 * owner: part_owner(), or 0 for a slot that holds no part. */
int cache_slot(struct cache *c, uint64_t bytes, uint64_t owner, int node, bool keep, slot_ref *out);

/* A slot for a part that moves out of a closed slab; blocks leave for it that may leave for
 * anybody's. 0: there is none now. */
slot_ref cache_slot_beside(struct cache *c, uint64_t bytes, uint64_t owner, int node);

/* ---- compact.c: slabs emptied of blocks that stay ---- */

/* Without progress for so long it gives up. */
#define CACHE_COMPACT_PATIENCE_MS 2000u
bool cache_compact_run(void *ctx);
bool cache_compact_ready(const void *ctx);
void cache_compact_disarm(struct cache *c); /* its alarm */

/* ---- quota.c: what tenants are guaranteed, and get at most ---- */

/* What the tenant holds of ordinary DRAM, or may, has changed: of one that has, or may get, a group
 * in the policy. */
void cache_quota_update(struct cache *c, struct tenant *t);
/* Its blocks stay in DRAM even if others want the space. */
bool cache_quota_keeps(const struct tenant *t);
/* Its blocks stay on NVMe. */
bool cache_quota_keeps_below(const struct tenant *t);
/* The groups among which a search may choose, the one with the coldest candidate first: of more
 * than these, some, in turn. Returns their number. */
#define QUOTA_GROUPS 17u
uint32_t cache_quota_groups(struct cache *c, struct policy_group *out[QUOTA_GROUPS]);
bool cache_quota_regroup_run(void *ctx); /* brings some blocks into their groups */

/* ---- quota_below.c: what tenants get of NVMe at most ---- */

/* Makes room for a part of the tenant's, of its own blocks there. 0, or -EDQUOT: none may go now.
 * durable: for a part that somebody waits for. */
int cache_quota_below(struct cache *c, struct tenant *t, uint64_t bytes, bool durable);
bool cache_quota_trim_run(void *ctx); /* drops some of what tenants have too much */

#endif
