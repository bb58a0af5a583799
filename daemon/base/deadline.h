/* Deadlines: points in time behind one libuv timer, which runs only while any is armed. They lie in
 * a pairing heap whose links are part of them, so arming one needs no memory and can't fail.
 * Times are uv_now() milliseconds (monotonic: setting the clock changes nothing).
 * Callbacks run for some 1 ms in one go; the remaining ones wait 1 ms, so that others get their
 * turn.
 * Thread: the event loop only. */
#ifndef UCMD_BASE_DEADLINE_H
#define UCMD_BASE_DEADLINE_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

/* Embedded in its owner; zero-initialised is "not armed". */
struct deadline {
    uint64_t at_ms;
    void (*expired_cb)(struct deadline *d);
    /* The heap's own. */
    bool armed;
    struct deadline *child, *next; /* the first child; the next sibling */
    struct deadline *back;         /* the previous sibling, or the first child's parent */
};

struct deadlines {
    uv_timer_t timer;
    struct deadline *first; /* to expire; NULL: none is armed */
    bool expiring;          /* callbacks run */
};

int deadlines_init(struct deadlines *ds, uv_loop_t *loop);
/* Nothing may be armed. Closes the timer on the event loop: run it once more afterwards. */
void deadlines_close(struct deadlines *ds);

/* Arms d (again, if it was) for at_ms; expired_cb runs once, disarmed by then. What a callback arms
 * for a time that has passed expires 1 ms later. */
void deadline_arm(struct deadlines *ds, struct deadline *d, uint64_t at_ms,
                  void (*expired_cb)(struct deadline *d));
void deadline_disarm(struct deadlines *ds, struct deadline *d); /* harmless when not armed */

static inline bool deadline_armed(const struct deadline *d)
{
    return d->armed;
}

#endif
