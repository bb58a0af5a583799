/* Packets to and from a process. */
#include "daemon/share/process.h"

#include "daemon/base/rights.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static void io_cb(uv_poll_t *poll, int status, int events);

/* 0; -EAGAIN: the socket is full; -errno. fd: goes with it; -1: none. */
static int packet_send(struct process_run *run, size_t n, int fd)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct iovec iov = {run->out.bytes, n};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};
    struct cmsghdr *h;

    if (fd >= 0) {
        m.msg_control = control.bytes;
        m.msg_controllen = sizeof(control.bytes);
        h = CMSG_FIRSTHDR(&m);
        h->cmsg_level = SOL_SOCKET;
        h->cmsg_type = SCM_RIGHTS;
        h->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(h), &fd, sizeof(fd));
    }
    return sendmsg(run->socket, &m, MSG_NOSIGNAL | MSG_DONTWAIT) < 0 ? -errno : 0;
}

static void writable_want(struct process_run *run, bool want)
{
    if (run->writable_wanted == want)
        return;
    run->writable_wanted = want;
    if (uv_poll_start(&run->io, UV_READABLE | (want ? UV_WRITABLE : 0), io_cb) < 0)
        process_run_end(run, 0, "its socket can't be watched");
}

/* Sends the packet that is whole. False: nothing more can be sent now. */
static bool out_send(struct process_run *run)
{
    int rc = packet_send(run, wire_end(&run->out), -1);

    run->out_waits = rc == -EAGAIN;
    if (rc == 0)
        return true;
    if (rc == -EAGAIN)
        writable_want(run, true);
    else
        process_run_end(run, PROCESS_EXIT_MS, "its socket: %s", strerror(-rc));
    return false;
}

/* As many of the calls that are ready as one packet holds. */
static void out_fill(struct process_run *run)
{
    struct share_backend *b = run->b;
    struct wire_request request;

    wire_begin(&run->out);
    while (!list_empty(&b->ready)) {
        struct process_call *c = LIST_ENTRY(b->ready.next, struct process_call, link);

        process_request_of(c, &request);
        if (!wire_add_request(&run->out, &request))
            break;
        list_remove(&c->link);
        process_call_asked(c);
    }
}

void process_io_flush(struct process_run *run)
{
    if (run->out_waits)
        return;
    while (!list_empty(&run->b->ready)) {
        out_fill(run);
        if (!out_send(run))
            return;
    }
    writable_want(run, false);
}

/* ---- receiving ---- */

static int hello_take(struct process_run *run, struct wire_reader *r, struct ucm_error *e)
{
    struct wire_hello_answer h;
    int rc = wire_take_hello_answer(r, &h, e);

    if (rc < 0)
        return rc;
    if (h.version != WIRE_VERSION)
        return ucm_error_set(e, UCM_WIRE_INVALID, "field \"version\" is %llu; the daemon speaks %u",
                             (unsigned long long)h.version, WIRE_VERSION);
    process_run_up(run, &h);
    return 0;
}

static int answer_take(struct process_run *run, struct wire_reader *r, struct ucm_error *e)
{
    struct wire_answer a;
    const char *why = "";
    int rc = wire_take_answer(r, &a, e);

    if (rc < 0)
        return rc;
    return process_answered(run, &a, &why) ? 0 : ucm_error_set(e, UCM_WIRE_INVALID, "%s", why);
}

/* A callback of an answer can't end the run: it may only start and cancel operations. */
static void packet_take(struct process_run *run, const uint8_t *packet, size_t n)
{
    struct ucm_error e;
    struct wire_reader r;
    int rc = wire_open(&r, packet, n, &e);

    if (rc == 0) {
        if (run->state == RUN_GREETING)
            rc = hello_take(run, &r, &e);
        while (rc == 0 && wire_more(&r))
            rc = answer_take(run, &r, &e);
        wire_close(&r);
    }
    if (rc < 0)
        process_run_end(run, 0, "it broke the protocol: %.110s", e.text);
}

/* The kernel would close descriptors that come here and now, and a process can make that wait: those stay in the socket, which
 * a thread closes. -EPROTO: the next packet has some. */
static ssize_t packet_receive(struct process_run *run, uint8_t packet[WIRE_PACKET_BYTES],
                              int *flags)
{
    struct iovec iov = {packet, WIRE_PACKET_BYTES};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};
    bool some;
    ssize_t n = rights_peek(run->socket, NULL, 0, &some);

    if (n < 0 || some)
        return some ? -EPROTO : n;
    n = recvmsg(run->socket, &m, MSG_DONTWAIT);
    *flags = m.msg_flags;
    return n < 0 ? -errno : n;
}

static void io_cb(uv_poll_t *poll, int status, int events)
{
    struct process_run *run = poll->data;
    struct share_backend *b = run->b;
    uint8_t packet[WIRE_PACKET_BYTES];

    (void)status;
    for (unsigned i = 0; i < PROCESS_TURN_PACKETS && run->state != RUN_ENDING; i++) {
        int flags = 0;
        ssize_t n = packet_receive(run, packet, &flags);

        if (n == -EAGAIN || n == -EINTR)
            break;
        if (n == -EPROTO)
            process_run_end(run, 0, "it broke the protocol: it sent a descriptor");
        else if (n < 0)
            process_run_end(run, PROCESS_EXIT_MS, "its socket: %s", strerror((int)-n));
        else if (n == 0)
            process_run_end(run, PROCESS_EXIT_MS, "it closed its socket");
        else if (flags & MSG_TRUNC)
            process_run_end(run, 0, "it broke the protocol: a packet has more than %u bytes",
                            WIRE_PACKET_BYTES);
        else
            packet_take(run, packet, (size_t)n);
    }
    if (run->state != RUN_ENDING && (events & UV_WRITABLE) && run->out_waits && out_send(run))
        process_turn(b);
    if (run->state == RUN_UP)
        process_turn(b);
}

int process_io_open(struct process_run *run)
{
    struct share_backend *b = run->b;
    struct wire_hello h = {.version_min = WIRE_VERSION,
                           .version_max = WIRE_VERSION,
                           .buffer = run->buffer_bytes,
                           .depth = b->depth,
                           .read_only = b->read_only};
    int err;

    memcpy(h.root, b->name, sizeof(h.root));
    memcpy(h.host, b->host, sizeof(h.host));
    wire_begin(&run->out);
    (void)wire_add_hello(&run->out, &h); /* it fits */
    err = packet_send(run, wire_end(&run->out), run->buffer_fd);
    if (err < 0)
        return err;
    err = uv_poll_init(b->loop, &run->io, run->socket);
    if (err < 0)
        return err;
    run->io.data = run;
    run->io_open = true;
    run->handles++;
    return uv_poll_start(&run->io, UV_READABLE, io_cb);
}
