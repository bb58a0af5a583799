/* mapping.ref and mapping.unref. A request walks its blocks with a cursor: one in a mapping slot of
 * the tenant is referenced at once; any other waits until the cache has moved or read it there. In
 * an iteration of the event loop a request begins a bounded number of blocks, and a bounded number
 * of its bytes are under way.
 *
 * Once all have a place or can't get one, or at the deadline, the answer lists the places. It
 * brings the descriptors of slabs that the client does not map yet. */
#include "daemon/mapping/mapping.h"

#include "daemon/base/memfd.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BLOCKS_PER_TURN 512
/* Blocks of one mapping.ref that are being read or copied, at most. */
#define WAITS_MAX 256
#define WAIT_BYTES_MAX (UINT64_C(256) << 20)
/* While another tenant's references end, a reference looks again so often. */
#define AGAIN_MS 2

struct ref_request {
    struct request r;
    struct mapping *w;
    struct mapping_refs *p;
    struct sequence *ch;
    uint32_t first, n, cursor;
    uint32_t waits_n, moved, read, missing;
    uint8_t priority;
    bool ref; /* else it ends some */
    bool stopping, pumping, yielded;
    bool full;   /* a block found no space in the mapping: the others need not search for some */
    bool rewind; /* and another tenant's references end to make some */
    struct list waits;
    struct ref_wait *spare;
    struct cache_retry retry; /* for the next iteration, or for space */
    struct deadline again;
    struct ucm_wire_place *places; /* n, after the struct */
};

struct ref_wait {
    struct mapping_move m;
    struct list link;
    struct ref_request *q;
    uint32_t block;
};

static struct request_modules *modules_of(const struct ref_request *q)
{
    return &q->r.s->rq->modules;
}

static struct cache *cache_of_ref(const struct ref_request *q)
{
    return modules_of(q)->cache;
}

static struct relocations *relocations_of(const struct ref_request *q)
{
    return &mappings_of(q->w)->relocations;
}

static void ref_pump(struct ref_request *q);

/* ---- the answer ---- */

struct granted {
    uint32_t slabs[UCM_MAX_FRAME_FDS], n;
    int fds[UCM_MAX_FRAME_FDS];
};

static void granted_close(struct granted *l)
{
    for (uint32_t i = 0; i < l->n; i++)
        close(l->fds[i]);
}

/* Adds that slab, if the mapping does not map it and it is not there yet. 1: it is; 0: there is no
 * room for it in this answer; -EMFILE. */
static int granted_add(const struct ref_request *q, struct granted *l, uint32_t room, uint32_t slab)
{
    int fd;

    if (mapped_slabs_has(&q->w->map, slab))
        return 1;
    for (uint32_t i = 0; i < l->n; i++)
        if (l->slabs[i] == slab)
            return 1;
    if (l->n == room)
        return 0;
    fd = memfd_grant(grant_fd(modules_of(q)->arena, slab));
    if (fd < 0)
        return -EMFILE;
    l->slabs[l->n] = slab;
    l->fds[l->n++] = fd;
    return 1;
}

static bool place_of(const struct ref_request *q, uint32_t block, struct ucm_wire_place *out)
{
    struct grant_place place;

    *out = (struct ucm_wire_place){.slab = UCM_PLACE_NONE};
    if (q->p->slab[block] == UCM_PLACE_NONE ||
        !mapping_place(relocations_of(q), q->ch->blocks[block].base, q->ch->part, &place))
        return false;
    *out = (struct ucm_wire_place){place.mapping, place.slot, place.seq};
    return true;
}

/* The first places of the answer, as many as have their slabs' descriptors: how many. *none: of
 * them are not in the mapping. Or -errno. */
static int64_t places_list(struct ref_request *q, struct granted *l, uint32_t *none)
{
    uint32_t room = conn_fds_room(q->r.s->conn);

    room = room < UCM_MAX_FRAME_FDS ? room : UCM_MAX_FRAME_FDS;
    for (uint32_t i = 0; i < q->n; i++) {
        int rc = 1;

        if (place_of(q, q->first + i, &q->places[i]))
            rc = granted_add(q, l, room, q->places[i].slab);
        else
            ++*none;
        if (rc < 0)
            return rc;
        if (rc == 0)
            return i;
    }
    return q->n;
}

