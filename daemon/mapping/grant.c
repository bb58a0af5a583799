/* Shared mappings: slabs that are granted to one tenant each.
 *
 *   FREE --asked for--> MAKING --thread: has memory--> GRANTED --no slots, all released it--> GOING
 *        <--thread: given back-- ENDING: until nobody has it mapped <----devices let go----'
 *
 * A group has one slab in MAKING at a time. A slab without slots that workers still map stays
 * with its group, which may use it again; it is revoked when another group wants memory. */
#include "daemon/mapping/grant_internal.h"

#include "daemon/base/log.h"
#include "proto/memory/mapping.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Pages of the largest kind that the kernel gives files of memory. */
#define HUGE_BYTES (2ull << 20)

static char *mapping_base(const struct arena *a, const struct mapping *w)
{
    return grant_slab(a, w)->base;
}

static void report(struct arena *a, const struct mapping *w, enum arena_granted_event event)
{
    a->config.granted_cb(a->config.ctx, event, grant_number(a, w), mapping_base(a, w),
                         a->config.slab);
    if (a->granter->watcher.changed_cb)
        a->granter->watcher.changed_cb(a->granter->watcher.ctx);
}

static void slot_freed(struct arena *a, struct slab *e, uint32_t slot);

/* ---- life ---- */

int arena_granted_init(struct arena *a)
{
    uint64_t bytes, skip;
    struct granter *l;
    char *p;
    int rc;

    a->granted = a->granted < UCM_MAX_MAPPING_SLABS ? a->granted : UCM_MAX_MAPPING_SLABS;
    bytes = a->granted * a->config.slab;
    l = a->granter = calloc(1, sizeof(*l));
    if (!l)
        return -ENOMEM;
    a->granted_freed = slot_freed;
    list_init(&l->free);
    list_init(&l->groups);
    list_init(&l->revokes);
    list_init(&l->keeps);
    list_init(&l->jobs);
    list_init(&l->ended);
    if (a->granted == 0)
        return 0;
    l->mapping = calloc(a->granted, sizeof(*l->mapping));
    if (!l->mapping)
        return -ENOMEM;
    p = mmap(NULL, bytes + HUGE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
             0);
    if (p == MAP_FAILED) {
        rc = -errno;
        free(l->mapping);
        l->mapping = NULL;
        a->granted = 0;
        log_warn("arena", "no-mappings", "bytes=%llu error=%s", (unsigned long long)bytes,
                 strerror(-rc));
        return a->config.granted > 0 ? rc : 0; /* a limit on address space, and nobody wants any */
    }
    skip = HUGE_BYTES - (uintptr_t)p % HUGE_BYTES;
    munmap(p, skip);
    if (skip < HUGE_BYTES)
        munmap(p + skip + bytes, HUGE_BYTES - skip);
    l->base = p + skip;
    l->budget = a->config.granted;
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->more, NULL);
    return 0;
}

static void mappings_forget(struct list *mappings)
{
    struct list *node;

    while ((node = list_pop_front(mappings)) != NULL) {
        struct mapping *w = LIST_ENTRY(node, struct mapping, link);

        loan_cancel(&w->loan);
        if (w->fd >= 0)
            close(w->fd);
    }
}

void arena_granted_close(struct arena *a)
{
    struct granter *l = a->granter;

    if (!l || !l->base)
        return;
    munmap(l->base, a->granted * a->config.slab);
    mappings_forget(&l->keeps);
    while (!list_empty(&l->groups)) {
        struct arena_group *g = LIST_ENTRY(l->groups.next, struct arena_group, link);

        mappings_forget(&g->mappings);
        grant_group_free(a, g);
    }
    free(l->mapping);
    pthread_cond_destroy(&l->more);
    pthread_mutex_destroy(&l->lock);
    l->base = NULL;
}

/* ---- giving back ---- */

static void mapping_returns(struct arena *a, struct mapping *w)
{
    a->granter->returning += !w->returning;
    w->returning = true;
}

static void mapping_go(struct arena *a, struct mapping *w)
{
    mapping_returns(a, w);
    list_remove(&grant_slab(a, w)->link);
    list_remove(&w->job);
    w->state = MAPPING_GOING;
    report(a, w, GRANTED_GOES);
}

static void mapping_revoke(struct arena *a, struct mapping *w)
{
    struct arena_group *g = grant_group(a, w);

    w->revoked = true;
    mapping_returns(a, w);
    list_remove(&grant_slab(a, w)->link);
    list_push_back(&a->granter->revokes, &w->job);
    atomic_fetch_add_explicit(&g->header->epoch, 1, memory_order_release);
    (void)uv_async_send(&a->granter->done);
}

