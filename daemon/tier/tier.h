/* The contract of a storage tier below DRAM. A tier is a const struct tier_ops, declared at the end
 * of this file and listed in `tiers` of daemon/server.c.
 *
 * Every tier promises:
 * - A read delivers the bytes that were written, or fails: -EBADMSG when the checksum disagrees,
 *   -EIO or another errno when the device failed and the tier's bounded retries failed too.
 * - A short read or write is never success.
 * - A part whose write failed is never found.
 * - An accepted operation completes exactly once, on the event loop, and never from inside submit.
 * - A refused operation never completes.
 * - While an operation is under way the tier keeps the event loop alive.
 * - What a tenant with keys (daemon/encryption) stores is encrypted. A read without the right key
 *   fails with -ENOKEY, a write with the same from submit; the bytes stay on storage, and a start
 *   with the key finds them again.
 * - The tier counts its own work in the nvme_* metrics; there are no others. It leaves
 *   nvme_write_refused and nvme_write_amplification to the cache and to the method stats.
 * - While operations are under way the watchdog counts on nvme_reads, nvme_writes,
 *   nvme_read_errors, nvme_write_errors or nvme_corrupt to move, or it takes the daemon for hung.
 *
 * submit refuses with:
 * - -EAGAIN: the queue is full; a write may be dropped, a read retried after a completion
 * - -EINPROGRESS: of a read: its key is being read; the part is as it was
 * - -EROFS: a write, and no file takes writes any more
 * - -EFBIG: a write of a part that is too long for this tier's layout
 * - -ESTALE: a read of a place that was reused or forgotten, which is a miss
 * - -EINVAL: a part of no bytes
 *
 * An accepted write stores nothing when it completes with:
 * - -ENOSPC: everything in the tier is in use
 * - -EROFS, or the errno of the device
 *
 * Threads: every function on the event loop. The tier may use threads of its own. */
#ifndef UCMD_TIER_TIER_H
#define UCMD_TIER_TIER_H

#include "daemon/base/fair.h"
#include "daemon/base/list.h"
#include "proto/limits.h"
#include "proto/metrics/metrics.h"

#include <stdbool.h>
#include <stdint.h>

struct config;
struct config_error;
struct ucm_error;
struct uv_loop_s;
struct tier;

/* TIER_SYNC: completes when the part at `place`, written before, is on stable storage with all that
 * a later start needs to find it. It fails with -errno when the tier can't promise that, and with
 * -ESTALE when the namespace was purged after the part was written. Uses the fingerprint of `name`,
 * and not `data`.
 * TIER_READ_LAYERS: some layers of the part, in tier_layers_room bytes of `data`, from
 * tier_layers_at on. It says nothing about the part as a whole: with -ENODATA the tier has no
 * checksums of layers for it, with -EBADMSG these layers differ; the caller reads the part
 * instead. */
enum tier_op { TIER_READ, TIER_WRITE, TIER_SYNC, TIER_READ_LAYERS };

/* Where a stored part lies and how to recognize it. The index keeps it. */
struct tier_place {
    uint64_t loc; /* device, position and generation; opaque to all but the tier; 0 is legal */
    /* XXH3-64 of the payload's `bytes` bytes. Each write fills it: a snapshot compares the part's
     * bytes in DRAM with it. 0 says that nobody knows it: the snapshot then computes it. */
    uint64_t checksum;
    /* Encrypted: `checksum` is 8 bytes of the record's tag, and says nothing about bytes in
     * DRAM. */
    bool encrypted;
};

#define TIER_HEAT_KEPT 4u
#define TIER_HEAT_BUSY 255u

/* What a part is, for its header on storage. */
struct tier_name {
    uint8_t fingerprint[UCM_FINGERPRINT_BYTES];
    uint8_t key[UCM_MAX_KEY_BYTES];
    uint32_t key_bytes, part;
    uint64_t owner; /* the caller's word for it, handed to its callbacks; not stored */
};

/* One operation. The caller allocates it (embedded in its own object) and leaves it alone from
 * submit until `done_cb` runs. `data` is a slot of the arena: 4096-aligned and padded to 4096
 * bytes. A write stores the padding as it is, a read may overwrite it. */
