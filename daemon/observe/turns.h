/* How long the loop's turns take: from one poll for events to the next, without the time that it
 * slept in the poll. What becomes ready meanwhile waits for that long. It is time by the clock:
 * where the host gave the processor to others, that counts, too.
 *
 * Source: libuv's order of phases, and UV_METRICS_IDLE_TIME (docs.libuv.org, "Metrics operations").
 * Threads: the loop. */
#ifndef UCMD_OBSERVE_TURNS_H
#define UCMD_OBSERVE_TURNS_H

#include "proto/histogram.h"

#include <uv.h>

struct turns {
    uv_prepare_t before_poll;
    struct histogram *histogram;
    uint64_t at_ns, slept_ns; /* at the last turn's end; slept: in polls since the loop began */
};

/* Before the loop runs. `histogram` is the caller's and outlives the turns. 0 or -errno. */
int turns_begin(struct turns *t, uv_loop_t *loop, struct histogram *histogram);
/* The handle closes on the loop: run it once more. */
void turns_end(struct turns *t);

#endif
