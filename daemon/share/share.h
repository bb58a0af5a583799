/* The shared tier: block files that hosts have in common, on one or more roots. The door of this
 * room: `cache` asks for parts, `request` for the end of a prefix.
 *
 * Promise: bytes that a read delivers are those that were written for exactly this namespace, key
 * and part; everything else is -ENOENT. A root that is slow, hung, full, read-only or lying costs
 * its own hits only: every operation is told by its deadline at the latest, and a root whose
 * breaker is open refuses at once. What a host does not know by a deadline is a miss, never an
 * error. Ends exactly once, on the loop, never from inside the call that asked. Several hosts do
 * all this at once without talking to each other.
 *
 * Threads: every function on the loop. */
#ifndef UCMD_SHARE_SHARE_H
#define UCMD_SHARE_SHARE_H

#include "daemon/base/list.h"
#include "daemon/share/block_file.h"
#include "proto/metrics.h"

#include <stdbool.h>
#include <stdint.h>

struct config;
struct deadlines;
struct share;
struct ucm_error;
struct uv_loop_s;

#define SHARE_MAX_ROOTS 8u

/* Which root holds a part: 1 to SHARE_MAX_ROOTS; 0: none, or any. A hint: reads ask the others when
 * it is not there any more. */
typedef uint8_t share_root_id;

/* Opens the roots of config->share_roots; does no I/O on them, so no server holds up the start. 0,
 * or -errno with *e saying what would be right. With no roots *out is NULL. */
int share_open(struct uv_loop_s *loop, struct deadlines *deadlines, const struct config *config,
               struct metrics *metrics, struct share **out, struct ucm_error *e);
/* Nothing of the caller's may be under way (share_busy). Closes its handles on the loop. NULL-safe.
 */
void share_close(struct share *s);
/* Operations of callers that are not told yet or whose memory is still needed. */
uint32_t share_busy(const struct share *s);
/* Reads and lookups go on being answered, garbage collection and writes end: the daemon stops. */
void share_stop(struct share *s);

/* ---- parts ---- */

/* One part read or written. Memory of the caller (embedded), untouched by it from submit to
 * `done`; `data` (a slot) from submit to `released`. */
struct share_io {
    bool write;
    struct block_file_id id;
    void *data;
    uint64_t bytes; /* of the payload */
    /* in: of a read, the root that is asked first, or 0. out, with status 0: where the part is. */
    share_root_id root;
    /* The answer, by the deadline at the latest. 0; -ENOENT (read: nowhere, or not to be trusted);
     * -EEXIST is told as 0; -EBUSY (read): a root that may have it is asked too much already;
     * -ETIMEDOUT, -EIO, ...: the root's. A write that ends with an error may
     * leave the whole file all the same, never a part of it. */
    void (*done_cb)(struct share_io *io, int status);
    /* Nobody touches `data` or `io` any more. After done_cb; at once in most cases, late when a
     * thread hangs in a mounted folder. */
    void (*released_cb)(struct share_io *io);
    /* The room's own. */
    struct list link;
    void *op;
};

/* 0: accepted. -EAGAIN: the queue is full, or (write) reads wait: try again at share_ready_cb.
 * -ENOENT: no root that could have it is asked now. -EROFS: no root takes writes now. */
int share_submit(struct share *s, struct share_io *io);
/* Runs when a submit that was refused with -EAGAIN may be accepted. One caller: the cache. */
void share_on_ready(struct share *s, void (*ready_cb)(void *ctx), void *ctx);

/* ---- which of these keys are there? ---- */

enum { SHARE_UNKNOWN = 0, SHARE_MISSING = 0xff }; /* else: its share_root_id */

/* Memory of the caller, with keys and answers, until done_cb or cancel. */
struct share_lookup {
    uint8_t fingerprint[UCM_FINGERPRINT_BYTES];
    uint32_t key_bytes;
    const uint8_t *keys; /* n of key_bytes each */
    uint32_t n;          /* at most UCM_MAX_KEYS */
    uint32_t part;       /* the block's highest: written last, removed first */
    uint64_t part_bytes; /* of that part's payload */
    bool each; /* every key by itself; otherwise a chain, of which the end is looked for */
    uint64_t deadline_ms; /* by uv_now */
    /* out. answers[i]: a root, SHARE_MISSING or SHARE_UNKNOWN. A chain: `prefix` keys from the
     * first on are there, as far as is known; some of them by presumption. */
    uint8_t *answers;
    uint32_t prefix;
    void (*done_cb)(struct share_lookup *p);
    void *op; /* the room's own */
};
/* 0: done_cb will run, by the deadline at the latest. -EAGAIN: too many are under way; -ENOENT: no
 * root is asked now, or all keys are known to be missing: no need to wait. */
int share_lookup(struct share *s, struct share_lookup *p);
void share_lookup_cancel(struct share *s, struct share_lookup *p); /* done_cb runs no more */

/* ---- for people ---- */

/* The part is to go from every root: an eviction by name. Best effort, in the background. */
int share_remove(struct share *s, const struct block_file_id *id);

/* All files of a namespace go from every root that takes writes. Memory of the caller. */
struct share_purge {
    uint8_t fingerprint[UCM_FINGERPRINT_BYTES];
    void (*done_cb)(struct share_purge *p, int status, uint64_t files); /* worst of the roots */
    struct list link;
    void *op;
};
int share_purge(struct share *s, struct share_purge *p);
void share_purge_cancel(struct share *s, struct share_purge *p);

/* A pass of the garbage collection over this root (below share_roots) begins now; what it did is in
 * the metrics and in share_root_stats. 0; -EALREADY: one is under way; -EROFS; -EINVAL: there is no
 * such root, or nothing is collected; -ECANCELED: stopped. */
int share_collect(struct share *s, uint32_t root);

enum share_health { SHARE_UP, SHARE_READ_ONLY, SHARE_FULL, SHARE_DOWN };
struct share_root_stats {
    const char *target; /* without what may be secret in it */
    const char *backend;
    enum share_health health;
    char reason[128];           /* of the last failure; "" when there was none */
    uint64_t capacity_bytes;    /* 0: no bound */
    uint64_t used_bytes, files; /* as of the last pass of the garbage collection */
    uint64_t in_flight, queued; /* operations */
    uint64_t reads, read_bytes, writes, write_bytes, failures, timeouts, breaks;
    uint64_t latency_us; /* of a small operation, smoothed */
};
uint32_t share_roots(const struct share *s);
/* root: 0 and up */
void share_stats(const struct share *s, uint32_t root, struct share_root_stats *out);

/* The functions above that `cache` and `request` call, as a table: share_tier_ops in the daemon,
 * another in their tests. */
struct share_ops {
    int (*submit)(struct share *s, struct share_io *io);
    void (*on_ready)(struct share *s, void (*ready_cb)(void *ctx), void *ctx);
    int (*lookup)(struct share *s, struct share_lookup *p);
    void (*lookup_cancel)(struct share *s, struct share_lookup *p);
    int (*remove)(struct share *s, const struct block_file_id *id);
    int (*purge)(struct share *s, struct share_purge *p);
    void (*purge_cancel)(struct share *s, struct share_purge *p);
    int (*collect)(struct share *s, uint32_t root);
    uint32_t (*roots)(const struct share *s);
    void (*stats)(const struct share *s, uint32_t root, struct share_root_stats *out);
};
extern const struct share_ops share_tier_ops;

#endif
