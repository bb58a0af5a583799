/* The contract of a storage tier below DRAM. A tier is a const struct tier_ops; daemon/server.c
 * lists the tiers that the daemon opens.
 *
 * Every tier promises:
 * - A read delivers the bytes that were written, or fails: -EBADMSG when the checksum disagrees,
 *   -EIO or another errno when the device failed and the tier's bounded retries failed too.
 * - A short read or write is never success.
 * - A part whose write failed is never found.
 * - An accepted operation completes exactly once, on the loop, and never from inside submit.
 * - A refused operation never completes.
 * - While an operation is under way the tier keeps the loop alive.
 *
 * submit refuses with:
 * - -EAGAIN: the queue is full; a write may be dropped, a read retried after a completion
 * - -EROFS: a write, and no file takes writes any more
 * - -EFBIG: a write of a part that is too long for this tier's layout
 * - -ESTALE: a read of a place that was reused or forgotten, which is a miss
 * - -EINVAL: a part of no bytes
 *
 * An accepted write stores nothing when it completes with:
 * - -ENOSPC: everything in the tier is in use
 * - -EROFS, or the errno of the device
 *
 * Threads: every function on the loop. The tier may use threads of its own. */
#ifndef UCMD_TIER_TIER_H
#define UCMD_TIER_TIER_H

#include "daemon/base/list.h"
#include "proto/limits.h"
#include "proto/metrics.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct config;
struct config_error;
struct ucm_error;
struct uv_loop_s;
struct tier;

/* SYNC: done when the part at `place`, written before, is on stable storage with all that a later
 * start needs to find it; -errno when that can't be promised, -ESTALE when its namespace was purged
 * after it was written. Of its name the fingerprint counts; its `data` has no meaning. */
enum tier_op { TIER_READ, TIER_WRITE, TIER_SYNC };

/* Where a stored part lies and how to know that it is the right one. Kept in the index. */
struct tier_place {
    uint64_t loc;      /* device, position and generation; opaque to all but the tier */
    uint64_t checksum; /* XXH3-64 of the payload's `bytes` bytes */
};

#define TIER_HEAT_BUSY 255u

/* What a part is, for its header on storage. */
struct tier_name {
    uint8_t fingerprint[UCM_FINGERPRINT_BYTES];
    uint8_t key[UCM_MAX_KEY_BYTES];
    uint32_t key_bytes, part;
    uint64_t owner; /* given back to tier_callbacks.drop; process-local, not stored */
};

/* One operation. Allocated by the caller (embedded in its own object), untouched by it from submit
 * until `done` runs. `data` is a slot of the arena: 4096-aligned, padded to 4096 bytes; the padding is written
 * as it is and may be overwritten by a read. */
struct tier_io {
    enum tier_op op;
    void *data;
    uint64_t bytes;   /* payload, without padding */
    uint32_t buffer;  /* number of the registered buffer that `data` lies in */
    uint8_t priority; /* 0 to 15, more is sooner among reads; reads go before writes */
    bool check;       /* a read that only checks the part: no use of it */
    struct tier_name name;
    struct tier_place place;                      /* in for a read, out for a write */
    void (*done)(struct tier_io *io, int status); /* 0 or -errno */
    /* The tier's own, from submit to done. */
    struct list link;
    void *scratch[8];
};

/* Where a part lies already that is found a second time. */
struct tier_duplicate {
    uint64_t owner; /* 0: nowhere */
    struct tier_place place;
};

/* A part that an earlier run has left, found by its header. Its bytes are checked when they are
 * read. */
struct tier_found {
    const struct tier_name *name; /* without owner */
    const uint8_t *identity;      /* of its namespace, as tier_ns_record had it */
    uint32_t identity_bytes;
    bool
        ns_record_unsynced; /* the namespace's name may not be on stable storage: to be named again */
    uint64_t bytes, sequence;
    struct tier_place place;
    struct tier_duplicate
        *duplicate; /* out: of one that is refused because this sequence is known */
};

/* What a checkpoint keeps of a part. */
struct tier_described {
    struct tier_name name;
    uint64_t bytes, checksum;
};

