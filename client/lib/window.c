/* Windows: opening, pinning, giving back. window_map.c maps and reads. */
#include "proto/window.h"
#include "client/lib/internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- the object ---- */

static void window_unref(struct ucm_window *w)
{
    if (--w->refs > 0)
        return;
    client_maps_free(&w->maps);
    client_handle_unref(&w->ns->handle);
    free(w);
}

static bool window_known(const struct ucm_window *w)
{
    return w->attempts != 0 && w->attempts == w->client->attempts;
}

static bool keeps(const struct ucm_window *w)
{
    return w->flags & UCM_WINDOW_ADDRESSES && !w->closed;
}

/* What the daemon pinned and lent is unknown, or the user has done: that window ends. */
static void window_abandon(struct ucm_window *w)
{
    if (window_known(w) && client_link_live(w->client))
        client_followup(w->client, UCM_METHOD_WINDOW_CLOSE, w->id);
    w->attempts = 0;
    client_maps_end(&w->maps, keeps(w));
}

void client_windows_end(struct ucm_client *c)
{
    struct ucm_window *w;

    TAILQ_FOREACH(w, &c->windows, node)
        if (w->attempts != 0)
            window_abandon(w);
}

void client_windows_free(struct ucm_client *c)
{
    struct ucm_window *w;

    while ((w = TAILQ_FIRST(&c->windows)) != NULL) {
        TAILQ_REMOVE(&c->windows, w, node);
        window_unref(w);
    }
}

static uint64_t part_bytes(const struct ucm_namespace *ns, uint32_t part)
{
    const struct proto_u32s *shards = &ns->open.shards;

    return ns->open.shard_bytes * shards->p[shards->n == 1 ? 0 : part];
}

static struct ucm_window *window_new(struct ucm_namespace *ns, uint32_t part, uint32_t flags)
{
    struct ucm_window *w = calloc(1, sizeof *w);

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

static int window_lock(struct ucm_window *w, int64_t deadline_ns)
{
    struct ucm_client *c = w->client;

    while (w->busy)
        if (client_cond_wait(c, &c->idle, deadline_ns) == ETIMEDOUT && w->busy)
            return client_fail(UCM_EDEADLINE, "another thread pins in the window");
    if (w->closed)
        return client_fail(UCM_EINVALID, "the window was closed");
    w->busy = true;
    w->refs++;
    return 0;
}

static void window_unlock(struct ucm_window *w)
{
    if (w->closed)
        window_abandon(w); /* it may have been opened anew beside ucm_window_close */
    w->busy = false;
    pthread_cond_broadcast(&w->client->idle);
    window_unref(w);
}

/* ---- window.open ---- */

struct open_call {
    struct client_call call;
    struct ucm_window *w;
};

/* Takes the i-th descriptor of an answer that should have n. -code with call->error. */
static int fds_check(struct client_call *call, uint32_t n)
{
    uint32_t came = call->fds ? call->fds->n : 0;

    if (came < n && call->fds && call->fds->lost)
        return ucm_error_set(&call->error, UCM_ENOMEMORY,
                             "this process has no room for %u descriptors of a window; raise "
                             "its limit of open files",
                             n);
    if (came != n)
        return ucm_error_set(&call->error, UCM_EPROTOCOL,
                             "ucmd sent %u descriptors with its answer, which has %u", came, n);
    return 0;
}

static int geometry_check(const struct ucm_window *w, const struct msg_window_open_r *m,
                          struct client_geometry *g, struct ucm_error *e)
{
    uint64_t bytes = part_bytes(w->ns, w->part);
    uint64_t padded = (bytes + UCM_WINDOW_ALIGN - 1) / UCM_WINDOW_ALIGN * UCM_WINDOW_ALIGN;

