/* The cache: the only module that changes the state of blocks and parts. README.md has its rules.
 *
 * A part is whole when some tier holds all its bytes. A block is complete when all its parts are.
 * - dump: pending_write_claim, the device copies into the slot, pending_write_done. The part is
 *   published when every layer was claimed, copied and reported.
 * - load: cache_get, the device copies out of the slot, cache_put. A part that lies on NVMe or on
 *   the shared tier is read once, however many ask for it, into the slot that they copy from.
 * - write-back: complete blocks go to NVMe and to the shared tier, in the order in which they
 *   became complete.
 *
 * Eviction waits by counting, never by a clock: a slot stays while its part has users, a block
 * stays in some tier while it has leases.
 *
 * Thread: the event loop only. Callbacks run on the event loop, and never inside the call that
 * asked. */
#ifndef UCMD_CACHE_CACHE_H
#define UCMD_CACHE_CACHE_H

#include "daemon/arena/arena.h"
#include "daemon/base/list.h"
#include "daemon/index/index.h"
#include "daemon/shared/shared.h"
#include "daemon/tier/tier.h"
#include "proto/metrics/metrics.h"

struct cache;

struct cache_config {
    struct uv_loop_s *loop;
    struct deadlines *deadlines; /* borrowed; NULL: nothing waits for a time */
    struct index *index;         /* borrowed, as are the next two */
    struct policy *policy;
    struct metrics *metrics;
    struct encryption *encryption; /* NULL: nothing is encrypted */
    bool write_reused;             /* NVMe gets only blocks that were used or stored before */
    bool write_learned;            /* or those that daemon/learn/learn.h lets in */
    uint64_t backlog_bytes;        /* dirty DRAM that eviction spares */
    bool shared_reused;            /* as write_reused, for the shared tier */
    /* As many, of one part, may be known that lie on the shared tier only. */
    uint64_t shared_blocks;
};

int cache_new(const struct cache_config *config, struct cache **out);
/* Nobody may hold or wait for anything of it. Closes its handles on the event loop. NULL-safe. */
void cache_free(struct cache *c);

/* What the cache works on; all of it is borrowed. The tier is opened with the cache's callbacks
 * before. The arena comes last, when the devices and the tier can register its memory. */
struct tier_callbacks cache_tier_callbacks(struct cache *c);
void cache_tier_attach(struct cache *c, const struct tier_ops *ops, struct tier *tier);
void cache_shared_attach(struct cache *c, struct shared *shared);

/* Are the namespace's blocks encrypted below DRAM? */
bool cache_encrypted(const struct cache *c, const struct ns *ns);
/* The fingerprint that its files have in their names: another one if it is encrypted. False: that
 * is not known now, and *out is one that no file has. */
bool cache_shared_fingerprint(const struct cache *c, const struct ns *ns,
                              uint8_t out[UCM_FINGERPRINT_BYTES]);
void cache_arena_attach(struct cache *c, struct arena *arena);

/* Operations of the tier that are under way; it may be closed at 0. */
uint32_t cache_tier_busy(const struct cache *c);
/* Nothing waits to be written, and no parts of an earlier run come. */
bool cache_written(const struct cache *c);
/* The daemon stops: begins no further writes. Blocks that wait for one are counted as dropped and
 * logged. */
void cache_stop_writing(struct cache *c);

/* ---- records of namespaces ---- */

/* The daemon is about to stop: records that could not be written are tried once more. */
void cache_ns_records_last(struct cache *c);
/* Namespaces without a record on stable storage, because it could not be written, and their parts
 * on NVMe: no later start finds them. */
uint32_t cache_ns_unrecorded(const struct cache *c, uint64_t *bytes);

/* ---- purges ---- */

/* Removes a whole namespace. From begin on, no later start finds its blocks, and its files are
 * removed from every root. Nothing of it is written until cache_purge_end. In between the caller
 * evicts its blocks. The caller owns the memory, zeroed and with done_cb set. */
struct cache_purge {
    void (*done_cb)(struct cache_purge *p, int status); /* 0: the purge is on stable storage */
    bool only_shared;  /* blocks on NVMe are only evicted: a later start may find them */
    int shared_status; /* out: 0, or why some files may be left */
    /* The cache's own. */
    struct ns *ns;
    struct cache_record *record;
    bool sharing;
    int status;
    struct shared_purge shared;
};
/* 0: done_cb will run, unless cache_purge_done is true already. Or -ENOMEM. */
int cache_purge_begin(struct cache *c, struct cache_purge *p, struct ns *ns);
bool cache_purge_done(const struct cache_purge *p);
/* done_cb does not run afterwards. */
void cache_purge_end(struct cache *c, struct cache_purge *p);

