/* window.pin and window.unpin. A pin walks its blocks with a cursor: one that lies in a window slot
 * of the tenant is pinned at once, any other waits until the cache has moved or read it there. In a
 * iteration of the event loop a pin begins a bounded number, and a bounded number of its bytes are
 * under way.
 *
 * When all have a place or can't get one, or the deadline is here, the answer lists the places, and
 * brings the descriptors of slabs that the window does not map yet. */
#include "daemon/window/window.h"

#include "daemon/base/memfd.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BLOCKS_PER_TURN 512
/* Of one pin, being read or copied. */
#define WAITS_MAX 256
#define WAIT_BYTES_MAX (UINT64_C(256) << 20)
/* While another tenant's pins end, a pin looks again so often. */
#define AGAIN_MS 2

struct pin_request {
    struct request r;
    struct window *w;
    struct window_pins *p;
    struct sequence *ch;
    uint32_t first, n, cursor;
    uint32_t waits_n, moved, read, missing;
    uint8_t priority;
    bool pin; /* else it is an unpin */
    bool stopping, pumping, yielded;
    bool full;   /* a block found no space in the window: the others need not search for some */
    bool rewind; /* and another tenant's pins end to make some */
    struct list waits;
    struct pin_wait *spare;
    struct cache_retry retry; /* for the next iteration, or for space */
    struct deadline again;
    struct ucm_wire_place *places; /* n, behind the struct */
};

struct pin_wait {
    struct window_move m;
    struct list link;
    struct pin_request *q;
    uint32_t block;
};

static struct request_modules *modules_of(const struct pin_request *q)
{
    return &q->r.s->rq->modules;
}

static struct cache *cache_of_pin(const struct pin_request *q)
{
    return modules_of(q)->cache;
}

static struct relocations *relocations_of(const struct pin_request *q)
{
    return &windows_of(q->w)->relocations;
}

static void pin_pump(struct pin_request *q);

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

/* Adds that slab, if the window does not map it and it is not there yet. 1: it is; 0: there is no
 * room for it in this answer; -EMFILE. */
static int granted_add(const struct pin_request *q, struct granted *l, uint32_t room, uint32_t slab)
{
    int fd;

    if (window_map_has(&q->w->map, slab))
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

static bool place_of(const struct pin_request *q, uint32_t block, struct ucm_wire_place *out)
{
    struct grant_place place;

    *out = (struct ucm_wire_place){.slab = UCM_PLACE_NONE};
    if (q->p->slab[block] == UCM_PLACE_NONE ||
        !window_place(relocations_of(q), q->ch->blocks[block].base, q->ch->part, &place))
        return false;
    *out = (struct ucm_wire_place){place.window, place.slot, place.seq};
    return true;
}

/* The first places of the answer, as many as have their slabs' descriptors: how many. *none: of
 * them are not in the window. Or -errno. */
static int64_t places_list(struct pin_request *q, struct granted *l, uint32_t *none)
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
        ucm_error_set(e, UCM_WIRE_NO_MEMORY, "the daemon has no descriptor left for a window");
    else
        ucm_error_set(e, UCM_WIRE_BUSY,
                      "descriptors of earlier answers were not read; read them, and pin again");
}

/* The answer of a pin. False: it is the error *e. */
static bool pin_answer(struct pin_request *q, struct ucm_error *e)
{
    struct msg_window_pin_r r = {.moved = q->moved, .read = q->read, .missing = q->missing};
    struct granted l = {.n = 0};
    uint32_t none = 0;
    int64_t n = places_list(q, &l, &none);

    if (n <= 0) {
        granted_close(&l);
        answer_error(n, e);
        return false;
    }
    for (uint32_t i = 0; i < l.n; i++) {
        window_map_grant(&q->w->map, l.slabs[i]);
        grant_map(modules_of(q)->arena, l.slabs[i]);
    }
    if (n == q->n && none > q->missing)
        modules_of(q)->metrics->window_full += none - q->missing;
    r.places = (struct proto_bin){(const uint8_t *)q->places, (uint32_t)n * UCM_PLACE_BYTES};
    r.granted = (struct proto_u32s){l.slabs, l.n};
    r.more = n < q->n;
    session_reply_fds(q->r.s, q->r.msgid, q->r.method, &r, l.fds, l.n);
    return true;
}

/* ---- the end ---- */

static void pin_finish(struct pin_request *q)
{
    struct session *s = q->r.s;
    struct window *w = q->w;
    struct sequence *ch = q->ch;
    struct window_pins *p = q->p;
    struct ucm_error e = {0};

    assert(q->waits_n == 0);
    cache_retry_cancel(&q->retry);
    deadline_disarm(s->rq->modules.deadlines, &q->again);
    free(q->spare);
    if (q->pin && !s->closing)
        q->r.silent = pin_answer(q, &e);
    if (p) {
        p->requests--;
        pins_put(p);
    }
    /* Sequence and window may go now, and with the request the session. */
    s->n_requests++;
    sequence_unref(ch);
    window_unref(w);
    s->n_requests--;
    request_end(&q->r, e.code ? &e : NULL, NULL);
}