    if (m->slot_bytes != padded || m->extent_bytes % UCM_WINDOW_ALIGN != 0 ||
        m->slot_bytes > m->extent_bytes)
        return ucm_error_set(e, UCM_EPROTOCOL, "ucmd's sizes of a window don't fit the namespace");
    *g = (struct client_geometry){.extent_bytes = m->extent_bytes,
                                  .slot_bytes = m->slot_bytes,
                                  .part_bytes = bytes,
                                  .extents = (uint32_t)m->extents,
                                  .slots = (uint32_t)(m->extent_bytes / m->slot_bytes),
                                  .budget = m->budget};
    return 0;
}

static int open_take_cb(struct client_call *call, const union proto_any *any)
{
    struct ucm_window *w = ((struct open_call *)call)->w;
    struct client_geometry g;
    int r = geometry_check(w, &any->window_open_r, &g, &call->error);

    w->id = (uint32_t)any->window_open_r.window;
    w->attempts = call->client->attempts;
    if (r == 0)
        r = fds_check(call, 1);
    if (r == 0)
        r = client_maps_open(&w->maps, w->openings + 1, &g, call->fds->fd[0], &call->error);
    if (r == 0)
        w->openings++;
    return r;
}

static int window_send_open(struct ucm_window *w, int64_t deadline_ns)
{
    struct msg_window_open m = {.part = w->part};
    struct client_request q = {UCM_METHOD_WINDOW_OPEN, &m, &w->ns->handle, .handle_id = &m.ns};
    struct open_call open = {.w = w};
    int r = client_exchange(&open.call, w->client, open_take_cb, &q, deadline_ns);

    if (r)
        window_abandon(w); /* also one that the daemon opened, and whose answer was no good */
    return r;
}

/* ---- window.pin ---- */

struct pin_call {
    struct client_call call;
    struct ucm_window *w;
    uint32_t n;               /* blocks asked for */
    struct ucm_place *places; /* receives `done` */
    uint32_t done;
    struct ucm_window_pinned sum;
};

static int lent_map(struct client_call *call, struct ucm_window *w,
                    const struct msg_window_pin_r *m)
{
    int r = fds_check(call, m->lent.n);

    for (uint32_t i = 0; r == 0 && i < m->lent.n; i++) {
        uint32_t extent = m->lent.p[i];

        if (extent >= w->maps.geometry.extents || client_maps_has(&w->maps, extent))
            return ucm_error_set(&call->error, UCM_EPROTOCOL, "ucmd lent extent %u %s", extent,
                                 extent < w->maps.geometry.extents ? "twice" : "of none such");
        r = client_maps_add(&w->maps, extent, call->fds->fd[i], &call->error);
    }
    return r;
}

static struct ucm_place place_take(const struct ucm_window *w, const uint8_t *from)
{
    struct ucm_wire_place place;

