/* Shared mappings: references, and the places of referenced blocks. */
#include "client/lib/sparse/internal.h"

#include "proto/memory/mapping.h"

#include <string.h>

/* ---- mapping.ref ---- */

struct ref_call {
    struct client_call call;
    struct ucm_mapping *w;
    uint32_t n;               /* blocks asked for */
    struct ucm_place *places; /* receives `done` */
    uint32_t done;
    struct ucm_mapping_referenced sum;
};

static int granted_map(struct client_call *call, struct ucm_mapping *w,
                       const struct msg_mapping_ref_r *m)
{
    int r = client_mapping_fds_check(call, m->granted.n);

    for (uint32_t i = 0; r == 0 && i < m->granted.n; i++) {
        uint32_t slab = m->granted.p[i];

        if (slab >= w->maps.geometry.slabs || client_maps_has(&w->maps, slab))
            return ucm_error_set(&call->error, UCM_EPROTOCOL, "ucmd granted slab %u %s", slab,
                                 slab < w->maps.geometry.slabs ? "twice" : "of none such");
        r = client_maps_add(&w->maps, slab, call->fds->fd[i], &call->error);
    }
    return r;
}

static struct ucm_place place_take(const struct ucm_mapping *w, const uint8_t *from)
{
    struct ucm_wire_place place;

    memcpy(&place, from, sizeof place);
    if (!client_maps_has(&w->maps, place.slab) || place.slot >= w->maps.geometry.slots)
        return (struct ucm_place){.slab = UCM_PLACE_NONE};
    return (struct ucm_place){place.slab, place.slot, place.seq, w->openings};
}

static int ref_take_cb(struct client_call *call, const union proto_any *any)
{
    struct ref_call *ref = (struct ref_call *)call;
    const struct msg_mapping_ref_r *m = &any->mapping_ref_r;
    uint32_t n = m->places.n / UCM_PLACE_BYTES;
    int r;

    if (m->places.n % UCM_PLACE_BYTES != 0 || n == 0 || n > ref->n || (!m->more && n < ref->n) ||
        m->missing > ref->n)
        return ucm_error_set(&call->error, UCM_EPROTOCOL,
                             "ucmd's answer to mapping.ref does not fit the question");
    if (ref->w->closed) /* meanwhile, and nothing is mapped any more */
        return ucm_error_set(&call->error, UCM_EINVALID, "the mapping was closed");
    r = granted_map(call, ref->w, m);
    if (r)
        return r;
    for (uint32_t i = 0; i < n; i++) {
        ref->places[i] = place_take(ref->w, m->places.p + (size_t)i * UCM_PLACE_BYTES);
        ref->sum.placed += ref->places[i].slab != UCM_PLACE_NONE;
    }
    ref->done = n;
    ref->sum.moved = (uint32_t)m->moved;
    ref->sum.read = (uint32_t)m->read;
    /* If `more` is set, the next answer counts the rest again. */
    ref->sum.missing = m->more ? 0 : (uint32_t)m->missing;
    return 0;
}

/* As client_begin. Afterwards the daemon of the present connection knows the mapping and the
 * sequence. */
static int mapping_begin(struct ucm_mapping *w, struct ucm_sequence *sequence, int64_t deadline_ns)
{
    for (;;) {
        int r = client_sequences_begin(&sequence, 1, NULL, deadline_ns);

        if (r || client_mapping_known(w))
            return r;
        client_writer_release(w->client);
        if (w->closed)
            return client_fail(UCM_EINVALID, "the mapping was closed");
        r = client_mapping_send_open(w, deadline_ns);
        if (r)
            return r;
    }
}

/* One request. */
static int ref_send(struct ref_call *ref, const struct ucm_mapping_ref *what, uint32_t at,
                    int64_t deadline_ns)
{
    struct msg_mapping_ref m = {.first = what->first + at, .n = ref->n, .priority = what->priority};
    struct client_request q = {.method = UCM_METHOD_MAPPING_REF, .params = &m};
    struct ucm_mapping *w = ref->w;
    int r;

    client_call_init(&ref->call, w->client, ref_take_cb, NULL);
    r = mapping_begin(w, what->sequence, deadline_ns);
    if (r == 0) {
        m.mapping = w->id;
        m.sequence = what->sequence->id;
        m.timeout_ms = client_answer_ms(what->daemon_timeout_ms, deadline_ns);
        r = client_request_wait(&ref->call, &q, deadline_ns);
        if (r < 0 && r != -UCM_EBUSY && r != -UCM_EINVALID && r != -UCM_ENOTFOUND)
            client_mapping_abandon(w);
    }
    client_call_close(&ref->call);
    return r;
}

static void referenced_add(struct ucm_mapping_referenced *sum,
                           const struct ucm_mapping_referenced *more)
{
    sum->placed += more->placed;
    sum->moved += more->moved;
    sum->read += more->read;
    sum->missing += more->missing;
}

/* The daemon no longer knows the sequence, or otherwise the mapping: forgets that one's id. False:
 * it knew both. */
