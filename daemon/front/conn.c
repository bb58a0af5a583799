/* A connection's life and its output.
 *
 * conn_close runs the session's close_cb, which stops requests and may free the session. So it is
 * called from the loop's callbacks only. Functions that a session calls (conn_send, conn_offend,
 * conn_drop) at most mark the connection CONN_DRAINING; the flusher closes it. */
#include "daemon/front/front.h"
#include "daemon/front/internal.h"

#include "daemon/base/log.h"
#include "daemon/base/rights.h"
#include "daemon/front/peer.h"

#include <assert.h>
#include <errno.h>
#include <linux/sockios.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define OUT_HIGH_BYTES (1u << 20)
#define OUT_KEPT_BYTES (64u << 10) /* of an empty buffer */
/* Of frames, in a turn of the loop. */
#define TICK_NS 100000u
#define SLICE_NS 200000u /* of one connection's among them */
/* The same, and of a connection's slice, while several tenants use the loop: another one was served in the last SHARED_NS of
 * service. */
#define SHARED_TICK_NS 30000u
#define SHARED_NS 20000000u
/* What a slice is charged at most, beyond what the dearest frame takes: the rest was a pause of the daemon or its machine. */
#define CHARGED_NS 20000000u
/* Of connections that are served out of their tenants' turns, in a turn of the loop: those that have ended, and answers
 * that wait to be written. */
#define ASIDE_NS 200000u
#define DRAIN_MS 1000 /* for a dropped peer to read its last answers */

static void poll_cb(uv_poll_t *poll, int status, int events);
static void out_free(struct conn *c);

bool conn_backed_up(const struct conn *c)
{
    return c->out_n - c->out_at >= OUT_HIGH_BYTES;
}

/* ---- how many there may be ---- */

/* What each connection takes; operators may all be silent. */
static const enum limit taken[] = {LIMIT_DESCRIPTORS, LIMIT_CONNECTIONS, LIMIT_SILENT};

static unsigned taken_by(const struct peer *peer)
{
    return peer->admin ? 2 : 3;
}

/* 0, or -EUSERS with *e. */
static int conn_admit(const struct peer *peer, struct ucm_error *e)
{
    for (unsigned i = 0; i < taken_by(peer); i++) {
        if (limit_take(peer->owner, taken[i], 1, e) == 0)
            continue;
        while (i > 0)
            limit_give(peer->owner, taken[--i], 1);
        return -EUSERS;
    }
    return 0;
}

static void silence_end(struct conn *c)
{
    if (!c->greeted && !c->peer.admin)
        limit_give(c->peer.owner, LIMIT_SILENT, 1);
}

void conn_welcome(struct conn *c)
{
    if (c->state != CONN_CLOSED)
        silence_end(c);
    c->greeted = true;
}

/* ---- life ---- */

/* Reads while the peer reads, writes while there is something to write; nothing before the turn of what
 * is ready. While the peer does not read, the daemon does not ask for its half close: epoll would tell
 * of it again and again. A full close shows in the write. */
static void conn_interest(struct conn *c)
{
    bool reads = !c->stalled && !conn_backed_up(c), writes = c->out_n > c->out_at;
    int events = 0, rc;

    if (!c->ready && (reads || !writes || c->state != CONN_OPEN))
        events |= UV_DISCONNECT;
    if (!c->ready && reads && c->state == CONN_OPEN)
        events |= UV_READABLE;
    if (!c->ready && writes)
        events |= UV_WRITABLE;
    if (events == c->events)
        return;
    rc = events ? uv_poll_start(&c->poll, events, poll_cb) : uv_poll_stop(&c->poll);
    if (rc != 0) {
        conn_close(c, uv_strerror(rc), false);
        return;
    }
    c->events = events;
}

static void conn_release(struct conn *c)
{
    reaper_close_socket(c->front->reaper, c->fd, c->peer.owner);
    limit_owner_unref(c->peer.owner);
    free(c);
}

static void poll_closed_cb(uv_handle_t *handle)
{
    struct conn *c = handle->data;
    struct front *f = c->front;

    /* Freed only here: conn_close may run while one of these frames is being handled. */
    conn_input_free(c);
    c->polling = false;
    if (c->freed)
        conn_release(c);
    else
        (void)shutdown(c->fd,
                       SHUT_RDWR); /* devices still poll the socket; the peer need not wait */
    front_handle_closed(f);
}