/* The mapping has no slots: ends it, revokes it, or keeps it for its group. */
static void mapping_settle(struct arena *a, struct mapping *w)
{
    struct slab *e = grant_slab(a, w);

    assert(w->state == MAPPING_GRANTED && e->slots == 0);
    if (w->mapped == 0)
        mapping_go(a, w);
    else if (!w->revoked && grant_over(a))
        mapping_revoke(a, w);
    else if (!w->revoked && list_empty(&e->link))
        list_push_front(&grant_group(a, w)->empty, &e->link);
}

void grant_group_close(struct arena *a, struct arena_group *g)
{
    struct list *node;

    assert(g->opens > 0);
    if (--g->opens > 0)
        return;
    g->opens = 1; /* it stays during this call */
    for (node = g->empty.next; node != &g->empty;) {
        struct slab *e = LIST_ENTRY(node, struct slab, link);

        node = node->next;
        mapping_settle(a, grant_mapping(a, e));
    }
    g->opens = 0;
    grant_group_settle(a, g);
}

static void class_leave(struct mapping *w)
{
    if (--w->class->slabs == 0) {
        list_remove(&w->class->link);
        free(w->class);
    }
    w->class = NULL;
}

static void slot_freed(struct arena *a, struct slab *e, uint32_t slot)
{
    struct mapping *w = grant_mapping(a, e);

    arena_slot_retract(a, 1 + ((uint32_t)(e - a->slab) << a->slot_bits | slot));

    a->granter->used_bytes -= e->slot_bytes;
    if (e->n_free == 1 && !e->closed)
        list_push_back(&w->class->partial, &e->link);
    if (e->n_free < e->slots)
        return;
    list_remove(&e->link);
    free(e->owner);
    e->owner = NULL;
    e->slot_bytes = 0;
    e->slots = e->n_free = 0;
    e->closed = false;
    class_leave(w);
    mapping_settle(a, w);
}

uint32_t grant_at(const struct arena *a, const void *base)
{
    return (uint32_t)((uint64_t)((const char *)base - a->granter->base) / a->config.slab);
}

/* Removes it from its group. */
static void mapping_leave(struct arena *a, struct mapping *w)
{
    struct arena_group *g = grant_group(a, w);

    list_remove(&w->link);
    if (g->hand == w)
        g->hand = NULL;
    a->granter->returning -= w->returning;
    w->returning = false;
    a->granter->granted--;
    g->granted--;
}

static void ungranted_cb(struct loan *l)
{
    struct mapping *w = LIST_ENTRY(l, struct mapping, loan);

    if (grant_submit(l->ctx, w) < 0)
        abort(); /* the thread that got the memory is there */
}

/* From now on it is its own group's loss. */
static void kept_cb(struct loan *l)
{
    struct mapping *w = LIST_ENTRY(l, struct mapping, loan);
    struct arena *a = l->ctx;

    log_warn("arena", "mapping-kept", "tenant=%s bytes=%llu", grant_group(a, w)->tenant,
             (unsigned long long)a->config.slab);
    mapping_leave(a, w);
    w->kept = true;
    grant_group(a, w)->kept++;
    a->granter->kept++;
    list_push_back(&a->granter->keeps, &w->link);
    report(a, w, GRANTED_KEPT);
}

static const struct loan_calls loan_calls = {ungranted_cb, kept_cb};

void grant_let_go(struct arena *a, uint32_t mapping)
{
    struct mapping *w = &a->granter->mapping[mapping];

    assert(w->state == MAPPING_GOING);
    arena_slab_unpoison(a, a->slabs + mapping);
    w->state = MAPPING_ENDING;
    loan_end(&w->loan, a->config.deadlines, w->fd, &loan_calls, a);
}

/* Something that another group has granted and does not use. */
static bool reclaim(struct arena *a, const struct arena_group *but)
{
    struct list *groups = &a->granter->groups;

    for (struct list *node = groups->next; node != groups; node = node->next) {
        struct arena_group *g = LIST_ENTRY(node, struct arena_group, link);
        struct slab *e;

        if (g == but || list_empty(&g->empty))
            continue;
        e = LIST_ENTRY(g->empty.next, struct slab, link);
        if (grant_mapping(a, e)->mapped > 0)
            mapping_revoke(a, grant_mapping(a, e));
        else
            mapping_go(a, grant_mapping(a, e));
        return true;
    }
    return false;
}

