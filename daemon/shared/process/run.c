/* One process at a time: started, watched, ended; and packets to and from it.
 *
 *   STARTING --thread--> GREETING --hello--> UP --> ENDING --reaped, threads done--> none
 *
 * Every state may go to ENDING. */
#include "daemon/shared/process/process.h"

#include "daemon/base/log.h"
#include "daemon/base/rights.h"
#include "daemon/shared/process/sandbox.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

static void run_free(struct process_run *run)
{
    struct shared_backend *b = run->b;

    /* Descriptors may lie in it that the process sent, as no process may. It can make their close()
     * wait, by a socket that lingers or a file of a mount that hangs. */
    if (run->socket >= 0)
        closing_begin(b->closing_fds, run->socket);
    close_fd(&run->pid_fd);
    free(run);
    b->run = NULL;
    if (b->closing)
        b->events->last(b);
    else
        b->events->turn(b);
}

/* The last reference to the buffer goes with it: pages by the ten thousand, which would hold up the
 * event loop for milliseconds. */
static void buffer_drop(struct process_run *run)
{
    if (run->buffer)
        munmap(run->buffer, run->buffer_bytes);
    run->buffer = NULL;
    close_fd(&run->buffer_fd);
}

static void drop_cb(uv_work_t *work)
{
    buffer_drop(work->data);
}

static void dropped_cb(uv_work_t *work, int status)
{
    (void)status; /* nobody cancels it */
    run_free(work->data);
}

static void run_drop(struct process_run *run)
{
    run->threaded = true;
    run->start.data = run;
    if (uv_queue_work(run->b->loop, &run->start, drop_cb, dropped_cb) == 0)
        return;
    buffer_drop(run);
    run_free(run);
}

static void handle_closed_cb(uv_handle_t *h)
{
    struct process_run *run = h->data;

    run->handles--;
    process_run_settle(run);
}

static void handle_close(bool *open, void *handle)
{
    if (*open)
        uv_close(handle, handle_closed_cb);
    *open = false;
}

void process_run_settle(struct process_run *run)
{
    if (run->state != RUN_ENDING || run->pid != 0)
        return;
    handle_close(&run->limit_open, &run->limit);
    if (run->handles == 0 && run->copying == 0 && !run->threaded)
        run_drop(run);
}

/* The group, which nobody can leave, is killed while its first process, a zombie now, keeps its
 * number from being used again. */
static void reap(struct process_run *run)
{
    struct shared_backend *b = run->b;
    char how[64] = "it is gone";
    int status;

    (void)kill(-run->pid, SIGKILL);
    if (waitpid(run->pid, &status, WNOHANG) == run->pid) {
        if (WIFSIGNALED(status))
            snprintf(how, sizeof(how), "signal %d", WTERMSIG(status));
        else
            snprintf(how, sizeof(how), "exit status %d", WEXITSTATUS(status));
        b->absent = WIFEXITED(status) && WEXITSTATUS(status) == PROCESS_ABSENT;
        if (b->absent)
            snprintf(b->reason, sizeof(b->reason),
                     "the directory that the backend may use does not exist: is it mounted?");
    }
    if (!b->closing)
        log_warn(
            "shared", "backend-ended", "root=%s pid=%d how=\"%s\" reason=\"%s\" next_start_ms=%llu",
            b->shown, (int)run->pid, how, run->why,
            (unsigned long long)(b->pause.until > uv_now(b->loop) ? b->pause.until - uv_now(b->loop)
                                                                  : 0));
    run->pid = 0;
}

static void exit_cb(uv_poll_t *poll, int status, int events)
{
    struct process_run *run = poll->data;

    (void)status, (void)events;
    if (run->state != RUN_ENDING)
        process_run_end(run, PROCESS_EXIT_MS, "it ended by itself");
    reap(run);
    handle_close(&run->exit_open, &run->exit);
}

/* SIGKILL does not end a call in a file system whose server has taken the request and does not
 * answer. The daemon ends all the same; the process does when the call returns. */
