/* A connection's input: bytes and descriptors become frames, which go to the session. Connections
 * have their turns here, a slice at a time. */
#include "daemon/front/front.h"
#include "daemon/front/internal.h"

#include "daemon/base/rights.h"
#include "daemon/front/peer.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* What a connection gets at most before others have their turn. The frame that passes its time is
 * handled whole. */
#define SLICE_FRAMES 32u
/* Time for frames in one iteration of the event loop. */
#define TICK_NS 100000u
#define SLICE_NS 200000u /* of one connection's among them */
/* The same, and of a connection's slice, while several tenants use the event loop: another one was
 * served in the last SHARED_NS of service. */
#define SHARED_TICK_NS 30000u
#define SHARED_NS 20000000u
/* What a slice is charged at most, beyond what the dearest frame takes: the rest was a pause of the
 * daemon or its machine. */
#define CHARGED_NS 20000000u

static void conn_violation(struct conn *c, uint32_t msgid, bool answerable,
                           const struct ucm_error *e)
{
    struct proto_buf b;

    proto_buf_init(&b, 4096);
    if (answerable) {
        if (proto_response_error(&b, msgid, e) == 0)
            conn_send(c, &b);
    } else if (proto_notification_error(&b, e) == 0) {
        conn_send(c, &b);
    }
    proto_buf_free(&b);
    conn_drop(c, e->text);
}

void conn_offend(struct conn *c, const struct ucm_error *e)
{
    conn_violation(c, 0, false, e);
}

/* ---- reading ---- */

/* Closes the connection that holds most memory among those of `group` that make no progress: their
 * peers do not read answers, or were stopped in the middle of a frame. False: there is none. */
static bool idler_close(const struct conn *c, const struct limit_owner *group)
{
    struct list *conns = &c->front->conns;
    size_t most_bytes = IN_FIRST_BYTES;
    struct conn *most = NULL;

    for (struct list *node = conns->next; node != conns; node = node->next) {
        struct conn *other = LIST_ENTRY(node, struct conn, link);
        size_t bytes = other->in_cap + other->out_cap;

        if (other == c || !limit_within(other->peer.owner, group) || bytes <= most_bytes ||
            !(other->stalled || other->excused || conn_backed_up(other)))
            continue;
        most = other;
        most_bytes = bytes;
    }
    if (most)
        conn_close(most, "held memory that others need, and did not move on", true);
    return most != NULL;
}

/* Makes space for more bytes. The buffer grows with the bytes that arrive, not by the length that a
 * header names. 0 or a negative wire code with *e. */
static int in_reserve(struct conn *c, struct ucm_error *e)
{
    const struct limit_owner *refuser;
    size_t cap = c->in_cap ? 2 * c->in_cap : IN_FIRST_BYTES;
    uint8_t *in;

    if (cap > UCM_MAX_FRAME_BYTES + PROTO_HEADER_BYTES)
        cap = UCM_MAX_FRAME_BYTES + PROTO_HEADER_BYTES;
    while ((refuser = limit_refuser(c->peer.owner, LIMIT_FRAMES, cap - c->in_cap)))
        if (!idler_close(c, refuser))
            return limit_ask(c->peer.owner, LIMIT_FRAMES, cap - c->in_cap, e);
    in = realloc(c->in, cap);
    if (!in)
        return ucm_error_set(e, UCM_WIRE_NO_MEMORY, "the daemon has no memory left for frames");
    limit_add(c->peer.owner, LIMIT_FRAMES, cap - c->in_cap); /* nobody refuses */
    c->in = in;
    c->in_cap = cap;
    return 0;
}

/* An idle connection keeps a small buffer only, of which all is handled. */
static void in_shrink(struct conn *c)
{
    uint8_t *in;

    c->in_at = c->in_n = c->fds_end = 0;
    in = realloc(c->in, IN_FIRST_BYTES);

    if (!in)
        return;
    limit_give(c->peer.owner, LIMIT_FRAMES, c->in_cap - IN_FIRST_BYTES);
    c->in = in;
    c->in_cap = IN_FIRST_BYTES;
}

static int too_many_fds(struct ucm_error *e)
{
    return ucm_error_set(e, UCM_WIRE_INVALID,
                         "too many descriptors came with one frame, at most %d may",
                         UCM_MAX_FRAME_FDS);
}

/* Keeps what came; what is too much is closed. 0, or a negative wire code with *e. */
static int fds_take(struct conn *c, struct msghdr *m, struct ucm_error *e)
{
    int rc = 0;

    for (struct cmsghdr *h = CMSG_FIRSTHDR(m); h; h = CMSG_NXTHDR(m, h)) {
        size_t n;

        if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS)
            continue;
        n = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n; i++) {
            int fd;

            memcpy(&fd, CMSG_DATA(h) + i * sizeof(int), sizeof(fd));
            limit_add(c->peer.owner, LIMIT_DESCRIPTORS, 1); /* fds_admit found room */
            if (c->n_fds < UCM_MAX_FRAME_FDS) {
                c->fds[c->n_fds++] = fd;
            } else {
                rc = too_many_fds(e);
                reaper_close(c->front->reaper, fd, c->peer.owner);
            }
        }
    }
    return rc == 0 && m->msg_flags & MSG_CTRUNC ? too_many_fds(e) : rc;
}

