/* A connection's input: bytes and descriptors become frames, which go to the session. Connections have their turns here, a slice
 * at a time. */
#include "daemon/front/front.h"
#include "daemon/front/internal.h"

#include "daemon/base/rights.h"
#include "daemon/front/peer.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* What a connection gets at most before others have their turn. The frame that passes its time is handled whole. */
#define SLICE_FRAMES 32u
/* Of frames, in a turn of the loop. */
#define TICK_NS 100000u
#define SLICE_NS 200000u /* of one connection's among them */
/* The same, and of a connection's slice, while several tenants use the loop: another one was served in the last SHARED_NS of
 * service. */
#define SHARED_TICK_NS 30000u
#define SHARED_NS 20000000u
/* What a slice is charged at most, beyond what the dearest frame takes: the rest was a pause of the daemon or its machine. */
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

static void violate(struct conn *c, int code, const char *text)
{
    struct ucm_error e;

    ucm_error_set(&e, code, "%s", text);
    conn_violation(c, 0, false, &e);
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

/* An idle connection keeps a small buffer only. */
static void in_shrink(struct conn *c)
{
    uint8_t *in = realloc(c->in, IN_FIRST_BYTES);

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

/* How much there is to read of the first frame. Once descriptors have come no more is read, so that those of the next one
 * cannot mix with them. */
static size_t frame_rest(const struct conn *c)
{
    size_t frame = PROTO_HEADER_BYTES;

    if (c->in_n >= PROTO_HEADER_BYTES)
        frame += proto_frame_length(c->in);
    return frame - c->in_n;
}

/* Asks for room for the descriptors that a read would bring: the kernel closes in this thread what finds none in the table,
 * and what one client has beyond its limit others lack. So what is too much stays in the socket. Returns what may be
 * read, 0 at the end, or -errno; or -EPROTO with *e. */
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

/* Returns the bytes read, 0 at the end or when there are none now, or -errno; or -EPROTO with *e. */
static ssize_t in_receive(struct conn *c, bool *end, struct ucm_error *e)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int) * RIGHTS_MOST)];
    } control;
    struct iovec iov = {c->in + c->in_n, c->in_cap - c->in_n};
    struct msghdr m = {.msg_iov = &iov,
                       .msg_iovlen = 1,
                       .msg_control = control.bytes,
                       .msg_controllen = sizeof(control.bytes)};
    uint32_t n_fds = c->n_fds;
    ssize_t n;

    if (n_fds > 0 && frame_rest(c) < iov.iov_len)
        iov.iov_len = frame_rest(c);
    n = limit_few(c->peer.owner, LIMIT_DESCRIPTORS, RIGHTS_MOST) ? (ssize_t)iov.iov_len
                                                                 : fds_admit(c, &iov, e);
    if (n > 0) {
        iov.iov_len = (size_t)n;
        do
            n = recvmsg(c->fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        while (n < 0 && errno == EINTR);
        n = n < 0 ? -errno : n;
    }
    *end = n == 0;
    if (n <= 0)
        return n == -EAGAIN ? 0 : n;
    if ((m.msg_controllen > 0 || m.msg_flags & MSG_CTRUNC) && fds_take(c, &m, e) != 0)
        return -EPROTO;
    c->in_n += (size_t)n;
    if (c->n_fds > n_fds)
        c->fds_end = c->in_n;
    return n;
}

static void frame_handle(struct conn *c, const uint8_t *body, size_t n, bool with_fds)
{
    struct front *f = c->front;
    struct proto_envelope env;
    struct ucm_error e;
    bool answerable = false;

    if (proto_envelope_open(&env, body, n, &answerable, &e) != 0) {
        conn_violation(c, env.msgid, answerable, &e);
        return;
    }
    f->handler.frame_cb(c->session, &env, c->fds, with_fds ? c->n_fds : 0);
    proto_envelope_close(&env);
    if (with_fds)
        conn_fds_drop(c);
}

/* What is left of a slice. */
struct slice {
    uint64_t until_ns;
    uint32_t frames;
};

/* Never before its first frame. */
static bool slice_over(const struct slice *slice)
{
    return slice->frames == 0 || (slice->frames < SLICE_FRAMES && uv_hrtime() >= slice->until_ns);
}