static void left_cb(uv_timer_t *timer)
{
    struct process_run *run = timer->data;

    log_warn("shared", "backend-left", "root=%s pid=%d: it was killed, and a system call holds it",
             run->b->shown, (int)run->pid);
    run->pid = 0;
    handle_close(&run->exit_open, &run->exit);
    process_run_settle(run);
}

static void kill_cb(uv_timer_t *timer)
{
    struct process_run *run = timer->data;

    if (run->pid == 0)
        return;
    (void)kill(-run->pid, SIGKILL);
    if (run->b->closing)
        (void)uv_timer_start(timer, left_cb, PROCESS_LEFT_MS, 0); /* can't fail */
}

static void hello_late_cb(uv_timer_t *timer)
{
    process_run_end(timer->data, 0, "it did not answer the hello in time");
}

void process_run_end(struct process_run *run, uint64_t grace_ms, const char *why, ...)
{
    struct shared_backend *b = run->b;
    uint64_t now = uv_now(b->loop);
    va_list args;

    if (run->state == RUN_ENDING)
        return;
    va_start(args, why);
    vsnprintf(run->why, sizeof(run->why), why, args);
    va_end(args);
    /* The socket may tell of an end before the exit status says why: what the run before said of
     * its directory holds. */
    if (!b->absent)
        snprintf(b->reason, sizeof(b->reason), "the backend: %.140s", run->why);
    if (!b->closing) {
        if (run->state == RUN_UP && now - run->up_ms >= PROCESS_WELL_MS)
            backoff_reset(&b->pause);
        (void)backoff_fail(&b->pause, now);
        b->ends++;
        b->kills += grace_ms == 0 && run->pid > 0;
    }
    run->state = RUN_ENDING;
    handle_close(&run->io_open, &run->io);
    if (run->socket >= 0)
        (void)shutdown(run->socket, SHUT_RDWR); /* it is closed when the process is gone */
    if (run->pid > 0 && grace_ms == 0)
        (void)kill(-run->pid, SIGKILL);
    else if (run->pid > 0)
        (void)uv_timer_start(&run->limit, kill_cb, grace_ms, 0); /* can't fail */
    b->events->calls_fail(run);
    b->events->queue_fail(b, -ECONNREFUSED);
    process_run_settle(run);
}

void process_run_stop(struct process_run *run)
{
    if (run->state == RUN_ENDING && run->pid > 0)
        (void)uv_timer_start(&run->limit, kill_cb, PROCESS_STOP_MS, 0); /* can't fail */
    else if (run->state != RUN_STARTING)
        process_run_end(run, PROCESS_STOP_MS, "the daemon stops");
}

/* ---- sending ---- */

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
    struct shared_backend *b = run->b;
    struct wire_request request;

    wire_begin(&run->out);
    while (!list_empty(&b->ready)) {
        struct process_call *c = LIST_ENTRY(b->ready.next, struct process_call, link);

        b->events->request(c, &request);
        if (!wire_add_request(&run->out, &request))
            break;
        list_remove(&c->link);
        b->events->asked(c);
    }
}

void process_run_flush(struct process_run *run)
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

static void run_up(struct process_run *run, const struct wire_hello_answer *h)
{
    struct shared_backend *b = run->b;

    run->state = RUN_UP;
    run->up_ms = uv_now(b->loop);
    run->depth = h->depth < b->depth ? (unsigned)h->depth : b->depth;
    run->touch = h->touch;
    run->list = h->list;
    memcpy(run->name, h->name, sizeof(run->name));
    (void)uv_timer_stop(&run->limit);
    b->reason[0] = '\0';
    b->absent = false;
    log_info("shared", "backend-up", "root=%s pid=%d backend=\"%s\" depth=%u", b->shown,
             (int)run->pid, run->name, run->depth);
    b->events->turn(b);
}

