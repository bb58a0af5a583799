/* mapping.open and mapping.release: what a connection maps, and how it gives that back. */
#include "daemon/mapping/mapping.h"

#include "daemon/base/log.h"
#include "daemon/base/memfd.h"
#include "daemon/index/ns_form.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct request_modules *modules_of(const struct mapping *w)
{
    return &w->s->rq->modules;
}

/* ---- tenants ---- */

static void mapping_tenant_unref(struct requests *rq, struct mapping_tenant *t)
{
    if (--t->mappings > 0)
        return;
    for (uint32_t i = 0; i < mappings_at(rq)->n_slabs; i++)
        if (mappings_at(rq)->slabs[i].tenant == t)
            mappings_at(rq)->slabs[i].tenant = NULL;
    if (mappings_at(rq)->taking.from == t)
        mappings_at(rq)->taking.from = NULL;
    grant_group_close(rq->modules.arena, t->group);
    list_remove(&t->link);
    mappings_at(rq)->n_tenants--;
    free(t);
}

static bool slabs_reserve(struct mappings *ws, uint32_t n)
{
    struct mapping_slab *slabs;

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

static struct mapping_tenant *tenant_new(struct requests *rq, const char *name, int *rc)
{
    struct mapping_tenant *t = calloc(1, sizeof(*t));

    *rc = t ? grant_group_open(rq->modules.arena, name, &t->group) : -ENOMEM;
    if (*rc != 0) {
        free(t);
        return NULL;
    }
    if (grant_group_table(t->group, &t->header) < 0 ||
        !slabs_reserve(mappings_at(rq), t->header.slabs)) {
        *rc = -ENOMEM;
        grant_group_close(rq->modules.arena, t->group);
        free(t);
        return NULL;
    }
    list_push_back(&mappings_at(rq)->tenants, &t->link);
    mappings_at(rq)->n_tenants++;
    return t;
}

static struct mapping_tenant *mapping_tenant_ref(struct requests *rq, const char *name, int *rc)
{
    struct list *tenants = &mappings_at(rq)->tenants;
    struct mapping_tenant *t = NULL;

    for (struct list *node = tenants->next; node != tenants && !t; node = node->next) {
        t = LIST_ENTRY(node, struct mapping_tenant, link);
        if (strcmp(grant_group_tenant(t->group), name) != 0)
            t = NULL;
    }
    if (!t)
        t = tenant_new(rq, name, rc);
    if (t)
        t->mappings++;
    return t;
}

/* ---- what a mapping maps ---- */

static void revoke_expired_cb(struct deadline *d);

static void revoke_time(struct mapping *w)
{
    if (w->map.due_ms > 0)
        deadline_arm(modules_of(w)->deadlines, &w->revoke, w->map.due_ms, revoke_expired_cb);
    else
        deadline_disarm(modules_of(w)->deadlines, &w->revoke);
}

static void revoke_expired_cb(struct deadline *d)
{
    struct mapping *w = LIST_ENTRY(d, struct mapping, revoke);
    uint32_t late = mapped_slabs_expire(&w->map, uv_now(modules_of(w)->loop));
    uint64_t bytes = late * w->tenant->header.slab_bytes;

    if (late == 0) {
        revoke_time(w);
        return;
    }
    modules_of(w)->metrics->mapping_overdue_bytes += bytes;
    log_warn("mapping", "overdue", "tenant=%s pid=%d uid=%u slabs=%u bytes=%llu", w->s->peer.tenant,
             (int)w->s->peer.pid, (unsigned)w->s->peer.uid, late, (unsigned long long)bytes);
    conn_drop(w->s->conn, "did not release a mapping's memory in time");
}

static void slab_unmap(struct mapping *w, uint32_t slab)
{
    mapped_slabs_release(&w->map, slab);
    revoke_time(w);
    grant_release(modules_of(w)->arena, slab);
}

/* The arena wants a slab that has no slot in use, and that somebody still maps. */
void mapping_revoke_cb(void *ctx, struct arena_group *group, uint32_t slab)
{
    struct requests *rq = ctx;
    uint64_t now_ms = uv_now(rq->modules.loop);

    rq->modules.metrics->mapping_revocations++;
    mappings_at(rq)->slabs[slab].taken_ms = 0; /* the arena hands out no slot of it any more */
    for (struct list *node = mappings_at(rq)->all.next; node != &mappings_at(rq)->all;
         node = node->next) {
        struct mapping *w = LIST_ENTRY(node, struct mapping, link);
        struct msg_mapping_revoke m = {
            .mapping = w->name, .slabs = {&slab, 1}, .timeout_ms = MAPPING_REVOKE_MS};

        if (w->tenant->group != group || !mapped_slabs_revoke(&w->map, slab, now_ms))
            continue;
        revoke_time(w);
        session_notify(w->s, UCM_MAPPING_REVOKE, &proto_mapping_revoke, &m);
    }
}

/* Each is checked before any is released: 0 or -code. */
static int release_check(struct call *call, struct mapping *w)
{
    const struct msg_mapping_release *m = &call->params.mapping_release;
    uint32_t bad;
    bool twice;

    if (mapped_slabs_names(&w->map, m->slabs.p, m->slabs.n, &bad, &twice))
        return 0;
    return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                         twice ? "slab %u is named twice"
                               : "slab %u is not granted to this mapping",
                         m->slabs.p[bad]);
}

