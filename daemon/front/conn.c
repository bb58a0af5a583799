/* A connection's life and its output.
 *
 * conn_close runs the session's close_cb, which stops requests and may free the session. So it is
 * called from the loop's callbacks only. Functions that a session calls (conn_send, conn_offend,
 * conn_drop) at most mark the connection CONN_DRAINING; the flusher closes it. */
#include "daemon/front/front.h"
#include "daemon/front/internal.h"

#include "daemon/base/log.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define OUT_HIGH_BYTES (1u << 20)
#define DRAIN_MS 1000 /* for a dropped peer to read its last answers */
/* Of limits.connections: */
#define UID_DIVISOR 2        /* one uid's */
#define SILENT_DIVISOR 8     /* one uid's that have not said hello */
#define OPERATORS_DIVISOR 64 /* the last ones, for operators only */

static void poll_cb(uv_poll_t *poll, int status, int events);

bool conn_backed_up(const struct conn *c)
{
    return c->out_n - c->out_at >= OUT_HIGH_BYTES;
}

/* ---- how many there may be ---- */

static struct user *user_of(struct front *f, uid_t uid)
{
    struct user *u;

    for (struct list *node = f->users.next; node != &f->users; node = node->next) {
        u = LIST_ENTRY(node, struct user, link);
        if (u->uid == uid)
            return u;
    }
    u = calloc(1, sizeof(*u));
    if (!u)
        return NULL;
    u->uid = uid;
    list_push_back(&f->users, &u->link);
    return u;
}

static void user_leave(struct conn *c)
{
    struct user *u = c->user;

    u->conns--;
    u->silent -= !c->greeted;
    if (u->conns > 0)
        return;
    list_remove(&u->link);
    free(u);
}

/* A fraction of a limit, rounded up so that it is never 0. */
static uint32_t fraction(uint32_t limit, uint32_t divisor)
{
    return (limit + divisor - 1) / divisor;
}

/* Whether one more may come. 0 or -EUSERS with *e. */
static int conn_admit(const struct front *f, const struct user *u, const struct peer *peer,
                      struct ucm_error *e)
{
    uint32_t limit = f->config->max_connections, of_uid = fraction(limit, UID_DIVISOR),
             silent = fraction(limit, SILENT_DIVISOR);
    /* Rounded down: a small limit has no place to spare. */
    uint32_t all = peer->admin ? limit : limit - limit / OPERATORS_DIVISOR;

    if (f->n_conns >= all)
        ucm_error_set(e, UCM_WIRE_BUSY,
                      "there are %u connections, as many as limits.connections allows", f->n_conns);
    else if (!peer->admin && u->conns >= of_uid)
        ucm_error_set(e, UCM_WIRE_BUSY,
                      "uid %u has %u connections; one uid may have half of limits.connections",
                      (unsigned)peer->uid, u->conns);
    else if (!peer->admin && u->silent >= silent)
        ucm_error_set(e, UCM_WIRE_BUSY,
                      "uid %u has %u connections that have not said hello; one uid may have an "
                      "eighth of limits.connections",
                      (unsigned)peer->uid, u->silent);
    else
        return 0;
    return -EUSERS;
}

void conn_welcome(struct conn *c)
{
    if (!c->greeted && c->state != CONN_CLOSED)
        c->user->silent--;
    c->greeted = true;
}

/* ---- life ---- */

/* Reads while the peer reads, writes while there is something to write. */
static void conn_interest(struct conn *c)
{
    int events = UV_DISCONNECT, rc;

    if (c->state == CONN_OPEN && !c->stalled && !conn_backed_up(c))
        events |= UV_READABLE;
    if (c->out_n > c->out_at)
        events |= UV_WRITABLE;
    if (events == c->events)
        return;
    rc = uv_poll_start(&c->poll, events, poll_cb);
    if (rc != 0) {
        conn_close(c, uv_strerror(rc), false);
        return;
    }
    c->events = events;
}

static void conn_release(struct conn *c)
{
    close(c->fd);
    free(c);
}

