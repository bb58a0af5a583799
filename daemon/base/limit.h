/* Limits: counts what clients use of each bounded resource, by uid and tenant, and decides whether
 * a client may have more.
 *
 * One rule for all: **a dynamic threshold with alpha = 3: an owner may have at most three times
 * what is free.** One alone gets three quarters; two that take all they can get three sevenths
 * each, n of them 3 in 3n + 1. A newcomer finds some free, although neither the number of owners
 * nor their shares are known. The rule is Choudhury and Hahne's ("Dynamic queue length thresholds
 * for shared-memory packet switches", IEEE/ACM Transactions on Networking 6(2), 1998). It holds
 *
 * - for a tenant, of all that there is, less the last 64th, which is for operators;
 * - for a uid of a tenant that may have several, of what the tenant may have by this rule and by
 *   its setting.
 *
 * Every owner may have a 64th of all, but one at least, while there is that much. The rule does not
 * apply to operators. If others come, or a limit falls, an owner keeps what it has, but gets
 * nothing further.
 *
 * Thread: the event loop only. */
#ifndef UCMD_BASE_LIMIT_H
#define UCMD_BASE_LIMIT_H

#include "proto/errors.h"
#include "proto/limits.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

/* Bounded resources: the name in messages, what sets the total, and a tenant's setting that bounds
 * it, too (config/tenants.h). */
#define LIMITS(X)                                                                                  \
    X(CONNECTIONS, "connections", "limits.connections", "connections")                             \
    X(SILENT, "connections that have not said hello", "a quarter of limits.connections", NULL)     \
    X(DESCRIPTORS, "descriptors", "three quarters of the daemon's limit of open files", NULL)      \
    X(FRAMES, "bytes of frames that arrive and of answers that wait to be read",                   \
      "limits.frame_memory", NULL)                                                                 \
    X(NAMESPACES, "namespaces", "limits.namespaces", NULL)                                         \
    X(REQUESTS, "requests in progress", "the daemon's bound", "requests")                          \
    X(MEMORY, "bytes of requests, leases and sequences", "limits.frame_memory", "memory")          \
    X(SEQUENCES, "bytes of sequences", "half of limits.frame_memory", NULL)                        \
    X(SUMMARIES, "bytes of block summaries that sequences keep", "a quarter of arena.size",        \
      "dram.max")                                                                                  \
    X(LEASED, "keys under leases and in sequences", "nothing", "leased")                           \
    X(LOOKUP_TABLES, "lookup tables", "a quarter of the daemon's limit of open files, or 1024,",   \
      NULL)                                                                                        \
    X(KEPT, "bytes of tables that ended here and that processes still have mapped",                \
      "64 MiB and a 16th of arena.size", NULL)                                                     \
    X(MAPPINGS, "mappings of workers' memory", "half of the kernel's vm.max_map_count", NULL)      \
    X(MAPPED, "bytes of workers' memory that the daemon maps", "the address space", NULL)          \
    X(TOUCHED, "bytes of workers' host memory", "eight times the host's", NULL)                    \
    X(MOVES, "parts being copied into shared mappings", "the daemon's bound", NULL)                \
    X(REFERENCED, "bytes referenced in shared mappings", "mapping.size", NULL)                     \
    X(SHARED_LOOKUPS, "lookups that wait for the shared tier", "the daemon's bound", NULL)         \
    X(BUILDS, "builds in progress", "the daemon's bound", NULL)                                    \
    X(BUILDS_WAITING, "parts that wait for their builds", "the daemon's bound", NULL)              \
    X(EVENTS, "bytes of cache events and block metadata", "events.memory", NULL)

enum limit {
#define X(NAME, things, source, setting) LIMIT_##NAME,
    LIMITS(X)
#undef X
        LIMIT_KINDS
};

struct limits;
/* An owner of counted things: a uid of a tenant, a tenant, or all of them. */
struct limit_owner;

struct limits *limits_new(void);    /* NULL: no memory */
void limits_free(struct limits *l); /* after the last unref; NULL-safe */
/* There is so much of it in all. What is not set has no bound. */
void limits_set(struct limits *l, enum limit what, uint64_t all);
/* What a tenant's setting gives it; UINT64_MAX: it has none. */
typedef uint64_t (*limit_setting_fn)(void *ctx, const char *tenant, enum limit what);
void limits_settings(struct limits *l, limit_setting_fn setting_cb, void *ctx);
uint64_t limits_used(const struct limits *l, enum limit what);
/* How often somebody was refused. */
uint64_t limits_refused(const struct limits *l);

/* That uid of the tenant, as an operator or not. NULL: no memory. The names are copied. */
struct limit_owner *limits_uid(struct limits *l, const char *tenant, uid_t uid, bool admin);
/* The tenant itself, for what no uid of it has by itself. */
struct limit_owner *limits_tenant(struct limits *l, const char *tenant);
struct limit_owner *limit_owner_ref(struct limit_owner *o);
/* The last one: of an owner that has nothing any more. */
void limit_owner_unref(struct limit_owner *o);

/* The tenant's number among those that have an owner now: from 1, below twice as many as there ever
 * were at once. */
uint32_t limit_number(const struct limit_owner *o);

/* The limit at which n more would fail: the owner's, its tenant's, or that of all; NULL: n more are
 * allowed. */
const struct limit_owner *limit_refuser(const struct limit_owner *o, enum limit what, uint64_t n);
/* Whether o is `group`, or one of it. */
bool limit_within(const struct limit_owner *o, const struct limit_owner *group);
/* 0; or -UCM_WIRE_BUSY and nothing is taken. *e (or NULL) then says whose limit it was, and what
 * sets it. */
int limit_take(struct limit_owner *o, enum limit what, uint64_t n, struct ucm_error *e);
/* The same without taking. */
int limit_ask(const struct limit_owner *o, enum limit what, uint64_t n, struct ucm_error *e);
/* Counts n more, also beyond what limit_take would allow. */
void limit_add(struct limit_owner *o, enum limit what, uint64_t n);
void limit_give(struct limit_owner *o, enum limit what, uint64_t n);
/* The same rule for what is counted elsewhere: `used` of `all` is taken, and each owner has the
 * same fraction of it as of everything counted as `what`. Takes nothing. 0, or -UCM_WIRE_BUSY with
 * *e. */
struct limit_pool {
    const char *things, *source; /* for the sentence */
    uint64_t all, used;
    bool set; /* the tenant's setting for `what` bounds it, too */
};
int limit_check(const struct limit_owner *o, enum limit what, const struct limit_pool *pool,
                uint64_t n, struct ucm_error *e);
/* The same rule among the uids of a tenant alone, for what the tenant is given elsewhere: it may
 * have `all`, of which its uids use what is counted as `what`. Returns how much more the owner may
 * have; UINT64_MAX: it is the tenant's only one, or an operator. */
uint64_t limit_room_within(const struct limit_owner *o, enum limit what, uint64_t all);
/* True: with n more the owner's tenant has so little, and so much is free, that the owner may have
 * them without further counting. False says nothing. */
bool limit_few(const struct limit_owner *o, enum limit what, uint64_t n);
/* How much more the owner may have now; and how much in all if nobody else had any. */
uint64_t limit_room(const struct limit_owner *o, enum limit what);
uint64_t limit_most(const struct limit_owner *o, enum limit what);
uint64_t limit_has(const struct limit_owner *o, enum limit what);

#endif
