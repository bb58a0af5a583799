/* Windows: extents that are lent to one tenant each, and the tables that tell its workers which slots hold
 * what they were told.
 *
 *   FREE --asked for--> MAKING --thread: has memory--> LENT --no slots, no mapping--> GOING
 *        <--thread: given back-- ENDING <--devices let go--'
 *
 * A group has one extent in MAKING at a time. An extent without slots that workers still map stays with its
 * group, which may use it again; it is revoked when another group wants memory. */
#include "daemon/arena/arena.h"
#include "daemon/arena/internal.h"

#include "daemon/base/log.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* After a loan failed, the group's next one waits. */
#define LOAN_RETRY_MIN_MS 100u
#define LOAN_RETRY_MAX_MS 10000u
/* Pages of the largest kind that the kernel gives files of memory. */
#define HUGE_BYTES (2ull << 20)

static uint32_t number_of(const struct arena *a, const struct window *w)
{
    return (uint32_t)(w - a->windows.window);
}

static struct extent *extent_of_window(const struct arena *a, const struct window *w)
{
    return &a->extent[a->extents + number_of(a, w)];
}

static struct window *window_of_extent(const struct arena *a, const struct extent *e)
{
    return &a->windows.window[(uint32_t)(e - a->extent) - a->extents];
}

static char *window_base(const struct arena *a, const struct window *w)
{
    return arena_extent_base(a, a->extents + number_of(a, w));
}

static void report(struct arena *a, const struct window *w, enum arena_window_event event)
{
    a->config.window_cb(a->config.ctx, event, number_of(a, w), window_base(a, w), a->config.extent);
}

/* ---- life ---- */

int arena_windows_init(struct arena *a)
{
    struct windows *ws = &a->windows;
    uint64_t bytes = ws->n * a->config.extent, skip;
    char *p;

    list_init(&ws->free);
    list_init(&ws->groups);
    list_init(&ws->revokes);
    list_init(&ws->jobs);
    list_init(&ws->ended);
    if (ws->n == 0)
        return 0;
    ws->window = calloc(ws->n, sizeof(*ws->window));
    if (!ws->window)
        return -ENOMEM;
    p = mmap(NULL, bytes + HUGE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
             0);
    if (p == MAP_FAILED) {
        free(ws->window);
        ws->window = NULL;
        return -errno;
    }
    skip = HUGE_BYTES - (uintptr_t)p % HUGE_BYTES;
    munmap(p, skip);
    if (skip < HUGE_BYTES)
        munmap(p + skip + bytes, HUGE_BYTES - skip);
    ws->base = p + skip;
    ws->budget = a->config.window;
    for (uint32_t i = 0; i < ws->n; i++) {
        list_init(&a->extent[a->extents + i].link);
        list_init(&ws->window[i].job);
        ws->window[i].fd = -1;
        list_push_back(&ws->free, &ws->window[i].link);
    }
    pthread_mutex_init(&ws->lock, NULL);
    pthread_cond_init(&ws->more, NULL);
    return 0;
}

static void table_close(struct arena *a, struct arena_group *g)
{
    if (g->header)
        munmap(g->header,
               ucm_window_table_bytes(a->windows.n, (uint32_t)(a->config.extent / ARENA_ALIGN)));
    if (g->read_fd >= 0)
        close(g->read_fd);
    if (g->fd >= 0)
        close(g->fd);
}

static void group_free(struct arena *a, struct arena_group *g)
{
    struct list *node;

    while ((node = list_pop_front(&g->classes)) != NULL)
        free(LIST_ENTRY(node, struct window_class, link));
    list_remove(&g->link);
    table_close(a, g);
    free(g->tenant);
    free(g);
}

void arena_windows_close(struct arena *a)
{
    struct windows *ws = &a->windows;
    struct list *node;

    if (!ws->base)
        return;
    munmap(ws->base, ws->n * a->config.extent);
    while ((node = ws->groups.next) != &ws->groups) {
        struct arena_group *g = LIST_ENTRY(node, struct arena_group, link);

        while ((node = list_pop_front(&g->windows)) != NULL) {
            struct window *w = LIST_ENTRY(node, struct window, link);

            if (w->fd >= 0)
                close(w->fd);
        }
        group_free(a, g);
    }
    free(ws->window);
    pthread_cond_destroy(&ws->more);
    pthread_mutex_destroy(&ws->lock);
    ws->base = NULL;
}

