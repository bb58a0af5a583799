/* Seeds of encrypted namespaces on the shared tier: without a namespace's seed nobody can derive
 * the keys of its files, and a purge puts a new one in its place. They lie in a directory of their
 * own, encryption.seeds, which hosts have in common and of which no snapshots are kept
 * (docs/security.md, "Purge").
 *
 * Promises:
 * - All hosts that use the directory get the same seed of a namespace. One that another host has
 *   replaced is given up within SEEDS_FRESH_MS, also where the directory does not answer any more.
 * - No call waits for the directory: calls to it run in a thread, one at a time, with a deadline.
 * - A directory that can't be used is told of from the start on, whether anybody needs a seed or
 * not,
 *   until it can.
 *
 * Thread: the event loop. */
#ifndef UCMD_SEAL_SEEDS_H
#define UCMD_SEAL_SEEDS_H

#include "daemon/base/list.h"
#include "daemon/seal/seeds_file.h"

#include <uv.h>

#define SEEDS_CHECK_MS 5000u  /* between two looks at those that are in use */
#define SEEDS_FRESH_MS 20000u /* then one that could not be looked at is given up */

struct seeds;

/* changed_cb: a seed has come, or another one. The directory is looked at soon. It is copied. 0 or
 * -ENOMEM. */
int seeds_open(uv_loop_t *loop, const char *directory, uint64_t deadline_ms,
               void (*changed_cb)(void *ctx), void *ctx, struct seeds **out);
/* Calls back for what is under way, with -ECANCELED. Its handles end on the event loop.
 * NULL-safe. */
void seeds_close(struct seeds *s);

/* 0 and *seed, which stays until the next iteration of the event loop; -EAGAIN: it is being read,
 * and changed_cb says when that is over; -ENOKEY: it can't be had now. */
int seeds_find(struct seeds *s, const uint8_t fingerprint[UCM_FINGERPRINT_BYTES],
               const uint8_t **seed);

/* What is wrong with the directory, or was when it was last used, for health; NULL: nothing. */
const char *seeds_problem(const struct seeds *s);

/* A purge: memory of the caller until done_cb or seeds_cancel. */
struct seeds_purge {
    uint8_t fingerprint[UCM_FINGERPRINT_BYTES];
    void (*done_cb)(struct seeds_purge *p, int status);
    struct list link;
    bool queued;
};
/* done_cb runs on the event loop, not inside the call, but for seeds_close. */
void seeds_purge(struct seeds *s, struct seeds_purge *p);
/* done_cb will not run; the seed may be replaced all the same. */
void seeds_cancel(struct seeds *s, struct seeds_purge *p);

#endif