int method_mapping_release(struct call *call)
{
    const struct msg_mapping_release *m = &call->params.mapping_release;
    struct mapping *w = call_mapping(call, m->mapping);

    if (!w || release_check(call, w) != 0)
        return -call->error.code;
    for (uint32_t i = 0; i < m->slabs.n; i++)
        slab_unmap(w, m->slabs.p[i]);
    return call_reply(call, NULL);
}

/* ---- the end ---- */

static void mapping_free(struct mapping *w)
{
    struct session *s = w->s;
    struct requests *rq = s->rq;
    struct request *close = w->close;

    for (uint32_t i = 0; i < w->tenant->header.slabs; i++)
        if (mapped_slabs_has(&w->map, i))
            slab_unmap(w, i);
    list_remove(&w->link);
    rq->modules.metrics->mappings--;
    memory_return(s, sizeof(*w) + w->tenant->header.slabs);
    mapping_tenant_unref(rq, w->tenant);
    free(w);
    session_mappings(s)->n--;
    if (close)
        request_end(close, NULL, NULL);
    else if (!session_mappings(s)->ending)
        s->settle_cb(s);
}

static void mapping_drain(struct mapping *w)
{
    if (w->requests > 0 || !list_empty(&w->retry.link))
        return;
    if (mapping_refs_end_all(w))
        mapping_free(w);
    else
        (void)cache_wait_for(modules_of(w)->cache, &w->retry, WAIT_TURN);
}

static void drain_cb(struct cache_retry *r)
{
    mapping_drain(LIST_ENTRY(r, struct mapping, retry));
}

void mapping_unref(struct mapping *w)
{
    w->requests--;
    if (w->closing)
        mapping_drain(w);
}

/* ---- by name ---- */

struct mapping *call_mapping(struct call *call, uint64_t name)
{
    struct mapping *w = table_get(&session_mappings(call->s)->all, name & SESSION_NUMBERS);

    if (w && w->name == name)
        return w;
    ucm_error_set(&call->error, UCM_WIRE_NOT_FOUND, "mapping %llu is not open on this connection",
                  (unsigned long long)name);
    return NULL;
}

/* ---- mapping.open ---- */

