/* The cache: what the index, the policy, the arena and the tier are together. The only room that
 * changes the state of blocks and parts; `request` asks it for slots to copy from and to.
 *
 * A part is whole when a tier holds all its bytes; a block is complete when all its parts are
 * whole. dump   cache_fill_claim -> (device copies into the slot) -> cache_fill_done; the part is
 * published when every shard was claimed, copied and reported, and not by the last one's arrival
 *   load   cache_get -> (device copies out of the slot) -> cache_put; a part that lies on the tier
 * is read once for any number of askers, straight into the slot that they copy from write-behind:
 * complete blocks are written to the tier in the order in which they became complete
 *
 * Eviction waits by counting, never by a clock: a DRAM slot stays while a part has users, a block
 * stays in some tier while it has leases. What is evicted by name while in use is doomed: not found
 * any more at once, gone with its last user.
 *
 * Thread: the loop only. Callbacks run on the loop, never from inside the call that asked. */
#ifndef UCMD_CACHE_CACHE_H
#define UCMD_CACHE_CACHE_H

#include "daemon/arena/arena.h"
#include "daemon/base/list.h"
#include "daemon/index/index.h"
#include "daemon/index/policy.h"
#include "daemon/share/share.h"
#include "daemon/tier/tier.h"
#include "proto/metrics.h"

struct cache;
struct uv_loop_s;

struct cache_config {
    struct uv_loop_s *loop;
    struct index *index; /* borrowed, as are the next two */
    struct policy *policy;
    struct metrics *metrics;
    bool write_reused;      /* only blocks that were used or stored before are written behind */
    uint64_t backlog_bytes; /* DRAM that waits to be written and is spared for it */
    bool share_reused;      /* as write_reused, for the shared tier */
    uint64_t shared_blocks; /* as many may be known that lie on a share only */
};

int cache_new(const struct cache_config *config, struct cache **out);
/* Nobody may hold anything of it. Closes its handles on the loop. NULL-safe. */
void cache_free(struct cache *c);

/* The tier is opened with the cache's callbacks and then handed over (borrowed). */
struct tier_callbacks cache_tier_callbacks(struct cache *c);
void cache_tier_attach(struct cache *c, const struct tier_ops *ops, struct tier *tier);
/* Likewise. */
void cache_share_attach(struct cache *c, const struct share_ops *ops, struct share *share);
/* The arena comes last, when who registers its memory is there (borrowed). */
void cache_arena_attach(struct cache *c, struct arena *arena);
/* Operations of the tier that are under way; a close must wait for 0. */
uint32_t cache_tier_busy(const struct cache *c);
/* The same of the shared tier: those that were not told yet. Slots may be in use for longer, see
 * share_busy. */
uint32_t cache_share_busy(const struct cache *c);
/* A purge of a whole namespace. From begin on, all that was stored for it until then is not to come
 * back with a later start, its files go from every share, and nothing of it is written until
 * cache_purge_end; what it holds is the caller's to evict in between. Zeroed by the caller, with
 * done_cb set. */
struct cache_purge {
    void (*done_cb)(struct cache_purge *p, int status); /* 0: that is on stable storage */
    bool only_shared; /* what lies on NVMe is only evicted, and may come back */
    int share_status; /* out: 0, or why some files may be left on a share */
    struct ns *ns;
    struct cache_record *record;
    bool sharing;
    int status;
    struct share_purge share;
};
/* 0: done_cb will run unless cache_purge_done says that nothing waits (there is no tier and no
 * share); -ENOMEM. */
int cache_purge_begin(struct cache *c, struct cache_purge *p, struct ns *ns);
bool cache_purge_done(const struct cache_purge *p);
/* done_cb runs no more. */
void cache_purge_end(struct cache *c, struct cache_purge *p);
/* Nothing waits to be written to the tier or a share, or to be taken over from the run before. */
bool cache_written(const struct cache *c);
/* No more writes to the tier and to shares from now on, and nothing is taken over: the daemon is
 * stopping. */
void cache_stop_writing(struct cache *c);

/* ---- blocks ---- */

/* Complete, and not doomed: what a lookup may promise. */
bool cache_found(struct cache *c, block_ref ref);
/* Complete and every part in DRAM. */
bool cache_in_dram(struct cache *c, block_ref ref);
/* Complete, but some part must be read from a share. */
bool cache_on_share(struct cache *c, block_ref ref);
/* Keeps the block in some tier until cache_drop. */
void cache_hold(struct cache *c, block_ref ref);
void cache_drop(struct cache *c, block_ref ref);
/* The block of a key, new if need be, held for the caller. 0 when the index is full. */
block_ref cache_open(struct cache *c, struct ns *ns, const uint8_t *key);
void cache_touch(struct cache *c, const block_ref *refs, uint32_t n);

/* CACHE_SHARE: its files go from every root, in the background, for all hosts. */
enum { CACHE_DRAM = 1, CACHE_NVME = 2, CACHE_SHARE = 4 };
#define CACHE_ALL (CACHE_DRAM | CACHE_NVME | CACHE_SHARE)

enum cache_evicted { CACHE_EVICT_NONE, CACHE_EVICT_DONE, CACHE_EVICT_LATER };
/* NONE: nothing lay there. LATER: it is in use; when every tier was named it goes with its last
 * user. Pinned blocks stay, and leaving DRAM alone is refused (LATER) to blocks that lie nowhere
 * else. */
enum cache_evicted cache_evict(struct cache *c, block_ref ref, unsigned tiers);
/* Returns whether that changed something. */
bool cache_pin(struct cache *c, block_ref ref, bool pinned);

