/* What the server owns. server.c makes it, and stop.c ends it. */
#ifndef UCMD_MODULES_H
#define UCMD_MODULES_H

#include "daemon/base/deadline.h"
#include "daemon/base/numa.h"
#include "daemon/base/signals.h"
#include "daemon/config/config.h"
#include "daemon/notify.h"
#include "daemon/observe/iterations.h"
#include "daemon/reload.h"
#include "daemon/tier/tier.h"
#include "proto/metrics/metrics.h"

struct server {
    uv_loop_t loop;
    struct config config;
    struct reload reload;
    const char *commit; /* that the program was built from */
    struct metrics metrics;
    struct deadlines deadlines;
    struct limits *limits;
    struct reaper *reaper;
    struct index *index;
    struct policy *policy;
    struct cache *cache;
    struct numa numa; /* no nodes: nothing is placed */
    struct arena *arena;
    struct snapshot *snapshot; /* NULL: DRAM ends with the daemon */
    const struct tier_ops *tier_ops;
    struct tier *tier;             /* NULL, and tier_ops too: the configuration wants no tier */
    struct shared *shared;         /* NULL: nothing is shared with other hosts */
    struct encryption *encryption; /* NULL: nothing is encrypted */
    struct device_set *devices;
    struct requests *requests;
    struct front *front;
    struct observe *observe; /* NULL: nobody may look */
    struct notify notify;
    struct signals signals;
    uv_timer_t stop_timer;
    struct iterations iterations;
    uint64_t stop_at_ms, progress_seen;
    /* DRAINING: requests and write-back have until stop_at_ms. DROPPING: what is left was
     * stopped, connections end. SNAPSHOT: the list of parts in DRAM is being written. */
    enum { SERVING, DRAINING, DROPPING, SNAPSHOT, STOPPED } state;
    int exit_status;
};

/* Begins to stop; the event loop ends when all has. */
void server_stop(struct server *s, int exit_status);

#endif