static int hello_take(struct process_run *run, struct wire_reader *r, struct ucm_error *e)
{
    struct wire_hello_answer h;
    int rc = wire_take_hello_answer(r, &h, e);

    if (rc < 0)
        return rc;
    if (h.version != WIRE_VERSION)
        return ucm_error_set(e, UCM_WIRE_INVALID, "field \"version\" is %llu; the daemon speaks %u",
                             (unsigned long long)h.version, WIRE_VERSION);
    run_up(run, &h);
    return 0;
}

static int answer_take(struct process_run *run, struct wire_reader *r, struct ucm_error *e)
{
    struct wire_answer a;
    const char *why = "";
    int rc = wire_take_answer(r, &a, e);

    if (rc < 0)
        return rc;
    return run->b->events->answered(run, &a, &why) ? 0
                                                   : ucm_error_set(e, UCM_WIRE_INVALID, "%s", why);
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

/* The kernel would close descriptors that come here and now, and a process can make that wait:
 * those stay in the socket, which a thread closes. -EPROTO: the next packet has some. */
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
    struct shared_backend *b = run->b;
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
        b->events->turn(b);
    if (run->state == RUN_UP)
        b->events->turn(b);
}

int process_run_greet(struct process_run *run)
{
    struct shared_backend *b = run->b;
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

/* ---- starting ---- */

static void start_cb(uv_work_t *work)
{
    struct process_run *run = work->data;

    run->start_status = process_make(run);
}

static int exit_watch(struct process_run *run)
{
    int err = uv_poll_init(run->b->loop, &run->exit, run->pid_fd);

    if (err < 0)
        return err;
    run->exit.data = run;
    run->exit_open = true;
    run->handles++;
    return uv_poll_start(&run->exit, UV_READABLE, exit_cb);
}

/* It was started and can't be watched: it is killed, and waited for here. It does not take long, as
 * SIGKILL ends what has not done anything yet. */
static void kill_unwatched(struct process_run *run)
{
    (void)kill(-run->pid, SIGKILL);
    (void)kill(run->pid, SIGKILL);
    (void)waitpid(run->pid, NULL, 0);
    run->pid = 0;
}

static void started_cb(uv_work_t *work, int status)
{
    struct process_run *run = work->data;
    struct shared_backend *b = run->b;
    int err = status < 0 ? status : run->start_status;
    char why[sizeof(run->why)];

    run->threaded = false;
    b->starts += run->pid > 0;
    memcpy(why, run->why, sizeof(why));
    if (err == 0) {
        err = exit_watch(run);
        if (err == 0)
            err = process_run_greet(run);
        if (err < 0)
            snprintf(why, sizeof(why), "its socket can't be watched: %s", strerror(-err));
    }
    if (err == 0 && !b->closing) {
        run->state = RUN_GREETING;
        (void)uv_timer_start(&run->limit, hello_late_cb, b->config.patience_ms, 0);
        return;
    }
    if (run->pid > 0 && !run->exit_open)
        kill_unwatched(run);
    if (err < 0 && !b->closing)
        log_warn("shared", "backend-not-started", "root=%s reason=\"%s\"", b->shown, why);
    process_run_end(run, b->closing ? PROCESS_STOP_MS : 0, "%s", why);
}

int process_run_start(struct shared_backend *b)
{
    struct process_run *run = calloc(1, sizeof(*run));
    int err;

    if (!run)
        return -ENOMEM;
    run->b = b;
    run->socket = run->pid_fd = run->buffer_fd = -1;
    run->buffer_bytes = b->config.buffer_bytes;
    list_init(&run->spans);
    run->start.data = run;
    err = uv_queue_work(b->loop, &run->start, start_cb, started_cb);
    if (err < 0) {
        free(run);
        return err;
    }
    run->threaded = true;
    (void)uv_timer_init(b->loop, &run->limit); /* can't fail */
    run->limit.data = run;
    run->limit_open = true;
    run->handles++;
    b->run = run;
    return 0;
}
