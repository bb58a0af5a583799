#include "daemon/base/deadline.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

static void heap_put(struct deadlines *ds, uint32_t i, struct deadline *d)
{
    ds->heap[i] = d;
    d->place = i + 1;
}

static void heap_up(struct deadlines *ds, uint32_t i)
{
    struct deadline *d = ds->heap[i];

    while (i > 0 && ds->heap[(i - 1) / 2]->at_ms > d->at_ms) {
        heap_put(ds, i, ds->heap[(i - 1) / 2]);
        i = (i - 1) / 2;
    }
    heap_put(ds, i, d);
}

static void heap_down(struct deadlines *ds, uint32_t i)
{
    struct deadline *d = ds->heap[i];

    for (;;) {
        uint32_t child = 2 * i + 1;

        if (child >= ds->n)
            break;
        if (child + 1 < ds->n && ds->heap[child + 1]->at_ms < ds->heap[child]->at_ms)
            child++;
        if (ds->heap[child]->at_ms >= d->at_ms)
            break;
        heap_put(ds, i, ds->heap[child]);
        i = child;
    }
    heap_put(ds, i, d);
}

static void heap_remove(struct deadlines *ds, struct deadline *d)
{
    uint32_t i = d->place - 1;
    struct deadline *last = ds->heap[--ds->n];

    d->place = 0;
    if (last == d)
        return;
    heap_put(ds, i, last);
    heap_up(ds, i);
    heap_down(ds, last->place - 1);
}

static void timer_cb(uv_timer_t *timer);

static void timer_set(struct deadlines *ds)
{
    uint64_t now = uv_now(ds->timer.loop);
    int rc;

    if (ds->n == 0) {
        rc = uv_timer_stop(&ds->timer);
        assert(rc == 0);
        (void)rc;
        return;
    }
    rc = uv_timer_start(&ds->timer, timer_cb,
                        ds->heap[0]->at_ms > now ? ds->heap[0]->at_ms - now : 0, 0);
    assert(rc == 0);
    (void)rc;
}

static void timer_cb(uv_timer_t *timer)
{
    struct deadlines *ds = timer->data;
    uint64_t now = uv_now(timer->loop);

    ds->expiring = true;
    while (ds->n > 0 && ds->heap[0]->at_ms <= now) {
        struct deadline *d = ds->heap[0];

        heap_remove(ds, d);
        d->expired_cb(d);
    }
    ds->expiring = false;
    timer_set(ds);
}

int deadlines_init(struct deadlines *ds, uv_loop_t *loop)
{
    *ds = (struct deadlines){0};
    ds->timer.data = ds;
    return uv_timer_init(loop, &ds->timer);
}

static void closed_cb(uv_handle_t *handle)
{
    struct deadlines *ds = handle->data;

    free(ds->heap);
    ds->heap = NULL;
}

void deadlines_close(struct deadlines *ds)
{
    assert(ds->n == 0);
    uv_close((uv_handle_t *)&ds->timer, closed_cb);
}

int deadline_arm(struct deadlines *ds, struct deadline *d, uint64_t at_ms,
                 void (*expired_cb)(struct deadline *d))
{
    if (!deadline_armed(d) && ds->n == ds->cap) {
        uint32_t cap = ds->cap ? 2 * ds->cap : 64;
        struct deadline **heap = realloc(ds->heap, cap * sizeof(*heap));

        if (!heap)
            return -ENOMEM;
        ds->heap = heap;
        ds->cap = cap;
    }
    if (deadline_armed(d))
        heap_remove(ds, d);
    /* Not in this turn of timer_cb: the loop would spin there. */
    if (ds->expiring && at_ms <= uv_now(ds->timer.loop))
        at_ms = uv_now(ds->timer.loop) + 1;
    d->at_ms = at_ms;
    d->expired_cb = expired_cb;
    heap_put(ds, ds->n, d);
    heap_up(ds, ds->n++);
    if (ds->heap[0] == d)
        timer_set(ds);
    return 0;
}

void deadline_disarm(struct deadlines *ds, struct deadline *d)
{
    if (!deadline_armed(d))
        return;
    heap_remove(ds, d);
    if (ds->n == 0)
        timer_set(ds);
}
