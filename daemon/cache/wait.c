/* Waiters: for an iteration of the event loop, for space, for write-back. */
#include "daemon/cache/cache.h"

#include "daemon/cache/internal.h"

/* Waiters for something else than a slot that try again in one iteration of the event loop. */
#define OTHER_WAKES 16

/* To be released. */
static bool anybody_waits(const struct cache *c)
{
    return !list_empty(&c->firsts) || !list_empty(&c->waits[WAIT_SLOT]) ||
           !list_empty(&c->waits[WAIT_OTHER]) || !list_empty(&c->woken);
}

/* An operation is under way, or about to be, whose end may free a slot. */
static bool space_may_come(const struct cache *c)
{
    return c->space.searching || c->users > 0 || c->tier_busy > 0 || c->shared_busy > 0 ||
           c->granted > 0 || c->write[WRITE_SHARED].full || c->without_secret.n > 0 ||
           ((c->chore[CHORE_WRITE_NVME].due || c->chore[CHORE_WRITE_SHARED].due) &&
            !c->no_writes) ||
           c->moving > 0 || c->compact.slot_bytes > 0 ||
           arena_bytes_ready(c->arena) != arena_bytes_configured(c->arena);
}

/* Returns the waiter, which may have ended by now; NULL: none waits. */
static const struct list *first_retries(struct list *waits)
{
    struct list *node = list_pop_front(waits);

    if (node) {
        struct cache_retry *r = LIST_ENTRY(node, struct cache_retry, link);

        r->retry_cb(r);
    }
    return node;
}

/* Each waits for something of its own, so that one fails says nothing about the next: after a
 * release each tries once, some in each iteration. */
bool cache_other_run(void *ctx)
{
    struct cache *c = ctx;

    for (int i = 0; i < OTHER_WAKES && first_retries(&c->woken); i++)
        ;
    return !list_empty(&c->woken);
}

bool cache_other_ready(const void *ctx)
{
    const struct cache *c = ctx;

    return !list_empty(&c->woken);
}

/* Something was released, or a search goes on. */
bool cache_space_run(void *ctx)
{
    struct cache *c = ctx;
    struct list *slots = &c->waits[WAIT_SLOT];
    const struct list *node;

    c->space.searching = false;
    do {
        c->trying = list_empty(&c->firsts) ? slots->next : c->firsts.next;
        node = first_retries(list_empty(&c->firsts) ? slots : &c->firsts);
        /* A request that waits again has too little, and so have those after it. This compares the
         * address only: r may be freed. */
    } while (node && c->firsts.next != node && slots->prev != node && slots->next != node);
    c->trying = NULL;
    /* Waiters that have not tried since the last release are first. */
    list_splice_front(&c->waits[WAIT_OTHER], &c->woken);
    list_splice_front(&c->woken, &c->waits[WAIT_OTHER]);
    if (!list_empty(&c->woken))
        cache_wake(c, CHORE_OTHER);
    return false;
}

/* Whether nothing is under way that could free a slot: waiters for one have to know. */
bool cache_space_ready(const void *ctx)
{
    const struct cache *c = ctx;

    return anybody_waits(c) && !space_may_come(c);
}

void cache_less_under_way(struct cache *c)
{
    if (cache_space_ready(c))
        cache_wake(c, CHORE_SPACE);
    if (c->users == 0 && !list_empty(&c->durables.waiting))
        cache_wake(c, CHORE_WRITE_NVME);
}

/* One an iteration of the event loop, each in its turn. */
bool cache_iteration_run(void *ctx)
{
    struct cache *c = ctx;

    (void)first_retries(&c->waits[WAIT_TURN]);
    return !list_empty(&c->waits[WAIT_TURN]);
}

bool cache_iteration_ready(const void *ctx)
{
    const struct cache *c = ctx;

    return !list_empty(&c->waits[WAIT_TURN]);
}

bool cache_pressure_run(void *ctx)
{
    struct cache *c = ctx;

    while (!cache_back_pressure(c) && first_retries(&c->waits[WAIT_PRESSURE]))
        ;
    return false;
}

bool cache_pressure_ready(const void *ctx)
{
    const struct cache *c = ctx;

    return !list_empty(&c->waits[WAIT_PRESSURE]) && !cache_back_pressure(c);
}

void cache_less_dirty(struct cache *c)
{
    if (cache_pressure_ready(c))
        cache_wake(c, CHORE_PRESSURE);
}

void cache_released(struct cache *c)
{
    c->lists.fruitless = 0;
    c->releases++;
    if (anybody_waits(c))
        cache_wake(c, CHORE_SPACE);
    c->write[WRITE_NVME].full = false; /* what was released may be an operation of the tier */
    if (c->write[WRITE_NVME].n > 0 || !list_empty(&c->durables.waiting))
        cache_wake(c, CHORE_WRITE_NVME);
    if (c->write[WRITE_SHARED].n > 0)
        cache_wake(c, CHORE_WRITE_SHARED);
    if (c->mover && c->mover->waits)
        chore_wake(&c->mover->chore);
    if (c->compact.slot_bytes > 0 || c->compact.n > 0)
        cache_wake(c, CHORE_COMPACT);
    if (!list_empty(&c->waits[WAIT_PRESSURE]))
        cache_less_dirty(c);
}

/* ---- waiting for space, and for write-back ---- */

bool cache_wait_for(struct cache *c, struct cache_retry *r, enum wait_for what)
{
    if ((what == WAIT_SLOT || what == WAIT_OTHER) && !space_may_come(c))
        return false;
    if (what != WAIT_SLOT || !r->first)
        list_push_back(&c->waits[what], &r->link);
    else if (&r->link == c->trying)
        list_push_front(&c->firsts, &r->link);
    else
        list_push_back(&c->firsts, &r->link);
    if (what == WAIT_PRESSURE)
        cache_less_dirty(c); /* it may have fallen while r got ready to wait */
    if (what == WAIT_TURN)
        cache_wake(c, CHORE_WAITERS);
    return true;
}

bool cache_slot_awaited(const struct cache *c, const struct cache_retry *r)
{
    const struct list *first = list_empty(&c->firsts) ? &c->waits[WAIT_SLOT] : &c->firsts;

    return !list_empty(first) && first->next != &r->link;
}

bool cache_back_pressure(const struct cache *c)
{
    return c->dirty_bytes > c->config.backlog_bytes && !c->no_writes;
}

void cache_retry_cancel(struct cache_retry *r)
{
    list_remove(&r->link);
}