void conn_close(struct conn *c, const char *reason, bool offence)
{
    struct front *f = c->front;

    if (c->state == CONN_CLOSED)
        return;
    c->state = CONN_CLOSED;
    if (offence) {
        f->metrics->connections_dropped++;
        log_warn("front", "dropped", "conn=%llu pid=%d uid=%u reason=\"%s\"",
                 (unsigned long long)c->id, (int)c->peer.pid, (unsigned)c->peer.uid, reason);
    } else {
        log_debug("front", "closed", "conn=%llu pid=%d reason=\"%s\"", (unsigned long long)c->id,
                  (int)c->peer.pid, reason);
    }
    deadline_disarm(f->deadlines, &c->frame_deadline);
    deadline_disarm(f->deadlines, &c->unread_deadline);
    list_remove(&c->link);
    list_remove(&c->link_unflushed);
    list_remove(&c->link_ready);
    silence_end(c);
    limit_give(c->peer.owner, LIMIT_CONNECTIONS, 1);
    limit_give(c->peer.owner, LIMIT_FRAMES, c->in_cap);
    f->n_conns--;
    f->metrics->connections = f->n_conns;
    parcels_drop(c);
    out_free(c);
    if (c->polling)
        uv_close((uv_handle_t *)&c->poll, poll_closed_cb);
    if (c->session)
        f->handler.close_cb(c->session);
}

void conn_free(struct conn *c)
{
    assert(c->state == CONN_CLOSED && !c->freed);
    c->freed = true;
    if (!c->polling)
        conn_release(c);
}

static int conn_alloc(struct front *f, int fd, const struct peer *peer, struct conn **out)
{
    struct conn *c = calloc(1, sizeof(*c));

    if (!c)
        return -ENOMEM;
    if (uv_poll_init(f->loop, &c->poll, fd) != 0) {
        free(c);
        return -ENOMEM;
    }
    c->front = f;
    c->peer = *peer;
    c->who = (struct fair_who){limit_number(peer->owner), FAIR_WEIGHT};
    c->fd = fd;
    c->id = ++f->next_id;
    list_init(&c->link_unflushed);
    list_init(&c->link_ready);
    list_init(&c->parcels);
    *out = c;
    return 0;
}

/* With an owner, as long as this is admitted. 0, or -errno with *e. */
static int conn_begin(struct front *f, int fd, struct peer *peer, struct conn **out,
                      struct ucm_error *e)
{
    int rc;

    peer->owner = limits_uid(f->limits, peer->tenant, peer->uid, peer->admin);
    if (!peer->owner)
        return -ENOMEM;
    rc = conn_admit(peer, e);
    if (rc == 0) {
        rc = conn_alloc(f, fd, peer, out);
        for (unsigned i = 0; rc != 0 && i < taken_by(peer); i++)
            limit_give(peer->owner, taken[i], 1);
    }
    if (rc != 0)
        limit_owner_unref(peer->owner);
    return rc;
}

int conn_new(struct front *f, int fd, const struct peer *from, struct ucm_error *e)
{
    struct peer peer = *from;
    struct conn *c;
    int rc = conn_begin(f, fd, &peer, &c, e);

    if (rc == -ENOMEM)
        ucm_error_set(e, UCM_WIRE_NO_MEMORY, "no memory for a connection");
    if (rc != 0)
        return rc;
    (void)rights_pass(fd, true); /* it may already, where the listener's can't refuse */
    c->poll.data = c;
    c->polling = true;
    f->handles++;
    list_push_back(&f->conns, &c->link);
    f->n_conns++;
    f->metrics->connections = f->n_conns;
    f->metrics->connections_total++;
    c->session = f->handler.open_cb(f->handler.ctx, c, &c->peer);
    if (!c->session) {
        conn_close(c, "no memory for a session", false);
        conn_free(c);
        return 0; /* the descriptor is closed with the poll handle */
    }
    conn_watch(c);
    if (c->state == CONN_OPEN)
        conn_interest(c);
    return 0;
}

/* ---- out ---- */

static void flusher_cb(uv_idle_t *idle);

/* The loop's next idle phase writes to the connection. */
static void flush_later(struct conn *c)
{
    struct front *f = c->front;

    if (!list_empty(&c->link_unflushed))
        return;
    list_push_back(&f->unflushed, &c->link_unflushed);
    (void)uv_idle_start(&f->flusher, flusher_cb); /* fails without a callback only */
}

/* One round for each connection; of many the last ones in their tenants' turns. */
static void flusher_cb(uv_idle_t *idle)
{
    struct front *f = idle->data;
    uint64_t begun_ns = uv_hrtime();
    struct list round, *node;

    uv_idle_stop(idle);
    list_init(&round);
    list_splice_front(&round, &f->unflushed);
    while ((node = list_pop_front(&round)) != NULL) {
        struct conn *c = LIST_ENTRY(node, struct conn, link_unflushed);

        if (uv_hrtime() - begun_ns < ASIDE_NS)
            conn_flush(c);
        else
            conn_ready(c);
    }
}