/* ---- the shared tier ---- */

/* A probe found the block's last part on that root; `asked`: the root said so itself. May let
 * others go that nobody holds and that lie on a share only. */
void cache_shared_note(struct cache *c, struct ns *ns, const uint8_t *key, share_root_id root,
                       bool asked);
/* The part is to be made durable, which no share is: a dump of it is taken though one has it. */
void cache_shared_presume(struct cache *c, block_ref ref, uint32_t part);
/* Its files go from every root, whether this host knows of them or not. */
void cache_shared_remove(struct cache *c, const struct ns *ns, const uint8_t *key);

/* ---- a part's bytes, for reading ---- */

struct cache_wait {
    struct list link;
    bool shared; /* out, with CACHE_PENDING: a share is asked, not the tier */
    /* status 0: the caller now has one use of the part; else -errno and it has none. -ENOENT: the
     * share does not have it any more, or did not say in time. */
    void (*ready_cb)(struct cache_wait *w, int status);
};

enum cache_got { CACHE_PENDING = 0, CACHE_READY = 1 };
/* CACHE_READY: the caller has one use of the part (until cache_put). CACHE_PENDING: w->ready_cb
 * will run. -ENOENT: not whole. -EBUSY: no slot, no place in the tier's queue or too many users now
 * (cache_room_wait). A slot that has to be found lies on `node`, if one can be had there without
 * more ado; NUMA_NONE: on any. */
int cache_get(struct cache *c, block_ref ref, uint32_t part, uint8_t priority, int node,
              struct cache_wait *w);
/* Before ready_cb has run: it will not. The read goes on for others. */
void cache_get_cancel(struct cache *c, struct cache_wait *w);
void cache_put(struct cache *c, block_ref ref, uint32_t part);
void *cache_memory(struct cache *c, block_ref ref, uint32_t part);

/* ---- a part's bytes, for filling ---- */

/* Whose unfinished fills vanish together. */
struct cache_owner {
    struct list fills;
};
void cache_owner_init(struct cache_owner *o);
/* Drops every unfinished fill of the owner. No copy of them may be under way. */
void cache_owner_gone(struct cache *c, struct cache_owner *o);

struct cache_fill;
/* Claims shards [shard, shard + n) of a part for one copy. The block must be held by the caller.
 * -EEXIST: the part is whole. -EINPROGRESS: another owner fills it, or one of the shards was
 * claimed before. -EBUSY: no slot now (cache_room_wait). node: as with cache_get. */
int cache_fill_claim(struct cache *c, struct cache_owner *o, block_ref ref, uint32_t part,
                     uint32_t shard, uint32_t n, int node, struct cache_fill **out);
void *cache_fill_memory(struct cache *c, struct cache_fill *f);
/* The copy of n claimed shards ended. ok false drops the fill and all that it had. Publishes the
 * part when all its shards are there: then the fill is gone. */
void cache_fill_done(struct cache *c, struct cache_fill *f, uint32_t n, bool ok);

/* ---- on stable storage ---- */

struct cache_durable {
    struct tier_io io;
    struct cache *cache;
    block_ref ref;
    uint32_t part;
    struct list link;
    void (*done_cb)(struct cache_durable *d, int status);
};
/* Has a whole part of a held block made durable; done_cb tells, never from inside the call: 0 when
 * a later start will find it, even after a power failure. Other returns, and done_cb will not run:
 * -EINPROGRESS, the part is not whole yet; -EOPNOTSUPP, there is no tier; or the tier's. */
int cache_durable(struct cache *c, struct cache_durable *d, block_ref ref, uint32_t part);

/* ---- waiting for room ---- */

struct cache_room {
    struct list link;
    void (*room_cb)(struct cache_room *r); /* something was released: try again */
};
/* False when nothing is under way that could make room (a copy, a read, a write, the arena's
 * growth): waiting would be for ever. first: before those who wait already. */
bool cache_room_wait(struct cache *c, struct cache_room *r, bool first);
/* Enough was done in this turn of the loop: room_cb runs in the next. */
void cache_room_yield(struct cache *c, struct cache_room *r);
/* The arena has grown, or will not grow any more. */
void cache_room_grew(struct cache *c);
void cache_room_cancel(struct cache_room *r); /* r is initialised and may be waiting or not */

/* ---- waiting for the tier to keep up ---- */

/* More waits to be written than backlog_bytes. */
bool cache_back_pressure(const struct cache *c);

struct cache_pressure {
    struct list link;
    void (*eased_cb)(struct cache_pressure *w); /* it does not any more */
};
void cache_pressure_wait(struct cache *c, struct cache_pressure *w);
void cache_pressure_cancel(
    struct cache_pressure *w); /* w is initialised and may be waiting or not */

/* ---- verifying ---- */

struct cache_check {
    struct tier_io io;
    struct cache *cache;
    block_ref ref;
    uint32_t part;
    slot_ref slot;
    void (*done_cb)(struct cache_check *k, int status);
};
/* Reads the part from the tier and checks it; a copy that is corrupt is dropped. The block must be
 * held. -ENOENT: the part is not on the tier. -EBUSY: no slot or queue full. */
int cache_verify(struct cache *c, struct cache_check *k, block_ref ref, uint32_t part);

struct cache_stats {
    uint64_t complete, pinned, shared_only;
};
void cache_stats(const struct cache *c, struct cache_stats *out);
struct ns *cache_ns(struct cache *c, block_ref ref);

#endif
