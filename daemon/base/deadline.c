#include "daemon/base/deadline.h"

#include <assert.h>

/* ---- the heap ---- */

/* Melds two heaps; either may be NULL. The root with the later deadline becomes the other's
 * child. */
static struct deadline *heaps_meld(struct deadline *a, struct deadline *b)
{
    struct deadline *first = a, *later = b;

    if (!a || !b)
        return a ? a : b;
    if (b->at_ms < a->at_ms) {
        first = b;
        later = a;
    }
    later->back = first;
    later->next = first->child;
    if (first->child)
        first->child->back = later;
    first->child = later;
    return first;
}

/* Melds d and its siblings into one heap: first in pairs, which keeps the heap flat. */
static struct deadline *siblings_meld(struct deadline *d)
{
    struct deadline *pairs = NULL, *all = NULL;

    while (d) {
        struct deadline *a = d, *b = d->next;

        d = b ? b->next : NULL;
        a->next = NULL;
        if (b)
            b->next = NULL;
        a = heaps_meld(a, b);
        a->next = pairs;
        pairs = a;
    }
    while (pairs) {
        struct deadline *a = pairs;

        pairs = a->next;
        a->next = NULL;
        all = heaps_meld(all, a);
    }
    return all;
}

/* ---- the timer ---- */

/* How long callbacks run in one go; a client's thousand leases may expire in one moment. */
#define TURN_NS 1000000u

/* uv_timer_start fails without a callback only, and uv_timer_stop never. */
static void timer_cb(uv_timer_t *timer)
{
    struct deadlines *ds = timer->data;
    uint64_t now = uv_now(timer->loop), begun_ns = uv_hrtime();

    ds->expiring = true;
    while (ds->first && ds->first->at_ms <= now && uv_hrtime() - begun_ns < TURN_NS) {
        struct deadline *d = ds->first;

        deadline_disarm(ds, d);
        d->expired_cb(d);
    }
    ds->expiring = false;
    /* What is due in this moment waits 1 ms: of 0 libuv would run it again before anything else. */
    if (ds->first)
        (void)uv_timer_start(timer, timer_cb, ds->first->at_ms > now ? ds->first->at_ms - now : 1,
                             0);
}

int deadlines_init(struct deadlines *ds, uv_loop_t *loop)
{
    *ds = (struct deadlines){0};
    ds->timer.data = ds;
    return uv_timer_init(loop, &ds->timer);
}

void deadlines_close(struct deadlines *ds)
{
    assert(!ds->first);
    uv_close((uv_handle_t *)&ds->timer, NULL);
}

void deadline_arm(struct deadlines *ds, struct deadline *d, uint64_t at_ms,
                  void (*expired_cb)(struct deadline *d))
{
    uint64_t now = uv_now(ds->timer.loop);

    deadline_disarm(ds, d);
    /* Not in this iteration of timer_cb: the event loop would spin there. */
    if (ds->expiring && at_ms <= now)
        at_ms = now + 1;
    d->at_ms = at_ms;
    d->expired_cb = expired_cb;
    d->armed = true;
    ds->first = ds->first ? heaps_meld(ds->first, d) : d;
    if (ds->first == d && !ds->expiring)
        (void)uv_timer_start(&ds->timer, timer_cb, at_ms > now ? at_ms - now : 0, 0);
}

void deadline_disarm(struct deadlines *ds, struct deadline *d)
{
    struct deadline *below;

    if (!d->armed)
        return;
    below = d->child ? siblings_meld(d->child) : NULL;
    if (d == ds->first) {
        ds->first = below;
    } else {
        if (d->back->child == d)
            d->back->child = d->next;
        else
            d->back->next = d->next;
        if (d->next)
            d->next->back = d->back;
        ds->first = heaps_meld(ds->first, below);
    }
    d->child = d->next = d->back = NULL;
    d->armed = false;
    if (!ds->first)
        (void)uv_timer_stop(&ds->timer);
}