    memcpy(&place, from, sizeof place);
    if (!client_maps_has(&w->maps, place.extent) || place.slot >= w->maps.geometry.slots)
        return (struct ucm_place){.extent = UCM_PLACE_NONE};
    return (struct ucm_place){place.extent, place.slot, place.generation, w->openings};
}

static int pin_take_cb(struct client_call *call, const union proto_any *any)
{
    struct pin_call *pin = (struct pin_call *)call;
    const struct msg_window_pin_r *m = &any->window_pin_r;
    uint32_t n = m->places.n / UCM_PLACE_BYTES;
    int r;

    if (m->places.n % UCM_PLACE_BYTES != 0 || n == 0 || n > pin->n || (!m->more && n < pin->n) ||
        m->missing > pin->n)
        return ucm_error_set(&call->error, UCM_EPROTOCOL,
                             "ucmd's answer to window.pin does not fit the question");
    if (pin->w->closed) /* meanwhile, and nothing is mapped any more */
        return ucm_error_set(&call->error, UCM_EINVALID, "the window was closed");
    r = lent_map(call, pin->w, m);
    if (r)
        return r;
    for (uint32_t i = 0; i < n; i++) {
        pin->places[i] = place_take(pin->w, m->places.p + (size_t)i * UCM_PLACE_BYTES);
        pin->sum.placed += pin->places[i].extent != UCM_PLACE_NONE;
    }
    pin->done = n;
    pin->sum.moved = (uint32_t)m->moved;
    pin->sum.read = (uint32_t)m->read;
    /* With `more` set, the next answer counts the rest again. */
    pin->sum.missing = m->more ? 0 : (uint32_t)m->missing;
    return 0;
}

/* The daemon answers in time with what it has. */
static uint64_t pin_deadline_ms(uint32_t asked_ms, int64_t deadline_ns)
{
    int64_t left_ms = (deadline_ns - client_now_ns()) / 1000000 * 7 / 8;

    if (left_ms < 1)
        left_ms = 1;
    if (asked_ms > 0 && asked_ms < left_ms)
        return asked_ms;
    return left_ms < UCM_DEADLINE_MS ? (uint64_t)left_ms : UCM_DEADLINE_MS;
}

/* As client_begin: the daemon of the present connection knows the window and the chain. */
static int window_begin(struct ucm_window *w, struct ucm_chain *chain, int64_t deadline_ns)
{
    for (;;) {
        int r = client_chains_begin(&chain, 1, NULL, deadline_ns);

        if (r || window_known(w))
            return r;
        client_writer_release(w->client);
        if (w->closed)
            return client_fail(UCM_EINVALID, "the window was closed");
        r = window_send_open(w, deadline_ns);
        if (r)
            return r;
    }
}

/* One request. */
static int pin_send(struct pin_call *pin, const struct ucm_window_pin *what, uint32_t at,
                    int64_t deadline_ns)
{
    struct msg_window_pin m = {.first = what->first + at, .n = pin->n, .priority = what->priority};
    struct client_request q = {.method = UCM_METHOD_WINDOW_PIN, .params = &m};
    struct ucm_window *w = pin->w;
    int r;

    client_call_init(&pin->call, w->client, pin_take_cb, NULL);
    r = window_begin(w, what->chain, deadline_ns);
    if (r == 0) {
        m.window = w->id;
        m.chain = what->chain->id;
        m.deadline_ms = pin_deadline_ms(what->deadline_ms, deadline_ns);
        r = client_request_wait(&pin->call, &q, deadline_ns);
        if (r < 0 && r != -UCM_EBUSY && r != -UCM_EINVALID && r != -UCM_ENOTFOUND)
            window_abandon(w);
    }
    client_call_close(&pin->call);
    return r;
}

static void pinned_add(struct ucm_window_pinned *sum, const struct ucm_window_pinned *more)
{
    sum->placed += more->placed;
    sum->moved += more->moved;
    sum->read += more->read;
    sum->missing += more->missing;
}

/* The daemon does not know the chain any more, or if that was not it, the window. False: it knew both. */
static bool forget(struct ucm_window *w, struct ucm_chain *chain, uint32_t tries)
{
    if (tries == 0)
        client_chain_forget(chain);
    else if (tries == 1)
        window_abandon(w);
    return tries < 2;
}

/* The window is busy. A window or chain that the daemon ended is opened again, once. */
static int pin_all(struct ucm_window *w, const struct ucm_window_pin *what, int64_t deadline_ns,
                   struct ucm_window_pinned *sum)
{
    uint32_t at = 0, most = w->client->info.max_keys, tries = 0;
    uint64_t opening = 0;

    while (at < what->n) {
        struct pin_call pin = {
            .w = w, .n = what->n - at < most ? what->n - at : most, .places = what->places + at};
        int r = pin_send(&pin, what, at, deadline_ns);

        if (r == CLIENT_AGAIN ||
            (r == -UCM_ENOTFOUND && at == 0 && forget(w, what->chain, tries++)))
            continue;
        if (r)
            return r;
        if (at > 0 && opening != w->openings)
            return client_fail(UCM_EDISCONNECTED,
                               "the connection broke in the middle of a pin; pin again");
        opening = w->openings;
        pinned_add(sum, &pin.sum);
        at += pin.done;
    }
    if (atomic_load(&w->maps.opened) != opening)
        return client_fail(UCM_EDISCONNECTED, "the connection broke after a pin; pin again");
    return 0;
}

static int pin_check(const struct ucm_window *w, const struct ucm_window_pin *what)
{
    const struct ucm_chain *chain = what->chain;

    if (!chain || !what->places || what->n == 0)
        return client_fail(UCM_EINVALID, "chain or places is NULL, or n is 0");
    if (chain->client != w->client || chain->ns->handle.request.handle != &w->ns->handle ||
        chain->part != w->part)
        return client_fail(UCM_EINVALID, "the chain is not of the window's namespace and part");
    if (what->first >= chain->n_blocks || what->n > chain->n_blocks - what->first)
        return client_fail(UCM_EINVALID, "blocks %u to %llu of a chain of %u", what->first,
                           (unsigned long long)what->first + what->n - 1, chain->n_blocks);
    if (what->priority > 7)
        return client_fail(UCM_EINVALID, "priority is %u, at most 7", what->priority);
    return 0;
}

int ucm_window_pin(struct ucm_window *w, const struct ucm_window_pin *what, int timeout_ms,
                   struct ucm_window_pinned *result)
{
    struct ucm_window_pinned sum = {0};
    struct ucm_client *c;
    int64_t deadline_ns;
    int r;

