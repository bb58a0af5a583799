/* Descriptors that go to a peer: each with the first byte of its frame, in a call that sends nothing of
 * another frame. */
#include "daemon/front/front.h"
#include "daemon/front/internal.h"

#include <assert.h>
#include <errno.h>
#include <linux/sockios.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

/* Of one connection, unread. */
#define FDS_MAX (2u * UCM_MAX_FRAME_FDS)

static void fds_close(const int *fds, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        close(fds[i]);
}

static void parcel_free(struct conn *c, struct parcel *p)
{
    list_remove(&p->link);
    fds_close(p->fds, p->n);
    c->fds_waiting -= p->n;
    free(p);
}

void parcels_drop(struct conn *c)
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

static uint64_t queued_end(const struct conn *c)
{
    return c->sent + (c->out_n - c->out_at);
}

void conn_send_fds(struct conn *c, struct proto_buf *b, const int *fds, uint32_t n)
{
    struct parcel *p = n > 0 ? malloc(sizeof(*p) + n * sizeof(int)) : NULL;
    uint64_t at = queued_end(c), end = at + b->n;

    assert(n <= UCM_MAX_FRAME_FDS);
    if (n > 0 && (!p || !conn_take(c, LIMIT_DESCRIPTORS, n))) {
        free(p);
        p = NULL;
        b->n = 0;
        conn_drop(c, "no memory or descriptors for an answer");
    }
    conn_send(c, b);
    if (!p || queued_end(c) != end || end == at) {
        if (p)
            limit_give(c->peer.owner, LIMIT_DESCRIPTORS, n);
        fds_close(fds, n);
        free(p);
        return;
    }
    p->at = at;
    p->end = end;
    p->n = n;
    memcpy(p->fds, fds, n * sizeof(int));
    c->fds_waiting += n;
    list_push_back(&c->parcels, &p->link);
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

ssize_t parcels_send(struct conn *c)
{
    struct parcel *p = LIST_ENTRY(c->parcels.next, struct parcel, link);
    size_t n = c->out_n - c->out_at;

    if (p->at == c->sent)
        return parcel_send(c, p);
    n = n < p->at - c->sent ? n : (size_t)(p->at - c->sent);
    return send(c->fd, c->out + c->out_at, n, MSG_NOSIGNAL | MSG_DONTWAIT);
}
