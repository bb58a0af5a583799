/* Shared mappings: opening and giving back. mapping_ref.c takes references, mapping_ranges.c maps
 * and reads. */
#include "client/lib/sparse/internal.h"

#include "proto/memory/mapping.h"

#include <stdlib.h>

/* ---- the object ---- */

static void mapping_unref(struct ucm_mapping *w)
{
    if (--w->refs > 0)
        return;
    client_maps_free(&w->maps);
    client_handle_unref(&w->ns->handle);
    free(w);
}

bool client_mapping_known(const struct ucm_mapping *w)
{
    return w->attempts != 0 && w->attempts == w->client->attempts;
}

static bool keeps(const struct ucm_mapping *w)
{
    return w->flags & UCM_MAPPING_ADDRESSES && !w->closed;
}

/* Ends the mapping at the daemon: the user is done with it, or it is unknown what the daemon
 * referenced and granted. */
void client_mapping_abandon(struct ucm_mapping *w)
{
    if (client_mapping_known(w) && client_link_live(w->client))
        client_followup(w->client, UCM_METHOD_MAPPING_CLOSE, w->id);
    w->attempts = 0;
    client_maps_end(&w->maps, keeps(w));
}

static struct ucm_mapping *mapping_of(struct client_hook *hook)
{
    return (struct ucm_mapping *)((char *)hook - offsetof(struct ucm_mapping, hook));
}

static void mapping_down_cb(struct client_hook *hook)
{
    if (mapping_of(hook)->attempts != 0)
        client_mapping_abandon(mapping_of(hook));
}

/* The child has none of its ranges. */
static void mapping_forked_cb(struct client_hook *hook)
{
    atomic_store(&mapping_of(hook)->maps.opened, 0);
}

static void mapping_closed_cb(struct client_hook *hook)
{
    client_hook_close(hook);
    mapping_unref(mapping_of(hook));
}

static int mapping_notified_cb(struct client_hook *hook, struct proto_envelope *env,
                               struct ucm_error *e);

static const struct client_feature mappings = {.down_cb = mapping_down_cb,
                                               .forked_cb = mapping_forked_cb,
                                               .notified_cb = mapping_notified_cb,
                                               .closed_cb = mapping_closed_cb};

static uint64_t part_bytes(const struct ucm_namespace *ns, uint32_t part)
{
    const struct proto_u32s *layers = &ns->open.layers;

    return ns->open.layer_bytes * layers->p[layers->n == 1 ? 0 : part];
}

static struct ucm_mapping *mapping_new(struct ucm_namespace *ns, uint32_t part, uint32_t flags)
{
    struct ucm_mapping *w = calloc(1, sizeof *w);

    if (!w || client_maps_init(&w->maps) != 0) {
        free(w);
        return NULL;
    }
    w->client = ns->handle.client;
    w->ns = ns;
    client_handle_ref(&ns->handle);
    w->refs = 1;
    w->part = part;
    w->flags = flags;
    return w;
}

/* ---- one thread at a time ---- */

static int mapping_turn(struct ucm_mapping *w, int64_t deadline_ns)
{
    int r = client_turn(w->client, &w->busy, "takes references in the mapping", deadline_ns);

    if (r)
        return r;
    if (w->closed) {
        client_turn_end(w->client, &w->busy);
        return client_fail(UCM_EINVALID, "the mapping was closed");
    }
    w->refs++;
    return 0;
}

static void mapping_turn_end(struct ucm_mapping *w)
{
    struct ucm_client *c = w->client;

    if (w->closed)
        client_mapping_abandon(w); /* it may have been opened again alongside ucm_mapping_close */
    client_turn_end(c, &w->busy);
    mapping_unref(w);
}

int client_mapping_enter(struct ucm_mapping *w, int timeout_ms, int64_t *deadline_ns)
{
    int r = client_enter(w->client);

    if (r)
        return r;
    *deadline_ns = client_deadline(w->client, timeout_ms);
    r = mapping_turn(w, *deadline_ns);
    return r ? client_leave(w->client, r) : 0;
}

int client_mapping_leave(struct ucm_mapping *w, int status)
{
    struct ucm_client *c = w->client;

    mapping_turn_end(w);
    return client_leave(c, status);
}

/* ---- mapping.open ---- */

struct open_call {
    struct client_call call;
    struct ucm_mapping *w;
};