/* How much there is to read of the first frame. Once descriptors have come, reading stops at its
 * end, so that those of the next frame cannot mix with them. */
static size_t frame_rest(const struct conn *c)
{
    size_t frame = PROTO_HEADER_BYTES;

    if (c->in_n >= PROTO_HEADER_BYTES)
        frame += proto_frame_length(c->in);
    return frame - c->in_n;
}

/* Asks for room for the descriptors that a read would bring: the kernel closes in this thread what
 * finds none in the table, and what one client has beyond its limit others lack. So what is too
 * much stays in the socket. Returns what may be read, 0 at the end, or -errno; or -EPROTO with *e.
 */
static ssize_t fds_admit(struct conn *c, const struct iovec *iov, struct ucm_error *e)
{
    uint32_t unread;
    bool some;
    ssize_t n;

    if (limit_room(c->peer.owner, LIMIT_DESCRIPTORS) >= RIGHTS_MOST)
        return (ssize_t)iov->iov_len;
    n = rights_peek(c->fd, iov->iov_base, iov->iov_len, &some);
    if (n <= 0 || !some)
        return n;
    unread = rights_unread(c->fd);
    return limit_ask(c->peer.owner, LIMIT_DESCRIPTORS, unread < RIGHTS_MOST ? unread : RIGHTS_MOST,
                     e) == 0
               ? n
               : -EPROTO;
}

/* Bytes that came; 0: none now, or the connection has ended. */
static size_t conn_read(struct conn *c)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int) * RIGHTS_MOST)];
    } control;
    struct msghdr m = {.msg_control = control.bytes, .msg_controllen = sizeof(control.bytes)};
    struct iovec iov;
    uint32_t n_fds = c->n_fds;
    size_t at = c->in_at;
    struct ucm_error e;
    ssize_t n = -EPROTO;

    if (at > 0) { /* what is not handled yet goes to the beginning */
        memmove(c->in, c->in + at, c->in_n - at);
        c->in_n -= at;
        c->fds_end -= at < c->fds_end ? at : c->fds_end;
        c->in_at = 0;
    }
    if (c->in_n < c->in_cap || in_reserve(c, &e) == 0) {
        iov = (struct iovec){c->in + c->in_n, c->in_cap - c->in_n};
        if (n_fds > 0 && frame_rest(c) < iov.iov_len)
            iov.iov_len = frame_rest(c);
        n = limit_few(c->peer.owner, LIMIT_DESCRIPTORS, RIGHTS_MOST) ? (ssize_t)iov.iov_len
                                                                     : fds_admit(c, &iov, &e);
    }
    if (n > 0) {
        iov.iov_len = (size_t)n;
        m.msg_iov = &iov;
        m.msg_iovlen = 1;
        do
            n = recvmsg(c->fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        while (n < 0 && errno == EINTR);
        n = n < 0 ? -errno : n;
    }
    if (n > 0 && (m.msg_controllen > 0 || m.msg_flags & MSG_CTRUNC) && fds_take(c, &m, &e) != 0)
        n = -EPROTO;
    if (n == -EPROTO)
        conn_violation(c, 0, false, &e);
    else if (n <= 0 && n != -EAGAIN)
        conn_close(c, n == 0 ? "peer closed" : strerror((int)-n), false);
    if (n <= 0)
        return 0;
    c->in_n += (size_t)n;
    if (c->n_fds > n_fds)
        c->fds_end = c->in_n;
    return (size_t)n;
}

/* ---- frames ---- */

/* How long the next frame is without its header, once all of it is here; 0: not yet; or -EPROTO:
 * its header is refused. */
static int frame_next(struct conn *c)
{
    size_t have = c->in_n - c->in_at;
    struct ucm_error e;
    uint32_t n;

    if (have < PROTO_HEADER_BYTES)
        return 0;
    n = proto_frame_length(c->in + c->in_at);
    if (n > 0 && n <= UCM_MAX_FRAME_BYTES)
        return have - PROTO_HEADER_BYTES < n ? 0 : (int)n;
    ucm_error_set(&e, UCM_WIRE_INVALID, "a frame's body has 1 to %u bytes, this header says %u",
                  UCM_MAX_FRAME_BYTES, n);
    conn_violation(c, 0, false, &e);
    return -EPROTO;
}

static void frame_handle(struct conn *c, size_t n)
{
    size_t at = c->in_at, end = at + PROTO_HEADER_BYTES + n;
    /* The kernel ends a read with the bytes that descriptors were sent with; it may begin with
     * earlier frames. */
    bool with_fds = c->n_fds > 0 && at < c->fds_end && c->fds_end <= end, answerable = false;
    struct proto_envelope env;
    struct ucm_error e;

    c->in_at = end;
    if (proto_envelope_open(&env, c->in + at + PROTO_HEADER_BYTES, n, &answerable, &e) != 0) {
        conn_violation(c, env.msgid, answerable, &e);
        return;
    }
    c->front->handler.frame_cb(c->session, &env, c->fds, with_fds ? c->n_fds : 0);
    proto_envelope_close(&env);
    if (with_fds)
        conn_fds_drop(c);
    if (c->greeted && c->state == CONN_OPEN)
        c->frames++;
}

