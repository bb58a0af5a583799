/* Whether too many parts that should be written were dropped lately. Thread: the event loop only.
 *
 * More than one part in so many not written is less cache than was bought, as the alert
 * UcmdDiskTooSlow has it. The count begins again every window, and the answer holds for a while
 * after the last one, since a burst is over before anybody asks. */
#ifndef UCMD_OBSERVE_DROPS_H
#define UCMD_OBSERVE_DROPS_H

#include <stdbool.h>
#include <stdint.h>

#define DROPS_FRACTION 10
#define DROPS_WINDOW_MS (10u * 1000u)
#define DROPS_SHOWN_MS (60u * 1000u)

/* Zeros are one that nothing was dropped of. */
struct drops {
    uint64_t begun_ms, dropped, written; /* when the window began, and the counters then */
    uint64_t until_ms;                   /* until when it is too much */
    uint64_t lost, of;                   /* in the window that said so */
    bool begin;                          /* the next count begins a window */
};

/* Health names another cause for what is dropped until the next count: leave it out. */
static inline void drops_excuse(struct drops *d)
{
    d->until_ms = 0;
    d->begin = true;
}

/* Takes the counters, which never go back; at least as often as somebody asks. True: it is too
 * much. */
static inline bool drops_count(struct drops *d, uint64_t now_ms, uint64_t dropped, uint64_t written)
{
    uint64_t lost = d->begin ? 0 : dropped - d->dropped, of = lost + written - d->written;

    if (lost > 0 && lost * DROPS_FRACTION >= of) {
        d->until_ms = now_ms + DROPS_SHOWN_MS;
        d->lost = lost;
        d->of = of;
    }
    if (d->begin || now_ms - d->begun_ms >= DROPS_WINDOW_MS) {
        d->begin = false;
        d->begun_ms = now_ms;
        d->dropped = dropped;
        d->written = written;
    }
    return now_ms < d->until_ms;
}

#endif