struct tier_io {
    enum tier_op op;
    void *data;
    uint64_t bytes;      /* payload, without padding */
    uint32_t buffer;     /* number of the registered buffer that `data` lies in */
    struct fair_who who; /* whose: tenants share a disk by their weights; reads go before writes */
    struct fair_got got; /* out, of a read; 0 in */
    uint8_t priority;    /* 0 to 15, more is sooner among the reads of one tenant */
    bool encryption;     /* a write: encrypted or not at all */
    bool check;          /* a read that only checks the part: no use of it */
    bool small; /* a read of a request for few parts: it should not wait behind many writes */
    uint64_t layer_bytes; /* of a write and TIER_READ_LAYERS: of each layer; 0: one can't be read */
    uint32_t layer, layers; /* TIER_READ_LAYERS: the first, and how many */
    struct tier_name name;
    struct tier_place place; /* in for a read or a sync; out, whole, for a write with status 0 */
    void (*done_cb)(struct tier_io *io, int status); /* 0 or -errno */
    /* The tier's own, from submit to done. */
    struct list link;
    void *scratch[11];
};

#define TIER_ALIGN 4096u
/* Where in a part's bytes the pages of some layers begin and end. */
static inline uint64_t tier_layers_begin(uint64_t layer_bytes, uint32_t layer)
{
    return layer * layer_bytes / TIER_ALIGN * TIER_ALIGN;
}

static inline uint64_t tier_layers_end(uint64_t layer_bytes, uint32_t layer, uint32_t layers)
{
    return ((layer + (uint64_t)layers) * layer_bytes + TIER_ALIGN - 1) / TIER_ALIGN * TIER_ALIGN;
}

/* Memory that a TIER_READ_LAYERS needs: these pages, and one before them for the tier. */
static inline uint64_t tier_layers_room(uint64_t layer_bytes, uint32_t layer, uint32_t layers)
{
    return TIER_ALIGN + tier_layers_end(layer_bytes, layer, layers) -
           tier_layers_begin(layer_bytes, layer);
}

/* Where in it the first layer lies. */
static inline uint64_t tier_layers_at(uint64_t layer_bytes, uint32_t layer)
{
    return TIER_ALIGN + layer * layer_bytes - tier_layers_begin(layer_bytes, layer);
}

/* The place of a part that recovery finds a second time. */
struct tier_duplicate {
    uint64_t owner; /* 0: there is none */
    struct tier_place place;
};

/* A part of an earlier run, found by its header. Its first reader verifies the bytes. */
struct tier_found {
    const struct tier_name *name; /* without owner */
    const uint8_t *identity;      /* of its namespace, as in tier_ns_record */
    uint32_t identity_bytes;
    bool ns_record_unsynced; /* the namespace record may not be on stable storage: write it again */
    uint64_t bytes, sequence;
    struct tier_place place;
    struct tier_duplicate *duplicate; /* out: where the part lies that has this sequence already */
};

/* What a checkpoint keeps of a part. */
struct tier_described {
    struct tier_name name;
    uint64_t bytes, checksum;
    bool encrypted;       /* as tier_place's */
    uint64_t layer_bytes; /* as tier_io's; not kept */
};

/* All run on the event loop, and none may be NULL but restore_cb. */
struct tier_callbacks {
    /* The tier wants to reuse the place. true: the caller has dropped the part from the index, and
     * the place is the tier's. false: the part is in use or pinned, and heat_cb says so, too. Not
     * from inside submit. */
    bool (*drop_cb)(void *ctx, uint64_t owner, uint64_t loc);
    /* How much the part deserves to stay when its neighbours go: 0 (cold) to 3. TIER_HEAT_KEPT: it
     * is guaranteed to stay, so it is moved if it can be. TIER_HEAT_BUSY:
     * drop_cb would refuse now; the tier then spares the neighbours. Not from inside submit. */
    unsigned (*heat_cb)(void *ctx, uint64_t owner);
    /* For each part of an earlier run, from open until stats no longer says `recovering`. Returns
     * the part's owner, or 0 when the caller does not want it. May call forget. NULL: the tier
     * starts empty, and recovered_cb never runs. */
    uint64_t (*restore_cb)(void *ctx, const struct tier_found *found);
    /* Recovery has ended. Not from inside open. */
    void (*recovered_cb)(void *ctx);
    /* Describes the part in a live record; false: a checkpoint should leave it out. */
    bool (*describe_cb)(void *ctx, uint64_t owner, struct tier_described *out);
    /* The part's bytes on storage can't be read, or are not those that were written. The caller
     * gives up that copy and calls forget. */
    void (*lost_cb)(void *ctx, uint64_t owner, uint64_t loc);
    /* The part at `from` was copied to `to`. true: the caller uses `to` from now on. false: it has
     * forgotten the part meanwhile. */
    bool (*moved_cb)(void *ctx, uint64_t owner, uint64_t from, const struct tier_place *to);
    /* Does the caller know the namespace? If not, the tier may drop its record once recovery has
     * ended. */
    bool (*ns_known_cb)(void *ctx, const uint8_t *fingerprint);
    void *ctx;
    struct encryption *encryption; /* keys of tenants; NULL: nothing is encrypted */
};

