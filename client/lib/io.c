#include "client/lib/internal.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define IN_BYTES 65536  /* first size of the receive buffer */
#define IN_SPACE 4096   /* smallest space for a receive, unless it is for the rest of a frame */
#define READ_ROUNDS 64  /* receives of one client_read_ready */
#define RELY_NS 5000000 /* how long a blocked sender relies on another thread to read */

static int left_ms(int64_t deadline_ns)
{
    int64_t left = deadline_ns == 0 ? 0 : deadline_ns - client_now_ns();

    if (left <= 0)
        return 0;
    left = (left + 999999) / 1000000;
    return left > INT32_MAX ? INT32_MAX : (int)left;
}

/* ---- in ---- */

/* Makes space for the rest of a frame that has begun, or for anything. */
static bool in_reserve(struct ucm_client *c)
{
    size_t have = c->in.end - c->in.begin;
    size_t need = have + 1, cap;
    uint8_t *p;

    if (have >= PROTO_HEADER_BYTES)
        need = PROTO_HEADER_BYTES + (size_t)proto_frame_length(c->in.p + c->in.begin);
    if (have == 0)
        c->in.begin = c->in.end = c->in.fds_end = 0;
    if (c->in.begin + need <= c->in.cap && c->in.cap - c->in.end >= IN_SPACE)
        return true;
    if (c->in.begin > 0)
        memmove(c->in.p, c->in.p + c->in.begin, have);
    c->in.fds_end -= c->in.fds_end > 0 ? c->in.begin : 0;
    c->in.begin = 0;
    c->in.end = have;
    if (need <= c->in.cap)
        return true;
    cap = need > IN_BYTES ? need : IN_BYTES;
    p = realloc(c->in.p, cap);
    if (!p)
        return false;
    c->in.p = p;
    c->in.cap = cap;
    return true;
}

int client_take(const struct proto_message *m, struct proto_envelope *env, void *out,
                struct ucm_error *e)
{
    struct ucm_error why = {0};

    if (proto_decode(m, env, out, &why) == 0)
        return 0;
    if (why.code == UCM_WIRE_NO_MEMORY) {
        *e = why;
        return -UCM_ENOMEMORY;
    }
    return ucm_error_set(e, UCM_EPROTOCOL, "ucmd's answer is not the protocol: %.180s", why.text);
}

/* Whether descriptors came with the frame that ends there. */
static bool frame_has_fds(const struct ucm_client *c, size_t end)
{
    return c->in.fds_end > c->in.begin && c->in.fds_end <= end;
}

static void deliver(struct ucm_client *c, struct proto_envelope *env, struct client_fds *fds)
{
    struct client_call *call = client_call_find(c, env->msgid);
    union proto_any m;
    int r;

    if (!call) /* of a followup, or of a call that was given up */
        return;
    if (env->error.code == UCM_WIRE_NO_METHOD) {
        r = ucm_error_set(&call->error, UCM_EUNSUPPORTED, "this ucmd does not have %s",
                          call->method == UCM_METHOD_COUNT ? "that method"
                                                           : proto_methods[call->method].name.p);
    } else if (env->error.code) {
        call->error = env->error;
        /* A code that enum ucm_status lacks is an internal error. */
        r = env->error.code <= UCM_EINTERNAL ? -env->error.code : -UCM_EINTERNAL;
    } else {
        call->answer = env;
        call->fds = fds;
        r = client_take(call->method == UCM_METHOD_COUNT ? &proto_free_map
                                                         : proto_methods[call->method].result,
                        env, &m, &call->error);
        if (r == 0 && call->take_cb)
            r = call->take_cb(call, &m);
    }
    client_call_finish(call, r, NULL);
}

static void garbage(struct ucm_client *c, const char *what)
{
    char text[CLIENT_WHY_BYTES];

    snprintf(text, sizeof text, "ucmd at %s sent what is not the protocol: %s", c->socket, what);
    client_link_break(c, UCM_EPROTOCOL, text);
}

static void notification(struct ucm_client *c, struct proto_envelope *env)
{
    struct ucm_error e;
    union proto_any m;

    if (env->error.code) {
        c->farewell = env->error; /* the daemon will hang up for this reason */
    } else if (proto_str_is(env->method, UCM_PROGRESS)) {
        if (client_take(&proto_progress, env, &m, &e) != 0)
            garbage(c, e.text);
        else if (!client_call_progress(c, &m.progress))
            garbage(c, "progress that fits no load");
    } else if (client_hooks_notify(c, env, &e) != 0) {
        garbage(c, e.text);
    }
}