/* ---- blocks ---- */

/* Complete, and not marked for deletion: what a lookup may promise. */
bool cache_found(struct cache *c, block_ref ref);
/* Complete and every part in DRAM. */
bool cache_in_dram(struct cache *c, block_ref ref);
/* A lease keeps the block in some tier until cache_unlease. */
void cache_lease(struct cache *c, block_ref ref);
void cache_unlease(struct cache *c, block_ref ref);
/* The same of refs[n]; 0 is passed over. found: leases those only that are found, and makes the
 * others 0. Returns how many it has leased. */
uint32_t cache_lease_many(struct cache *c, block_ref *refs, uint32_t n, bool found);
/* True: something was released, and the caller calls cache_released. */
bool cache_unlease_many(struct cache *c, const block_ref *refs, uint32_t n);
/* Ends a lease that its caller took just now and does not need. Either others have references to
 * the block, or it could be evicted before. Nothing can have begun to wait for it in between, so
 * this wakes nothing. */
void cache_lease_undo(struct cache *c, block_ref ref);
/* Totals of blocks that have leases, each counted once: what they count as in the index, and their
 * bytes if they are complete. */
struct cache_leased {
    uint64_t index_bytes, bytes;
};
struct cache_leased cache_leased(const struct cache *c);
/* CACHE_DRAM, _NVME or _SHARE: the lowest tier that a part of the block has to come from; 0 if it
 * is not found, or the ref is 0. */
uint8_t cache_tier(const struct cache *c, block_ref ref);
/* The same of each of refs[n]. stop_at_gap: what comes after one that is not found is not,
 * either. */
void cache_tiers(const struct cache *c, const block_ref *refs, uint32_t n, bool stop_at_gap,
                 uint8_t *tiers);
/* The same as lookups report it: enum ucm_lookup_status. */
uint8_t cache_status(const struct cache *c, block_ref ref);
/* Finds or makes the block of a key, and holds it. 0: the index is full. */
block_ref cache_open(struct cache *c, struct ns *ns, const uint8_t *key);
/* A request uses these blocks of one prefix in namespace ns, head first, or is about to store them;
 * 0 among them is passed over. */
void cache_touch(struct cache *c, struct ns *ns, const block_ref *refs, uint32_t n);
/* The same of those among them that are of ns: a chain may have blocks of two. At most
 * UCM_MAX_KEYS. */
void cache_touch_own(struct cache *c, struct ns *ns, const block_ref *refs, uint32_t n);

/* Tiers to evict from. CACHE_SHARED: what is known of the block there is forgotten. Its files are
 * the caller's to remove (shared_removal), but those that are being written meanwhile. */
enum { CACHE_DRAM = 1, CACHE_NVME = 2, CACHE_SHARED = 4 };
#define CACHE_ALL (CACHE_DRAM | CACHE_NVME | CACHE_SHARED)

enum cache_evicted {
    CACHE_EVICT_NONE, /* nothing of it was there */
    CACHE_EVICT_DONE,
    CACHE_EVICT_LATER, /* in use (of CACHE_ALL: marked for deletion until then), pinned,
                        * or, with CACHE_DRAM alone, nowhere else */
};
enum cache_evicted cache_evict(struct cache *c, block_ref ref, unsigned tiers);
/* How many blocks were marked for deletion since the start: while it stays, no block that somebody
 * holds became marked for deletion. */
uint64_t cache_deletions(const struct cache *c);
bool cache_deleting(struct cache *c, block_ref ref);
/* Returns whether it changed something. */
bool cache_pin(struct cache *c, block_ref ref, bool pinned);

/* A feature that follows blocks of some namespaces: those for which ns.follower or tenant.follower
 * is set. */
struct cache_follower {
    struct list link;
    /* The status of a block (enum ucm_lookup_status) changes of a namespace that somebody follows;
     * runs inside what changed it, and may call nothing of the cache. */
    void (*changed_cb)(struct cache_follower *f, const struct ns *ns, const uint8_t *key,
                       uint8_t was, uint8_t is);
};
void cache_follow(struct cache *c, struct cache_follower *f);
void cache_unfollow(struct cache_follower *f); /* f->link is initialised; it need not follow */

