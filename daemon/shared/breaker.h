/* A circuit breaker: after `limit` failures in a row a root is left alone for a pause; then one
 * trial at a time finds out whether it is back. Pauses double from BREAKER_PAUSE_MS to
 * BREAKER_PAUSE_MAX_MS and are up to a quarter longer at random, so that hosts do not return all at
 * once. The caller passes the clock; no I/O, no timer.
 *
 * CLOSED --`limit` failures, or a trip--> OPEN --pause over--> TRIAL --failure--> OPEN
 * Any state --success--> CLOSED */
#ifndef UCMD_SHARED_BREAKER_H
#define UCMD_SHARED_BREAKER_H

#include "proto/backoff.h"

#define BREAKER_PAUSE_MS 500u
#define BREAKER_PAUSE_MAX_MS 30000u

struct breaker {
    enum { BREAKER_CLOSED, BREAKER_OPEN, BREAKER_TRIAL } state;
    uint32_t limit, failures; /* in a row */
    struct backoff backoff;   /* BREAKER_OPEN: until when */
};

void breaker_init(struct breaker *b, uint32_t limit, uint64_t seed);
/* A success. True: the breaker was not closed and is now. */
bool breaker_good(struct breaker *b);
/* A failure. True: the breaker was closed and is open now. A failure from before the pause,
 * reported while it is open, changes nothing. */
bool breaker_bad(struct breaker *b, uint64_t now_ms);
/* As breaker_bad, without waiting for `limit` failures. */
bool breaker_trip(struct breaker *b, uint64_t now_ms);
/* True: the pause is over and this is the trial. breaker_good, breaker_bad or breaker_again must
 * follow. */
bool breaker_try(struct breaker *b, uint64_t now_ms);
/* The trial had no result: another one may begin at once. */
void breaker_again(struct breaker *b, uint64_t now_ms);

static inline bool breaker_closed(const struct breaker *b)
{
    return b->state == BREAKER_CLOSED;
}

#endif
