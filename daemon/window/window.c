/* window.open and window.release: what a connection maps, and how it gives that back. */
#include "daemon/window/window.h"

#include "daemon/base/log.h"
#include "daemon/base/memfd.h"
#include "daemon/index/ns_form.h"
#include "daemon/request/view.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct request_modules *modules_of(const struct window *w)
{
    return &w->s->rq->modules;
}

/* ---- tenants ---- */

static void window_tenant_unref(struct requests *rq, struct window_tenant *t)
{
    if (--t->windows > 0)
        return;
    for (uint32_t i = 0; i < windows_at(rq)->n_slabs; i++)
        if (windows_at(rq)->slabs[i].tenant == t)
            windows_at(rq)->slabs[i].tenant = NULL;
    if (windows_at(rq)->taking.from == t)
        windows_at(rq)->taking.from = NULL;
    grant_group_close(rq->modules.arena, t->group);
    list_remove(&t->link);
    windows_at(rq)->n_tenants--;
    free(t);
}

static bool slabs_reserve(struct windows *ws, uint32_t n)
{
    struct window_slab *slabs;

    if (n <= ws->n_slabs)
        return true;
    slabs = realloc(ws->slabs, n * sizeof(*slabs));
    if (!slabs)
        return false;
    memset(slabs + ws->n_slabs, 0, (n - ws->n_slabs) * sizeof(*slabs));
    ws->slabs = slabs;
    ws->n_slabs = n;
    return true;
}

static struct window_tenant *tenant_new(struct requests *rq, const char *name, int *rc)
{
    struct window_tenant *t = calloc(1, sizeof(*t));

    *rc = t ? grant_group_open(rq->modules.arena, name, &t->group) : -ENOMEM;
    if (*rc != 0) {
        free(t);
        return NULL;
    }
    if (grant_group_table(t->group, &t->header) < 0 ||
        !slabs_reserve(windows_at(rq), t->header.slabs)) {
        *rc = -ENOMEM;
        grant_group_close(rq->modules.arena, t->group);
        free(t);
        return NULL;
    }
    list_push_back(&windows_at(rq)->tenants, &t->link);
    windows_at(rq)->n_tenants++;
    return t;
}

static struct window_tenant *window_tenant_ref(struct requests *rq, const char *name, int *rc)
{
    struct list *tenants = &windows_at(rq)->tenants;
    struct window_tenant *t = NULL;

    for (struct list *node = tenants->next; node != tenants && !t; node = node->next) {
        t = LIST_ENTRY(node, struct window_tenant, link);
        if (strcmp(grant_group_tenant(t->group), name) != 0)
            t = NULL;
    }
    if (!t)
        t = tenant_new(rq, name, rc);
    if (t)
        t->windows++;
    return t;
}

/* ---- what a window maps ---- */

static void revoke_expired_cb(struct deadline *d);

static void revoke_time(struct window *w)
{
    if (w->map.due_ms > 0)
        deadline_arm(modules_of(w)->deadlines, &w->revoke, w->map.due_ms, revoke_expired_cb);
    else
        deadline_disarm(modules_of(w)->deadlines, &w->revoke);
}

static void revoke_expired_cb(struct deadline *d)
{
    struct window *w = LIST_ENTRY(d, struct window, revoke);
    uint32_t late = window_map_expire(&w->map, uv_now(modules_of(w)->loop));
    uint64_t bytes = late * w->tenant->header.slab_bytes;

    if (late == 0) {
        revoke_time(w);
        return;
    }
    modules_of(w)->metrics->window_overdue_bytes += bytes;
    log_warn("window", "overdue", "tenant=%s pid=%d uid=%u slabs=%u bytes=%llu", w->s->peer.tenant,
             (int)w->s->peer.pid, (unsigned)w->s->peer.uid, late, (unsigned long long)bytes);
    conn_drop(w->s->conn, "did not release a window's memory in time");
}

