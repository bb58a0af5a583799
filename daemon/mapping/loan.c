#include "daemon/mapping/loan.h"

#include "daemon/base/list.h"
#include "daemon/base/memfd.h"

#include <assert.h>

static void look(struct loan *l);

static void again_cb(struct deadline *d)
{
    look(LIST_ENTRY(d, struct loan, again));
}

static void look(struct loan *l)
{
    struct deadlines *ds = l->deadlines;

    if (!ds || memfd_granted(l->fd) <= 0) {
        l->calls->free_cb(l);
        return;
    }
    deadline_arm(ds, &l->again, uv_now(ds->timer.loop) + l->wait_ms, again_cb);
    if (l->wait_ms >= LOAN_KEPT_MS)
        return;
    l->wait_ms *= 2; /* the waits so far are as long as the next one */
    if (l->wait_ms >= LOAN_KEPT_MS && l->calls->kept_cb)
        l->calls->kept_cb(l);
}

void loan_end(struct loan *l, struct deadlines *deadlines, int fd, const struct loan_calls *calls,
              void *ctx)
{
    assert(!loan_waits(l));
    *l = (struct loan){.deadlines = deadlines, .fd = fd, .wait_ms = 2, .calls = calls, .ctx = ctx};
    look(l);
}

void loan_cancel(struct loan *l)
{
    if (loan_waits(l))
        deadline_disarm(l->deadlines, &l->again);
}
