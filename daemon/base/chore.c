#include "daemon/base/chore.h"

#include <assert.h>

static void idle_cb(uv_idle_t *idle);

static void start(struct chores *all)
{
    int rc = all->on || all->closing ? 0 : uv_idle_start(&all->idle, idle_cb);

    assert(rc == 0); /* it has a callback */
    (void)rc;
    all->on = !all->closing;
}

static bool is_ready(const struct chore *k)
{
    return k->ready_cb && k->ready_cb(k->ctx);
}

/* It stays due while it runs: what asks whether it is gets the truth. */
static void run(struct chore *k)
{
    k->woken = false;
    k->due = k->run_cb(k->ctx) || k->woken;
}

static void idle_cb(uv_idle_t *idle)
{
    struct chores *all = LIST_ENTRY(idle, struct chores, idle);
    bool more = false;

    for (struct list *n = all->all.next; n != &all->all; n = n->next) {
        struct chore *k = LIST_ENTRY(n, struct chore, link);

        if (k->due)
            run(k);
    }
    for (struct list *n = all->all.next; n != &all->all; n = n->next) {
        struct chore *k = LIST_ENTRY(n, struct chore, link);

        k->due = k->due || is_ready(k);
        more = more || k->due;
    }
    if (!more)
        uv_idle_stop(idle);
    all->on = more;
}

int chores_init(struct chores *all, uv_loop_t *loop)
{
    *all = (struct chores){.on = false};
    list_init(&all->all);
    return uv_idle_init(loop, &all->idle);
}

void chores_close(struct chores *all, uv_close_cb closed_cb)
{
    all->closing = true;
    uv_close((uv_handle_t *)&all->idle, closed_cb);
}

void chore_add(struct chores *all, struct chore *k, bool (*run_cb)(void *ctx),
               bool (*ready_cb)(const void *ctx), void *ctx)
{
    *k = (struct chore){.ctx = ctx, .run_cb = run_cb, .ready_cb = ready_cb, .of = all};
    list_push_back(&all->all, &k->link);
}

void chore_remove(struct chore *k)
{
    list_remove(&k->link);
}

void chore_wake(struct chore *k)
{
    k->due = true;
    k->woken = true;
    start(k->of);
}

const struct chore *chore_asleep(const struct chores *all)
{
    for (const struct list *n = all->all.next; n != &all->all; n = n->next) {
        const struct chore *k = LIST_ENTRY(n, struct chore, link);

        if (!k->due && is_ready(k))
            return k;
    }
    return NULL;
}
