/* The idle callback, in which the cache goes on with what it put off until the next turn of the loop; and who waits for
 * a turn, for space or for write-behind. */
#include "daemon/cache/cache.h"

#include "daemon/cache/internal.h"
#include "daemon/cache/snapshot.h"

#include <assert.h>

static void idle_cb(uv_idle_t *idle);

static void idle_start(struct cache *c)
{
    if (!c->idle_on && !c->closing) {
        int rc = uv_idle_start(&c->idle, idle_cb);

        assert(rc == 0);
        (void)rc;
        c->idle_on = true;
    }
}

/* Of those who wait for their own tenant's, that try again in one turn of the loop. */
#define MOST_WAKES 16

static bool anybody_waits(const struct cache *c)
{
    return !list_empty(&c->space_waits) || !list_empty(&c->quotas.waits) ||
           !list_empty(&c->quotas.woken);
}

/* Each waits for something of its own, so that one fails says nothing about the next: after a release
 * each tries once, some in each turn. */
static void most_wake(struct cache *c, bool released)
{
    struct list *node;

    if (released) { /* who has not tried since the last one is first */
        list_splice_front(&c->quotas.waits, &c->quotas.woken);
        list_splice_front(&c->quotas.woken, &c->quotas.waits);
    }
    for (int i = 0; i < MOST_WAKES && (node = list_pop_front(&c->quotas.woken)) != NULL; i++) {
        struct cache_retry *r = LIST_ENTRY(node, struct cache_retry, link);

        r->retry_cb(r);
    }
    if (!list_empty(&c->quotas.woken))
        idle_start(c);
}

static void space_wake(struct cache *c)
{
    struct list *node;

    c->wake = false;
    while ((node = list_pop_front(&c->space_waits)) != NULL) {
        struct cache_retry *r = LIST_ENTRY(node, struct cache_retry, link);

        r->retry_cb(r);
        /* It waits again, so there is too little space for those behind it, too. This compares the
         * address only: r may be freed. */
        if (c->space_waits.prev == node || c->space_waits.next == node)
            break;
    }
}

/* One a turn of the loop, each in its turn. */
static void next_turn_wake(struct cache *c)
{
    struct list *node = list_pop_front(&c->next_turn);

    if (node) {
        struct cache_retry *r = LIST_ENTRY(node, struct cache_retry, link);

        r->retry_cb(r);
    }
    if (!list_empty(&c->next_turn))
        idle_start(c);
}

static void pressure_wake(struct cache *c)
{
    struct list *node;

    while (!cache_back_pressure(c) && (node = list_pop_front(&c->pressure)) != NULL) {
        struct cache_retry *r = LIST_ENTRY(node, struct cache_retry, link);

        r->retry_cb(r);
    }
}

/* An operation is under way, or about to be, whose end may free a slot. */
static bool space_may_come(const struct cache *c)
{
    return c->searching || c->users > 0 || c->tier_busy > 0 || c->share_busy > 0 ||
           c->shards.pieces > 0 || c->write[WRITE_SHARE].full || c->unseeded.n > 0 ||
           ((c->write[WRITE_NVME].pump || c->write[WRITE_SHARE].pump) && !c->no_writes) ||
           c->relocations.n > 0 || c->compact.slot_bytes > 0 ||
           arena_bytes_ready(c->arena) != arena_bytes_configured(c->arena);
}

static void pump(struct cache *c)
{
    bool pumped = false;

    for (enum write_to to = 0; to < WRITE_TARGETS; to++) {
        if (!c->write[to].pump)
            continue;
        pumped = true;
        c->write[to].pump = cache_write_pump(c, to);
        if (c->write[to].pump)
            idle_start(c);
        c->fruitless = 0; /* a block that waits no more may be dropped for a new one */
    }
    /* No write began: if nothing else can free a slot, its waiters have to know. */
    if (pumped && anybody_waits(c) && !space_may_come(c)) {
        c->wake = true;
        idle_start(c);
    }
}