/* ---- the time for hello, or for a frame ---- */

/* Its turn decides: the frame may have arrived in time, and the daemon did not look. */
static void frame_expired_cb(struct deadline *d)
{
    struct conn *c = LIST_ENTRY(d, struct conn, frame_deadline);

    c->overdue = true;
    conn_ready(c);
}

/* The time begins again. uv_now is rounded down, and the peer gets its whole time. */
static void conn_frame_clock(struct conn *c)
{
    struct front *f = c->front;

    deadline_arm(f->deadlines, &c->frame_deadline, uv_now(f->loop) + 1 + f->config->handshake_ms,
                 frame_expired_cb);
}

void conn_start(struct conn *c)
{
    if (c->state != CONN_OPEN)
        return;
    conn_frame_clock(c); /* hello's */
    conn_interest(c);
}

/* The peer's bytes are overdue, and all that came has been handled. */
static void frame_missed(struct conn *c)
{
    bool was_excused = c->excused;
    struct ucm_error e;

    /* A peer that is stopped, or that the daemon does not read from, gets as long again, and once
     * more after that has ended. */
    c->excused = peer_stopped(c->peer.pid) || (c->greeted && conn_backed_up(c));
    if (c->excused || was_excused) {
        conn_frame_clock(c);
        return;
    }
    ucm_error_set(&e, UCM_WIRE_DEADLINE, "%s",
                  c->greeted ? "a frame was begun and not finished in time"
                             : "hello did not come in time");
    conn_violation(c, 0, false, &e);
}

/* ---- turns ---- */

/* Handles frames and reads, until there is nothing more, the peer must read answers first, or the
 * slice is over. True: there may be more. until_ns: when the slice is over, by uv_hrtime(), but
 * never before its first frame. */
static bool conn_serve(struct conn *c, uint64_t until_ns)
{
    uint64_t frames = c->frames;
    uint32_t left = SLICE_FRAMES;
    size_t came = SIZE_MAX;
    bool more = false, idle;
    int n;

    if (c->fds_unread > 0)
        conn_fds_refresh(c);
    while (c->state == CONN_OPEN && (n = frame_next(c)) >= 0) {
        if (n > 0)
            c->stalled = conn_backed_up(c);
        else if (c->in_n < c->in_cap && came < c->in_cap / 2)
            break; /* likely all there was; if not, the next event comes at once */
        if (c->stalled)
            break;
        more = left == 0 || (left < SLICE_FRAMES && uv_hrtime() >= until_ns);
        if (more)
            break;
        if (n > 0) {
            frame_handle(c, (size_t)n);
            left--;
        } else if ((came = conn_read(c)) == 0) {
            break;
        }
    }
    if (c->state != CONN_OPEN)
        return false;
    idle = c->greeted && (c->stalled || c->in_n == c->in_at);
    if (idle || c->frames != frames)
        deadline_disarm(c->front->deadlines, &c->frame_deadline);
    if (idle)
        c->excused = false;
    else if (!more && !deadline_armed(&c->frame_deadline))
        conn_frame_clock(c);
    if (!more && c->in_n == c->in_at && c->in_cap > 16 * IN_FIRST_BYTES)
        in_shrink(c);
    if (c->overdue && c->frames == frames)
        frame_missed(c);
    c->overdue = false;
    return more;
}

/* Gives each connection a slice in turn, until the tick is over. */
void front_serve_cb(uv_check_t *check)
{
    struct front *f = check->data;
    struct list *node = fair_queue_first(&f->ready);
    uint64_t begun_ns = node ? uv_hrtime() : 0, now_ns = begun_ns;
    bool shared = node && fair_contended(&f->ready.fair, SHARED_NS);
    uint64_t tick_ns = shared ? SHARED_TICK_NS : TICK_NS;

    f->ended_ns = 0;
    for (; node && now_ns - begun_ns < tick_ns; node = fair_queue_first(&f->ready)) {
        struct conn *c = LIST_ENTRY(node, struct conn, link_ready);
        uint64_t then_ns = now_ns, ns;
        bool more;

        c->serving = true;
        more = conn_serve(c, now_ns + (shared ? SHARED_TICK_NS : SLICE_NS));
        c->serving = false;
        list_remove(&c->link_ready);
        c->ready = more;
        conn_flush(c);
        now_ns = uv_hrtime();
        ns = now_ns - then_ns;
        fair_queue_charge(&f->ready, &c->who, ns < CHARGED_NS ? ns : CHARGED_NS, NULL);
        if (more && c->state == CONN_OPEN) /* charged before it comes back */
            fair_queue_push(&f->ready, &c->who, 0, &c->link_ready, false);
    }
    if (!node && list_empty(&f->unflushed))
        uv_idle_stop(&f->waker);
}