/* ---- groups ---- */

static int table_open(struct arena *a, struct arena_group *g)
{
    uint32_t slots = (uint32_t)(a->config.extent / ARENA_ALIGN);
    uint64_t bytes = ucm_window_table_bytes(a->windows.n, slots);
    void *p;
    int rc = arena_memfd("ucmd-window-table", bytes, &g->fd);

    if (rc < 0)
        return rc;
    p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, g->fd, 0);
    if (p == MAP_FAILED)
        return -errno;
    g->header = p;
    g->generation = (_Atomic uint64_t *)((char *)p + UCM_WINDOW_HEADER_BYTES);
    (void)madvise(p, bytes, MADV_DONTDUMP);
    memcpy(g->header->magic, UCM_WINDOW_MAGIC, sizeof(g->header->magic));
    g->header->version = UCM_WINDOW_VERSION;
    g->header->slot_align = UCM_WINDOW_ALIGN;
    g->header->extent_bytes = a->config.extent;
    g->header->extents = a->windows.n;
    g->header->slots_per_extent = slots;
    g->read_fd = arena_memfd_share(g->fd);
    return g->read_fd < 0 ? g->read_fd : 0;
}

static int group_new(struct arena *a, const char *tenant, struct arena_group **out)
{
    struct arena_group *g = calloc(1, sizeof(*g));
    int rc = -ENOMEM;

    if (!g)
        return rc;
    g->fd = g->read_fd = -1;
    list_init(&g->link);
    list_init(&g->windows);
    list_init(&g->classes);
    list_init(&g->empty);
    backoff_init(&g->failed, LOAN_RETRY_MIN_MS, LOAN_RETRY_MAX_MS, 0);
    g->tenant = strdup(tenant);
    if (g->tenant)
        rc = table_open(a, g);
    if (rc < 0) {
        group_free(a, g);
        return rc;
    }
    list_push_back(&a->windows.groups, &g->link);
    *out = g;
    return 0;
}

static struct arena_group *group_find(const struct arena *a, const char *tenant)
{
    const struct list *groups = &a->windows.groups;

    for (struct list *node = groups->next; node != groups; node = node->next) {
        struct arena_group *g = LIST_ENTRY(node, struct arena_group, link);

        if (strcmp(g->tenant, tenant) == 0)
            return g;
    }
    return NULL;
}

int arena_group_open(struct arena *a, const char *tenant, struct arena_group **out)
{
    struct arena_group *g;
    int rc = 0;

    if (a->windows.n == 0)
        return -EOPNOTSUPP;
    g = group_find(a, tenant);
    if (!g)
        rc = group_new(a, tenant, &g);
    if (rc < 0)
        return rc;
    g->opens++;
    *out = g;
    return 0;
}

void arena_group_ref(struct arena_group *g)
{
    g->opens++;
}

static void group_settle(struct arena *a, struct arena_group *g)
{
    if (g->opens == 0 && g->lent == 0)
        group_free(a, g);
}

/* An extent that was lent for those who have gone, and never used. */
static void window_settle(struct arena *a, struct window *w);

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
        window_settle(a, window_of_extent(a, e));
    }
    g->opens = 0;
    group_settle(a, g);
}

const char *arena_group_tenant(const struct arena_group *g)
{
    return g->tenant;
}

int arena_group_table(const struct arena_group *g, struct ucm_window_header *out)
{
    memcpy(out->magic, g->header->magic, sizeof(out->magic));
    out->version = g->header->version;
    out->slot_align = g->header->slot_align;
    out->extent_bytes = g->header->extent_bytes;
    out->extents = g->header->extents;
    out->slots_per_extent = g->header->slots_per_extent;
    atomic_init(&out->epoch, atomic_load_explicit(&g->header->epoch, memory_order_relaxed));
    return g->read_fd;
}

/* ---- giving back ---- */

