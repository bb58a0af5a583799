/* Windows: extents that are lent to one tenant each.
 *
 *   FREE --asked for--> MAKING --thread: has memory--> LENT --no slots, all have released it--> GOING
 *        <--thread: given back-- ENDING: until nobody has it mapped <--devices let go--'
 *
 * A group has one extent in MAKING at a time. An extent without slots that workers still map stays with its
 * group, which may use it again; it is revoked when another group wants memory. */
#include "daemon/window/lend_internal.h"

#include "daemon/base/log.h"
#include "proto/memory/window.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Pages of the largest kind that the kernel gives files of memory. */
#define HUGE_BYTES (2ull << 20)

static char *window_base(const struct arena *a, const struct window *w)
{
    return arena_window_extent(a, w)->base;
}

static void report(struct arena *a, const struct window *w, enum arena_lent_event event)
{
    a->config.lent_cb(a->config.ctx, event, arena_window_number(a, w), window_base(a, w),
                      a->config.extent);
}

static void slot_freed(struct arena *a, struct extent *e, uint32_t slot);

/* ---- life ---- */

int arena_lent_init(struct arena *a)
{
    uint64_t bytes, skip;
    struct windows *ws;
    char *p;
    int rc;

    a->lent = a->lent < UCM_MAX_WINDOW_EXTENTS ? a->lent : UCM_MAX_WINDOW_EXTENTS;
    bytes = a->lent * a->config.extent;
    ws = a->windows = calloc(1, sizeof(*ws));
    if (!ws)
        return -ENOMEM;
    a->lent_freed = slot_freed;
    list_init(&ws->free);
    list_init(&ws->groups);
    list_init(&ws->revokes);
    list_init(&ws->keeps);
    list_init(&ws->jobs);
    list_init(&ws->ended);
    if (a->lent == 0)
        return 0;
    ws->window = calloc(a->lent, sizeof(*ws->window));
    if (!ws->window)
        return -ENOMEM;
    p = mmap(NULL, bytes + HUGE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
             0);
    if (p == MAP_FAILED) {
        rc = -errno;
        free(ws->window);
        ws->window = NULL;
        a->lent = 0;
        log_warn("arena", "no-windows", "bytes=%llu error=%s", (unsigned long long)bytes,
                 strerror(-rc));
        return a->config.lent > 0 ? rc : 0; /* a limit on address space, and nobody wants any */
    }
    skip = HUGE_BYTES - (uintptr_t)p % HUGE_BYTES;
    munmap(p, skip);
    if (skip < HUGE_BYTES)
        munmap(p + skip + bytes, HUGE_BYTES - skip);
    ws->base = p + skip;
    ws->budget = a->config.lent;
    pthread_mutex_init(&ws->lock, NULL);
    pthread_cond_init(&ws->more, NULL);
    return 0;
}

static void windows_forget(struct list *windows)
{
    struct list *node;

    while ((node = list_pop_front(windows)) != NULL) {
        struct window *w = LIST_ENTRY(node, struct window, link);

        loan_cancel(&w->loan);
        if (w->fd >= 0)
            close(w->fd);
    }
}

void arena_lent_close(struct arena *a)
{
    struct windows *ws = a->windows;

    if (!ws || !ws->base)
        return;
    munmap(ws->base, a->lent * a->config.extent);
    windows_forget(&ws->keeps);
    while (!list_empty(&ws->groups)) {
        struct arena_group *g = LIST_ENTRY(ws->groups.next, struct arena_group, link);

        windows_forget(&g->windows);
        arena_group_free(a, g);
    }
    free(ws->window);
    pthread_cond_destroy(&ws->more);
    pthread_mutex_destroy(&ws->lock);
    ws->base = NULL;
}

/* ---- giving back ---- */

static void window_returns(struct arena *a, struct window *w)
{
    a->windows->returning += !w->returning;
    w->returning = true;
}

static void window_go(struct arena *a, struct window *w)
{
    window_returns(a, w);
    list_remove(&arena_window_extent(a, w)->link);
    list_remove(&w->job);
    w->state = WINDOW_GOING;
    report(a, w, LENT_GOES);
}

