/* The daemon's public state at one moment: plain data, copied from the event loop to the renderers.
 *
 * admin/observe.c fills it (requests_observe), on the event loop; `stats` and `health` answer from
 * it, and the event loop publishes it. */
#ifndef UCMD_OBSERVE_SNAPSHOT_H
#define UCMD_OBSERVE_SNAPSHOT_H

#include "proto/metrics/exposition.h"

#include <stdbool.h>

#define OBSERVE_REASONS 16

struct observe_snapshot {
    struct exposition shown;
    bool recovering; /* whatever else shown.health says */
    bool draining;   /* new work is refused: the daemon is about to stop */
    uint32_t n_reasons;
    char reason[OBSERVE_REASONS][400]; /* of shown.health */
};

#endif