/* Makes a namespace known to later starts. The caller allocates it, as it does a tier_io, and keeps
 * the bytes that it points to until `done_cb` runs. */
struct tier_ns_record {
    const uint8_t *fingerprint, *identity;
    uint32_t identity_bytes; /* at most TIER_IDENTITY_BYTES */
    bool forget;             /* a purge: no later start finds what was stored before now */
    struct fair_who who;     /* whose: tenants take turns */
    void (*done_cb)(struct tier_ns_record *n, int status); /* 0: on stable storage; or -errno */
    struct list link;                                      /* the tier's own */
    /* Later starts find what is stored with this number or a later one. In: 0, or what an attempt
     * that failed has set, so that they also find what was stored since. */
    uint64_t from_sequence;
};
#define TIER_IDENTITY_BYTES 4000u

#define TIER_REASON_BYTES 240
struct tier_stats {
    uint64_t capacity_bytes; /* without segments in quarantine */
    uint64_t used_bytes;     /* of live records */
    uint32_t queued, in_flight;
    bool degraded; /* a file takes no writes, or no reads either: `reason` says why */
    char reason[TIER_REASON_BYTES];
    char records
        [TIER_REASON_BYTES]; /* where namespaces' records can't be written, and why; "": they can */
    bool recovering;         /* recovery may still find parts of an earlier run */
    uint32_t segments, segments_recovered;
    char engine[16]; /* "io_uring" or "threads" */
};

/* The daemon calls every function: none may be NULL. */
struct tier_ops {
    const char *name; /* in stats and health */
    /* Does the configuration ask for this tier? */
    bool (*wanted)(const struct config *c);
    /* What open would refuse of the configuration and of what lies at its paths, but for what
     * another process has in use. Only of a wanted tier. Any thread, before open. 0 or -EINVAL with
     * *e. */
    int (*check)(const struct config *c, struct config_error *e);
    /* Opens or creates its files by config. 0, or -errno with *e saying what would be right. */
    int (*open)(struct uv_loop_s *loop, const struct config *config,
                const struct tier_callbacks *callbacks, struct metrics *metrics, struct tier **out,
                struct ucm_error *e);
    /* No operation and no ns_record may be under way; the `done_cb` of the last one may call close.
     * Recovery and the tier's own work may: close cuts them short. Closes its handles on the event
     * loop; NULL-safe. The NVMe tier asserts that no read is queued and no write under way, unless
     * such work of its own is. */
    void (*close)(struct tier *t);
    /* Registers memory that operations will use. Operations work without it, a little slower. */
    void (*buffer_add)(struct tier *t, uint32_t buffer, void *base, uint64_t bytes);
    /* 0: accepted. The config bounds the queue. */
    int (*submit)(struct tier *t, struct tier_io *io);
    /* The caller has forgotten the part: its place is dead. Also follows a read that failed or was
     * refused with -ESTALE, so a place that is dead or reused already stays as it is. Another read
     * or sync of the place may be under way: it still completes, never with other bytes. */
    void (*forget)(struct tier *t, const struct tier_place *place, uint64_t bytes);
    void (*stats)(struct tier *t, struct tier_stats *out);
    /* How many parts, and bytes, it has that the key with this id has encrypted; NULL: that are
     * encrypted at all. They may count another key's too, whose id begins with the same 16 bits;
     * never less. Any time. */
    void (*encrypted)(const struct tier *t, const uint8_t *key_id, uint64_t *parts,
                      uint64_t *bytes);
    /* A number that grows with each write: of the part at `loc`; 0 when there is none. */
    uint64_t (*sequence)(struct tier *t, uint64_t loc);
    /* Later starts may not find parts of a namespace that were written before `done_cb` ran.
     * Several may be under way, also of one namespace; they take effect in the order of the calls.
     * `done_cb` never runs inside the call. */
    void (*ns_record)(struct tier *t, struct tier_ns_record *n);
    /* Pushes written data to stable storage before an orderly stop. Blocks for as long as the
     * devices take. 0, or -errno when some of it may be lost. */
    int (*sync)(struct tier *t);
};

extern const struct tier_ops tier_nvme;

#endif