/* ---- blocks ---- */

/* The request has one reference to the block's part, which lies in a window slot. */
static void block_take(struct pin_request *q, uint32_t block, const struct window_move *m)
{
    struct metrics *metrics = modules_of(q)->metrics;

    if (q->p->slab[block] != UCM_PLACE_NONE) { /* another request was faster */
        cache_put(cache_of_pin(q), q->ch->blocks[block].base, q->ch->part);
        return;
    }
    if (!pins_add(q->p, block))
        return;
    q->moved += m->copied;
    q->read += m->read;
    metrics->window_moves += m->copied;
}

/* Other failures are for want of space or time. */
static void block_failed(struct pin_request *q, int status)
{
    if (status == -ENOSPC) {
        q->full = true;
        q->rewind = q->rewind || window_claim(q->w);
    }
    q->missing += status == -ENOENT || status == -EIO || status == -EBADMSG;
}

static void wait_ended(struct pin_request *q, struct pin_wait *pw)
{
    list_remove(&pw->link);
    q->waits_n--;
    limit_give(q->r.s->peer.owner, LIMIT_MOVES, 1);
}

static void moved_cb(struct window_move *m, int status)
{
    struct pin_wait *pw = LIST_ENTRY(m, struct pin_wait, m);
    struct pin_request *q = pw->q;

    wait_ended(q, pw);
    if (status == 0)
        block_take(q, pw->block, m);
    else
        block_failed(q, status);
    free(pw);
    pin_pump(q);
}

static bool spare_reserve(struct pin_request *q)
{
    if (!q->spare)
        q->spare = calloc(1, sizeof(*q->spare));
    return q->spare != NULL;
}