static bool forget(struct ucm_mapping *w, struct ucm_sequence *sequence, uint32_t tries)
{
    if (tries == 0)
        client_sequence_forget(sequence);
    else if (tries == 1)
        client_mapping_abandon(w);
    return tries < 2;
}

/* The mapping is busy. A mapping or sequence that the daemon ended is opened again, once. */
static int ref_all(struct ucm_mapping *w, const struct ucm_mapping_ref *what, int64_t deadline_ns,
                   struct ucm_mapping_referenced *sum)
{
    uint32_t at = 0, most = w->client->info.max_keys, tries = 0;
    uint64_t opening = 0;

    while (at < what->n) {
        struct ref_call ref = {
            .w = w, .n = what->n - at < most ? what->n - at : most, .places = what->places + at};
        int r = ref_send(&ref, what, at, deadline_ns);

        if (r == CLIENT_AGAIN ||
            (r == -UCM_ENOTFOUND && at == 0 && forget(w, what->sequence, tries++)))
            continue;
        if (r)
            return r;
        if (at > 0 && opening != w->openings)
            return client_fail(
                UCM_EDISCONNECTED,
                "the connection broke in the middle of a reference; take references again");
        opening = w->openings;
        referenced_add(sum, &ref.sum);
        at += ref.done;
    }
    if (atomic_load(&w->maps.opened) != opening)
        return client_fail(UCM_EDISCONNECTED,
                           "the connection broke after a reference; take references again");
    return 0;
}

static int ref_check(const struct ucm_mapping *w, const struct ucm_mapping_ref *what)
{
    const struct ucm_sequence *sequence = what->sequence;

    if (!sequence || !what->places || what->n == 0)
        return client_fail(UCM_EINVALID, "sequence or places is NULL, or n is 0");
    if (sequence->client != w->client || sequence->ns->handle.request.handle != &w->ns->handle ||
        sequence->part != w->part)
        return client_fail(UCM_EINVALID, "the sequence is not of the mapping's namespace and part");
    if (what->first >= sequence->n_blocks || what->n > sequence->n_blocks - what->first)
        return client_fail(UCM_EINVALID, "blocks %u to %llu of a sequence of %u", what->first,
                           (unsigned long long)what->first + what->n - 1, sequence->n_blocks);
    if (what->priority > 7)
        return client_fail(UCM_EINVALID, "priority is %u, at most 7", what->priority);
    return 0;
}

int ucm_mapping_ref(struct ucm_mapping *w, const struct ucm_mapping_ref *what, int timeout_ms,
                    struct ucm_mapping_referenced *result)
{
    struct ucm_mapping_referenced sum = {0};
    int64_t deadline_ns;
    int r;

    if (!w || !what)
        return client_fail(UCM_EINVALID, "mapping or reference is NULL");
    r = client_mapping_enter(w, timeout_ms, &deadline_ns);
    if (r)
        return r;
    r = ref_check(w, what);
    if (r == 0) {
        client_sequence_ref(what->sequence);
        r = ref_all(w, what, deadline_ns, &sum);
        client_sequence_unref(what->sequence);
    }
    if (r == 0 && result)
        *result = sum;
    return client_mapping_leave(w, r);
}

/* ---- mapping.unref ---- */

/* The mapping is busy. A connection that broke has no references left. */
static int unref(struct ucm_mapping *w, const struct ucm_sequence *sequence, uint32_t first,
                 uint32_t n, int64_t deadline_ns)
{
    struct msg_mapping_unref m = {.first = first, .n = n};
    int r;

    if (!client_mapping_known(w) || sequence->attempts != w->attempts)
        return 0;
    r = client_begin_same(w->client, deadline_ns);
    if (r)
        return r;
    if (!client_mapping_known(w) || sequence->attempts != w->attempts) {
        client_writer_release(w->client);
        return 0;
    }
    m.mapping = w->id;
    m.sequence = sequence->id;
    return client_exchange_same(w->client, UCM_METHOD_MAPPING_UNREF, &m, deadline_ns);
}

int ucm_mapping_unref(struct ucm_mapping *w, struct ucm_sequence *sequence, uint32_t first,
                      uint32_t n, int timeout_ms)
{
    int64_t deadline_ns;
    int r;

    if (!w || !sequence || n == 0 || sequence->client != w->client)
        return client_fail(UCM_EINVALID,
                           "mapping or sequence is NULL, n is 0, or they are not of one "
                           "client");
    if (first >= UCM_SEQUENCE_BLOCKS_MAX)
        return client_fail(UCM_EINVALID, "first is %u; a sequence has at most %d blocks", first,
                           UCM_SEQUENCE_BLOCKS_MAX);
    if (n > UCM_SEQUENCE_BLOCKS_MAX - first)
        n = UCM_SEQUENCE_BLOCKS_MAX - first;
    r = client_mapping_enter(w, timeout_ms, &deadline_ns);
    if (r)
        return r;
    client_sequence_ref(sequence);
    r = unref(w, sequence, first, n, deadline_ns);
    client_sequence_unref(sequence);
    /* It ended meanwhile, and its references with it. */
    return client_mapping_leave(w, r == -UCM_EDISCONNECTED || r == -UCM_ENOTFOUND ? 0 : r);
}