int client_mapping_fds_check(struct client_call *call, uint32_t n)
{
    uint32_t came = call->fds ? call->fds->n : 0;

    if (came < n && call->fds && call->fds->lost)
        return ucm_error_set(&call->error, UCM_ENOMEMORY,
                             "this process has no room for %u descriptors of a mapping; raise "
                             "its limit of open files",
                             n);
    if (came != n)
        return ucm_error_set(&call->error, UCM_EPROTOCOL,
                             "ucmd sent %u descriptors with its answer, which has %u", came, n);
    return 0;
}

static int geometry_check(const struct ucm_mapping *w, const struct msg_mapping_open_r *m,
                          struct client_geometry *g, struct ucm_error *e)
{
    uint64_t bytes = part_bytes(w->ns, w->part);
    uint64_t padded = (bytes + UCM_MAPPING_ALIGN - 1) / UCM_MAPPING_ALIGN * UCM_MAPPING_ALIGN;

    if (m->slot_bytes != padded || m->slab_bytes % UCM_MAPPING_ALIGN != 0 ||
        m->slot_bytes > m->slab_bytes)
        return ucm_error_set(e, UCM_EPROTOCOL, "ucmd's sizes of a mapping don't fit the namespace");
    *g = (struct client_geometry){.slab_bytes = m->slab_bytes,
                                  .slot_bytes = m->slot_bytes,
                                  .part_bytes = bytes,
                                  .slabs = (uint32_t)m->slabs,
                                  .slots = (uint32_t)(m->slab_bytes / m->slot_bytes),
                                  .budget = m->budget};
    return 0;
}

static int open_take_cb(struct client_call *call, const union proto_any *any)
{
    struct ucm_mapping *w = ((struct open_call *)call)->w;
    struct client_geometry g;
    int r = geometry_check(w, &any->mapping_open_r, &g, &call->error);

    w->id = (uint32_t)any->mapping_open_r.mapping;
    w->attempts = call->client->attempts;
    if (r == 0)
        r = client_mapping_fds_check(call, 1);
    if (r == 0)
        r = client_maps_open(&w->maps, w->openings + 1, &g, call->fds->fd[0], &call->error);
    if (r == 0)
        w->openings++;
    return r;
}

int client_mapping_send_open(struct ucm_mapping *w, int64_t deadline_ns)
{
    struct msg_mapping_open m = {.part = w->part};
    struct client_request q = {UCM_METHOD_MAPPING_OPEN, &m, &w->ns->handle, .handle_id = &m.ns};
    struct open_call open = {.w = w};
    int r = client_exchange(&open.call, w->client, open_take_cb, &q, deadline_ns);

    if (r)
        client_mapping_abandon(
            w); /* also one that the daemon opened, and whose answer was no good */
    return r;
}

/* ---- giving back ---- */

static void slab_release(struct ucm_mapping *w, uint32_t slab)
{
    client_followup_params(w->client, UCM_METHOD_MAPPING_RELEASE,
                           &(struct msg_mapping_release){.mapping = w->id, .slabs = {&slab, 1}});
}

/* The daemon wants slabs back. The user may have released one of them meanwhile. */
static void mapping_revoke(struct ucm_mapping *w, const struct msg_mapping_revoke *m)
{
    for (uint32_t i = 0; i < m->slabs.n; i++) {
        if (!client_maps_has(&w->maps, m->slabs.p[i]))
            continue;
        if (keeps(w)) {
            client_maps_want(&w->maps, m->slabs.p[i]);
            client_signal(w->client);
            continue;
        }
        client_maps_remove(&w->maps, m->slabs.p[i]);
        slab_release(w, m->slabs.p[i]);
    }
}

static int mapping_notified_cb(struct client_hook *hook, struct proto_envelope *env,
                               struct ucm_error *e)
{
    struct ucm_mapping *w = mapping_of(hook);
    union proto_any m;
    int r;

    if (!proto_str_is(env->method, UCM_MAPPING_REVOKE))
        return 0;
    r = client_take(&proto_mapping_revoke, env, &m, e);
    if (r == 0 && client_mapping_known(w) && w->id == m.mapping_revoke.mapping)
        mapping_revoke(w, &m.mapping_revoke);
    return r;
}

int ucm_mapping_ranges(struct ucm_mapping *w, struct ucm_mapped_range *out, uint32_t room,
                       uint32_t *n)
{
    struct ucm_client *c = w && n && (room == 0 || out) ? w->client : NULL;
    int r = client_enter_given(c, "mapping, n or out");

    if (r)
        return r;
    client_read_ready(c); /* the daemon may have asked for some */
    for (uint32_t i = 0; i < w->maps.n && i < room; i++) {
        const struct client_range *m = &w->maps.ranges[i];

        out[i] = (struct ucm_mapped_range){m->p, m->bytes, m->slab, m->wanted, m->opened};
    }
    *n = w->maps.n;
    return client_leave(c, 0);
}