/* Writes what the peer takes now. 0, or -errno: the connection is broken. */
static int out_write(struct conn *c)
{
    while (c->out_at < c->out_n) {
        ssize_t n = list_empty(&c->parcels) ? send(c->fd, c->out + c->out_at, c->out_n - c->out_at,
                                                   MSG_NOSIGNAL | MSG_DONTWAIT)
                                            : parcels_send(c);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -errno;
        c->out_at += (size_t)n;
        c->sent += (uint64_t)n;
    }
    return 0;
}

/* Drops sent bytes before the buffer grows: a peer that is always a little behind never empties it. */
static void out_compact(struct conn *c)
{
    if (c->out_at == 0)
        return;
    c->out_n -= c->out_at;
    memmove(c->out, c->out + c->out_at, c->out_n);
    c->out_at = 0;
}

/* 0, -ENOMEM, or -EUSERS: the peer's uid or tenant leaves too much unread. */
static int out_grow(struct conn *c, size_t n)
{
    size_t cap = c->out_cap ? c->out_cap : 4096;
    uint8_t *out;

    while (cap < c->out_n + n)
        cap *= 2;
    if (!conn_take(c, LIMIT_FRAMES, cap - c->out_cap))
        return -EUSERS;
    out = realloc(c->out, cap);
    if (!out) {
        limit_give(c->peer.owner, LIMIT_FRAMES, cap - c->out_cap);
        return -ENOMEM;
    }
    c->out = out;
    c->out_cap = cap;
    return 0;
}

static int out_append(struct conn *c, const uint8_t *p, size_t n)
{
    int rc = 0;

    if (c->out_at > 0 && (c->out_at == c->out_n || c->out_n + n > c->out_cap))
        out_compact(c);
    if (c->out_n + n > c->out_cap)
        rc = out_grow(c, n);
    if (rc == -EUSERS) {    /* the peer may read, and the daemon did not write yet */
        (void)out_write(c); /* the flusher sees an error, too */
        out_compact(c);
        rc = c->out_n + n > c->out_cap ? out_grow(c, n) : 0;
    }
    if (rc != 0)
        return rc;
    memcpy(c->out + c->out_n, p, n);
    c->out_n += n;
    return 0;
}

static void out_free(struct conn *c)
{
    limit_give(c->peer.owner, LIMIT_FRAMES, c->out_cap);
    free(c->out);
    c->out = NULL;
    c->out_at = c->out_n = c->out_cap = 0;
}

void conn_send(struct conn *c, struct proto_buf *b)
{
    if (c->state != CONN_CLOSED && b->n > 0) {
        int rc = out_append(c, b->p, b->n);

        /* A peer that never gets an answer would wait for ever: end the connection instead. */
        if (rc != 0)
            conn_drop(c, rc == -EUSERS ? "its uid or tenant leaves more answers unread than it may"
                                       : "no memory for an answer");
        else
            flush_later(c);
    }
    b->n = 0;
}

static void unread_expired_cb(struct deadline *d);

/* A peer that is backed up has request.unread to read something. */
static void unread_watch(struct conn *c)
{
    struct front *f = c->front;

    if (!conn_backed_up(c)) {
        deadline_disarm(f->deadlines, &c->unread_deadline);
        return;
    }
    if (deadline_armed(&c->unread_deadline))
        return;
    c->sent_then = c->sent;
    deadline_arm(f->deadlines, &c->unread_deadline, uv_now(f->loop) + 1 + f->config->unread_ms,
                 unread_expired_cb);
}

static void unread_expired_cb(struct deadline *d)
{
    struct conn *c = LIST_ENTRY(d, struct conn, unread_deadline);

    (void)out_write(c); /* first: it may have read, and the daemon did not look */
    if (c->sent == c->sent_then && !peer_stopped(c->peer.pid))
        conn_close(c, "did not read its answers", true);
    else
        unread_watch(c);
}

void conn_flush(struct conn *c)
{
    int rc;

    list_remove(&c->link_unflushed);
    if (c->state == CONN_CLOSED)
        return;
    rc = out_write(c);
    if (rc != 0 && c->ready && c->state == CONN_OPEN) { /* gone; what it sent before that counts */
        parcels_drop(c);
        out_free(c);
        rc = 0;
    }
    if (rc != 0) {
        conn_close(c, strerror(-rc), false);
        return;
    }
    if (c->out_at == c->out_n && c->state == CONN_DRAINING) {
        conn_close(c, "drained", false);
        return;
    }
    if (c->out_at == c->out_n && c->out_cap > OUT_KEPT_BYTES)
        out_free(c);
    unread_watch(c);
    if (c->stalled && c->state == CONN_OPEN && !conn_backed_up(c))
        conn_ready(c);
    conn_interest(c);
}

