/* How the event loop hands what it counted to the thread of http.h: three buffers, of which the
 * event loop fills one, the reader has one, and one is the newest. Handing over swaps two of them,
 * by one atomic exchange, so neither thread ever waits for the other, and the reader reads without
 * copying.
 *
 * Threads: one fills (the event loop), one reads. */
#ifndef UCMD_OBSERVE_PUBLISHED_H
#define UCMD_OBSERVE_PUBLISHED_H

#include "daemon/observe/snapshot.h"

#include <stdint.h>

struct published;

/* 0 or -ENOMEM. */
int published_new(struct published **out);
void published_free(struct published *p);

/* The buffer to fill: what it holds is old. Then published_commit makes it the newest. The event
 * loop only. */
struct observe_snapshot *published_begin(struct published *p);
void published_commit(struct published *p);

struct published_view {
    const struct observe_snapshot *snapshot; /* until the next published_latest */
    uint64_t number;                         /* of the publication, from 1; 0: there was none yet */
    uint64_t at_ms;                          /* clock_ms() then, or in published_new */
};
/* The newest. The reader only. */
struct published_view published_latest(struct published *p);

#endif
