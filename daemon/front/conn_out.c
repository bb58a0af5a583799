/* What waits to be written to a peer, and what the event loop is asked for a connection.
 *
 * Frames wait, and descriptors, each of which goes with the first byte of its frame, in a call that
 * sends nothing of another frame. They are written at the end of the connection's turn, or in the
 * next idle phase. */
#include "daemon/front/front.h"
#include "daemon/front/internal.h"
#include "daemon/front/peer.h"

#include "daemon/base/log.h"

#include <assert.h>
#include <errno.h>
#include <linux/sockios.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define DRAIN_MS 1000 /* for a dropped peer to read its last answers */
#define OUT_HIGH_BYTES (1u << 20)
#define OUT_KEPT_BYTES (64u << 10) /* of an empty buffer */
/* Unread descriptors of one connection. */
#define FDS_MAX (2u * UCM_MAX_FRAME_FDS)
/* Time in one iteration of the event loop for connections that are served out of their tenants'
 * turns: those that have ended, and those with answers to write. */
#define ASIDE_NS 200000u

/* ---- descriptors ---- */

void conn_fds_refresh(struct conn *c)
{
    int unread = 0;

    if (c->fds_unread == 0 || ioctl(c->fd, SIOCOUTQ, &unread) != 0 || unread != 0)
        return;
    limit_give(c->peer.owner, LIMIT_DESCRIPTORS, c->fds_unread);
    c->fds_unread = 0;
}

uint32_t conn_fds_room(struct conn *c)
{
    uint64_t room;
    uint32_t n;

    if (c->state != CONN_OPEN)
        return 0;
    conn_fds_refresh(c);
    n = c->fds_waiting + c->fds_unread;
    n = n < FDS_MAX ? FDS_MAX - n : 0;
    room = limit_room(c->peer.owner, LIMIT_DESCRIPTORS);
    return room < n ? (uint32_t)room : n;
}

static ssize_t parcel_send(struct conn *c, struct parcel *p)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int) * UCM_MAX_FRAME_FDS)];
    } control;
    struct iovec iov = {c->out + c->out_at, (size_t)(p->end - p->at)};
    struct msghdr m = {.msg_iov = &iov,
                       .msg_iovlen = 1,
                       .msg_control = control.bytes,
                       .msg_controllen = CMSG_SPACE(sizeof(int) * p->n)};
    struct cmsghdr *h;
    ssize_t n;

    memset(&control, 0, sizeof(control));
    h = CMSG_FIRSTHDR(&m);
    h->cmsg_level = SOL_SOCKET;
    h->cmsg_type = SCM_RIGHTS;
    h->cmsg_len = CMSG_LEN(sizeof(int) * p->n);
    memcpy(CMSG_DATA(h), p->fds, p->n * sizeof(int));
    n = sendmsg(c->fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n > 0) {
        c->fds_unread += p->n;
        conn_parcel_free(c, p);
    }
    return n;
}

/* While there are parcels: sends some of what waits, as send() does: up to the next descriptors, or
 * these with bytes of their frame. */