static void frame(struct ucm_client *c, const uint8_t *body, size_t n, bool with_fds)
{
    struct client_fds fds = {c->in.fds, c->in.n_fds, c->in.fds_lost};
    struct proto_envelope env;
    struct ucm_error e = {0};
    bool answerable;

    if (proto_envelope_open(&env, body, n, &answerable, &e) != 0) {
        if (e.code == UCM_WIRE_NO_MEMORY)
            client_link_break(c, UCM_ENOMEMORY, e.text);
        else
            garbage(c, e.text);
        return;
    }
    if (env.type == PROTO_RESPONSE)
        deliver(c, &env, with_fds ? &fds : NULL);
    else if (env.type == PROTO_NOTIFICATION)
        notification(c, &env);
    else if (env.type == PROTO_REQUEST)
        garbage(c, "a request; it may only answer");
    proto_envelope_close(&env);
}

static void dispatch(struct ucm_client *c)
{
    while (client_link_live(c) && c->in.end - c->in.begin >= PROTO_HEADER_BYTES) {
        const uint8_t *p = c->in.p + c->in.begin;
        uint32_t n = proto_frame_length(p);
        bool with_fds;

        if (n == 0 || n > UCM_MAX_FRAME_BYTES) {
            garbage(c, "a frame of an impossible length");
            return;
        }
        if (c->in.end - c->in.begin < PROTO_HEADER_BYTES + (size_t)n)
            return;
        with_fds = frame_has_fds(c, c->in.begin + PROTO_HEADER_BYTES + (size_t)n);
        frame(c, p + PROTO_HEADER_BYTES, n, with_fds);
        if (with_fds)
            client_fds_close(c);
        c->in.begin += PROTO_HEADER_BYTES + (size_t)n;
    }
}

/* What one recvmsg brought. */
struct arrival {
    ssize_t got;
    int error;
    uint32_t n_fds;
    int fds[UCM_MAX_FRAME_FDS];
    bool fds_lost;
};

/* How much to read. If descriptors have come, it stops at the end of their frame, since the next
 * frame's would mix with them. */
static size_t in_wanted(const struct ucm_client *c)
{
    size_t have = c->in.end - c->in.begin, space = c->in.cap - c->in.end;
    size_t frame = PROTO_HEADER_BYTES;

    if (c->in.fds_end == 0)
        return space;
    if (have >= PROTO_HEADER_BYTES)
        frame += proto_frame_length(c->in.p + c->in.begin);
    return frame - have < space ? frame - have : space;
}