static void window_revoke(struct arena *a, struct window *w)
{
    struct arena_group *g = arena_window_group(a, w);

    w->revoked = true;
    window_returns(a, w);
    list_remove(&arena_window_extent(a, w)->link);
    list_push_back(&a->windows->revokes, &w->job);
    atomic_fetch_add_explicit(&g->header->epoch, 1, memory_order_release);
    (void)uv_async_send(&a->windows->done);
}

/* The window has no slots: who wants it now? */
static void window_settle(struct arena *a, struct window *w)
{
    struct extent *e = arena_window_extent(a, w);

    assert(w->state == WINDOW_LENT && e->slots == 0);
    if (w->mapped == 0)
        window_go(a, w);
    else if (!w->revoked && arena_window_over(a))
        window_revoke(a, w);
    else if (!w->revoked && list_empty(&e->link))
        list_push_front(&arena_window_group(a, w)->empty, &e->link);
}

void arena_group_close(struct arena *a, struct arena_group *g)
{
    struct list *node;

    assert(g->opens > 0);
    if (--g->opens > 0)
        return;
    g->opens = 1; /* it stays during this call */
    for (node = g->empty.next; node != &g->empty;) {
        struct extent *e = LIST_ENTRY(node, struct extent, link);

        node = node->next;
        window_settle(a, arena_extent_window(a, e));
    }
    g->opens = 0;
    arena_group_settle(a, g);
}

static void class_leave(struct window *w)
{
    if (--w->class->extents == 0) {
        list_remove(&w->class->link);
        free(w->class);
    }
    w->class = NULL;
}

static void slot_freed(struct arena *a, struct extent *e, uint32_t slot)
{
    struct window *w = arena_extent_window(a, e);

    arena_slot_retract(a, 1 + ((uint32_t)(e - a->extent) << a->slot_bits | slot));

    a->windows->used_bytes -= e->slot_bytes;
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
    window_settle(a, w);
}

uint32_t arena_window_at(const struct arena *a, const void *base)
{
    return (uint32_t)((uint64_t)((const char *)base - a->windows->base) / a->config.extent);
}

/* It is no more one of its group's. */
static void window_leave(struct arena *a, struct window *w)
{
    struct arena_group *g = arena_window_group(a, w);

    list_remove(&w->link);
    if (g->hand == w)
        g->hand = NULL;
    a->windows->returning -= w->returning;
    w->returning = false;
    a->windows->lent--;
    g->lent--;
}

static void unlent_cb(struct loan *l)
{
    struct window *w = LIST_ENTRY(l, struct window, loan);

    if (arena_window_submit(l->ctx, w) < 0)
        abort(); /* the thread that got the memory is there */
}

/* From now on it is its own group's loss. */
static void kept_cb(struct loan *l)
{
    struct window *w = LIST_ENTRY(l, struct window, loan);
    struct arena *a = l->ctx;

    log_warn("arena", "window-kept", "tenant=%s bytes=%llu", arena_window_group(a, w)->tenant,
             (unsigned long long)a->config.extent);
    window_leave(a, w);
    w->kept = true;
    arena_window_group(a, w)->kept++;
    a->windows->kept++;
    list_push_back(&a->windows->keeps, &w->link);
    report(a, w, LENT_KEPT);
}

static const struct loan_calls loan_calls = {unlent_cb, kept_cb};

void arena_window_let_go(struct arena *a, uint32_t window)
{
    struct window *w = &a->windows->window[window];

    assert(w->state == WINDOW_GOING);
    arena_extent_unpoison(a, a->extents + window);
    w->state = WINDOW_ENDING;
    loan_end(&w->loan, a->config.deadlines, w->fd, &loan_calls, a);
}

/* Something that another group has lent and does not use. */
static bool reclaim(struct arena *a, const struct arena_group *but)
{
    struct list *groups = &a->windows->groups;

    for (struct list *node = groups->next; node != groups; node = node->next) {
        struct arena_group *g = LIST_ENTRY(node, struct arena_group, link);
        struct extent *e;

        if (g == but || list_empty(&g->empty))
            continue;
        e = LIST_ENTRY(g->empty.next, struct extent, link);
        if (arena_extent_window(a, e)->mapped > 0)
            window_revoke(a, arena_extent_window(a, e));
        else
            window_go(a, arena_extent_window(a, e));
        return true;
    }
    return false;
}

/* ---- lending ---- */

