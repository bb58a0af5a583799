/* The shared tier: block files that hosts have in common, on one or more roots. The cache reads and
 * writes parts here; requests ask which keys exist.
 *
 * Promises:
 * - A read delivers the bytes that were written for exactly this namespace, key and part;
 *   everything else is -ENOENT.
 * - A root that is slow, hung, full, read-only or lying costs its own hits only. Every operation
 *   reports by its deadline, and a root whose breaker is open refuses at once. What this host does
 *   not know by a deadline is a miss, never an error.
 * - Each callback runs once, on the event loop, never from inside the call that asked.
 * - Several hosts do all this at once without talking to each other.
 *
 * README.md of this directory has the rest. Threads: every function on the event loop. */
#ifndef UCMD_SHARED_SHARED_H
#define UCMD_SHARED_SHARED_H

#include "daemon/base/deadline.h"
#include "daemon/base/fair.h"
#include "daemon/base/list.h"
#include "daemon/encryption/encryption.h"
#include "daemon/shared/block_file.h"
#include "proto/limits.h"
#include "proto/metrics/metrics.h"

#include <stdbool.h>
#include <stdint.h>

struct shared;
struct ucm_error;

/* Number of the root that holds a part: 1 to UCM_MAX_ROOTS; 0: none, or any. A hint: a read asks
 * the other roots when the part is not there any more. */
typedef uint8_t shared_root_id;

#define SHARED_LOOKUPS_MAX 512u /* under way */
#define SHARED_SECRET_BYTES 16u /* of an encrypted namespace */

/* What the tenant of that name is guaranteed of each root, and gets at most there (0: no bound).
 * tenant NULL: nothing is set. Returns whether it is given either; NULL: whether anybody may be. */
typedef bool (*shared_quota_fn)(void *ctx, const char *tenant, uint64_t *guaranteed,
                                uint64_t *most);

/* Opens the roots of config->shared_roots. Does no I/O on them, so no server delays the start; a
 * health check of each is under way on return. 0, or -errno with *e saying what would be right.
 * Without roots *out is NULL. */
int shared_open(struct uv_loop_s *loop, struct deadlines *deadlines, const struct config *config,
                struct encryption *encryption, struct metrics *metrics, struct shared **out,
                struct ucm_error *e);
/* Not while shared_busy. Closes its handles on the event loop. NULL-safe. */
void shared_close(struct shared *s);
/* Quotas, which garbage collection keeps from its next pass on. */
void shared_quotas(struct shared *s, shared_quota_fn quota_cb, void *ctx);
/* Operations whose callback has not run, or whose memory is still in use. */
uint32_t shared_busy(const struct shared *s);
/* The daemon stops: garbage collection and writes end, reads and lookups go on. */
void shared_stop(struct shared *s);
/* After that: nobody waits any longer, and what is under way is given up. */
void shared_give_up(struct shared *s);

/* ---- parts ---- */

/* One part read or written. Memory of the caller (embedded), which it does not touch from submit to
 * done_cb, nor `data` (a slot). */
struct shared_io {
    bool write;
    struct block_file_id id;
    void *data;
    uint64_t bytes; /* of the payload */
    struct fair_who who;
    const char *tenant;  /* of a write: whose the namespace is; NULL: that is not noted */
    struct fair_got got; /* out, with done_cb */
    /* in: of a read, the root that is asked first, or 0. out, with status 0: where the part is. */
    shared_root_id root;
    /* Encrypted, or not at all: `id` has the encrypted fingerprint, `space` says whose keys. */
    bool encrypted;
    struct encryption_space space;
    /* Runs by the deadline at the latest, or as soon as a copy that is under way then has ended.
     * Status:
     * - 0; a write of a part that exists already, too
     * - -ENOENT: a read; no root has the part, or what is there can't be trusted
     * - -ENOKEY: it is encrypted with a key that is not there; the file stays
     * - -EBUSY: a read; the queue of a root that may have the part is full
     * - -ETIMEDOUT, -EIO, ...: what a root reported
     * A write that fails may leave the whole file all the same, never a part of it. */
    void (*done_cb)(struct shared_io *io, int status);
    /* The module's own. */
    struct list link;
    void *op;
};