/* ---- granting ---- */

/* What a worker keeps is its group's of the budget, and nobody else's, up to the budget once more
 * for all that is kept. */
static bool affordable(const struct arena *a, const struct arena_group *g)
{
    const struct granter *l = a->granter;
    uint64_t most = l->budget / a->config.slab;

    return l->granted + g->kept + 1 <= most && l->granted + l->kept + 1 <= 2 * most &&
           (!list_empty(&l->free) || a->granted_used < a->granted);
}

static void mapping_free(struct arena *a, struct mapping *w)
{
    struct arena_group *g = grant_group(a, w);

    if (w->kept) {
        list_remove(&w->link);
        a->granter->kept--;
        g->kept--;
    } else {
        mapping_leave(a, w);
    }
    w->state = MAPPING_FREE;
    w->revoked = w->kept = false;
    grant_slab(a, w)->group = NULL;
    list_push_front(&a->granter->free, &w->link);
    grant_group_settle(a, g);
}

static void mapping_made(struct arena *a, struct mapping *w)
{
    struct arena_group *g = grant_group(a, w);

    g->making = false;
    if (w->status < 0) {
        g->failed_rc = w->status;
        backoff_fail(&g->failed, uv_now(a->loop));
        log_warn("arena", "mapping-failed", "bytes=%llu error=%s",
                 (unsigned long long)a->config.slab, strerror(-w->status));
        mapping_free(a, w);
        report(a, w, GRANTED_FAILED);
        return;
    }
    backoff_reset(&g->failed);
    w->state = MAPPING_GRANTED;
    list_push_front(&g->empty, &grant_slab(a, w)->link);
    report(a, w, GRANTED_READY);
    /* The caller has gone, or the grant is too large by now. */
    if ((g->opens == 0 || grant_over(a)) && grant_slab(a, w)->slots == 0)
        mapping_settle(a, w);
}

static void done_cb(uv_async_t *async)
{
    struct arena *a = async->data;
    struct mapping *w;
    struct list *node;

    while ((w = grant_ended(a)) != NULL) {
        if (w->state == MAPPING_MAKING) {
            mapping_made(a, w);
        } else {
            if (w->status < 0)
                log_warn("arena", "mapping-not-unmapped", "error=%s", strerror(-w->status));
            mapping_free(a, w);
            report(a, w, GRANTED_GONE);
        }
    }
    while ((node = list_pop_front(&a->granter->revokes)) != NULL) {
        w = LIST_ENTRY(node, struct mapping, job);
        if (a->granter->watcher.revoke_cb)
            a->granter->watcher.revoke_cb(a->granter->watcher.ctx, grant_group(a, w),
                                          grant_number(a, w));
    }
}

/* One that affordable() found. */
static struct mapping *free_mapping(struct arena *a)
{
    struct granter *l = a->granter;

    if (list_empty(&l->free)) {
        struct mapping *w = &l->mapping[a->granted_used++];

        list_init(&grant_slab(a, w)->link);
        grant_slab(a, w)->base = l->base + grant_number(a, w) * a->config.slab;
        list_init(&w->job);
        w->fd = -1;
        list_push_front(&l->free, &w->link);
    }
    return LIST_ENTRY(l->free.next, struct mapping, link);
}

static int grant(struct arena *a, struct arena_group *g)
{
    struct mapping *w = free_mapping(a);
    int rc = 0;

    if (!a->granter->open) {
        rc = uv_async_init(a->loop, &a->granter->done, done_cb);
        if (rc != 0)
            return rc;
        a->granter->done.data = a;
        uv_unref((uv_handle_t *)&a->granter->done);
        a->granter->open = true;
    }
    w->state = MAPPING_MAKING;
    grant_slab(a, w)->group = g;
    rc = grant_submit(a, w);
    if (rc < 0) {
        w->state = MAPPING_FREE;
        grant_slab(a, w)->group = NULL;
        return rc;
    }
    list_remove(&w->link);
    list_push_back(&g->mappings, &w->link);
    g->making = true;
    g->granted++;
    a->granter->granted++;
    return 0;
}

