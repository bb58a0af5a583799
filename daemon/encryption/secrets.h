/* Secrets of encrypted namespaces on the shared tier: without a namespace's secret nobody can
 * derive the keys of its files, and a purge puts a new one in its place. They lie in a directory of
 * their own, encryption.secrets, which hosts have in common and of which no snapshots are kept
 * (docs/security.md, "Purge").
 *
 * Promises:
 * - All hosts that use the directory get the same secret of a namespace. One that another host has
 *   replaced is given up within SECRETS_FRESH_MS, also where the directory does not answer any
 *   more.
 * - No call waits for the directory: calls to it run in a thread, one at a time, with a deadline.
 * - An unusable directory is reported from the start on, even if no secret is needed.
 *
 * Thread: the event loop. */
#ifndef UCMD_ENCRYPTION_SECRETS_H
#define UCMD_ENCRYPTION_SECRETS_H

#include "daemon/base/list.h"
#include "daemon/encryption/secrets_file.h"

#include <uv.h>

#define SECRETS_CHECK_MS 5000u  /* between two looks at those that are in use */
#define SECRETS_FRESH_MS 20000u /* then one that could not be looked at is given up */

struct secrets;

/* changed_cb: a secret has come, or another one. The directory is looked at soon. It is copied. 0
 * or -ENOMEM. */
int secrets_open(uv_loop_t *loop, const char *directory, uint64_t timeout_ms,
                 void (*changed_cb)(void *ctx), void *ctx, struct secrets **out);
/* Calls back for what is under way, with -ECANCELED. Its handles end on the event loop.
 * NULL-safe. */
void secrets_close(struct secrets *s);

/* 0 and *secret, which stays until the next iteration of the event loop; -EAGAIN: it is being read,
 * and changed_cb says when that is over; -ENOKEY: it is unavailable now. */
int secrets_find(struct secrets *s, const uint8_t fingerprint[UCM_FINGERPRINT_BYTES],
                 const uint8_t **secret);

/* What is wrong with the directory, or was when it was last used, for health; NULL: nothing. */
const char *secrets_problem(const struct secrets *s);

/* A purge: memory of the caller until done_cb or secrets_cancel. */
struct secrets_purge {
    uint8_t fingerprint[UCM_FINGERPRINT_BYTES];
    void (*done_cb)(struct secrets_purge *p, int status);
    struct list link;
    bool queued;
};
/* done_cb runs on the event loop, not inside the call, but for secrets_close. */
void secrets_purge(struct secrets *s, struct secrets_purge *p);
/* done_cb will not run; the secret may be replaced all the same. */
void secrets_cancel(struct secrets *s, struct secrets_purge *p);

#endif
