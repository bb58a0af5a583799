/* How long the event loop's iterations take: from one poll for events to the next, without the time
 * that it slept in the poll. What becomes ready meanwhile waits for that long. It is time by the
 * clock: where the host gave the processor to others, that counts, too.
 *
 * Source: libuv's order of phases, and UV_METRICS_IDLE_TIME (docs.libuv.org, "Metrics operations").
 * Threads: the event loop. */
#ifndef UCMD_OBSERVE_ITERATIONS_H
#define UCMD_OBSERVE_ITERATIONS_H

#include "proto/histogram.h"

#include <uv.h>

struct iterations {
    uv_prepare_t before_poll;
    struct histogram *histogram;
    /* at the last iteration's end; slept: in polls since the event loop began */
    uint64_t at_ns, slept_ns;
};

/* Before the event loop runs. `histogram` is the caller's and outlives the iterations. 0 or
 * -errno. */
int iterations_begin(struct iterations *t, uv_loop_t *loop, struct histogram *histogram);
/* The handle closes on the event loop: run it once more. */
void iterations_end(struct iterations *t);

#endif