/* Why there is no slot, after whatever can be done about it was begun. */
static int grant_or_wait(struct arena *a, struct arena_group *g)
{
    int rc;

    if (g->making)
        return -EAGAIN;
    if (!backoff_ready(&g->failed, uv_now(a->loop)))
        return g->failed_rc;
    if (affordable(a, g)) {
        rc = grant(a, g);
        return rc < 0 ? rc : -EAGAIN;
    }
    if (a->granter->returning > 0)
        return -EAGAIN;
    if ((uint64_t)(g->granted + g->kept + 1) * a->config.slab > a->granter->budget)
        return -ENOSPC; /* what others don't use is of no help */
    return reclaim(a, g) ? -EAGAIN : -ENOSPC;
}

static struct mapping_class *class_of(struct arena_group *g, uint64_t slot_bytes, bool make)
{
    struct mapping_class *k;

    for (struct list *node = g->classes.next; node != &g->classes; node = node->next) {
        k = LIST_ENTRY(node, struct mapping_class, link);
        if (k->slot_bytes == slot_bytes)
            return k;
    }
    k = make ? calloc(1, sizeof(*k)) : NULL;
    if (!k)
        return NULL;
    k->slot_bytes = slot_bytes;
    list_init(&k->partial);
    list_push_front(&g->classes, &k->link);
    return k;
}

static int carve(struct arena *a, struct slab *e, uint64_t slot_bytes)
{
    struct mapping *w = grant_mapping(a, e);

    w->class = class_of(grant_group(a, w), slot_bytes, true);
    if (!w->class)
        return -ENOMEM;
    w->class->slabs++;
    if (arena_carve(a, e, slot_bytes) < 0) {
        class_leave(w);
        return -ENOMEM;
    }
    e->partial = &w->class->partial;
    list_remove(&e->link);
    list_push_front(e->partial, &e->link);
    return 0;
}

int grant_slot(struct arena *a, struct arena_group *g, uint64_t bytes, uint64_t owner,
               slot_ref *out)
{
    uint64_t slot_bytes = arena_padded(bytes);
    struct mapping_class *k;
    struct slab *e;

    assert(bytes > 0 && !(owner & SLOT_FREE));
    if (slot_bytes > a->config.slab)
        return -EFBIG;
    if (grant_over(a))
        return -ENOSPC;
    k = class_of(g, slot_bytes, false);
    if (!k || list_empty(&k->partial)) {
        if (list_empty(&g->empty))
            return grant_or_wait(a, g);
        e = LIST_ENTRY(g->empty.next, struct slab, link);
        if (carve(a, e, slot_bytes) < 0)
            return -ENOMEM;
    } else {
        e = LIST_ENTRY(k->partial.next, struct slab, link);
    }
    a->granter->used_bytes += slot_bytes;
    *out = arena_slot_hand_out(a, e, bytes, owner);
    return 0;
}

/* ---- workers ---- */

int grant_fd(struct arena *a, uint32_t mapping)
{
    assert(a->granter->mapping[mapping].state == MAPPING_GRANTED);
    return a->granter->mapping[mapping].fd;
}

void grant_map(struct arena *a, uint32_t mapping)
{
    struct mapping *w = &a->granter->mapping[mapping];

    assert(w->state == MAPPING_GRANTED && w->mapped < UINT32_MAX);
    w->mapped++;
}

void grant_release(struct arena *a, uint32_t mapping)
{
    struct mapping *w = &a->granter->mapping[mapping];

    assert(w->mapped > 0);
    if (--w->mapped == 0 && grant_slab(a, w)->slots == 0)
        mapping_settle(a, w);
}

void grant_watch(struct arena *a, const struct grant_watcher *w)
{
    a->granter->watcher = w ? *w : (struct grant_watcher){.ctx = NULL};
}

/* ---- the budget ---- */

bool grant_over(const struct arena *a)
{
    return (a->granter->granted - a->granter->returning) * a->config.slab > a->granter->budget;
}

void grant_budget_set(struct arena *a, uint64_t bytes)
{
    a->granter->budget = bytes;
    while (grant_over(a) && reclaim(a, NULL))
        ;
}

uint64_t grant_budget(const struct arena *a)
{
    return a->granter->budget;
}

uint64_t grant_bytes(const struct arena *a, const struct arena_group *g)
{
    return (g ? g->granted : a->granter->granted) * a->config.slab;
}

uint64_t grant_kept_bytes(const struct arena *a, const struct arena_group *g)
{
    return (g ? g->kept : a->granter->kept) * a->config.slab;
}

uint64_t grant_used_bytes(const struct arena *a)
{
    return a->granter->used_bytes;
}

uv_async_t *arena_granted_handle(struct arena *a)
{
    return a->granter->open ? &a->granter->done : NULL;
}