static ssize_t parcels_send(struct conn *c)
{
    struct parcel *p = LIST_ENTRY(c->parcels.next, struct parcel, link);
    size_t n = c->out_n - c->out_at;

    if (p->at == c->sent)
        return parcel_send(c, p);
    n = n < p->at - c->sent ? n : (size_t)(p->at - c->sent);
    return send(c->fd, c->out + c->out_at, n, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* ---- bytes ---- */

bool conn_backed_up(const struct conn *c)
{
    return c->out_n - c->out_at >= OUT_HIGH_BYTES;
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
    c->out_at = c->out_n = 0;
    return 0;
}

/* 0, -ENOMEM, or -EUSERS: the peer's uid or tenant leaves too much unread. */
static int out_grow(struct conn *c, size_t n)
{
    size_t cap = c->out_cap ? c->out_cap : 4096;
    uint8_t *out;

    while (cap < c->out_n + n)
        cap *= 2;
    if (limit_take(c->peer.owner, LIMIT_FRAMES, cap - c->out_cap, NULL) != 0)
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

/* Drops sent bytes before the buffer grows: a peer that is always a little behind never empties it.
 * As out_grow. */
static int out_reserve(struct conn *c, size_t n)
{
    for (int tries = 0;; tries++) {
        int rc = 0;

        c->out_n -= c->out_at;
        if (c->out_at > 0)
            memmove(c->out, c->out + c->out_at, c->out_n);
        c->out_at = 0;
        if (n > c->out_cap - c->out_n)
            rc = out_grow(c, n);
        if (rc != -EUSERS || tries > 0)
            return rc;
        /* The peer may read, and the daemon did not write yet. The next flush sees an error,
         * too. */
        (void)out_write(c);
    }
}

/* ---- what is to be done soon ---- */

/* The waker's callback: one round for each connection; of many the last ones in their tenants' turns. */
static void front_flush_cb(uv_idle_t *idle)
{
    struct front *f = idle->data;
    uint64_t begun_ns = list_empty(&f->unflushed) ? 0 : uv_hrtime();
    struct list *node;

    while ((node = list_pop_front(&f->unflushed)) != NULL) {
        struct conn *c = LIST_ENTRY(node, struct conn, link_unflushed);

        if (uv_hrtime() - begun_ns < ASIDE_NS)
            conn_flush(c);
        else
            conn_ready(c);
    }
    if (f->ready.fair.n == 0)
        uv_idle_stop(idle);
}

void conn_ready(struct conn *c)
{
    struct front *f = c->front;

    if (!c->ready) {
        c->ready = true;
        fair_queue_push(&f->ready, &c->who, 0, &c->link_ready, false);
    }
    (void)uv_idle_start(&f->waker, front_flush_cb); /* fails without a callback only */
}

/* In the next idle phase. */
static void conn_flush_later(struct conn *c)
{
    struct front *f = c->front;

    if (!list_empty(&c->link_unflushed))
        return;
    list_push_back(&f->unflushed, &c->link_unflushed);
    (void)uv_idle_start(&f->waker, front_flush_cb); /* fails without a callback only */
}

/* ---- frames ---- */

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
    conn_flush_later(c);
}

/* A peer that never gets an answer would wait for ever: end the connection instead. */
static void answer_lost(struct conn *c, int rc)
{
    conn_drop(c, rc == -EUSERS ? "its uid or tenant leaves more answers unread than it may"
                               : "no memory or descriptors for an answer");
}

void conn_send(struct conn *c, struct proto_buf *b)
{
    int rc = 0;

    if (c->state != CONN_CLOSED && b->n > 0) {
        if (b->n > c->out_cap - c->out_n)
            rc = out_reserve(c, b->n);
        if (rc == 0) {
            memcpy(c->out + c->out_n, b->p, b->n);
            c->out_n += b->n;
            if (!c->serving)
                conn_flush_later(c);
        } else {
            answer_lost(c, rc);
        }
    }
    b->n = 0;
}

/* All bytes that were queued so far. */
static uint64_t queued(const struct conn *c)
{
    return c->sent + (c->out_n - c->out_at);
}

void conn_send_fds(struct conn *c, struct proto_buf *b, const int *fds, uint32_t n)
{
    struct parcel *p = NULL;
    uint64_t at = queued(c);

    assert(n <= UCM_MAX_FRAME_FDS);
    if (n > 0 && c->state != CONN_CLOSED && b->n > 0) {
        p = malloc(sizeof(*p) + n * sizeof(int));
        if (!p || limit_take(c->peer.owner, LIMIT_DESCRIPTORS, n, NULL) != 0) {
            free(p);
            p = NULL;
            answer_lost(c, -EMFILE);
            b->n = 0;
        }
    }
    conn_send(c, b);
    if (p && queued(c) > at) {
        p->at = at;
        p->end = queued(c);
        p->n = n;
        memcpy(p->fds, fds, n * sizeof(int));
        c->fds_waiting += n;
        list_push_back(&c->parcels, &p->link);
        return;
    }
    for (uint32_t i = 0; i < n; i++)
        close(fds[i]);
    limit_give(c->peer.owner, LIMIT_DESCRIPTORS, p ? n : 0);
    free(p);
}

/* ---- peers that do not read ---- */

static void unread_expired_cb(struct deadline *d);

/* A peer that is backed up has request.unread to read something. */
static void unread_watch(struct conn *c)
{
    struct front *f = c->front;

    c->behind = conn_backed_up(c);
    if (!c->behind) {
        deadline_disarm(f->deadlines, &c->unread_deadline);
        return;
    }
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

/* ---- what the event loop is asked, and says ---- */

static void conn_poll_cb(uv_poll_t *poll, int status, int events);

/* Reads while the peer reads, writes while there is something to write; nothing before the turn of
 * what is ready. While the peer does not read, the daemon does not ask for its half close: epoll
 * would tell of it again and again. A full close shows in the write. */
void conn_interest(struct conn *c)
{
    bool reads = !c->stalled && !c->behind, writes = c->out_n > c->out_at;
    int events = 0, rc;

    if (!c->ready && (reads || !writes || c->state != CONN_OPEN))
        events |= UV_DISCONNECT;
    if (!c->ready && reads && c->state == CONN_OPEN)
        events |= UV_READABLE;
    if (!c->ready && writes)
        events |= UV_WRITABLE;
    if (events == c->events)
        return;
    rc = events ? uv_poll_start(&c->poll, events, conn_poll_cb) : uv_poll_stop(&c->poll);
    if (rc != 0) {
        conn_close(c, uv_strerror(rc), false);
        return;
    }
    c->events = events;
}

static bool nothing_unread(const struct conn *c)
{
    int bytes;

    return ioctl(c->fd, SIOCINQ, &bytes) == 0 && bytes == 0;
}

/* Frees the connection at once, so that the next client finds a free place. If many end, the last
 * ones wait for their tenants' turns. */
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

static void conn_poll_cb(uv_poll_t *poll, int status, int events)
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

/* ---- the end of a turn ---- */

void conn_flush(struct conn *c)
{
    int rc;

    list_remove(&c->link_unflushed);
    if (c->state == CONN_CLOSED)
        return;
    rc = c->out_at < c->out_n ? out_write(c) : 0;
    if (rc != 0 && c->ready && c->state == CONN_OPEN) { /* gone; what it sent before that counts */
        conn_parcels_drop(c);
        conn_out_free(c);
        rc = 0;
    }
    if (rc != 0 || (c->out_at == c->out_n && c->state == CONN_DRAINING)) {
        conn_close(c, rc ? strerror(-rc) : "drained", false);
        return;
    }
    if (c->out_at == c->out_n && c->out_cap > OUT_KEPT_BYTES)
        conn_out_free(c);
    if (c->behind != conn_backed_up(c))
        unread_watch(c);
    if (c->stalled && c->state == CONN_OPEN && !c->behind)
        conn_ready(c);
    conn_interest(c);
}