/* The secret of an encrypted namespace's names and keys here. 0 and *secret, until the next
 * iteration of the event loop, or NULL where secrets are not in use; -EAGAIN: it is being read;
 * -ENOKEY: it is unavailable now. */
int shared_secret(struct shared *s, const uint8_t fingerprint[UCM_FINGERPRINT_BYTES],
                  const uint8_t **secret);
/* The fingerprint in the names of a namespace's files. encrypted: its tenant's parts are. 0; or,
 * with zeros, which no file has: what shared_secret returned, or -ENOMEM. s: NULL without roots. */
int shared_file_fingerprint(struct shared *s, const uint8_t fingerprint[UCM_FINGERPRINT_BYTES],
                            bool encrypted, uint8_t out[UCM_FINGERPRINT_BYTES]);
/* Why the directory of secrets can't be used, for health; NULL: it can, or there is none. */
const char *shared_secrets_problem(const struct shared *s);
/* 0: accepted. -EAGAIN: the queue is full, or reads wait (write): try again when ready_cb runs.
 * -ENOENT: a read, and no root that could have the part is usable now. -EROFS: no root takes writes
 * now. -ENOKEY: a write, and there is no key. -ENOMEM. */
int shared_submit(struct shared *s, struct shared_io *io);
/* ready_cb runs when a submit that returned -EAGAIN may be accepted; secrets_cb before it, when a
 * secret that shared_secret was asked for has been read, or is unavailable. One caller: the
 * cache. */
void shared_on_ready(struct shared *s, void (*ready_cb)(void *ctx), void (*secrets_cb)(void *ctx),
                     void *ctx);

/* ---- which of these keys exist? ---- */

enum { SHARED_UNKNOWN = 0, SHARED_MISSING = 0xff }; /* other answers: a shared_root_id */

/* Memory of the caller, with keys and answers, until done_cb or cancel. */
struct shared_lookup {
    uint8_t fingerprint[UCM_FINGERPRINT_BYTES];
    uint32_t key_bytes;
    const uint8_t *keys; /* n of key_bytes each */
    uint32_t n;          /* at most UCM_MAX_KEYS */
    uint32_t part;       /* the block's highest: written last, removed first */
    /* Bytes of the payload of one part, which is at most `part`, with the encryption header if it
     * has one. */
    uint64_t (*bytes_of)(const struct shared_lookup *p, uint32_t part);
    struct fair_who who;
    bool per_key;         /* every key by itself; otherwise the end of a chain is searched */
    uint64_t deadline_ms; /* by uv_now */
    /* out. answers[i]: a root, SHARED_MISSING or SHARED_UNKNOWN. A chain: the first `prefix` keys
     * exist, as far as is known; some of them are unverified. */
    uint8_t *answers;
    uint32_t prefix;
    void (*done_cb)(struct shared_lookup *p);
    void *op; /* the module's own */
};
/* 0: done_cb will run, by the deadline at the latest. -EAGAIN: too many are under way. -ENOENT:
 * no root is usable now, or all keys are known to be missing: no need to wait. -ENOMEM. */
int shared_lookup(struct shared *s, struct shared_lookup *p);
void shared_lookup_cancel(struct shared *s, struct shared_lookup *p); /* done_cb will not run */

/* ---- removals by key ---- */

/* Its way through the files at one root: the module's own. */
struct shared_removal;
struct shared_removal_way {
    struct shared_removal *removal;
    struct list link;              /* while it has a file to remove */
    uint32_t key, part, under_way; /* part: so many of the key's, below the highest, are left */
    bool rest;                     /* it has passed the highest parts */
};

/* Removes blocks' files from every root that is not configured read-only, in the background:
 * tenants take turns at each root. Memory of the caller, with keys and whole, until done_cb or
 * cancel. */