/* ---- the shared tier ---- */

/* A shared lookup found the block on that root. asked: the root said so itself; else the block lies
 * between two that are there. May forget others that lie on the shared tier only. */
void cache_shared_note(struct cache *c, struct ns *ns, const uint8_t *key, shared_root_id root,
                       bool asked);
/* A KNOWN part that is nowhere else becomes UNVERIFIED, so that a dump of it is taken: the dump
 * asks for stable storage, which the shared tier is not. */
void cache_shared_presume(struct cache *c, block_ref ref, uint32_t part);
/* Where something of the block lies, as far as this host knows: bit i for root i + 1; all, if the
 * root is not known. */
uint32_t cache_shared_roots(struct cache *c, block_ref ref);

/* ---- reading a part ---- */

struct cache_wait {
    struct list link;
    bool small;  /* in: the request is for few parts; as tier_io.small */
    bool shared; /* out, in done_cb: the part was read from the shared tier, not from NVMe */
    /* For a caller that reads only some layers (daemon/block_pool). out: the caller has these, and
     * no reference.
     * cancel_cb: also ends a wait; NULL: nothing. */
    struct cache_layers *layers;
    void (*cancel_cb)(struct cache_wait *w);
    /* 0: the caller has one reference to the part. -errno: it has none; -ENOENT: the shared tier
     * does not have the part any more, or did not say in time; -EBUSY: too many users, or the copy
     * on NVMe failed and the shared tier takes no read now. */
    void (*done_cb)(struct cache_wait *w, int status);
};

enum cache_got { CACHE_PENDING = 0, CACHE_READY = 1 };
/* CACHE_READY: the caller has one reference to the part, until cache_put. CACHE_PENDING: done_cb
 * will run. -ENOENT: the part is not whole, or its last copy is gone. -EIO: its read can't begin;
 * that copy is dropped. -EINPROGRESS: its key is still being read. -EBUSY: no slot now, see
 * WAIT_SLOT. -EAGAIN: no place in the tier's queue, or too many users now, see
 * WAIT_OTHER. node: where a new slot should lie if that costs nothing, or NUMA_NONE. */
int cache_get(struct cache *c, block_ref ref, uint32_t part, uint8_t priority, int node,
              struct cache_wait *w);
/* The same of a part in DRAM: CACHE_READY or -EAGAIN. */
int cache_take(struct cache *c, block_ref ref, uint32_t part);
/* done_cb will not run. The read goes on for others. */
void cache_get_cancel(struct cache *c, struct cache_wait *w);
void cache_put(struct cache *c, block_ref ref, uint32_t part);
/* The same for one of several, after which the caller calls cache_released. Whoever got the
 * reference in this same callback need not: nothing became free that was not before. */
void cache_unref(struct cache *c, block_ref ref, uint32_t part);
/* Something was released. In the next iteration of the event loop waiters for space try again, and
 * writes begin. */
void cache_released(struct cache *c);
/* A prefetch brought a part of the block into DRAM, whose use, or eviction before one, is
 * counted. */
void cache_prefetched(struct cache *c, block_ref ref);
void cache_prefetch_used(struct cache *c, block_ref ref);

/* Makes the caller's reference a lasting one: nobody waits for space to come from its end. */
void cache_ref_lasting(struct cache *c, block_ref ref, uint32_t part);
void cache_unref_lasting(struct cache *c, block_ref ref, uint32_t part); /* ends it */
/* Takes a lasting reference to this part of each block in refs[n] that has it in DRAM, of `most` at
 * most; memory[i]: where it lies, or NULL; 0 in refs is passed over. Returns how many. */
uint32_t cache_ref_ready(struct cache *c, const block_ref *refs, uint32_t n, uint32_t part,
                         uint32_t most, const void **memory);

/* Parts on their way into other slots. The copier may end once it is 0. */
uint32_t cache_moves(const struct cache *c);
#define CACHE_MOVES_MAX 1024u /* that features may have under way */

/* ---- filling a part ---- */