/* Without the lock, by the holder of the reader's token. */
static void receive(struct ucm_client *c, struct arrival *a)
{
    union {
        char bytes[CMSG_SPACE(UCM_MAX_FRAME_FDS * sizeof(int))];
        struct cmsghdr align;
    } control;
    struct iovec iov = {.iov_base = c->in.p + c->in.end, .iov_len = in_wanted(c)};
    struct msghdr m = {.msg_iov = &iov,
                       .msg_iovlen = 1,
                       .msg_control = control.bytes,
                       .msg_controllen = sizeof control.bytes};

    a->got = recvmsg(c->fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    a->error = a->got < 0 ? errno : 0;
    if (a->got < 0)
        return;
    a->fds_lost = m.msg_flags & MSG_CTRUNC;
    /* The control buffer has room for UCM_MAX_FRAME_FDS in one header. The library asks for no
     * other control messages. */
    for (struct cmsghdr *h = CMSG_FIRSTHDR(&m); h; h = CMSG_NXTHDR(&m, h)) {
        if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS)
            continue;
        a->n_fds = (uint32_t)((h->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        memcpy(a->fds, CMSG_DATA(h), a->n_fds * sizeof(int));
    }
}

static void fds_take(struct ucm_client *c, struct arrival *a)
{
    if (a->n_fds == 0 && !a->fds_lost)
        return;
    if (c->in.fds_end != 0) {
        garbage(c, "descriptors twice with one frame");
        return;
    }
    memcpy(c->in.fds, a->fds, a->n_fds * sizeof(int));
    c->in.n_fds = a->n_fds;
    c->in.fds_lost = a->fds_lost;
    c->in.fds_end = c->in.end;
    a->n_fds = 0;
}

static void received(struct ucm_client *c, struct arrival *a)
{
    if (client_link_live(c) && a->got > 0) {
        c->in.end += (size_t)a->got;
        fds_take(c, a);
        dispatch(c);
    } else if (client_link_live(c) && a->got == 0) {
        client_link_break(c, UCM_EDISCONNECTED, "ucmd hung up");
    } else if (client_link_live(c) && a->error != EAGAIN && a->error != EINTR) {
        client_link_break(c, UCM_EDISCONNECTED, strerror(a->error));
    }
    for (uint32_t i = 0; i < a->n_fds; i++) /* that were not taken */
        close(a->fds[i]);
}

/* On a breaking link: looks every millisecond whether copy agents have ended. */
static int wait_settled(struct ucm_client *c, int64_t deadline_ns)
{
    int64_t now = client_now_ns(), until = now + CLIENT_SETTLE_NS;

    client_link_try_settle(c);
    if (c->link != LINK_BREAKING)
        return 0;
    if (now >= deadline_ns)
        return ETIMEDOUT;
    client_cond_wait(c, &c->idle, until < deadline_ns ? until : deadline_ns);
    return 0;
}

int client_read(struct ucm_client *c, short also, int64_t expected_ns, int64_t deadline_ns)
{
    struct pollfd p = {.fd = c->fd, .events = (short)(POLLIN | also)};
    struct arrival a = {.got = -1, .error = EAGAIN};
    int n = 1;

    if (c->link == LINK_BREAKING)
        return wait_settled(c, deadline_ns);
    assert(!c->reading && c->link != LINK_DOWN);
    if (!in_reserve(c)) {
        client_link_break(c, UCM_ENOMEMORY, "no memory to receive an answer");
        return 0;
    }
    c->reading = true;
    pthread_mutex_unlock(&c->lock);
    if (deadline_ns != 0 || also) {
        n = expected_ns != 0 ? client_spin_poll(&p, expected_ns, deadline_ns) : 0;
        if (n == 0)
            n = poll(&p, 1, left_ms(deadline_ns));
    } else {
        p.revents = POLLIN;
    }
    if (n < 0)
        a.error = errno;
    else if (n > 0 && p.revents & ~POLLOUT)
        receive(c, &a);
    pthread_mutex_lock(&c->lock);
    received(c, &a);
    c->reading = false;
    client_link_reap(c);
    pthread_cond_broadcast(&c->idle);
    if (n == 0 || (deadline_ns == 0 && !also && a.error == EAGAIN))
        return ETIMEDOUT;
    return 0;
}

void client_read_ready(struct ucm_client *c)
{
    for (int i = 0; i < READ_ROUNDS; i++)
        if (c->reading || c->link == LINK_DOWN || client_read(c, 0, 0, 0) != 0)
            return;
}

void client_lead_pass(struct ucm_client *c)
{
    if (!c->reading && c->link != LINK_DOWN && !TAILQ_EMPTY(&c->waiting))
        pthread_cond_signal(&TAILQ_FIRST(&c->waiting)->cond);
}

/* Another thread reads: sleeps until that one finishes this call or stops reading. */
static int follow(struct client_call *call, int64_t deadline_ns)
{
    struct ucm_client *c = call->client;
    int r;

    if (call->n_waiting++ == 0)
        TAILQ_INSERT_TAIL(&c->waiting, call, waiting);
    r = client_cond_wait(c, &call->cond, deadline_ns);
    if (--call->n_waiting == 0)
        TAILQ_REMOVE(&c->waiting, call, waiting);
    return r;
}

int client_call_wait_layers(struct client_call *call, uint32_t layers, int64_t deadline_ns)
{
    struct ucm_client *c = call->client;
    int r = 0;

    while (!call->done && call->layers < layers && r == 0) {
        r = c->reading ? follow(call, deadline_ns)
                       : client_read(c, 0, call->expected_ns, deadline_ns);
        if (c->rest_cb)
            c->rest_cb(c);
    }
    return call->done || call->layers >= layers ? 0 : -UCM_EDEADLINE;
}

int client_call_wait(struct client_call *call, int64_t deadline_ns)
{
    return client_call_wait_layers(call, UINT32_MAX, deadline_ns);
}

/* ---- out ---- */

int client_writer_wait(struct ucm_client *c, int64_t deadline_ns)
{
    client_lead_pass(c);
    if (client_cond_wait(c, &c->idle, deadline_ns) == 0 || !c->writing)
        return 0;
    return client_fail(UCM_EDEADLINE, "ucmd did not read the requests before this one in time");
}

void client_writer_release(struct ucm_client *c)
{
    c->writing = false;
    client_link_reap(c);
    pthread_cond_broadcast(&c->idle);
}

static ssize_t send_with(struct ucm_client *c, const int *fds, uint32_t n_fds)
{
    union {
        char bytes[CMSG_SPACE(UCM_MAX_FRAME_FDS * sizeof(int))];
        struct cmsghdr align;
    } control;
    struct iovec iov = {.iov_base = c->out.p, .iov_len = c->out.n};
    struct msghdr message = {.msg_iov = &iov,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = CMSG_SPACE(n_fds * sizeof(int))};
    struct cmsghdr *h;

    memset(&control, 0, sizeof control);
    h = CMSG_FIRSTHDR(&message);
    h->cmsg_level = SOL_SOCKET;
    h->cmsg_type = SCM_RIGHTS;
    h->cmsg_len = CMSG_LEN(n_fds * sizeof(int));
    memcpy(CMSG_DATA(h), fds, n_fds * sizeof(int));
    return sendmsg(c->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

/* Descriptors go with the frame's first byte. */
static ssize_t send_some(struct ucm_client *c, size_t begin, const int *fds, uint32_t n_fds)
{
    if (begin == 0 && n_fds > 0)
        return send_with(c, fds, n_fds);
    return send(c->fd, c->out.p + begin, c->out.n - begin, MSG_DONTWAIT | MSG_NOSIGNAL);
}

/* The socket is full. A daemon that cannot send its answers stops reading requests, so some thread
 * must read meanwhile. Another reader may stop at any time: look again soon. */
static int wait_space(struct ucm_client *c, int64_t deadline_ns)
{
    struct pollfd p = {.fd = c->fd, .events = POLLOUT};
    int64_t until;

    if (!c->reading)
        return client_read(c, POLLOUT, 0, deadline_ns);
    until = client_now_ns() + RELY_NS;
    pthread_mutex_unlock(&c->lock);
    poll(&p, 1, left_ms(until < deadline_ns ? until : deadline_ns));
    pthread_mutex_lock(&c->lock);
    return p.revents == 0 && client_now_ns() >= deadline_ns ? ETIMEDOUT : 0;
}

/* Earlier answers, and the reason for hanging up, may still lie in the socket. */
static void hung_up(struct ucm_client *c, int error, int64_t deadline_ns)
{
    while (client_link_live(c) && c->reading)
        if (client_cond_wait(c, &c->idle, deadline_ns) != 0)
            break;
    client_read_ready(c);
    client_link_break(c, UCM_EDISCONNECTED, strerror(error));
}

int client_send(struct ucm_client *c, const int *fds, uint32_t n_fds, int64_t deadline_ns)
{
    size_t sent = 0;

    while (client_link_live(c) && sent < c->out.n) {
        ssize_t n = send_some(c, sent, fds, n_fds);

        if (n >= 0) {
            sent += (size_t)n;
        } else if (errno == EAGAIN) {
            if (wait_space(c, deadline_ns) != ETIMEDOUT)
                continue;
            if (sent == 0)
                return client_fail(UCM_EDEADLINE, "ucmd did not read the request in time");
            /* Otherwise the daemon would take the next frame for the rest of this one. */
            client_link_break(c, UCM_EDISCONNECTED, "a deadline passed in the middle of a request");
        } else if (errno == ETOOMANYREFS) {
            return client_fail(UCM_EBUSY, "too many descriptors of this user are on their way");
        } else if (errno != EINTR) {
            hung_up(c, errno, deadline_ns);
        }
    }
    if (client_link_live(c))
        return 0;
    return sent == 0 ? CLIENT_AGAIN : client_fail_as(c->why, c->why_text);
}
