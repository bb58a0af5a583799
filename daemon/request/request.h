/* Requests: what the methods of the wire do. The module where front, cache and devices meet.
 *
 * A session is a connection's state: its peer, the namespaces it opened, its regions, its leases
 * and its requests under way. Most methods answer at once; load, dump, prefetch, region.* and what
 * changes stored blocks by name are request objects that answer when they are done. There are at
 * most CONFIG_MAX_REQUESTS of them, and each has a deadline; past the limit the answer is BUSY.
 *
 * A session ends in order: its requests are stopped and copies under way awaited. Then its regions
 * are unmapped, features end what they have, its leases end, its pending writes are dropped, and
 * its memory is freed. Thread: the event loop only. */
#ifndef UCMD_REQUEST_REQUEST_H
#define UCMD_REQUEST_REQUEST_H

#include "daemon/base/deadline.h"
#include "daemon/config/config.h"
#include "daemon/front/front.h"
#include "daemon/request/feature.h"
#include "daemon/tier/tier.h"
#include "proto/metrics/metrics.h"

struct snapshot;
struct requests;

/* Everything is borrowed. tier and shared may be NULL: then there is none. */
struct request_modules {
    const struct feature *const *features; /* FEATURES: daemon/features.h */
    const method_fn *methods;              /* by enum ucm_method */
    uv_loop_t *loop;
    const struct config *config;
    struct metrics *metrics;
    struct deadlines *deadlines;
    struct limits *limits;
    struct reaper *reaper;
    struct index *index;
    struct arena *arena;
    struct cache *cache;
    struct policy *policy;
    struct device_set *devices;
    const struct tier_ops *tier_ops;
    struct tier *tier;
    struct shared *shared;
    struct encryption *encryption;   /* NULL: nothing is encrypted */
    const struct snapshot *snapshot; /* NULL: DRAM ends with the daemon */
    const char *socket;              /* that the daemon made; NULL: it came with the start */
    uint8_t instance[16];
    const char *commit, *options; /* of the build; NULL: not shown */
    /* Reads the configuration again. 0; -EINVAL or another -errno with *e: nothing changed. NULL:
     * it came from no file. */
    int (*reload_cb)(void *ctx, struct config_changes *changes, struct config_error *e);
    void *reload_ctx;
    const struct config *next; /* as of the last reload, for the next start; without a file: none */
};

int requests_new(const struct request_modules *modules, struct requests **out);
/* No session may be left. */
void requests_free(struct requests *rq);

/* The front's side of every session. */
struct front_handler requests_handler(struct requests *rq);

/* New work is answered SHUTDOWN from now on. */
void requests_drain(struct requests *rq);
/* Stops every request that is under way. */
void requests_stop_all(struct requests *rq);
uint32_t requests_active(const struct requests *rq);
uint32_t requests_sessions(const struct requests *rq);
/* Settings may have changed. */
void requests_reloaded(struct requests *rq);
/* The arena has all the memory that it will have, which may be less than was configured. */
void requests_arena_ended(struct requests *rq);
#endif
