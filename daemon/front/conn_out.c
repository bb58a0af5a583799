/* What waits to be written to a peer: frames, and descriptors, each with the first byte of its frame, in a call that sends
 * nothing of another frame. */
#include "daemon/front/front.h"
#include "daemon/front/internal.h"

#include <errno.h>
#include <linux/sockios.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define OUT_HIGH_BYTES (1u << 20)
/* Of one connection, unread. */
#define FDS_MAX (2u * UCM_MAX_FRAME_FDS)

/* ---- descriptors ---- */

void conn_fds_close(const int *fds, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        close(fds[i]);
}

static void parcel_free(struct conn *c, struct parcel *p)
{
    list_remove(&p->link);
    conn_fds_close(p->fds, p->n);
    c->fds_waiting -= p->n;
    free(p);
}

void conn_parcels_drop(struct conn *c)
{
    limit_give(c->peer.owner, LIMIT_DESCRIPTORS, c->fds_waiting + c->fds_unread);
    c->fds_unread = 0;
    while (!list_empty(&c->parcels))
        parcel_free(c, LIST_ENTRY(c->parcels.next, struct parcel, link));
}

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
        parcel_free(c, p);
    }
    return n;
}

/* While there are parcels: sends some of what waits, as send() does: up to the next descriptors, or these with bytes of
 * their frame. */
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

int conn_out_write(struct conn *c)
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

/* Drops sent bytes before the buffer grows: a peer that is always a little behind never empties it. */
static void out_compact(struct conn *c)
{
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

int conn_out_add(struct conn *c, const uint8_t *p, size_t n)
{
    int rc = 0;

    if (c->out_at > 0 && c->out_n + n > c->out_cap)
        out_compact(c);
    if (c->out_n + n > c->out_cap)
        rc = out_grow(c, n);
    if (rc == -EUSERS) {         /* the peer may read, and the daemon did not write yet */
        (void)conn_out_write(c); /* the flusher sees an error, too */
        if (c->out_at > 0)
            out_compact(c);
        rc = c->out_n + n > c->out_cap ? out_grow(c, n) : 0;
    }
    if (rc != 0)
        return rc;
    memcpy(c->out + c->out_n, p, n);
    c->out_n += n;
    return 0;
}

int conn_out_add_fds(struct conn *c, const uint8_t *bytes, size_t n, const int *fds, uint32_t n_fds)
{
    struct parcel *p = malloc(sizeof(*p) + n_fds * sizeof(int));
    int rc = p && conn_take(c, LIMIT_DESCRIPTORS, n_fds) ? 0 : -EMFILE;

    if (rc == 0) {
        rc = conn_out_add(c, bytes, n);
        if (rc != 0)
            limit_give(c->peer.owner, LIMIT_DESCRIPTORS, n_fds);
    }
    if (rc != 0) {
        free(p);
        return rc;
    }
    p->end = c->sent + (c->out_n - c->out_at);
    p->at = p->end - n;
    p->n = n_fds;
    memcpy(p->fds, fds, n_fds * sizeof(int));
    c->fds_waiting += n_fds;
    list_push_back(&c->parcels, &p->link);
    return 0;
}

void conn_out_free(struct conn *c)
{
    limit_give(c->peer.owner, LIMIT_FRAMES, c->out_cap);
    free(c->out);
    c->out = NULL;
    c->out_at = c->out_n = c->out_cap = 0;
}