static void answer_error(int64_t rc, struct ucm_error *e)
{
    if (rc < 0)
        ucm_error_set(e, UCM_WIRE_NO_MEMORY, "the daemon has no descriptor left for a mapping");
    else
        ucm_error_set(
            e, UCM_WIRE_BUSY,
            "descriptors of earlier answers were not read; read them, and reference again");
}

/* The answer of a reference. False: it is the error *e. */
static bool ref_answer(struct ref_request *q, struct ucm_error *e)
{
    struct msg_mapping_ref_r r = {.moved = q->moved, .read = q->read, .missing = q->missing};
    struct granted l = {.n = 0};
    uint32_t none = 0;
    int64_t n = places_list(q, &l, &none);

    if (n <= 0) {
        granted_close(&l);
        answer_error(n, e);
        return false;
    }
    for (uint32_t i = 0; i < l.n; i++) {
        mapped_slabs_grant(&q->w->map, l.slabs[i]);
        grant_map(modules_of(q)->arena, l.slabs[i]);
    }
    if (n == q->n && none > q->missing)
        modules_of(q)->metrics->mapping_full += none - q->missing;
    r.places = (struct proto_bin){(const uint8_t *)q->places, (uint32_t)n * UCM_PLACE_BYTES};
    r.granted = (struct proto_u32s){l.slabs, l.n};
    r.more = n < q->n;
    session_reply_fds(q->r.s, q->r.msgid, q->r.method, &r, l.fds, l.n);
    return true;
}

/* ---- the end ---- */

static void ref_finish(struct ref_request *q)
{
    struct session *s = q->r.s;
    struct mapping *w = q->w;
    struct sequence *ch = q->ch;
    struct mapping_refs *p = q->p;
    struct ucm_error e = {0};

    assert(q->waits_n == 0);
    cache_retry_cancel(&q->retry);
    deadline_disarm(s->rq->modules.deadlines, &q->again);
    free(q->spare);
    if (q->ref && !s->closing)
        q->r.silent = ref_answer(q, &e);
    if (p) {
        p->requests--;
        refs_put(p);
    }
    /* Sequence and mapping may go now, and with the request the session. */
    s->n_requests++;
    sequence_unref(ch);
    mapping_unref(w);
    s->n_requests--;
    request_end(&q->r, e.code ? &e : NULL, NULL);
}

/* ---- blocks ---- */

/* The request has one reference to the block's part, which lies in a mapping slot. */
static void block_take(struct ref_request *q, uint32_t block, const struct mapping_move *m)
{
    struct metrics *metrics = modules_of(q)->metrics;

    if (q->p->slab[block] != UCM_PLACE_NONE) { /* another request was faster */
        cache_put(cache_of_ref(q), q->ch->blocks[block].base, q->ch->part);
        return;
    }
    if (!refs_add(q->p, block))
        return;
    q->moved += m->copied;
    q->read += m->read;
    metrics->mapping_moves += m->copied;
}

/* Other failures are for want of space or time. */
static void block_failed(struct ref_request *q, int status)
{
    if (status == -ENOSPC) {
        q->full = true;
        q->rewind = q->rewind || mapping_claim(q->w);
    }
    q->missing += status == -ENOENT || status == -EIO || status == -EBADMSG;
}

static void wait_ended(struct ref_request *q, struct ref_wait *pw)
{
    list_remove(&pw->link);
    q->waits_n--;
    limit_give(q->r.s->peer.owner, LIMIT_MOVES, 1);
}

static void moved_cb(struct mapping_move *m, int status)
{
    struct ref_wait *pw = LIST_ENTRY(m, struct ref_wait, m);
    struct ref_request *q = pw->q;

    wait_ended(q, pw);
    if (status == 0)
        block_take(q, pw->block, m);
    else
        block_failed(q, status);
    free(pw);
    ref_pump(q);
}

static bool spare_reserve(struct ref_request *q)
{
    if (!q->spare)
        q->spare = calloc(1, sizeof(*q->spare));
    return q->spare != NULL;
}

