/* A connection's beginning and end, and what it holds in between.
 *
 * conn_close runs the session's close_cb, which stops requests and may free the session. So it is
 * called from the event loop's callbacks only. Functions that a session calls (conn_send,
 * conn_offend, conn_drop) at most mark the connection CONN_DRAINING; their flush closes it. */
#include "daemon/front/front.h"
#include "daemon/front/internal.h"

#include "daemon/base/log.h"
#include "daemon/base/rights.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

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

/* ---- what it holds ---- */

void conn_parcel_free(struct conn *c, struct parcel *p)
{
    list_remove(&p->link);
    for (uint32_t i = 0; i < p->n; i++)
        close(p->fds[i]);
    c->fds_waiting -= p->n;
    free(p);
}

void conn_parcels_drop(struct conn *c)
{
    limit_give(c->peer.owner, LIMIT_DESCRIPTORS, c->fds_waiting + c->fds_unread);
    c->fds_unread = 0;
    while (!list_empty(&c->parcels))
        conn_parcel_free(c, LIST_ENTRY(c->parcels.next, struct parcel, link));
}

void conn_out_free(struct conn *c)
{
    limit_give(c->peer.owner, LIMIT_FRAMES, c->out_cap);
    free(c->out);
    c->out = NULL;
    c->out_at = c->out_n = c->out_cap = 0;
}

void conn_fds_drop(struct conn *c)
{
    for (uint32_t i = 0; i < c->n_fds; i++)
        if (c->fds[i] >= 0)
            reaper_close(c->front->reaper, c->fds[i], c->peer.owner);
        else
            limit_give(c->peer.owner, LIMIT_DESCRIPTORS, 1); /* the new owner counts it itself */
    c->n_fds = 0;
}

/* Gives whole pages back to the system before the heap gets the buffer: after a crowd of
 * connections with large frames the heap can't, where one that stays lies above them. */
static void pages_give_back(uint8_t *buffer, size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t skip = (page - (uintptr_t)buffer % page) % page;

    if (bytes > skip + page)
        (void)madvise(buffer + skip, (bytes - skip) / page * page, MADV_DONTNEED); /* or it stays */
}

static void input_free(struct conn *c)
{
    conn_fds_drop(c);
    if (c->in_cap > 16 * IN_FIRST_BYTES)
        pages_give_back(c->in, c->in_cap);
    free(c->in);
    c->in = NULL;
    c->in_at = c->in_n = c->in_cap = 0;
}

/* ---- the end ---- */

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
    input_free(c);
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
    conn_parcels_drop(c);
    conn_out_free(c);
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

/* ---- the beginning ---- */

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

int conn_new(struct front *f, int fd, const struct peer *from, struct conn **out,
             struct ucm_error *e)
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
    f->metrics->connections_accepted++;
    c->session = f->handler.open_cb(f->handler.ctx, c, &c->peer);
    if (!c->session) {
        conn_close(c, "no memory for a session", false);
        conn_free(c); /* the descriptor is closed with the poll handle */
        c = NULL;
    }
    *out = c;
    return 0;
}

/* ---- the front, whose memory goes with the last of its handles ---- */

/* Peers that were not accepted may have sent descriptors, too. systemd's socket may serve another
 * daemon next. */
void front_release(struct front *f)
{
    if (f->socket.fd >= 0 && !f->socket.owns_path)
        (void)rights_pass(f->socket.fd, true);
    if (f->socket.fd >= 0)
        reaper_close(f->reaper, f->socket.fd, NULL);
    f->socket.fd = -1;
    listener_close(&f->socket);
    free(f);
}

void front_handle_closed(struct front *f)
{
    if (--f->handles == 0)
        front_release(f);
}
