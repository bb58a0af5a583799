/* What the cache puts off until the next turn of the loop; and who waits for a turn, for space or for write-behind. */
#include "daemon/cache/cache.h"

#include "daemon/cache/internal.h"
#include "daemon/cache/snapshot.h"

/* Of those who wait for their own tenant's, that try again in one turn of the loop. */
#define MOST_WAKES 16

static bool anybody_waits(const struct cache *c)
{
    return !list_empty(&c->space_waits) || !list_empty(&c->quotas.waits) ||
           !list_empty(&c->quotas.woken);
}

/* An operation is under way, or about to be, whose end may free a slot. */
static bool space_may_come(const struct cache *c)
{
    return c->searching || c->users > 0 || c->tier_busy > 0 || c->share_busy > 0 ||
           c->shards.pieces > 0 || c->write[WRITE_SHARE].full || c->unseeded.n > 0 ||
           ((c->chore[CHORE_WRITE_NVME].due || c->chore[CHORE_WRITE_SHARE].due) && !c->no_writes) ||
           c->relocations.n > 0 || c->compact.slot_bytes > 0 ||
           arena_bytes_ready(c->arena) != arena_bytes_configured(c->arena);
}

/* Each waits for something of its own, so that one fails says nothing about the next: after a release
 * each tries once, some in each turn. */
static bool own_run(void *ctx)
{
    struct cache *c = ctx;
    struct list *node;

    for (int i = 0; i < MOST_WAKES && (node = list_pop_front(&c->quotas.woken)) != NULL; i++) {
        struct cache_retry *r = LIST_ENTRY(node, struct cache_retry, link);

        r->retry_cb(r);
    }
    return !list_empty(&c->quotas.woken);
}

static bool own_ready(const void *ctx)
{
    const struct cache *c = ctx;

    return !list_empty(&c->quotas.woken);
}

/* Something was released, or a search goes on. */
static bool space_run(void *ctx)
{
    struct cache *c = ctx;
    struct list *node;

    c->searching = false;
    while ((node = list_pop_front(&c->space_waits)) != NULL) {
        struct cache_retry *r = LIST_ENTRY(node, struct cache_retry, link);

        r->retry_cb(r);
        /* It waits again, so there is too little space for those behind it, too. This compares the
         * address only: r may be freed. */
        if (c->space_waits.prev == node || c->space_waits.next == node)
            break;
    }
    /* Who has not tried since the last one is first. */
    list_splice_front(&c->quotas.waits, &c->quotas.woken);
    list_splice_front(&c->quotas.woken, &c->quotas.waits);
    if (!list_empty(&c->quotas.woken))
        cache_wake(c, CHORE_OWN);
    return false;
}

/* Nothing is under way that could free a slot: who waits for one has to know. */
static bool space_ready(const void *ctx)
{
    const struct cache *c = ctx;

    return anybody_waits(c) && !space_may_come(c);
}

void cache_less_under_way(struct cache *c)
{
    if (space_ready(c))
        cache_wake(c, CHORE_SPACE);
}

/* One a turn of the loop, each in its turn. */
static bool turn_run(void *ctx)
{
    struct cache *c = ctx;
    struct list *node = list_pop_front(&c->next_turn);

    if (node) {
        struct cache_retry *r = LIST_ENTRY(node, struct cache_retry, link);

        r->retry_cb(r);
    }
    return !list_empty(&c->next_turn);
}

static bool turn_ready(const void *ctx)
{
    const struct cache *c = ctx;

    return !list_empty(&c->next_turn);
}

static bool pressure_run(void *ctx)
{
    struct cache *c = ctx;
    struct list *node;

    while (!cache_back_pressure(c) && (node = list_pop_front(&c->pressure)) != NULL) {
        struct cache_retry *r = LIST_ENTRY(node, struct cache_retry, link);

        r->retry_cb(r);
    }
    return false;
}

static bool pressure_ready(const void *ctx)
{
    const struct cache *c = ctx;

    return !list_empty(&c->pressure) && !cache_back_pressure(c);
}

void cache_less_dirty(struct cache *c)
{
    if (pressure_ready(c))
        cache_wake(c, CHORE_PRESSURE);
}

/* ---- chores ---- */

/* In this order: who waits for the extent that compact.c has emptied takes it before others come. */
static const struct {
    bool (*run_cb)(void *ctx);
    bool (*ready_cb)(const void *ctx);
} chores[CHORES] = {
    [CHORE_COMPACT] = {cache_compact_run, cache_compact_ready},
    [CHORE_SPACE] = {space_run, space_ready},
    [CHORE_OWN] = {own_run, own_ready},
    [CHORE_TURN] = {turn_run, turn_ready},
    [CHORE_SEEDS] = {cache_seeds_run, cache_seeds_ready},
    [CHORE_WRITE_NVME] = {cache_write_nvme_run, cache_write_nvme_ready},
    [CHORE_WRITE_SHARE] = {cache_write_share_run, cache_write_share_ready},
    [CHORE_WINDOWS] = {cache_windows_run, cache_windows_ready},
    [CHORE_SWEEP] = {cache_list_sweep_run, cache_list_sweep_ready},
    [CHORE_HINTS] = {cache_hints_run, NULL},
    [CHORE_REGROUP] = {cache_quota_regroup_run, NULL},
    [CHORE_TRIM] = {cache_quota_trim_run, NULL},
    [CHORE_PRESSURE] = {pressure_run, pressure_ready},
};

int cache_chores_init(struct cache *c)
{
    int rc = chores_init(&c->chores, c->config.loop, c);

    c->chores.idle.data = c;
    for (unsigned i = 0; rc == 0 && i < CHORES; i++)
        chore_add(&c->chores, &c->chore[i], chores[i].run_cb, chores[i].ready_cb);
    return rc;
}

void cache_released(struct cache *c)
{
    c->fruitless = 0;
    c->releases++;
    c->window_search.change++;
    if (anybody_waits(c))
        cache_wake(c, CHORE_SPACE);
    c->write[WRITE_NVME].full = false; /* what was released may be an operation of the tier */
    for (enum write_to to = 0; to < WRITE_TARGETS; to++)
        if (cache_write_waits(c, to))
            cache_wake(c, CHORE_WRITE_NVME + to);
    if (c->relocations.n > 0 || c->taking || cache_window_over(c))
        cache_wake(c, CHORE_WINDOWS);
    if (c->compact.slot_bytes > 0 || c->compact.n > 0)
        cache_wake(c, CHORE_COMPACT);
    cache_less_dirty(c);
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
    cache_wake(c, CHORE_TURN);
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