static void window_returns(struct arena *a, struct window *w)
{
    a->windows.returning += !w->returning;
    w->returning = true;
}

static void window_go(struct arena *a, struct window *w)
{
    window_returns(a, w);
    list_remove(&extent_of_window(a, w)->link);
    list_remove(&w->job);
    w->state = WINDOW_GOING;
    report(a, w, WINDOW_GOES);
}

/* It has no slots: who wants it now? */
static void window_revoke(struct arena *a, struct window *w);

static void window_settle(struct arena *a, struct window *w)
{
    struct extent *e = extent_of_window(a, w);

    assert(w->state == WINDOW_LENT && e->slots == 0);
    if (w->mapped == 0)
        window_go(a, w);
    else if (!w->revoked && arena_window_over(a))
        window_revoke(a, w);
    else if (!w->revoked && list_empty(&e->link))
        list_push_front(&w->group->empty, &e->link);
}

static void class_leave(struct window *w)
{
    if (--w->class->extents == 0) {
        list_remove(&w->class->link);
        free(w->class);
    }
    w->class = NULL;
}

void arena_window_slot_freed(struct arena *a, struct extent *e)
{
    struct window *w = window_of_extent(a, e);

    a->windows.used_bytes -= e->slot_bytes;
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
    return (uint32_t)((uint64_t)((const char *)base - a->windows.base) / a->config.extent);
}

void arena_window_let_go(struct arena *a, uint32_t window)
{
    struct window *w = &a->windows.window[window];

    assert(w->state == WINDOW_GOING);
    w->state = WINDOW_ENDING;
    if (arena_window_submit(a, w) < 0)
        abort(); /* the thread that got the memory is there */
}

static void window_revoke(struct arena *a, struct window *w)
{
    struct arena_group *g = w->group;

    w->revoked = true;
    window_returns(a, w);
    list_remove(&extent_of_window(a, w)->link);
    list_push_back(&a->windows.revokes, &w->job);
    atomic_fetch_add_explicit(&g->header->epoch, 1, memory_order_release);
    (void)uv_async_send(&a->windows.done);
}

/* Something that another group has lent and does not use. */
static bool reclaim(struct arena *a, const struct arena_group *but)
{
    struct list *groups = &a->windows.groups;

    for (struct list *node = groups->next; node != groups; node = node->next) {
        struct arena_group *g = LIST_ENTRY(node, struct arena_group, link);
        struct extent *e;

        if (g == but || list_empty(&g->empty))
            continue;
        e = LIST_ENTRY(g->empty.next, struct extent, link);
        if (window_of_extent(a, e)->mapped > 0)
            window_revoke(a, window_of_extent(a, e));
        else
            window_go(a, window_of_extent(a, e));
        return true;
    }
    return false;
}

/* ---- lending ---- */

static bool affordable(const struct arena *a)
{
    return (a->windows.lent + 1) * a->config.extent <= a->windows.budget &&
           !list_empty(&a->windows.free);
}

static void window_free(struct arena *a, struct window *w)
{
    struct arena_group *g = w->group;

    list_remove(&w->link);
    if (g->hand == w)
        g->hand = NULL;
    a->windows.returning -= w->returning;
    w->state = WINDOW_FREE;
    w->revoked = w->returning = false;
    w->group = NULL;
    list_push_front(&a->windows.free, &w->link);
    a->windows.lent--;
    g->lent--;
    group_settle(a, g);
}

static void window_made(struct arena *a, struct window *w)
{
    struct arena_group *g = w->group;

    g->making = false;
    if (w->status < 0) {
        g->failed_rc = w->status;
        backoff_fail(&g->failed, uv_now(a->loop));
        log_warn("arena", "window-failed", "bytes=%llu error=%s",
                 (unsigned long long)a->config.extent, strerror(-w->status));
        window_free(a, w);
        report(a, w, WINDOW_FAILED);
        return;
    }
    backoff_reset(&g->failed);
    w->state = WINDOW_LENT;
    list_push_front(&g->empty, &extent_of_window(a, w)->link);
    report(a, w, WINDOW_READY);
    /* Who asked for it has gone, or it is too much by now. */
    if ((g->opens == 0 || arena_window_over(a)) && extent_of_window(a, w)->slots == 0)
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
            report(a, w, WINDOW_GONE);
        }
    }
    while ((node = list_pop_front(&a->windows.revokes)) != NULL) {
        w = LIST_ENTRY(node, struct window, job);
        if (a->windows.revoke_cb)
            a->windows.revoke_cb(a->windows.revoke_ctx, w->group, number_of(a, w));
    }
}