/* What a worker keeps is its group's of the budget, and nobody else's, up to the budget once more for all that is
 * kept. */
static bool affordable(const struct arena *a, const struct arena_group *g)
{
    const struct windows *ws = a->windows;
    uint64_t most = ws->budget / a->config.extent;

    return ws->lent + g->kept + 1 <= most && ws->lent + ws->kept + 1 <= 2 * most &&
           (!list_empty(&ws->free) || a->lent_used < a->lent);
}

static void window_free(struct arena *a, struct window *w)
{
    struct arena_group *g = arena_window_group(a, w);

    if (w->kept) {
        list_remove(&w->link);
        a->windows->kept--;
        g->kept--;
    } else {
        window_leave(a, w);
    }
    w->state = WINDOW_FREE;
    w->revoked = w->kept = false;
    arena_window_extent(a, w)->group = NULL;
    list_push_front(&a->windows->free, &w->link);
    arena_group_settle(a, g);
}

static void window_made(struct arena *a, struct window *w)
{
    struct arena_group *g = arena_window_group(a, w);

    g->making = false;
    if (w->status < 0) {
        g->failed_rc = w->status;
        backoff_fail(&g->failed, uv_now(a->loop));
        log_warn("arena", "window-failed", "bytes=%llu error=%s",
                 (unsigned long long)a->config.extent, strerror(-w->status));
        window_free(a, w);
        report(a, w, LENT_FAILED);
        return;
    }
    backoff_reset(&g->failed);
    w->state = WINDOW_LENT;
    list_push_front(&g->empty, &arena_window_extent(a, w)->link);
    report(a, w, LENT_READY);
    /* Who asked for it has gone, or it is too much by now. */
    if ((g->opens == 0 || arena_window_over(a)) && arena_window_extent(a, w)->slots == 0)
        window_settle(a, w);
}

static void done_cb(uv_async_t *async)
{
    struct arena *a = async->data;
    struct window *w;
    struct list *node;

    while ((w = arena_window_ended(a)) != NULL) {
        if (w->state == WINDOW_MAKING) {
            window_made(a, w);
        } else {
            if (w->status < 0)
                log_warn("arena", "window-not-unmapped", "error=%s", strerror(-w->status));
            window_free(a, w);
            report(a, w, LENT_GONE);
        }
    }
    while ((node = list_pop_front(&a->windows->revokes)) != NULL) {
        w = LIST_ENTRY(node, struct window, job);
        if (a->windows->revoke_cb)
            a->windows->revoke_cb(a->windows->revoke_ctx, arena_window_group(a, w),
                                  arena_window_number(a, w));
    }
}

/* One that affordable() found. */
static struct window *free_window(struct arena *a)
{
    struct windows *ws = a->windows;

    if (list_empty(&ws->free)) {
        struct window *w = &ws->window[a->lent_used++];

        list_init(&arena_window_extent(a, w)->link);
        arena_window_extent(a, w)->base = ws->base + arena_window_number(a, w) * a->config.extent;
        list_init(&w->job);
        w->fd = -1;
        list_push_front(&ws->free, &w->link);
    }
    return LIST_ENTRY(ws->free.next, struct window, link);
}

static int lend(struct arena *a, struct arena_group *g)
{
    struct window *w = free_window(a);
    int rc = 0;

    if (!a->windows->open) {
        rc = uv_async_init(a->loop, &a->windows->done, done_cb);
        if (rc != 0)
            return rc;
        a->windows->done.data = a;
        uv_unref((uv_handle_t *)&a->windows->done);
        a->windows->open = true;
    }
    w->state = WINDOW_MAKING;
    arena_window_extent(a, w)->group = g;
    rc = arena_window_submit(a, w);
    if (rc < 0) {
        w->state = WINDOW_FREE;
        arena_window_extent(a, w)->group = NULL;
        return rc;
    }
    list_remove(&w->link);
    list_push_back(&g->windows, &w->link);
    g->making = true;
    g->lent++;
    a->windows->lent++;
    return 0;
}