struct shared_removal {
    struct fair_who who;
    uint8_t fingerprint[UCM_FINGERPRINT_BYTES]; /* the namespace's */
    bool encrypted;                             /* it is encrypted */
    uint32_t key_bytes;
    uint32_t part;       /* the block's highest: removed first */
    bool alone;          /* no other part goes */
    uint32_t n;          /* keys */
    const uint8_t *keys; /* n of key_bytes each */
    /* n. Bit i: all parts of the key's block are removed from root i (from 0). Else only the
     * highest is, and the others where that was there: its bit is set then. */
    uint32_t *whole;
    /* Runs once, when all roots have answered. 0: the files are gone; -ENOKEY: their names can't be
     * known now; -ECANCELED: the shared tier was stopped; or the first failure of any root, which
     * may still have some of them. */
    void (*done_cb)(struct shared_removal *r, int status);
    /* The module's own. */
    struct list link, under_way;
    struct shared *shared; /* NULL: it has ended */
    struct deadline ended;
    struct shared_removal_way way[UCM_MAX_ROOTS];
    uint8_t name[UCM_FINGERPRINT_BYTES]; /* the fingerprint in the files' names */
    uint32_t ways;
    int status;
};
/* done_cb will run, never from inside. Names that are not known yet are waited for. */
void shared_removal_begin(struct shared *s, struct shared_removal *r);
/* done_cb will not run; what a root has begun goes on. Harmless after done_cb. */
void shared_removal_cancel(struct shared *s, struct shared_removal *r);

/* Removes one part, whose id has the fingerprint of the file's name, from every root. Nobody waits
 * for it; what fails is counted. */
void shared_remove(struct shared *s, const struct block_file_id *id, const struct fair_who *who);

/* ---- for operators ---- */

/* Removes all files of a namespace from every root that is not configured read-only. What a bucket
 * held when it was listed is removed: hosts that still write the namespace may write after that,
 * and a file that is being written has no namespace in its name yet. Memory of the caller. */
struct shared_purge {
    uint8_t fingerprint[UCM_FINGERPRINT_BYTES];
    bool encrypted; /* its tenant's parts are, but for those from before it had keys */
    /* Runs once, at the latest when no root has made progress for 90 s. status: the first failure
     * of any root, or 0. files: how many were removed. */
    void (*done_cb)(struct shared_purge *p, int status, uint64_t files);
    void *op; /* the module's own */
};
/* 0: done_cb will run; -EROFS: no root may be written; -ECANCELED: stopped; -ENOMEM. */
int shared_purge(struct shared *s, struct shared_purge *p);
void shared_purge_cancel(struct shared *s, struct shared_purge *p); /* done_cb will not run */

/* Begins a garbage collection of this root (below shared_roots) now; metrics and shared_root_stats
 * say what it did. 0; -EALREADY: one is under way; -EROFS; -EINVAL: there is no such root, or it is
 * not collected; -ECANCELED: stopped. */
int shared_collect(struct shared *s, uint32_t root);

/* Figures of a root that is a process; zeroes for others. */
struct shared_process_stats {
    uint64_t starts, ends, kills; /* ends: unasked; kills: of these, by the daemon */
    uint64_t pid;                 /* 0: there is none now */
    char name[64];                /* what it says that it is */
};
enum shared_health { SHARED_UP, SHARED_READ_ONLY, SHARED_FULL, SHARED_DOWN };
struct shared_root_stats {
    const char *target; /* without user, password and options */
    const char *backend;
    enum shared_health health;
    char reason[128];    /* of the last failure; "": none yet */
    bool writes_refused; /* it should take writes, and takes none: for refused_ms */
    uint64_t refused_ms;
    uint64_t capacity_bytes;    /* 0: no bound */
    uint64_t used_bytes, files; /* as of the last garbage collection of any host */
    uint64_t in_flight, queued; /* operations */
    uint64_t reads, read_bytes, writes, write_bytes, failures, timeouts, breaks;
    uint64_t latency_us; /* of a lookup's operation, smoothed */
    uint64_t backend_starts, backend_ends, backend_kills;
    struct shared_process_stats process;
};
uint32_t shared_roots(const struct shared *s); /* how many; s may be NULL */
/* root: from 0 */
void shared_stats(const struct shared *s, uint32_t root, struct shared_root_stats *out);

#endif