/* The pending writes of one connection, which end with it. */
struct pending_writes {
    struct list list;
    bool keep; /* they take no slot from a block that waits to be written */
};
void pending_writes_init(struct pending_writes *pending_writes);
/* Drops them. No copy of them may be under way. */
void pending_writes_end(struct cache *c, struct pending_writes *pending_writes);

struct pending_write;
/* Claims layers [layer, layer + n) of a part for one copy; the caller holds the block. -EEXIST: the
 * part is whole. -EINPROGRESS: another connection writes it, or one of the layers is claimed; all
 * of them may be claimed again while none is being copied. -EBUSY: no slot now, see WAIT_SLOT.
 * node: as in cache_get. */
int pending_write_claim(struct cache *c, struct pending_writes *pending_writes, block_ref ref,
                        uint32_t part, uint32_t layer, uint32_t n, int node,
                        struct pending_write **out);
/* The copy of n claimed layers ended. With ok false the pending write and all its layers are
 * dropped. When all layers are there the part is published, and the pending write is gone. */
void pending_write_done(struct cache *c, struct pending_write *f, uint32_t n, bool ok);
/* The same for one of several, after which the caller calls cache_released. */
void pending_write_end(struct cache *c, struct pending_write *f, uint32_t n, bool ok);
/* published_cb runs for each part that a pending write has published, inside the call that did. It
 * may lease the block, and call nothing else of the cache but cache_wait_for a turn. */
void cache_watch(struct cache *c,
                 void (*published_cb)(void *ctx, struct ns *ns, block_ref ref, uint32_t part),
                 void *ctx);

/* ---- stable storage ---- */

struct cache_durable {
    /* 0: a later start finds the part, even after a power failure. Or -errno. */
    void (*done_cb)(struct cache_durable *d, int status);
    /* The cache's own. */
    struct list link;
    struct cache *cache;
    block_ref ref;
    uint32_t part;
};
/* Makes a whole part of a held block durable. 0: done_cb will run. -EINPROGRESS: the part is not
 * whole; -EOPNOTSUPP: there is no tier; or another -errno of the tier. */
int cache_durable(struct cache *c, struct cache_durable *d, block_ref ref, uint32_t part);

/* ---- waiting for space, and for write-back ---- */

enum wait_for {
    /* the next iteration of the event loop, as enough was done in this one: one goes on in each */
    WAIT_TURN,
    /* A slot (-EBUSY), first come, first served: a request that still has too little lets none
     * pass. */
    WAIT_SLOT,
    /* Something else that is full: a queue (-EAGAIN), the tenant's DRAM (-EDQUOT). Nobody waits
     * behind it. */
    WAIT_OTHER,
    WAIT_PRESSURE, /* the end of cache_back_pressure */
    WAITS,
};
/* A waiter that will try again. retry_cb runs once. */
struct cache_retry {
    struct list link;
    void (*retry_cb)(struct cache_retry *r);
    bool first; /* WAIT_SLOT: before those without, in the order in which they came */
};
/* False: retry_cb will not run. Only for WAIT_SLOT and WAIT_OTHER, whose retry_cb runs when
 * something was released: nothing is under way that could be (a copy, a read, a write, the arena's
 * growth). */
bool cache_wait_for(struct cache *c, struct cache_retry *r, enum wait_for what);
void cache_retry_cancel(struct cache_retry *r); /* r is initialised; it need not wait */
/* Others wait for a slot, and none of them is r, or r is not the first. */
bool cache_slot_awaited(const struct cache *c, const struct cache_retry *r);
/* Settings of tenants have changed. */
void cache_tenants_changed(struct cache *c);
/* The arena has grown, or will not grow any more. */
void cache_arena_grew(struct cache *c);

/* More DRAM is dirty than backlog_bytes. */
bool cache_back_pressure(const struct cache *c);

/* ---- verifying ---- */

struct cache_check {
    struct list link; /* the cache's own */
    void (*done_cb)(struct cache_check *k, int status);
};
/* Reads the part of a held block from the tier, and drops that copy if it is corrupt. -ENOENT: the
 * part is not on the tier. -EBUSY: no slot, or the tier's queue is full. */
int cache_verify(struct cache *c, struct cache_check *k, block_ref ref, uint32_t part);

struct cache_stats {
    uint64_t complete, pinned, shared_only;
};
void cache_stats(const struct cache *c, struct cache_stats *out);
struct ns *cache_ns(struct cache *c, block_ref ref);

#endif