    if (!w || !what)
        return client_fail(UCM_EINVALID, "window or pin is NULL");
    c = w->client;
    r = client_enter(c);
    if (r)
        return r;
    deadline_ns = client_deadline(c, timeout_ms);
    r = pin_check(w, what);
    if (r == 0)
        r = window_lock(w, deadline_ns);
    if (r)
        return client_leave(c, r);
    client_chain_ref(what->chain);
    r = pin_all(w, what, deadline_ns, &sum);
    client_chain_unref(what->chain);
    window_unlock(w);
    if (r == 0 && result)
        *result = sum;
    return client_leave(c, r);
}

/* ---- window.unpin ---- */

/* The window is busy. A connection that broke has no pins left. */
static int unpin(struct ucm_window *w, const struct ucm_chain *chain, uint32_t first, uint32_t n,
                 int64_t deadline_ns)
{
    struct msg_window_unpin m = {.first = first, .n = n};
    int r;

    if (!window_known(w) || chain->attempts != w->attempts)
        return 0;
    r = client_begin_same(w->client, deadline_ns);
    if (r)
        return r;
    if (!window_known(w) || chain->attempts != w->attempts) {
        client_writer_release(w->client);
        return 0;
    }
    m.window = w->id;
    m.chain = chain->id;
    return client_exchange_same(w->client, UCM_METHOD_WINDOW_UNPIN, &m, deadline_ns);
}

int ucm_window_unpin(struct ucm_window *w, struct ucm_chain *chain, uint32_t first, uint32_t n,
                     int timeout_ms)
{
    struct ucm_client *c;
    int64_t deadline_ns;
    int r;

    if (!w || !chain || n == 0 || chain->client != w->client)
        return client_fail(UCM_EINVALID, "window or chain is NULL, n is 0, or they are not of one "
                                         "client");
    if (first >= UCM_CHAIN_BLOCKS_MAX)
        return client_fail(UCM_EINVALID, "first is %u; a chain has at most %d blocks", first,
                           UCM_CHAIN_BLOCKS_MAX);
    if (n > UCM_CHAIN_BLOCKS_MAX - first)
        n = UCM_CHAIN_BLOCKS_MAX - first;
    c = w->client;
    r = client_enter(c);
    if (r)
        return r;
    deadline_ns = client_deadline(c, timeout_ms);
    r = window_lock(w, deadline_ns);
    if (r)
        return client_leave(c, r);
    client_chain_ref(chain);
    r = unpin(w, chain, first, n, deadline_ns);
    client_chain_unref(chain);
    window_unlock(w);
    /* It ended meanwhile, and its pins with it. */
    return client_leave(c, r == -UCM_EDISCONNECTED || r == -UCM_ENOTFOUND ? 0 : r);
}

/* ---- giving back ---- */

/* The user may have released one of them meanwhile. */
void client_window_revoke(struct ucm_client *c, const struct msg_window_revoke *m)
{
    struct ucm_window *w;

    TAILQ_FOREACH(w, &c->windows, node)
        if (window_known(w) && w->id == m->window)
            break;
    for (uint32_t i = 0; w && i < m->extents.n; i++) {
        if (!client_maps_has(&w->maps, m->extents.p[i]))
            continue;
        if (keeps(w)) {
            client_maps_want(&w->maps, m->extents.p[i]);
            client_signal(c);
            continue;
        }
        client_maps_remove(&w->maps, m->extents.p[i]);
        client_followup_window(c, w->id, m->extents.p[i]);
    }
}

int ucm_window_mappings(struct ucm_window *w, struct ucm_window_mapping *out, uint32_t room,
                        uint32_t *n)
{
    struct ucm_client *c;
    int r;

    if (!w || !n || (room > 0 && !out))
        return client_fail(UCM_EINVALID, "window, n or out is NULL");
    c = w->client;
    r = client_enter(c);
    if (r)
        return r;
    client_read_ready(c); /* the daemon may have asked for some */
    for (uint32_t i = 0; i < w->maps.n && i < room; i++) {
        const struct client_mapping *m = &w->maps.mappings[i];

        out[i] = (struct ucm_window_mapping){m->p, m->bytes, m->extent, m->wanted, m->opened};
    }
    *n = w->maps.n;
    return client_leave(c, 0);
}

int ucm_window_release(struct ucm_window *w, const void *address)
{
    struct client_mapping *m;
    struct ucm_client *c;
    uint32_t extent;
    bool present;
    int r;

    if (!w || !address)
        return client_fail(UCM_EINVALID, "window or address is NULL");
    if (!(w->flags & UCM_WINDOW_ADDRESSES))
        return client_fail(UCM_EINVALID, "the window was opened without UCM_WINDOW_ADDRESSES: the "
                                         "library unmaps it by itself");
    c = w->client;
    r = client_enter(c);
    if (r)
        return r;
    m = client_maps_find(&w->maps, address);
    if (!m)
        return client_leave(c, client_fail(UCM_ENOTFOUND, "nothing is mapped there"));
    present = m->opened == atomic_load(&w->maps.opened);
    extent = m->extent;
    if (present && extent == UCM_PLACE_NONE)
        return client_leave(c, client_fail(UCM_EINVALID, "the table is in use: close the window"));
    /* A pin under way may count on it: its answer would name places in it. */
    r = present ? window_lock(w, client_deadline(c, -1)) : 0;
    if (r)
        return client_leave(c, r);
    m = client_maps_find(&w->maps, address);
    if (m && window_known(w) && m->opened == atomic_load(&w->maps.opened))
        client_followup_window(c, w->id, extent);
    if (m)
        client_maps_unmap(&w->maps, m);
    if (present)
        window_unlock(w);
    return client_leave(c, 0);
}

/* ---- open, close ---- */

int ucm_window_open(struct ucm_namespace *ns, uint32_t part, uint32_t flags, int timeout_ms,
                    struct ucm_window **out)
{
    struct ucm_window *w;
    struct ucm_client *c;
    int r;