/* Why there is no slot, after whatever can be done about it was begun. */
static int lend_or_wait(struct arena *a, struct arena_group *g)
{
    int rc;

    if (g->making)
        return -EAGAIN;
    if (!backoff_ready(&g->failed, uv_now(a->loop)))
        return g->failed_rc;
    if (affordable(a, g)) {
        rc = lend(a, g);
        return rc < 0 ? rc : -EAGAIN;
    }
    if (a->windows->returning > 0)
        return -EAGAIN;
    if ((uint64_t)(g->lent + g->kept + 1) * a->config.extent > a->windows->budget)
        return -ENOSPC; /* what others don't use is of no help */
    return reclaim(a, g) ? -EAGAIN : -ENOSPC;
}

static struct window_class *class_of(struct arena_group *g, uint64_t slot_bytes, bool make)
{
    struct window_class *k;

    for (struct list *node = g->classes.next; node != &g->classes; node = node->next) {
        k = LIST_ENTRY(node, struct window_class, link);
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

static int carve(struct arena *a, struct extent *e, uint64_t slot_bytes)
{
    struct window *w = arena_extent_window(a, e);

    w->class = class_of(arena_window_group(a, w), slot_bytes, true);
    if (!w->class)
        return -ENOMEM;
    w->class->extents++;
    if (arena_carve(a, e, slot_bytes) < 0) {
        class_leave(w);
        return -ENOMEM;
    }
    e->partial = &w->class->partial;
    list_remove(&e->link);
    list_push_front(e->partial, &e->link);
    return 0;
}

int arena_alloc_window(struct arena *a, struct arena_group *g, uint64_t bytes, uint64_t owner,
                       slot_ref *out)
{
    uint64_t slot_bytes = arena_padded(bytes);
    struct window_class *k;
    struct extent *e;

    assert(bytes > 0 && !(owner & SLOT_FREE));
    if (slot_bytes > a->config.extent)
        return -EFBIG;
    if (arena_window_over(a))
        return -ENOSPC;
    k = class_of(g, slot_bytes, false);
    if (!k || list_empty(&k->partial)) {
        if (list_empty(&g->empty))
            return lend_or_wait(a, g);
        e = LIST_ENTRY(g->empty.next, struct extent, link);
        if (carve(a, e, slot_bytes) < 0)
            return -ENOMEM;
    } else {
        e = LIST_ENTRY(k->partial.next, struct extent, link);
    }
    a->windows->used_bytes += slot_bytes;
    *out = arena_slot_hand_out(a, e, bytes, owner);
    return 0;
}

/* ---- workers ---- */

int arena_window_fd(struct arena *a, uint32_t window)
{
    assert(a->windows->window[window].state == WINDOW_LENT);
    return a->windows->window[window].fd;
}

void arena_window_map(struct arena *a, uint32_t window)
{
    struct window *w = &a->windows->window[window];

    assert(w->state == WINDOW_LENT && w->mapped < UINT32_MAX);
    w->mapped++;
}

void arena_window_release(struct arena *a, uint32_t window)
{
    struct window *w = &a->windows->window[window];

    assert(w->mapped > 0);
    if (--w->mapped == 0 && arena_window_extent(a, w)->slots == 0)
        window_settle(a, w);
}

void arena_window_watch(struct arena *a,
                        void (*revoke_cb)(void *ctx, struct arena_group *g, uint32_t window),
                        void *ctx)
{
    a->windows->revoke_cb = revoke_cb;
    a->windows->revoke_ctx = ctx;
}

/* ---- the budget ---- */

bool arena_window_over(const struct arena *a)
{
    return (a->windows->lent - a->windows->returning) * a->config.extent > a->windows->budget;
}

void arena_window_budget_set(struct arena *a, uint64_t bytes)
{
    a->windows->budget = bytes;
    while (arena_window_over(a) && reclaim(a, NULL))
        ;
}

uint64_t arena_window_budget(const struct arena *a)
{
    return a->windows->budget;
}

uint64_t arena_window_lent(const struct arena *a, const struct arena_group *g)
{
    return (g ? g->lent : a->windows->lent) * a->config.extent;
}

uint64_t arena_window_kept(const struct arena *a, const struct arena_group *g)
{
    return (g ? g->kept : a->windows->kept) * a->config.extent;
}

uint64_t arena_window_used(const struct arena *a)
{
    return a->windows->used_bytes;
}

uv_async_t *arena_lent_handle(struct arena *a)
{
    return a->windows->open ? &a->windows->done : NULL;
}