static void poll_closed_cb(uv_handle_t *handle)
{
    struct conn *c = handle->data;

    /* Freed only here: conn_close may run while one of these frames is being handled. */
    conn_input_free(c);
    c->polling = false;
    if (c->freed)
        conn_release(c);
    else
        (void)shutdown(c->fd,
                       SHUT_RDWR); /* devices still poll the socket; the peer need not wait */
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
    list_remove(&c->link);
    list_remove(&c->link_unflushed);
    user_leave(c);
    f->n_conns--;
    f->metrics->connections = f->n_conns;
    f->frame_memory -= c->in_cap;
    parcels_drop(c);
    free(c->out);
    c->out = NULL;
    c->out_at = c->out_n = c->out_cap = 0;
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

static int conn_alloc(struct front *f, int fd, const struct peer *peer, struct user *u,
                      struct conn **out)
{
    struct conn *c = calloc(1, sizeof(*c));

    if (!c)
        return -ENOMEM;
    if (uv_poll_init(f->loop, &c->poll, fd) != 0) {
        free(c);
        return -ENOMEM;
    }
    c->front = f;
    c->user = u;
    c->peer = *peer;
    c->fd = fd;
    c->id = ++f->next_id;
    list_init(&c->link_unflushed);
    list_init(&c->parcels);
    u->conns++;
    u->silent++;
    *out = c;
    return 0;
}

int conn_new(struct front *f, int fd, const struct peer *peer, struct ucm_error *e)
{
    struct user *u = user_of(f, peer->uid);
    struct conn *c;
    int rc = u ? conn_admit(f, u, peer, e) : -ENOMEM;

    if (rc == 0)
        rc = conn_alloc(f, fd, peer, u, &c);
    if (rc != 0) {
        if (rc == -ENOMEM)
            ucm_error_set(e, UCM_WIRE_NO_MEMORY, "no memory for a connection");
        if (u && u->conns == 0) {
            list_remove(&u->link);
            free(u);
        }
        return rc;
    }
    c->poll.data = c;
    c->polling = true;
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

/* The loop's next idle phase writes to the connection and handles its stalled frames. */
static void flush_later(struct conn *c)
{
    struct front *f = c->front;

    if (!list_empty(&c->link_unflushed))
        return;
    list_push_back(&f->unflushed, &c->link_unflushed);
    (void)uv_idle_start(&f->flusher, flusher_cb); /* fails without a callback only */
}

/* One round for each connection; one with more to do waits for the next turn of the loop. */
static void flusher_cb(uv_idle_t *idle)
{
    struct front *f = idle->data;
    struct list round, *node;

    uv_idle_stop(idle);
    list_init(&round);
    while ((node = list_pop_front(&f->unflushed)) != NULL)
        list_push_back(&round, node);
    while ((node = list_pop_front(&round)) != NULL) {
        struct conn *c = LIST_ENTRY(node, struct conn, link_unflushed);

        if (c->stalled && !conn_backed_up(c))
            conn_frames(c);
        conn_flush(c);
    }
}

static int out_append(struct conn *c, const uint8_t *p, size_t n)
{
    /* Drop sent bytes before growing: a peer that is always a little behind never empties the
     * buffer. */
    if (c->out_at > 0 && (c->out_at == c->out_n || c->out_n + n > c->out_cap)) {
        c->out_n -= c->out_at;
        memmove(c->out, c->out + c->out_at, c->out_n);
        c->out_at = 0;
    }
    if (c->out_n + n > c->out_cap) {
        size_t cap = c->out_cap ? c->out_cap : 4096;
        uint8_t *out;

        while (cap < c->out_n + n)
            cap *= 2;
        out = realloc(c->out, cap);
        if (!out)
            return -ENOMEM;
        c->out = out;
        c->out_cap = cap;
    }
    memcpy(c->out + c->out_n, p, n);
    c->out_n += n;
    return 0;
}

void conn_send(struct conn *c, struct proto_buf *b)
{
    if (c->state != CONN_CLOSED && b->n > 0) {
        /* A peer that never gets an answer would wait for ever: end the connection instead. */
        if (out_append(c, b->p, b->n) != 0)
            conn_drop(c, "no memory for an answer");
        else
            flush_later(c);
    }
    b->n = 0;
}

void conn_flush(struct conn *c)
{
    list_remove(&c->link_unflushed);
    if (c->state == CONN_CLOSED)
        return;
    while (c->out_at < c->out_n) {
        ssize_t n = parcels_send(c);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            break;
        if (n < 0) {
            conn_close(c, strerror(errno), false);
            return;
        }
        c->out_at += (size_t)n;
        c->sent += (uint64_t)n;
    }
    if (c->out_at == c->out_n && c->state == CONN_DRAINING) {
        conn_close(c, "drained", false);
        return;
    }
    if (c->out_at == c->out_n && c->out_cap > OUT_HIGH_BYTES) {
        free(c->out);
        c->out = NULL;
        c->out_at = c->out_n = c->out_cap = 0;
    }
    if (c->stalled && c->state == CONN_OPEN && !conn_backed_up(c))
        flush_later(c);
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

static void poll_cb(uv_poll_t *poll, int status, int events)
{
    struct conn *c = poll->data;

    if (status < 0) {
        conn_close(c, uv_strerror(status), false);
        return;
    }
    if (events & UV_READABLE && c->state == CONN_OPEN)
        conn_read(c);
    else if (events & UV_DISCONNECT)
        conn_close(c, "peer closed", false);
    if (c->state != CONN_CLOSED)
        conn_flush(c);
}