static void slab_unmap(struct window *w, uint32_t slab)
{
    window_map_release(&w->map, slab);
    revoke_time(w);
    grant_release(modules_of(w)->arena, slab);
}

/* The arena wants a slab that has no slot in use, and that somebody still maps. */
void window_revoke_cb(void *ctx, struct arena_group *group, uint32_t slab)
{
    struct requests *rq = ctx;
    uint64_t now_ms = uv_now(rq->modules.loop);

    rq->modules.metrics->window_revocations++;
    windows_at(rq)->slabs[slab].taken_ms = 0; /* the arena hands out no slot of it any more */
    for (struct list *node = windows_at(rq)->all.next; node != &windows_at(rq)->all;
         node = node->next) {
        struct window *w = LIST_ENTRY(node, struct window, link);
        struct msg_window_revoke m = {
            .window = w->name, .slabs = {&slab, 1}, .deadline_ms = WINDOW_REVOKE_MS};

        if (w->tenant->group != group || !window_map_revoke(&w->map, slab, now_ms))
            continue;
        revoke_time(w);
        session_notify(w->s, UCM_WINDOW_REVOKE, &proto_window_revoke, &m);
    }
}

/* Each is checked before any is released: 0 or -code. */
static int release_check(struct call *call, struct window *w)
{
    const struct msg_window_release *m = &call->params.window_release;
    uint32_t bad;
    bool twice;

    if (window_map_names(&w->map, m->slabs.p, m->slabs.n, &bad, &twice))
        return 0;
    return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                         twice ? "slab %u is named twice" : "slab %u is not granted to this window",
                         m->slabs.p[bad]);
}

int method_window_release(struct call *call)
{
    const struct msg_window_release *m = &call->params.window_release;
    struct window *w = call_window(call, m->window);

    if (!w || release_check(call, w) != 0)
        return -call->error.code;
    for (uint32_t i = 0; i < m->slabs.n; i++)
        slab_unmap(w, m->slabs.p[i]);
    return call_reply(call, NULL);
}

/* ---- the end ---- */

static void window_free(struct window *w)
{
    struct session *s = w->s;
    struct requests *rq = s->rq;
    struct request *close = w->close;

    for (uint32_t i = 0; i < w->tenant->header.slabs; i++)
        if (window_map_has(&w->map, i))
            slab_unmap(w, i);
    list_remove(&w->link);
    rq->modules.metrics->windows--;
    memory_return(s, sizeof(*w) + w->tenant->header.slabs);
    window_tenant_unref(rq, w->tenant);
    free(w);
    session_windows(s)->n--;
    if (close)
        request_end(close, NULL, NULL);
    else if (!session_windows(s)->ending)
        s->settle_cb(s);
}

static void window_drain(struct window *w)
{
    if (w->requests > 0 || !list_empty(&w->retry.link))
        return;
    if (window_pins_end_all(w))
        window_free(w);
    else
        (void)cache_wait_for(modules_of(w)->cache, &w->retry, WAIT_TURN);
}

static void drain_cb(struct cache_retry *r)
{
    window_drain(LIST_ENTRY(r, struct window, retry));
}

void window_unref(struct window *w)
{
    w->requests--;
    if (w->closing)
        window_drain(w);
}

/* ---- by name ---- */

struct window *call_window(struct call *call, uint64_t name)
{
    struct window *w = table_get(&session_windows(call->s)->all, name & SESSION_NUMBERS);

    if (w && w->name == name)
        return w;
    ucm_error_set(&call->error, UCM_WIRE_NOT_FOUND, "window %llu is not open on this connection",
                  (unsigned long long)name);
    return NULL;
}

/* ---- window.open ---- */

