/* Is somebody who failed asked again? Pure: the clock is given in; no I/O, no timer.
 *
 * Promise: closed until `limit` failures in a row; open for a pause that doubles with each trial
 * that fails, from BREAKER_PAUSE_MS to BREAKER_PAUSE_MAX_MS and up to a quarter more by chance, so
 * that hosts don't come back all at once; then one trial at a time. One success closes it. */
#ifndef UCMD_SHARE_BREAKER_H
#define UCMD_SHARE_BREAKER_H

#include <stdbool.h>
#include <stdint.h>

#define BREAKER_PAUSE_MS 500u
#define BREAKER_PAUSE_MAX_MS 30000u

struct breaker {
    enum { BREAKER_CLOSED, BREAKER_OPEN, BREAKER_TRIAL } state;
    uint32_t limit, failures; /* in a row */
    uint64_t pause_ms;        /* the present one, without what chance adds */
    uint64_t until_ms;        /* BREAKER_OPEN: the end of the pause */
    uint64_t chance;
};

void breaker_init(struct breaker *b, uint32_t limit, uint64_t seed);
/* It answered. True: it was not closed and is now. */
bool breaker_good(struct breaker *b);
/* It failed. True: it was closed and is not any more. Late news from before the pause, while it is
 * open, changes nothing. */
bool breaker_bad(struct breaker *b, uint64_t now_ms);
/* True: the pause is over and this is the trial: a good or a bad, or breaker_again, must follow. */
bool breaker_try(struct breaker *b, uint64_t now_ms);
/* The trial told nothing: another may begin at once. */
void breaker_again(struct breaker *b, uint64_t now_ms);

static inline bool breaker_closed(const struct breaker *b)
{
    return b->state == BREAKER_CLOSED;
}

#endif