struct tier_callbacks {
    /* The tier wants to reuse the place: may the part that lies there be dropped? true: it is
     * dropped from the index now, and the place is the tier's. false: it is in use or pinned. */
    bool (*drop)(void *ctx, uint64_t owner, uint64_t loc);
    /* 0 (cold) to 3: how much the part deserves to stay when its neighbours go. TIER_HEAT_BUSY:
     * drop would say no now; said here, the neighbours are spared. Neither is called from inside
     * submit. */
    unsigned (*heat)(void *ctx, uint64_t owner);
    /* From open on until stats says no more `recovering`, for each part of an earlier run: its
     * owner from now on, or 0 when it is not wanted. May call forget. NULL: the tier starts empty.
     */
    uint64_t (*restore)(void *ctx, const struct tier_found *found);
    /* No more of them will come. Not from inside open; NULL: nobody waits for it. */
    void (*recovered)(void *ctx);
    /* The part that lies in a live record; false: nothing is to be kept of it. NULL: the tier writes
     * no checkpoints. */
    bool (*describe)(void *ctx, uint64_t owner, struct tier_described *out);
    /* What lies there can't be read, or its bytes are not those that were written: whoever uses the
     * part, that copy of it is gone. Calls forget. NULL: the tier does not look for such by itself.
     */
    void (*lost)(void *ctx, uint64_t owner, uint64_t loc);
    /* The part that lay at `from` lies at `to` as well: true, and that is its place from now on; or
     * false when it was forgotten meanwhile. NULL: what is reclaimed is dropped, however much it
     * was read. */
    bool (*moved)(void *ctx, uint64_t owner, uint64_t from, const struct tier_place *to);
    /* Is the namespace one of the caller's? Otherwise its name may be forgotten, once recovery is
     * over. NULL: all are. */
    bool (*ns_known)(void *ctx, const uint8_t *fingerprint);
    void *ctx;
};

/* Makes a namespace known to later starts. Allocated by the caller, like a tier_io; the bytes it
 * points to stay until done. */
struct tier_ns_record {
    const uint8_t *fingerprint, *identity;
    uint32_t identity_bytes; /* at most TIER_IDENTITY_BYTES */
    bool forget;             /* whatever was stored for it before now is not to be found again */
    void (*done)(struct tier_ns_record *n, int status); /* 0: on stable storage; or -errno */
    struct list link;                                   /* the tier's own */
    /* What is stored from here on counts. In: 0, or what a try that failed left here, so that what
     * was stored since counts, too. */
    uint64_t from_sequence;
};
#define TIER_IDENTITY_BYTES 4000u

struct tier_stats {
    uint64_t capacity_bytes,
        used_bytes; /* used: records that are live; capacity: less quarantine */
    uint32_t queued, in_flight;
    bool degraded; /* no writes, or no reads either: `reason` says why */
    char reason[128];
    bool recovering; /* parts of an earlier run may still turn up */
    uint32_t segments, segments_recovered;
    char engine[16]; /* "io_uring" or "threads" */
};

struct tier_ops {
    const char *name;
    /* Opens or creates its files by config. 0, or -errno with *e saying what would be right. */
    int (*open)(struct uv_loop_s *loop, const struct config *config,
                const struct tier_callbacks *callbacks, struct metrics *metrics, struct tier **out,
                struct ucm_error *e);
    /* No operation may be under way. Closes its handles on the loop; NULL-safe. */
    void (*close)(struct tier *t);
    /* Memory that operations will come from, so that it can be registered with the ring. Failure to
     * register is the tier's to live with. */
    void (*buffer_add)(struct tier *t, uint32_t buffer, void *base, uint64_t bytes);
    /* 0: accepted. The queue is bounded by the config. */
    int (*submit)(struct tier *t, struct tier_io *io);
    /* The owner has forgotten the part: its place counts as dead. Not while a read of it is under
     * way. */
    void (*forget)(struct tier *t, const struct tier_place *place, uint64_t bytes);
    void (*stats)(struct tier *t, struct tier_stats *out);
    /* When the part that lies there was written: later ones have higher numbers. 0: nothing does.
     */
    uint64_t (*sequence)(struct tier *t, uint64_t loc);
    /* Parts of a namespace should be written after it is done, or no later start finds them. */
    void (*ns_record)(struct tier *t, struct tier_ns_record *n);
    /* Pushes written data to stable storage before a clean stop. Blocks for as long as the devices
     * take: with transfers in a stuck device the process could not exit any sooner. */
    int (*sync)(struct tier *t);
};

extern const struct tier_ops tier_nvme;

/* What tier_nvme.open would refuse of the configuration and of what lies at nvme.paths, but for what
 * another process has in use. Any thread, before open. 0 or -EINVAL with *e. */
int tier_nvme_check(const struct config *c, struct config_error *e);

#endif