static int open_check(struct call *call, const struct ns *ns)
{
    const struct msg_mapping_open *m = &call->params.mapping_open;
    const struct session *s = call->s;
    struct ns_encoded encoded;

    if (s->rq->draining)
        return ucm_error_set(&call->error, UCM_WIRE_SHUTDOWN, "the daemon is shutting down");
    if (m->part >= ns->identity.parts)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID, "part: %llu; this namespace has %u",
                             (unsigned long long)m->part, ns->identity.parts);
    if (strcmp(ns->identity.tenant, s->peer.tenant) != 0)
        return ucm_error_set(&call->error, UCM_WIRE_DENIED,
                             "a mapping is of the tenant's own namespaces; load another's blocks");
    if (ns_encoded(&ns->identity, &encoded))
        return ucm_error_set(
            &call->error, UCM_WIRE_UNSUPPORTED,
            "this namespace's blocks are encoded: a reader has no use for their bytes; load them, "
            "or open a mapping of the base namespace");
    for (uint32_t i = table_next(&session_mappings(s)->all, 0); i;
         i = table_next(&session_mappings(s)->all, i)) {
        const struct mapping *w = table_get(&session_mappings(s)->all, i);

        if (w->ns == ns && w->part == m->part)
            return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                                 "this connection has mapping %u of that part already", w->name);
    }
    return 0;
}

static int open_refused(struct call *call, int rc)
{
    if (rc == -EOPNOTSUPP)
        return ucm_error_set(&call->error, UCM_WIRE_UNSUPPORTED,
                             "this daemon has no mappings: mapping.size in its configuration is 0");
    return ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a mapping: %s",
                         strerror(-rc));
}

static struct mapping *mapping_alloc(struct call *call, struct mapping_tenant *t)
{
    struct session *s = call->s;
    size_t bytes = sizeof(struct mapping) + t->header.slabs;
    struct mapping *w = memory_alloc(s, bytes);

    if (!w) {
        ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a mapping");
        return NULL;
    }
    w->number = table_add(&session_mappings(s)->all, w);
    if (w->number == 0) {
        memory_return(s, bytes);
        free(w);
        ucm_error_set(&call->error, UCM_WIRE_BUSY,
                      "this connection has %u mappings, as many as one may have; close some",
                      table_count(&session_mappings(s)->all));
        return NULL;
    }
    mapped_slabs_init(&w->map, w->map_state, t->header.slabs);
    w->s = s;
    w->tenant = t;
    w->name = session_name(&session_mappings(s)->names, w->number);
    w->retry.retry_cb = drain_cb;
    list_init(&w->retry.link);
    list_init(&w->refs);
    list_push_back(&mappings_at(s->rq)->all, &w->link);
    session_mappings(s)->n++;
    s->rq->modules.metrics->mappings++;
    return w;
}

int method_mapping_open(struct call *call)
{
    const struct msg_mapping_open *m = &call->params.mapping_open;
    struct ns *ns = call_namespace(call, m->ns);
    struct requests *rq = call->s->rq;
    struct ucm_mapping_header header;
    struct msg_mapping_open_r r;
    struct mapping_tenant *t;
    struct mapping *w;
    int rc, fd;

    if (!ns || open_check(call, ns) != 0)
        return -call->error.code;
    if (conn_fds_room(call->s->conn) == 0)
        return ucm_error_set(&call->error, UCM_WIRE_BUSY, "read the answers before this one");
    rc = -EOPNOTSUPP;
    t = grant_budget(rq->modules.arena) > 0 ? mapping_tenant_ref(rq, call->s->peer.tenant, &rc)
                                            : NULL;
    if (!t)
        return open_refused(call, rc);
    fd = memfd_grant(grant_group_table(t->group, &header));
    w = fd >= 0 ? mapping_alloc(call, t) : NULL;
    if (!w) {
        if (fd < 0)
            ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no descriptor for a mapping");
        else
            close(fd);
        mapping_tenant_unref(rq, t);
        return -call->error.code;
    }
    w->ns = ns;
    w->part = (uint32_t)m->part;
    r = (struct msg_mapping_open_r){.mapping = w->name,
                                    .slab_bytes = t->header.slab_bytes,
                                    .slot_bytes = mapping_slot_bytes(w),
                                    .slabs = t->header.slabs,
                                    .budget = grant_budget(rq->modules.arena)};
    session_reply_fds(call->s, call->msgid, call->method, &r, &fd, 1);
    return 0;
}
