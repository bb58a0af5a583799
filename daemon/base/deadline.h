/* Deadlines: a heap of points in time behind one libuv timer, which runs only while any is armed.
 * Times are uv_now() milliseconds (monotonic: setting the clock changes nothing).
 * Thread: the loop only. */
#ifndef UCMD_BASE_DEADLINE_H
#define UCMD_BASE_DEADLINE_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

/* Embedded in its owner; zero-initialised is "not armed". */
struct deadline {
    uint64_t at_ms;
    uint32_t place; /* 1 + index in the heap; 0: not armed */
    void (*expired_cb)(struct deadline *d);
};

struct deadlines {
    uv_timer_t timer;
    struct deadline **heap;
    uint32_t n, cap;
    bool expiring; /* callbacks run */
};

int deadlines_init(struct deadlines *ds, uv_loop_t *loop);
/* Nothing may be armed. Closes the timer on the loop: run it once more afterwards. */
void deadlines_close(struct deadlines *ds);

/* Arms d (again, if it was) for at_ms; expired_cb runs once, disarmed by then. What a callback arms
 * for a time that has passed expires 1 ms later. 0 or -ENOMEM. */
int deadline_arm(struct deadlines *ds, struct deadline *d, uint64_t at_ms,
                 void (*expired_cb)(struct deadline *d));
void deadline_disarm(struct deadlines *ds, struct deadline *d); /* harmless when not armed */

static inline bool deadline_armed(const struct deadline *d)
{
    return d->place != 0;
}

#endif