/* The next whole frame's length, without its header; 0: there is none, or the header is refused. */
static uint32_t frame_next(struct conn *c)
{
    size_t have = c->in_n - c->in_at;
    struct ucm_error e;
    uint32_t n;

    if (have < PROTO_HEADER_BYTES)
        return 0;
    n = proto_frame_length(c->in + c->in_at);
    if (n > 0 && n <= UCM_MAX_FRAME_BYTES)
        return have - PROTO_HEADER_BYTES < n ? 0 : n;
    ucm_error_set(&e, UCM_WIRE_INVALID, "a frame's body has 1 to %u bytes, this header says %u",
                  UCM_MAX_FRAME_BYTES, n);
    conn_violation(c, 0, false, &e);
    return 0;
}

/* Handles the whole frames in `in`. False: the slice is over. */
static bool frames_handle(struct conn *c, struct slice *slice)
{
    uint32_t n;

    while (c->state == CONN_OPEN && (n = frame_next(c)) > 0) {
        size_t at = c->in_at, end = at + PROTO_HEADER_BYTES + n;

        c->stalled = conn_backed_up(c);
        if (c->stalled)
            break;
        if (slice_over(slice))
            return false;
        slice->frames--;
        c->in_at = end;
        /* The kernel ends a read with the bytes that descriptors were sent with; it may begin with earlier frames. */
        frame_handle(c, c->in + at + PROTO_HEADER_BYTES, n,
                     c->n_fds > 0 && at < c->fds_end && c->fds_end <= end);
        if (c->greeted && c->state == CONN_OPEN) {
            c->frames++;
            deadline_disarm(c->front->deadlines, &c->frame_deadline);
        }
    }
    return true;
}

/* Moves what is not handled yet to the beginning. */
static void in_compact(struct conn *c)
{
    size_t at = c->in_at;

    memmove(c->in, c->in + at, c->in_n - at);
    c->in_n -= at;
    c->fds_end -= at < c->fds_end ? at : c->fds_end;
    c->in_at = 0;
}

/* Bytes that came; 0: none now, or the connection has ended. */
static size_t conn_read(struct conn *c)
{
    struct ucm_error e;
    bool end = false;
    ssize_t n = c->in_n < c->in_cap || in_reserve(c, &e) == 0 ? in_receive(c, &end, &e) : -EPROTO;

    if (n == -EPROTO)
        conn_violation(c, 0, false, &e);
    else if (n < 0 || end)
        conn_close(c, end ? "peer closed" : strerror((int)-n), false);
    return n > 0 ? (size_t)n : 0;
}

/* What was due did not come, all that has come being handled. */
static void frame_missed(struct conn *c)
{
    bool was_excused = c->excused;

    /* The peer gets as long again if it is stopped, or if the daemon does not read from it, and once
     * more after either has ended. */
    c->excused = peer_stopped(c->peer.pid) || (c->greeted && conn_backed_up(c));
    if (c->excused || was_excused)
        conn_frame_clock(c);
    else
        violate(c, UCM_WIRE_DEADLINE,
                c->greeted ? "a frame was begun and not finished in time"
                           : "hello did not come in time");
}

bool conn_serve(struct conn *c, uint64_t until_ns)
{
    struct slice slice = {until_ns, SLICE_FRAMES};
    uint64_t frames = c->frames;
    size_t n = SIZE_MAX;
    bool more;

    if (c->fds_unread > 0)
        conn_fds_refresh(c);
    for (;;) {
        more = !frames_handle(c, &slice);
        if (more || c->state != CONN_OPEN || c->stalled)
            break;
        if (c->in_at > 0)
            in_compact(c);
        if (c->in_n < c->in_cap && n < c->in_cap / 2)
            break; /* likely all there was; if not, the next event comes at once */
        more = slice_over(&slice);
        if (more)
            break;
        n = conn_read(c);
        if (n == 0)
            break;
    }
    if (!more && c->state == CONN_OPEN) {
        conn_watch(c);
        if (c->in_n == 0 && c->in_cap > 16 * IN_FIRST_BYTES)
            in_shrink(c);
    }
    if (c->overdue && c->state == CONN_OPEN && c->frames == frames)
        frame_missed(c);
    c->overdue = false;
    return more;
}

/* ---- turns ---- */

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
        conn_ready(c);
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
    if (!node)
        uv_idle_stop(&f->waker);
}