/* 0: begun, or ended; -EBUSY: no slot now. */
static int block_begin(struct ref_request *q, uint32_t block)
{
    struct grant_place place;
    struct ref_wait *pw;
    int rc;

    if (q->p->slab[block] != UCM_PLACE_NONE || !mapping_may_ref(q->w))
        return 0;
    if (!spare_reserve(q)) {
        block_failed(q, -ENOMEM);
        return 0;
    }
    if (!sequence_has(q->ch, block)) {
        block_failed(q, -ENOENT);
        return 0;
    }
    if (bypass_on(q->r.s->rq, q->w->ns, BYPASS_LOAD)) {
        modules_of(q)->metrics->bypass_load_blocks++;
        q->missing++;
        return 0;
    }
    if (q->full &&
        !mapping_place(relocations_of(q), q->ch->blocks[block].base, q->ch->part, &place))
        return 0;
    pw = q->spare;
    *pw =
        (struct ref_wait){.q = q,
                          .block = block,
                          .m = {.priority = q->priority, .small = q->n <= 16, .done_cb = moved_cb}};
    rc = mapping_move(relocations_of(q), q->ch->blocks[block].base, q->ch->part,
                      q->w->tenant->group, &pw->m);
    if (rc == CACHE_READY) {
        block_take(q, block, &pw->m);
    } else if (rc == CACHE_PENDING) {
        q->spare = NULL;
        q->waits_n++;
        limit_add(q->r.s->peer.owner, LIMIT_MOVES, 1); /* one at least is anybody's */
        list_push_back(&q->waits, &pw->link);
    } else if (rc == -EBUSY) {
        return rc;
    } else {
        block_failed(q, rc);
    }
    return 0;
}

/* ---- the pump ---- */

static bool may_begin(const struct ref_request *q)
{
    return q->waits_n == 0 ||
           (q->waits_n < WAITS_MAX && q->waits_n * mapping_slot_bytes(q->w) < WAIT_BYTES_MAX &&
            limit_room(q->r.s->peer.owner, LIMIT_MOVES) > 0);
}

static void again_cb(struct deadline *d)
{
    struct ref_request *q = LIST_ENTRY(d, struct ref_request, again);

    q->yielded = q->full = q->rewind = false;
    q->cursor = q->missing = 0;
    ref_pump(q);
}

static void ref_retry_cb(struct cache_retry *r)
{
    struct ref_request *q = LIST_ENTRY(r, struct ref_request, retry);

    q->yielded = false;
    ref_pump(q);
}

static void ref_yield(struct ref_request *q)
{
    q->yielded = true;
    cache_retry_cancel(&q->retry);
    (void)cache_wait_for(cache_of_ref(q), &q->retry, WAIT_TURN);
}

/* Waits for a place among its tenant's relocations. Passes over a block if nothing under way could
 * free one. */
static void ref_park(struct ref_request *q)
{
    if (!list_empty(&q->retry.link) || cache_wait_for(cache_of_ref(q), &q->retry, WAIT_OTHER))
        return;
    block_failed(q, -EBUSY);
    q->cursor++;
    ref_yield(q);
}

static void refs_begin(struct ref_request *q)
{
    uint32_t left = BLOCKS_PER_TURN;

    while (!q->yielded && q->cursor < q->n && may_begin(q)) {
        if (left-- == 0) {
            ref_yield(q);
            return;
        }
        if (block_begin(q, q->first + q->cursor) != 0) {
            ref_park(q);
            return;
        }
        q->cursor++;
    }
}

static void unref_some(struct ref_request *q)
{
    uint32_t at = q->first + q->cursor, most = MAPPING_BLOCKS_PER_TURN;

    if (q->yielded)
        return;
    if (q->p->n > 0 && !refs_end(q->p, &at, q->first + q->n, &most)) {
        q->cursor = at - q->first;
        ref_yield(q);
    } else {
        q->cursor = q->n;
    }
}

static void ref_pump(struct ref_request *q)
{
    if (q->pumping)
        return;
    q->pumping = true;
    if (q->stopping)
        q->cursor = q->n;
    else if (q->ref)
        refs_begin(q);
    else
        unref_some(q);
    q->pumping = false;
    if (q->cursor < q->n || q->waits_n > 0)
        return;
    if (q->rewind && !q->stopping)
        deadline_arm(modules_of(q)->deadlines, &q->again, uv_now(modules_of(q)->loop) + AGAIN_MS,
                     again_cb);
    else
        ref_finish(q);
}

