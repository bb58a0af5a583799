/* Windows: pins, and where what is pinned lies. */
#include "client/lib/sparse/internal.h"

#include "proto/memory/window.h"

#include <errno.h>
#include <string.h>

/* ---- window.pin ---- */

struct pin_call {
    struct client_call call;
    struct ucm_window *w;
    uint32_t n;               /* blocks asked for */
    struct ucm_place *places; /* receives `done` */
    uint32_t done;
    struct ucm_window_pinned sum;
};

static int granted_map(struct client_call *call, struct ucm_window *w,
                       const struct msg_window_pin_r *m)
{
    int r = client_window_fds_check(call, m->granted.n);

    for (uint32_t i = 0; r == 0 && i < m->granted.n; i++) {
        uint32_t slab = m->granted.p[i];

        if (slab >= w->maps.geometry.slabs || client_maps_has(&w->maps, slab))
            return ucm_error_set(&call->error, UCM_EPROTOCOL, "ucmd granted slab %u %s", slab,
                                 slab < w->maps.geometry.slabs ? "twice" : "of none such");
        r = client_maps_add(&w->maps, slab, call->fds->fd[i], &call->error);
    }
    return r;
}

static struct ucm_place place_take(const struct ucm_window *w, const uint8_t *from)
{
    struct ucm_wire_place place;

    memcpy(&place, from, sizeof place);
    if (!client_maps_has(&w->maps, place.slab) || place.slot >= w->maps.geometry.slots)
        return (struct ucm_place){.slab = UCM_PLACE_NONE};
    return (struct ucm_place){place.slab, place.slot, place.seq, w->openings};
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
    r = granted_map(call, pin->w, m);
    if (r)
        return r;
    for (uint32_t i = 0; i < n; i++) {
        pin->places[i] = place_take(pin->w, m->places.p + (size_t)i * UCM_PLACE_BYTES);
        pin->sum.placed += pin->places[i].slab != UCM_PLACE_NONE;
    }
    pin->done = n;
    pin->sum.moved = (uint32_t)m->moved;
    pin->sum.read = (uint32_t)m->read;
    /* With `more` set, the next answer counts the rest again. */
    pin->sum.missing = m->more ? 0 : (uint32_t)m->missing;
    return 0;
}

/* As client_begin: the daemon of the present connection knows the window and the sequence. */
static int window_begin(struct ucm_window *w, struct ucm_sequence *sequence, int64_t deadline_ns)
{
    for (;;) {
        int r = client_sequences_begin(&sequence, 1, NULL, deadline_ns);

        if (r || client_window_known(w))
            return r;
        client_writer_release(w->client);
        if (w->closed)
            return client_fail(UCM_EINVALID, "the window was closed");
        r = client_window_send_open(w, deadline_ns);
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
    r = window_begin(w, what->sequence, deadline_ns);
    if (r == 0) {
        m.window = w->id;
        m.sequence = what->sequence->id;
        m.deadline_ms = client_answer_ms(what->deadline_ms, deadline_ns);
        r = client_request_wait(&pin->call, &q, deadline_ns);
        if (r < 0 && r != -UCM_EBUSY && r != -UCM_EINVALID && r != -UCM_ENOTFOUND)
            client_window_abandon(w);
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

/* The daemon does not know the sequence any more, or if that was not it, the window. False: it knew
 * both. */
static bool forget(struct ucm_window *w, struct ucm_sequence *sequence, uint32_t tries)
{
    if (tries == 0)
        client_sequence_forget(sequence);
    else if (tries == 1)
        client_window_abandon(w);
    return tries < 2;
}

/* The window is busy. A window or sequence that the daemon ended is opened again, once. */
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
            (r == -UCM_ENOTFOUND && at == 0 && forget(w, what->sequence, tries++)))
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
    const struct ucm_sequence *sequence = what->sequence;

    if (!sequence || !what->places || what->n == 0)
        return client_fail(UCM_EINVALID, "sequence or places is NULL, or n is 0");
    if (sequence->client != w->client || sequence->ns->handle.request.handle != &w->ns->handle ||
        sequence->part != w->part)
        return client_fail(UCM_EINVALID, "the sequence is not of the window's namespace and part");
    if (what->first >= sequence->n_blocks || what->n > sequence->n_blocks - what->first)
        return client_fail(UCM_EINVALID, "blocks %u to %llu of a sequence of %u", what->first,
                           (unsigned long long)what->first + what->n - 1, sequence->n_blocks);
    if (what->priority > 7)
        return client_fail(UCM_EINVALID, "priority is %u, at most 7", what->priority);
    return 0;
}

int ucm_window_pin(struct ucm_window *w, const struct ucm_window_pin *what, int timeout_ms,
                   struct ucm_window_pinned *result)
{
    struct ucm_window_pinned sum = {0};
    int64_t deadline_ns;
    int r;

    if (!w || !what)
        return client_fail(UCM_EINVALID, "window or pin is NULL");
    r = client_window_enter(w, timeout_ms, &deadline_ns);
    if (r)
        return r;
    r = pin_check(w, what);
    if (r == 0) {
        client_sequence_ref(what->sequence);
        r = pin_all(w, what, deadline_ns, &sum);
        client_sequence_unref(what->sequence);
    }
    if (r == 0 && result)
        *result = sum;
    return client_window_leave(w, r);
}

/* ---- window.unpin ---- */

/* The window is busy. A connection that broke has no pins left. */
static int unpin(struct ucm_window *w, const struct ucm_sequence *sequence, uint32_t first,
                 uint32_t n, int64_t deadline_ns)
{
    struct msg_window_unpin m = {.first = first, .n = n};
    int r;

    if (!client_window_known(w) || sequence->attempts != w->attempts)
        return 0;
    r = client_begin_same(w->client, deadline_ns);
    if (r)
        return r;
    if (!client_window_known(w) || sequence->attempts != w->attempts) {
        client_writer_release(w->client);
        return 0;
    }
    m.window = w->id;
    m.sequence = sequence->id;
    return client_exchange_same(w->client, UCM_METHOD_WINDOW_UNPIN, &m, deadline_ns);
}

int ucm_window_unpin(struct ucm_window *w, struct ucm_sequence *sequence, uint32_t first,
                     uint32_t n, int timeout_ms)
{
    int64_t deadline_ns;
    int r;

    if (!w || !sequence || n == 0 || sequence->client != w->client)
        return client_fail(UCM_EINVALID,
                           "window or sequence is NULL, n is 0, or they are not of one "
                           "client");
    if (first >= UCM_SEQUENCE_BLOCKS_MAX)
        return client_fail(UCM_EINVALID, "first is %u; a sequence has at most %d blocks", first,
                           UCM_SEQUENCE_BLOCKS_MAX);
    if (n > UCM_SEQUENCE_BLOCKS_MAX - first)
        n = UCM_SEQUENCE_BLOCKS_MAX - first;
    r = client_window_enter(w, timeout_ms, &deadline_ns);
    if (r)
        return r;
    client_sequence_ref(sequence);
    r = unpin(w, sequence, first, n, deadline_ns);
    client_sequence_unref(sequence);
    /* It ended meanwhile, and its pins with it. */
    return client_window_leave(w, r == -UCM_EDISCONNECTED || r == -UCM_ENOTFOUND ? 0 : r);
}
