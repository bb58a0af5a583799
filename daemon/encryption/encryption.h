/* The keys of tenants whose blocks are encrypted on NVMe and on the shared tier (docs/security.md).
 *
 * A tenant's keys come from a source of the configuration: a file, a systemd credential or a
 * command. The last one of the source is the current one, with which everything new is encrypted;
 * the others open what they have encrypted. A key's id, 8 bytes that say nothing of it, stands in
 * what it has encrypted.
 *
 * Promises:
 * - What a tenant with a source stores is never written in the clear, whether its keys are there or
 *   not.
 * - A source that fails changes nothing: the keys that were there stay.
 * - Keys lie in memory that is locked, where the system allows it, and left out of core dumps, and
 *   are overwritten before it is freed.
 *
 * Threads: the event loop, except where said. */
#ifndef UCMD_ENCRYPTION_ENCRYPTION_H
#define UCMD_ENCRYPTION_ENCRYPTION_H

#include "daemon/encryption/box.h"
#include "proto/limits.h"

#include <uv.h>

#define ENCRYPTION_KEYS_MAX 16u /* of a tenant */

struct config;
struct metrics;
struct encryption;

/* Begins to read all sources, and waits up to 2 s for files and credentials. Logs what fails. 0,
 * with *out NULL when nothing is to be encrypted, or -ENOMEM. The configuration stays as long as
 * it. */
int encryption_open(uv_loop_t *loop, const struct config *config, struct metrics *metrics,
                    struct encryption **out);
/* Ends on the event loop, once the last key that was taken is dropped. NULL-safe. */
void encryption_close(struct encryption *s);

/* Are this tenant's blocks encrypted? NULL-safe: no. */
bool encryption_wanted(const struct encryption *s, const char *tenant);
/* The same of a namespace's canonical identity (docs/protocol.md, "Fingerprint"). */
bool encryption_wanted_by(const struct encryption *s, const uint8_t *identity,
                          uint32_t identity_bytes);
/* Is its source being read for the first time, so that it has no key yet? */
bool encryption_awaited_by(const struct encryption *s, const uint8_t *identity,
                           uint32_t identity_bytes);
/* May records in the clear of such a tenant be read? */
bool encryption_plaintext_allowed(const struct encryption *s);

/* A namespace's key, derived of one of its tenant's. */
struct encryption_key {
    uint8_t id[ENCRYPTION_ID_BYTES];
    const uint8_t *secret; /* ENCRYPTION_KEY_BYTES, in locked memory */
    unsigned users;        /* the event loop's */
    struct encryption_key *next;
    struct encryption_origin *origin;
    uint8_t fingerprint[UCM_FINGERPRINT_BYTES];
    uint8_t salt[32];
    size_t salt_bytes;
};
/* What a namespace's key is derived of: the tenant by the identity; salt: at most 32 bytes that the
 * namespace has in this place. */
struct encryption_space {
    const uint8_t *fingerprint, *identity;
    uint32_t identity_bytes;
    const void *salt;
    size_t salt_bytes;
};
/* id NULL: the current one. 0 and *out, to be dropped; -ENOKEY: the tenant has no such key now,
 * which is logged at most once in ten seconds and counted; -ENOMEM. */
int encryption_key_take(struct encryption *s, const struct encryption_space *space,
                        const uint8_t *id, struct encryption_key **out);
void encryption_key_drop(struct encryption *s, struct encryption_key *k);

/* ---- for requests ---- */

struct encryption_tenant_view {
    const char *tenant, *source, *error; /* error: why the source could not be read last, or "" */
    unsigned keys;
    bool reading;
    uint8_t id[ENCRYPTION_KEYS_MAX][ENCRYPTION_ID_BYTES]; /* the last is current */
};
/* False: there are at most i. A tenant "*" is all that have no source of their own. */
bool encryption_view(const struct encryption *s, unsigned i, struct encryption_tenant_view *out);
/* Begins to read the tenant's source again, or with NULL all; `reading` says whether it has ended.
 * How many sources, or -ENOENT: no such tenant. */
int encryption_reload(struct encryption *s, const char *tenant);
/* Why health is degraded; false: it is not. tenant: the caller's: problems of others are reported
 * without details; NULL: the caller may know all. */
#define ENCRYPTION_PROBLEM_BYTES 560u
bool encryption_problem(const struct encryption *s, const char *tenant,
                        char text[ENCRYPTION_PROBLEM_BYTES]);

#endif