static int open_check(struct call *call, const struct ns *ns)
{
    const struct msg_window_open *m = &call->params.window_open;
    const struct session *s = call->s;
    struct ns_encoded encoded;

    if (s->rq->draining)
        return ucm_error_set(&call->error, UCM_WIRE_SHUTDOWN, "the daemon is shutting down");
    if (m->part >= ns->identity.parts)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID, "part: %llu; this namespace has %u",
                             (unsigned long long)m->part, ns->identity.parts);
    if (strcmp(ns->identity.tenant, s->peer.tenant) != 0)
        return ucm_error_set(&call->error, UCM_WIRE_DENIED,
                             "a window is of the tenant's own namespaces; load another's blocks");
    if (ns_encoded(&ns->identity, &encoded))
        return ucm_error_set(
            &call->error, UCM_WIRE_UNSUPPORTED,
            "this namespace's blocks are encoded: a reader has no use for their bytes; load them, "
            "or open a window of the base namespace");
    for (uint32_t i = table_next(&session_windows(s)->all, 0); i;
         i = table_next(&session_windows(s)->all, i)) {
        const struct window *w = table_get(&session_windows(s)->all, i);

        if (w->ns == ns && w->part == m->part)
            return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                                 "this connection has window %u of that part already", w->name);
    }
    return 0;
}

static int open_refused(struct call *call, int rc)
{
    if (rc == -EOPNOTSUPP)
        return ucm_error_set(&call->error, UCM_WIRE_UNSUPPORTED,
                             "this daemon has no windows: window.size in its configuration is 0");
    return ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a window: %s",
                         strerror(-rc));
}

static struct window *window_alloc(struct call *call, struct window_tenant *t)
{
    struct session *s = call->s;
    size_t bytes = sizeof(struct window) + t->header.slabs;
    struct window *w = memory_alloc(s, bytes);

    if (!w) {
        ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a window");
        return NULL;
    }
    w->number = table_add(&session_windows(s)->all, w);
    if (w->number == 0) {
        memory_return(s, bytes);
        free(w);
        ucm_error_set(&call->error, UCM_WIRE_BUSY,
                      "this connection has %u windows, as many as one may have; close some",
                      table_count(&session_windows(s)->all));
        return NULL;
    }
    window_map_init(&w->map, w->map_state, t->header.slabs);
    w->s = s;
    w->tenant = t;
    w->name = session_name(&session_windows(s)->names, w->number);
    w->retry.retry_cb = drain_cb;
    list_init(&w->retry.link);
    list_init(&w->pins);
    list_push_back(&windows_at(s->rq)->all, &w->link);
    session_windows(s)->n++;
    s->rq->modules.metrics->windows++;
    return w;
}

int method_window_open(struct call *call)
{
    const struct msg_window_open *m = &call->params.window_open;
    struct ns *ns = call_namespace(call, m->ns);
    struct requests *rq = call->s->rq;
    struct ucm_window_header header;
    struct msg_window_open_r r;
    struct window_tenant *t;
    struct window *w;
    int rc, fd;

    if (!ns || open_check(call, ns) != 0)
        return -call->error.code;
    if (conn_fds_room(call->s->conn) == 0)
        return ucm_error_set(&call->error, UCM_WIRE_BUSY, "read the answers before this one");
    rc = -EOPNOTSUPP;
    t = grant_budget(rq->modules.arena) > 0 ? window_tenant_ref(rq, call->s->peer.tenant, &rc)
                                            : NULL;
    if (!t)
        return open_refused(call, rc);
    fd = memfd_grant(grant_group_table(t->group, &header));
    w = fd >= 0 ? window_alloc(call, t) : NULL;
    if (!w) {
        if (fd < 0)
            ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no descriptor for a window");
        else
            close(fd);
        window_tenant_unref(rq, t);
        return -call->error.code;
    }
    w->ns = ns;
    w->part = (uint32_t)m->part;
    r = (struct msg_window_open_r){.window = w->name,
                                   .slab_bytes = t->header.slab_bytes,
                                   .slot_bytes = window_slot_bytes(w),
                                   .slabs = t->header.slabs,
                                   .budget = grant_budget(rq->modules.arena)};
    session_reply_fds(call->s, call->msgid, call->method, &r, &fd, 1);
    return 0;
}