static void drain_expired_cb(struct deadline *d)
{
    conn_close(LIST_ENTRY(d, struct conn, frame_deadline), "did not read its last answer", false);
}

void conn_drop(struct conn *c, const char *reason)
{
    struct front *f = c->front;

    if (c->state != CONN_OPEN)
        return;
    f->metrics->connections_dropped++;
    log_warn("front", "dropped", "conn=%llu pid=%d uid=%u reason=\"%s\"", (unsigned long long)c->id,
             (int)c->peer.pid, (unsigned)c->peer.uid, reason);
    c->state = CONN_DRAINING;
    deadline_arm(f->deadlines, &c->frame_deadline, uv_now(f->loop) + DRAIN_MS, drain_expired_cb);
    flush_later(c);
}

/* ---- turns ---- */

static void waker_cb(uv_idle_t *idle)
{
    (void)idle;
}

static void ready_push(struct conn *c)
{
    c->ready = true;
    fair_queue_push(&c->front->ready, &c->who, 0, &c->link_ready, false);
}

void conn_ready(struct conn *c)
{
    if (!c->ready)
        ready_push(c);
    (void)uv_idle_start(&c->front->waker, waker_cb); /* fails without a callback only */
}

static void ready_charge(struct front *f, const struct fair_who *who, uint64_t ns)
{
    fair_queue_charge(&f->ready, who, ns < CHARGED_NS ? ns : CHARGED_NS, NULL);
}

/* A slice of the connection whose turn it is. The time when it ended; it began at `now_ns`. */
static uint64_t ready_serve(struct front *f, struct conn *c, uint64_t now_ns, bool shared)
{
    struct fair_who who = c->who; /* c may go */
    bool more = conn_serve(c, now_ns + (shared ? SHARED_TICK_NS : SLICE_NS));
    uint64_t served_ns = now_ns, ended_ns;

    c->ready = false;
    list_remove(&c->link_ready);
    if (more && c->state == CONN_OPEN) {
        served_ns = uv_hrtime();
        ready_charge(f, &who, served_ns - now_ns); /* before it comes back */
        ready_push(c);
    }
    conn_flush(c);
    ended_ns = uv_hrtime();
    ready_charge(f, &who, ended_ns - served_ns);
    return ended_ns;
}

void front_serve_cb(uv_check_t *check)
{
    struct front *f = check->data;
    struct list *node = fair_queue_first(&f->ready);
    uint64_t begun_ns = node ? uv_hrtime() : 0, now_ns = begun_ns;
    bool shared = fair_contended(&f->ready.fair, SHARED_NS);
    uint64_t tick_ns = shared ? SHARED_TICK_NS : TICK_NS;

    f->ended_ns = 0;
    for (; node && now_ns - begun_ns < tick_ns; node = fair_queue_first(&f->ready))
        now_ns = ready_serve(f, LIST_ENTRY(node, struct conn, link_ready), now_ns, shared);
    if (node)
        (void)uv_idle_start(&f->waker, waker_cb); /* fails without a callback only */
    else
        uv_idle_stop(&f->waker);
}

static bool nothing_unread(const struct conn *c)
{
    int bytes;

    return ioctl(c->fd, SIOCINQ, &bytes) == 0 && bytes == 0;
}

/* At once, as who connects next finds its place free; of many the last ones in their tenants' turns. */
static void conn_ended(struct conn *c, const char *reason)
{
    struct front *f = c->front;
    uint64_t begun_ns = uv_hrtime();

    if (f->ended_ns >= ASIDE_NS) {
        conn_ready(c);
        return;
    }
    conn_close(c, reason, false);
    f->ended_ns += uv_hrtime() - begun_ns;
}

static void poll_cb(uv_poll_t *poll, int status, int events)
{
    struct conn *c = poll->data;

    if (status < 0) {
        c->events = 0; /* libuv has stopped it */
        conn_ended(c, uv_strerror(status));
    } else if (c->ready) {
        conn_interest(c); /* it was not served yet, and need not be told of again */
    } else if (events & UV_DISCONNECT && (c->state != CONN_OPEN || nothing_unread(c))) {
        conn_ended(c, "peer closed");
    } else {
        conn_ready(c);
    }
}