static int lend(struct arena *a, struct arena_group *g)
{
    struct window *w = LIST_ENTRY(a->windows.free.next, struct window, link);
    int rc = 0;

    if (!a->windows.open) {
        rc = uv_async_init(a->loop, &a->windows.done, done_cb);
        if (rc != 0)
            return rc;
        a->windows.done.data = a;
        uv_unref((uv_handle_t *)&a->windows.done);
        a->windows.open = true;
    }
    w->state = WINDOW_MAKING;
    w->group = g;
    rc = arena_window_submit(a, w);
    if (rc < 0) {
        w->state = WINDOW_FREE;
        w->group = NULL;
        return rc;
    }
    list_remove(&w->link);
    list_push_back(&g->windows, &w->link);
    g->making = true;
    g->lent++;
    a->windows.lent++;
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
    if (affordable(a)) {
        rc = lend(a, g);
        return rc < 0 ? rc : -EAGAIN;
    }
    return a->windows.returning > 0 || reclaim(a, g) ? -EAGAIN : -ENOSPC;
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
    struct window *w = window_of_extent(a, e);

    w->class = class_of(w->group, slot_bytes, true);
    if (!w->class)
        return -ENOMEM;
    w->class->extents++;
    if (arena_carve(a, e, slot_bytes) < 0) {
        class_leave(w);
        return -ENOMEM;
    }
    list_remove(&e->link);
    list_push_front(&w->class->partial, &e->link);
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
    a->windows.used_bytes += slot_bytes;
    *out = arena_slot_hand_out(a, e, owner);
    return 0;
}

struct list *arena_window_partial(struct arena *a, struct extent *e)
{
    return &window_of_extent(a, e)->class->partial;
}

/* ---- looking for slots to free ---- */

static struct window *window_behind(struct arena_group *g, struct window *w)
{
    struct list *next = w ? w->link.next : g->windows.next;

    if (next == &g->windows)
        next = next->next;
    return next == &g->windows ? NULL : LIST_ENTRY(next, struct window, link);
}

slot_ref arena_group_next(struct arena *a, struct arena_group *g, uint64_t bytes, uint64_t *owner)
{
    uint64_t slot_bytes = arena_padded(bytes);

    /* Once more than there are, as the hand may stand amid its extent. */
    for (uint32_t looks = 0; looks <= g->lent; looks++) {
        struct window *w = g->hand ? g->hand : window_behind(g, NULL);
        struct extent *e;

        if (!w)
            return 0;
        e = extent_of_window(a, w);
        g->hand = w;
        while (e->slot_bytes == slot_bytes && g->hand_slot < e->slots) {
            uint32_t slot = g->hand_slot++;

            if (!arena_slot_used(e, slot))
                continue;
            *owner = e->owner[slot];
            return 1 + ((uint32_t)(e - a->extent) << a->slot_bits | slot);
        }
        g->hand = window_behind(g, w);
        g->hand_slot = 0;
    }
    return 0;
}

struct arena_group *arena_group_most(struct arena *a, const struct arena_group *but)
{
    struct list *groups = &a->windows.groups;
    struct arena_group *most = NULL;

    for (struct list *node = groups->next; node != groups; node = node->next) {
        struct arena_group *g = LIST_ENTRY(node, struct arena_group, link);

        if (g != but && g->lent > 0 && (!most || g->lent > most->lent))
            most = g;
    }
    return most;
}

uint32_t arena_group_extent(struct arena *a, const struct arena_group *g, uint32_t i)
{
    const struct list *node = g->windows.next;
    const struct extent *e;

    if (g->lent == 0)
        return UINT32_MAX;
    for (i %= g->lent; i > 0; i--)
        node = node->next;
    e = extent_of_window(a, LIST_ENTRY(node, struct window, link));
    return e->slots > 0 && !e->closed ? (uint32_t)(e - a->extent) : UINT32_MAX;
}

