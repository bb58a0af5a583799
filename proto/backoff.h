/* Exponential back-off between retries: the pause doubles with each failure, between two bounds.
 *
 * The caller passes the clock and chooses its unit; all values have that unit. No I/O, no timer, no
 * thread rule beyond the owner's. Daemon and client library both use it. */
#ifndef UCM_PROTO_BACKOFF_H
#define UCM_PROTO_BACKOFF_H

#include <stdbool.h>
#include <stdint.h>

struct backoff {
    uint64_t min, max; /* bounds of the pause */
    uint64_t pause;    /* the last pause without jitter; 0 after a success */
    uint64_t until;    /* no retry before this time; 0: retry at once */
    uint64_t random;   /* state of the jitter; 0: no jitter */
};

/* seed: 0 for exact pauses; otherwise each pause is up to a quarter longer, at random, so that
 * hosts that failed together do not retry together. */
static inline void backoff_init(struct backoff *b, uint64_t min, uint64_t max, uint64_t seed)
{
    *b = (struct backoff){.min = min, .max = max, .random = seed};
}

/* Records a failure at `now` and returns the time of the next retry. */
static inline uint64_t backoff_fail(struct backoff *b, uint64_t now)
{
    uint64_t jitter = 0;

    b->pause = b->pause == 0 ? b->min : b->pause < b->max / 2 ? 2 * b->pause : b->max;
    if (b->random != 0) {
        b->random ^= b->random << 13;
        b->random ^= b->random >> 7;
        b->random ^= b->random << 17;
        jitter = (b->random >> 11) % (b->pause / 4 + 1);
    }
    b->until = now + b->pause + jitter;
    return b->until;
}

/* Records a success: the next failure pauses for `min` again. */
static inline void backoff_reset(struct backoff *b)
{
    b->pause = b->until = 0;
}

static inline bool backoff_ready(const struct backoff *b, uint64_t now)
{
    return now >= b->until;
}

#endif