static void ref_stop_cb(struct request *r)
{
    struct ref_request *q = LIST_ENTRY(r, struct ref_request, r);

    /* What gives back goes on to its end, which is near. */
    if (q->stopping || (!q->ref && !r->s->closing && !q->w->closing && !q->ch->closing))
        return;
    q->stopping = true;
    while (!list_empty(&q->waits)) {
        struct ref_wait *pw = LIST_ENTRY(q->waits.next, struct ref_wait, link);

        mapping_move_cancel(relocations_of(q), &pw->m);
        wait_ended(q, pw);
        block_failed(q, -ETIMEDOUT);
        free(pw);
    }
    ref_pump(q);
}

void ref_requests_stop(struct session *s, const struct mapping *w, const struct sequence *ch)
{
    struct list *node, *next;

    /* None of them frees the mapping, the sequence or the session: the caller uses them. */
    for (node = s->requests.next; node != &s->requests; node = next) {
        struct request *r = LIST_ENTRY(node, struct request, link);
        struct ref_request *q = LIST_ENTRY(r, struct ref_request, r);

        next = node->next;
        if ((r->method == UCM_METHOD_MAPPING_REF || r->method == UCM_METHOD_MAPPING_UNREF) &&
            (q->w == w || q->ch == ch))
            ref_stop_cb(r);
    }
}

static void sequence_refs_stop(struct sequence *ch)
{
    ref_requests_stop(ch->s, NULL, ch);
}

void refs_init(struct requests *rq)
{
    retrieval_of(rq)->refs = (struct sequence_refs){sequence_refs_stop, sequence_refs_end_all};
}

/* ---- the methods ---- */

static int range_check(struct call *call, const struct mapping *w, const struct sequence *ch,
                       uint64_t first, uint64_t n)
{
    if (ch->space->base != w->ns || ch->part != w->part)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "sequence %u is of another namespace or part than mapping %u",
                             ch->name, w->name);
    if (call->method == UCM_METHOD_MAPPING_REF && first + n > ch->n)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "blocks %llu to %llu; this sequence has %u", (unsigned long long)first,
                             (unsigned long long)(first + n - 1), ch->n);
    return 0;
}

/* NULL with call->error. */
static struct ref_request *ref_request_new(struct call *call, uint64_t mapping, uint64_t sequence,
                                           uint64_t first, uint64_t n, uint64_t timeout_ms)
{
    struct mapping *w = call_mapping(call, mapping);
    struct sequence *ch = w ? call_sequence(call, sequence) : NULL;
    bool ref = call->method == UCM_METHOD_MAPPING_REF;
    size_t bytes = sizeof(struct ref_request) + (ref ? n * sizeof(struct ucm_wire_place) : 0);
    struct ref_request *q;

    if (!ch || range_check(call, w, ch, first, n) != 0)
        return NULL;
    q = request_new(call, bytes, 0, timeout_ms, ref_stop_cb);
    if (!q)
        return NULL;
    q->w = w;
    q->ch = ch;
    q->first = (uint32_t)first;
    q->n = (uint32_t)n;
    q->ref = ref;
    q->places = (struct ucm_wire_place *)(q + 1);
    list_init(&q->waits);
    list_init(&q->retry.link);
    q->retry.retry_cb = ref_retry_cb;
    q->p = refs_get(w, ch);
    if (!q->p) {
        ucm_error_set(
            &call->error, UCM_WIRE_BUSY,
            "requests and sequences take as much memory as limits.frame_memory allows, or "
            "this user's three quarters of it; try again");
        request_refuse(&q->r, call);
        return NULL;
    }
    q->p->requests++;
    w->requests++;
    sequence_ref(ch);
    return q;
}

int method_mapping_ref(struct call *call)
{
    const struct msg_mapping_ref *m = &call->params.mapping_ref;
    struct ref_request *q =
        ref_request_new(call, m->mapping, m->sequence, m->first, m->n, m->timeout_ms);

    if (!q)
        return -call->error.code;
    q->priority = (uint8_t)m->priority;
    ref_pump(q);
    return 0;
}

int method_mapping_unref(struct call *call)
{
    const struct msg_mapping_unref *m = &call->params.mapping_unref;
    struct ref_request *q;

    call->gives_back = true;
    q = ref_request_new(call, m->mapping, m->sequence, m->first, m->n, 0);
    if (!q)
        return -call->error.code;
    ref_pump(q);
    return 0;
}