    if (!ns || !out)
        return client_fail(UCM_EINVALID, "namespace or out is NULL");
    if (flags & ~(uint32_t)UCM_WINDOW_ADDRESSES)
        return client_fail(UCM_EINVALID, "flags are %#x; see UCM_WINDOW_ADDRESSES", flags);
    if (ns->digest || ns->encoding)
        return client_fail(UCM_EUNSUPPORTED, "a window is of a namespace of ucm_namespace_open: "
                                             "encoded blocks are loaded, digests selected from");
    if (part >= ns->open.parts)
        return client_fail(UCM_EINVALID, "part is %u of %u", part, (unsigned)ns->open.parts);
    c = ns->handle.client;
    r = client_enter(c);
    if (r)
        return r;
    w = window_new(ns, part, flags);
    if (!w)
        return client_leave(c, client_fail(UCM_ENOMEMORY, "no memory for a window"));
    TAILQ_INSERT_TAIL(&c->windows, w, node); /* it may end while it is opened */
    r = window_send_open(w, client_deadline(c, timeout_ms));
    if (r) {
        TAILQ_REMOVE(&c->windows, w, node);
        window_unref(w);
        return client_leave(c, r);
    }
    *out = w;
    return client_leave(c, 0);
}

void ucm_window_close(struct ucm_window *w)
{
    struct ucm_client *c;

    if (!w)
        return;
    c = w->client;
    if (client_enter(c) != 0)
        return;
    w->closed = true;
    window_abandon(w);
    TAILQ_REMOVE(&c->windows, w, node);
    window_unref(w);
    client_leave(c, 0);
}

int ucm_window_info(struct ucm_window *w, struct ucm_window_info *out)
{
    const struct client_geometry *g;
    struct ucm_client *c;
    int r;

    if (!w || !out)
        return client_fail(UCM_EINVALID, "window or out is NULL");
    c = w->client;
    r = client_enter(c);
    if (r)
        return r;
    g = &w->maps.geometry;
    *out = (struct ucm_window_info){.opened = atomic_load(&w->maps.opened),
                                    .extent_bytes = g->extent_bytes,
                                    .slot_bytes = g->slot_bytes,
                                    .part_bytes = g->part_bytes,
                                    .extents = g->extents,
                                    .budget = g->budget};
    for (uint32_t i = 0; i < g->extents; i++)
        out->mapped += client_maps_has(&w->maps, i);
    return client_leave(c, 0);
}