static void idle_cb(uv_idle_t *idle)
{
    struct cache *c = idle->data;
    bool released;

    uv_idle_stop(idle);
    c->idle_on = false;
    /* First: who waits for the extent that it has emptied takes it before others come. */
    if (c->compact.pump && cache_compact_pump(c))
        cache_compact_later(c);
    c->wake = c->wake || c->searching;
    c->searching = false;
    released = c->wake;
    if (released)
        space_wake(c);
    most_wake(c, released);
    next_turn_wake(c);
    if (c->seeded > 0 && cache_writes_seed(c))
        idle_start(c);
    pump(c);
    c->window_search.looks = 0;
    c->window_search.change++;
    if (c->relocations.pump)
        cache_relocations_pump(c);
    cache_window_trim(c);
    if (c->taking && cache_window_empty_some(c))
        idle_start(c);
    if (c->sweep > 0 && cache_list_sweep(c))
        idle_start(c);
    if (c->hints.pump) {
        c->hints.pump = cache_hints_pump(c);
        if (c->hints.pump)
            idle_start(c);
    }
    if (c->quotas.regroup && cache_quota_regroup(c))
        idle_start(c);
    if (c->quotas.trim && cache_quota_trim(c))
        idle_start(c);
    pressure_wake(c);
}

void cache_regroup_later(struct cache *c)
{
    c->quotas.regroup = true;
    idle_start(c);
}

void cache_compact_later(struct cache *c)
{
    c->compact.pump = true;
    idle_start(c);
}

void cache_quota_trim_later(struct cache *c)
{
    c->quotas.trim = true;
    idle_start(c);
}

void cache_hints_later(struct cache *c)
{
    c->hints.pump = true;
    idle_start(c);
}

void cache_relocations_later(struct cache *c)
{
    if (c->relocations.n == 0)
        return;
    c->relocations.pump = true;
    idle_start(c);
}

void cache_window_search_later(struct cache *c)
{
    c->relocations.pump = true;
    idle_start(c);
}

void cache_search_later(struct cache *c)
{
    c->searching = true;
    idle_start(c);
}

void cache_released(struct cache *c)
{
    c->fruitless = 0;
    c->releases++;
    c->window_search.change++;
    if (anybody_waits(c)) {
        c->wake = true;
        idle_start(c);
    }
    c->write[WRITE_NVME].full = false; /* what was released may be an operation of the tier */
    for (enum write_to to = 0; to < WRITE_TARGETS; to++)
        if (cache_write_waits(c, to)) {
            c->write[to].pump = true;
            idle_start(c);
        }
    cache_relocations_later(c);
    if (c->compact.slot_bytes > 0 || c->compact.n > 0)
        cache_compact_later(c);
    if (c->sweep > 0 || c->taking || c->seeded > 0 || cache_window_over(c))
        idle_start(c);
    if (!list_empty(&c->pressure) && !cache_back_pressure(c))
        idle_start(c);
}

/* ---- waiting for space, and for write-behind ---- */

bool cache_space_wait(struct cache *c, struct cache_retry *r, bool first)
{
    if (!space_may_come(c))
        return false;
    if (first)
        list_push_front(&c->space_waits, &r->link);
    else
        list_push_back(&c->space_waits, &r->link);
    return true;
}

bool cache_most_wait(struct cache *c, struct cache_retry *r)
{
    if (!space_may_come(c))
        return false;
    list_push_back(&c->quotas.waits, &r->link);
    return true;
}

bool cache_space_awaited(const struct cache *c, const struct cache_retry *r)
{
    return !list_empty(&c->space_waits) && c->space_waits.next != &r->link;
}

void cache_next_turn(struct cache *c, struct cache_retry *r)
{
    list_push_back(&c->next_turn, &r->link);
    idle_start(c);
}

void cache_arena_grew(struct cache *c)
{
    cache_snapshot_load_grew(c);
    cache_released(c);
}

bool cache_back_pressure(const struct cache *c)
{
    return c->dirty_bytes > c->config.backlog_bytes && !c->no_writes;
}

void cache_pressure_wait(struct cache *c, struct cache_retry *r)
{
    list_push_back(&c->pressure, &r->link);
}

void cache_retry_cancel(struct cache_retry *r)
{
    list_remove(&r->link);
}