/* 0: begun, or ended; -EBUSY: no slot now. */
static int block_begin(struct pin_request *q, uint32_t block)
{
    struct grant_place place;
    struct pin_wait *pw;
    int rc;

    if (q->p->slab[block] != UCM_PLACE_NONE || !window_may_pin(q->w))
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
    if (q->full && !window_place(relocations_of(q), q->ch->blocks[block].base, q->ch->part, &place))
        return 0;
    pw = q->spare;
    *pw =
        (struct pin_wait){.q = q,
                          .block = block,
                          .m = {.priority = q->priority, .small = q->n <= 16, .done_cb = moved_cb}};
    rc = window_move(relocations_of(q), q->ch->blocks[block].base, q->ch->part, q->w->tenant->group,
                     &pw->m);
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

static bool may_begin(const struct pin_request *q)
{
    return q->waits_n == 0 ||
           (q->waits_n < WAITS_MAX && q->waits_n * window_slot_bytes(q->w) < WAIT_BYTES_MAX &&
            limit_room(q->r.s->peer.owner, LIMIT_MOVES) > 0);
}

static void again_cb(struct deadline *d)
{
    struct pin_request *q = LIST_ENTRY(d, struct pin_request, again);

    q->yielded = q->full = q->rewind = false;
    q->cursor = q->missing = 0;
    pin_pump(q);
}

static void pin_retry_cb(struct cache_retry *r)
{
    struct pin_request *q = LIST_ENTRY(r, struct pin_request, retry);

    q->yielded = false;
    pin_pump(q);
}

static void pin_yield(struct pin_request *q)
{
    q->yielded = true;
    cache_retry_cancel(&q->retry);
    (void)cache_wait_for(cache_of_pin(q), &q->retry, WAIT_TURN);
}

/* Waits for a place among its tenant's relocations. Passes over a block if nothing under way could
 * free one. */
static void pin_park(struct pin_request *q)
{
    if (!list_empty(&q->retry.link) || cache_wait_for(cache_of_pin(q), &q->retry, WAIT_OTHER))
        return;
    block_failed(q, -EBUSY);
    q->cursor++;
    pin_yield(q);
}

static void pins_begin(struct pin_request *q)
{
    uint32_t left = BLOCKS_PER_TURN;

    while (!q->yielded && q->cursor < q->n && may_begin(q)) {
        if (left-- == 0) {
            pin_yield(q);
            return;
        }
        if (block_begin(q, q->first + q->cursor) != 0) {
            pin_park(q);
            return;
        }
        q->cursor++;
    }
}

static void unpin_some(struct pin_request *q)
{
    uint32_t at = q->first + q->cursor, most = WINDOW_BLOCKS_PER_TURN;

    if (q->yielded)
        return;
    if (q->p->n > 0 && !pins_end(q->p, &at, q->first + q->n, &most)) {
        q->cursor = at - q->first;
        pin_yield(q);
    } else {
        q->cursor = q->n;
    }
}

static void pin_pump(struct pin_request *q)
{
    if (q->pumping)
        return;
    q->pumping = true;
    if (q->stopping)
        q->cursor = q->n;
    else if (q->pin)
        pins_begin(q);
    else
        unpin_some(q);
    q->pumping = false;
    if (q->cursor < q->n || q->waits_n > 0)
        return;
    if (q->rewind && !q->stopping)
        deadline_arm(modules_of(q)->deadlines, &q->again, uv_now(modules_of(q)->loop) + AGAIN_MS,
                     again_cb);
    else
        pin_finish(q);
}

static void pin_stop_cb(struct request *r)
{
    struct pin_request *q = LIST_ENTRY(r, struct pin_request, r);

    /* What gives back goes on to its end, which is near. */
    if (q->stopping || (!q->pin && !r->s->closing && !q->w->closing && !q->ch->closing))
        return;
    q->stopping = true;
    while (!list_empty(&q->waits)) {
        struct pin_wait *pw = LIST_ENTRY(q->waits.next, struct pin_wait, link);

        window_move_cancel(relocations_of(q), &pw->m);
        wait_ended(q, pw);
        block_failed(q, -ETIMEDOUT);
        free(pw);
    }
    pin_pump(q);
}

void pin_requests_stop(struct session *s, const struct window *w, const struct sequence *ch)
{
    struct list *node, *next;

    /* None of them frees the window, the sequence or the session: the caller uses them. */
    for (node = s->requests.next; node != &s->requests; node = next) {
        struct request *r = LIST_ENTRY(node, struct request, link);
        struct pin_request *q = LIST_ENTRY(r, struct pin_request, r);

        next = node->next;
        if ((r->method == UCM_METHOD_WINDOW_PIN || r->method == UCM_METHOD_WINDOW_UNPIN) &&
            (q->w == w || q->ch == ch))
            pin_stop_cb(r);
    }
}

static void sequence_pins_stop(struct sequence *ch)
{
    pin_requests_stop(ch->s, NULL, ch);
}

void pins_init(struct requests *rq)
{
    retrieval_of(rq)->pins = (struct sequence_pins){sequence_pins_stop, sequence_pins_end_all};
}

/* ---- the methods ---- */

static int range_check(struct call *call, const struct window *w, const struct sequence *ch,
                       uint64_t first, uint64_t n)
{
    if (ch->space->base != w->ns || ch->part != w->part)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "sequence %u is of another namespace or part than window %u", ch->name,
                             w->name);
    if (call->method == UCM_METHOD_WINDOW_PIN && first + n > ch->n)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "blocks %llu to %llu; this sequence has %u", (unsigned long long)first,
                             (unsigned long long)(first + n - 1), ch->n);
    return 0;
}

/* NULL with call->error. */
static struct pin_request *pin_request_new(struct call *call, uint64_t window, uint64_t sequence,
                                           uint64_t first, uint64_t n, uint64_t deadline_ms)
{
    struct window *w = call_window(call, window);
    struct sequence *ch = w ? call_sequence(call, sequence) : NULL;
    bool pin = call->method == UCM_METHOD_WINDOW_PIN;
    size_t bytes = sizeof(struct pin_request) + (pin ? n * sizeof(struct ucm_wire_place) : 0);
    struct pin_request *q;

    if (!ch || range_check(call, w, ch, first, n) != 0)
        return NULL;
    q = request_new(call, bytes, 0, deadline_ms, pin_stop_cb);
    if (!q)
        return NULL;
    q->w = w;
    q->ch = ch;
    q->first = (uint32_t)first;
    q->n = (uint32_t)n;
    q->pin = pin;
    q->places = (struct ucm_wire_place *)(q + 1);
    list_init(&q->waits);
    list_init(&q->retry.link);
    q->retry.retry_cb = pin_retry_cb;
    q->p = pins_get(w, ch);
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

int method_window_pin(struct call *call)
{
    const struct msg_window_pin *m = &call->params.window_pin;
    struct pin_request *q =
        pin_request_new(call, m->window, m->sequence, m->first, m->n, m->deadline_ms);

    if (!q)
        return -call->error.code;
    q->priority = (uint8_t)m->priority;
    pin_pump(q);
    return 0;
}

int method_window_unpin(struct call *call)
{
    const struct msg_window_unpin *m = &call->params.window_unpin;
    struct pin_request *q;

    call->gives_back = true;
    q = pin_request_new(call, m->window, m->sequence, m->first, m->n, 0);
    if (!q)
        return -call->error.code;
    pin_pump(q);
    return 0;
}