int ucm_mapping_release(struct ucm_mapping *w, const void *address)
{
    struct client_range *m;
    struct ucm_client *c;
    uint64_t opened;
    uint32_t slab;
    bool present;
    int r;

    if (!w || !address)
        return client_fail(UCM_EINVALID, "mapping or address is NULL");
    if (!(w->flags & UCM_MAPPING_ADDRESSES))
        return client_fail(UCM_EINVALID,
                           "the mapping was opened without UCM_MAPPING_ADDRESSES: the "
                           "library unmaps it by itself");
    c = w->client;
    r = client_enter(c);
    if (r)
        return r;
    m = client_maps_find(&w->maps, address);
    if (!m)
        return client_leave(c, client_fail(UCM_ENOTFOUND, "nothing is mapped there"));
    opened = m->opened;
    present = opened == atomic_load(&w->maps.opened);
    slab = m->slab;
    if (present && slab == UCM_PLACE_NONE)
        return client_leave(c, client_fail(UCM_EINVALID, "the table is in use: close the mapping"));
    /* A reference under way may need it, since its answer would name places in it. */
    r = present ? mapping_turn(w, client_deadline(c, -1)) : 0;
    if (r)
        return client_leave(c, r);
    m = client_maps_find(&w->maps, address);
    if (m && (m->slab != slab || m->opened != opened))
        m = NULL; /* it was released meanwhile, and the reference mapped another range there */
    if (m && client_mapping_known(w) && opened == atomic_load(&w->maps.opened))
        slab_release(w, slab);
    if (m)
        client_maps_unmap(&w->maps, m);
    if (present)
        mapping_turn_end(w);
    return client_leave(c, 0);
}

/* ---- open, close ---- */

int ucm_mapping_open(struct ucm_namespace *ns, uint32_t part, uint32_t flags, int timeout_ms,
                     struct ucm_mapping **out)
{
    struct ucm_mapping *w;
    struct ucm_client *c;
    int r;

    if (!ns || !out)
        return client_fail(UCM_EINVALID, "namespace or out is NULL");
    if (flags & ~(uint32_t)UCM_MAPPING_ADDRESSES)
        return client_fail(UCM_EINVALID, "flags are %#x; see UCM_MAPPING_ADDRESSES", flags);
    if (ns->summary || ns->encoding)
        return client_fail(UCM_EUNSUPPORTED, "a mapping is of a namespace of ucm_namespace_open: "
                                             "encoded blocks are loaded, summaries selected from");
    if (part >= ns->open.parts)
        return client_fail(UCM_EINVALID, "part is %u of %u", part, (unsigned)ns->open.parts);
    c = ns->handle.client;
    r = client_enter(c);
    if (r)
        return r;
    w = mapping_new(ns, part, flags);
    if (!w)
        return client_leave(c, client_fail(UCM_ENOMEMORY, "no memory for a mapping"));
    client_hook_open(c, &w->hook, &mappings); /* it may end while it is opened */
    r = client_mapping_send_open(w, client_deadline(c, timeout_ms));
    if (r) {
        client_hook_close(&w->hook);
        mapping_unref(w);
        return client_leave(c, r);
    }
    *out = w;
    return client_leave(c, 0);
}

void ucm_mapping_close(struct ucm_mapping *w)
{
    struct ucm_client *c = w ? w->client : NULL;

    if (!c || client_enter(c) != 0)
        return;
    w->closed = true;
    client_mapping_abandon(w);
    client_hook_close(&w->hook);
    mapping_unref(w);
    client_leave(c, 0);
}

int ucm_mapping_info(struct ucm_mapping *w, struct ucm_mapping_info *out)
{
    const struct client_geometry *g;
    struct ucm_client *c = w && out ? w->client : NULL;
    int r = client_enter_given(c, "mapping or out");

    if (r)
        return r;
    g = &w->maps.geometry;
    *out = (struct ucm_mapping_info){.opened = atomic_load(&w->maps.opened),
                                     .slab_bytes = g->slab_bytes,
                                     .slot_bytes = g->slot_bytes,
                                     .part_bytes = g->part_bytes,
                                     .slabs = g->slabs,
                                     .budget = g->budget};
    for (uint32_t i = 0; i < g->slabs; i++)
        out->mapped += client_maps_has(&w->maps, i);
    return client_leave(c, 0);
}