uint32_t arena_groups(const struct arena *a)
{
    uint32_t n = 0;

    for (const struct list *node = a->windows.groups.next; node != &a->windows.groups;
         node = node->next)
        n++;
    return n;
}

/* ---- generations ---- */

/* The entry of a slot in a window; NULL: it lies elsewhere. */
static _Atomic uint64_t *entry_of(struct arena *a, slot_ref ref, struct arena_place *place)
{
    uint32_t extent, slot;

    arena_slot_position(a, ref, &extent, &slot);
    if (!arena_extent_in_window(a, extent))
        return NULL;
    *place = (struct arena_place){.window = extent - a->extents, .slot = slot};
    return arena_generation(a, extent, slot);
}

_Atomic uint64_t *arena_generation(struct arena *a, uint32_t extent, uint32_t slot)
{
    uint32_t window = extent - a->extents;
    const struct arena_group *g = a->windows.window[window].group;

    return &g->generation[ucm_window_entry((uint32_t)(a->config.extent / ARENA_ALIGN), window,
                                           slot)];
}

struct arena_group *arena_slot_group(struct arena *a, slot_ref slot)
{
    uint32_t extent = arena_extent_of(a, slot);

    return arena_extent_in_window(a, extent) ? a->windows.window[extent - a->extents].group : NULL;
}

void arena_slot_publish(struct arena *a, slot_ref slot)
{
    struct arena_place place;
    _Atomic uint64_t *entry = entry_of(a, slot, &place);

    if (entry)
        ucm_window_publish(entry, a->windows.generation += 2);
}

void arena_slot_retract(struct arena *a, slot_ref slot)
{
    struct arena_place place;
    _Atomic uint64_t *entry = entry_of(a, slot, &place);

    if (entry)
        ucm_window_retract(entry);
}

bool arena_slot_place(struct arena *a, slot_ref slot, struct arena_place *out)
{
    struct arena_place place;
    _Atomic uint64_t *entry = entry_of(a, slot, &place);

    if (!entry)
        return false;
    place.generation = atomic_load_explicit(entry, memory_order_relaxed);
    if (place.generation == 0 || place.generation & 1)
        return false;
    *out = place;
    return true;
}

/* ---- workers ---- */

int arena_window_fd(struct arena *a, uint32_t window)
{
    assert(a->windows.window[window].state == WINDOW_LENT);
    return a->windows.window[window].fd;
}

void arena_window_map(struct arena *a, uint32_t window)
{
    struct window *w = &a->windows.window[window];

    assert(w->state == WINDOW_LENT && w->mapped < UINT32_MAX);
    w->mapped++;
}

void arena_window_release(struct arena *a, uint32_t window)
{
    struct window *w = &a->windows.window[window];

    assert(w->mapped > 0);
    if (--w->mapped == 0 && extent_of_window(a, w)->slots == 0)
        window_settle(a, w);
}

void arena_window_watch(struct arena *a,
                        void (*revoke_cb)(void *ctx, struct arena_group *g, uint32_t window),
                        void *ctx)
{
    a->windows.revoke_cb = revoke_cb;
    a->windows.revoke_ctx = ctx;
}

bool arena_window_revoked(const struct arena *a, uint32_t window)
{
    return a->windows.window[window].revoked;
}

/* ---- the budget ---- */

bool arena_window_over(const struct arena *a)
{
    return (a->windows.lent - a->windows.returning) * a->config.extent > a->windows.budget;
}

void arena_window_budget_set(struct arena *a, uint64_t bytes)
{
    a->windows.budget = bytes;
    while (arena_window_over(a) && reclaim(a, NULL))
        ;
}

uint64_t arena_window_budget(const struct arena *a)
{
    return a->windows.budget;
}

uint64_t arena_window_lent(const struct arena *a, const struct arena_group *g)
{
    return (g ? g->lent : a->windows.lent) * a->config.extent;
}

uint64_t arena_window_used(const struct arena *a)
{
    return a->windows.used_bytes;
}
