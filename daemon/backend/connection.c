#include "daemon/backend/ucmbackend.h"

#include "proto/clock.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

struct request {
    struct ucm_backend_request public; /* first */
    struct wire_request wire;
};

struct ucm_backend {
    int fd;
    uint8_t *buffer;
    struct wire_hello hello;
    uint8_t packet[WIRE_PACKET_BYTES];
    struct wire_reader reader;
    bool reading; /* `packet` has messages that were not handed out */
    pthread_mutex_t lock;
    pthread_cond_t sent;
    /* Guarded by lock. */
    struct wire_packet *out; /* what is answered is added to this one */
    bool sending; /* a thread has the other one: it goes on until there is nothing to be sent */
    int broken;   /* 0, -EPIPE */
    struct wire_packet outs[2];
};

static int protocol_error(const struct ucm_error *e)
{
    fprintf(stderr, "ucm_backend: the daemon broke the protocol: %s\n", e->text);
    return -EPROTO;
}

/* ---- sending ---- */

static int packet_send(struct ucm_backend *b, struct wire_packet *packet)
{
    size_t n = wire_end(packet);

    while (send(b->fd, packet->bytes, n, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
        struct pollfd p = {.fd = b->fd, .events = POLLOUT};

        if (errno != EAGAIN && errno != EINTR)
            return -EPIPE;
        (void)poll(&p, 1, 1000);
    }
    return 0;
}

/* Locked, but not while it sends: answers that come meanwhile go together. Nobody else sends. */
static void out_send(struct ucm_backend *b)
{
    b->sending = true;
    while (b->broken == 0 && b->out->messages > 0) {
        struct wire_packet *packet = b->out;
        int rc;

        b->out = &b->outs[packet == b->outs];
        wire_begin(b->out);
        pthread_cond_broadcast(&b->sent);
        pthread_mutex_unlock(&b->lock);
        rc = packet_send(b, packet);
        pthread_mutex_lock(&b->lock);
        b->broken = rc;
    }
    b->sending = false;
    pthread_cond_broadcast(&b->sent);
}

int ucm_backend_flush(struct ucm_backend *b)
{
    int rc;

    pthread_mutex_lock(&b->lock);
    if (!b->sending)
        out_send(b);
    rc = b->broken;
    pthread_mutex_unlock(&b->lock);
    return rc;
}

/* What does not fit after others waits until these are sent. */
static int answer_add(struct ucm_backend *b, const struct wire_answer *a,
                      const struct wire_file *files, uint32_t n)
{
    bool added;
    int rc;

    pthread_mutex_lock(&b->lock);
    while (!(added = wire_add_answer(b->out, a, files, n)) && b->broken == 0 &&
           b->out->messages > 0) {
        if (b->sending)
            pthread_cond_wait(&b->sent, &b->lock);
        else
            out_send(b);
    }
    rc = b->broken ? b->broken : added ? 0 : -EMSGSIZE;
    pthread_mutex_unlock(&b->lock);
    return rc;
}

static void reason_take(char out[WIRE_REASON_BYTES + 1], const char *reason)
{
    snprintf(out, WIRE_REASON_BYTES + 1, "%s", reason ? reason : "");
    for (char *c = out; *c; c++)
        if (*c < ' ' || *c > '~')
            *c = '?';
}

int ucm_backend_answer(struct ucm_backend *b, struct ucm_backend_request *r,
                       const struct ucm_backend_result *result)
{
    bool ok = result->status == WIRE_OK;
    struct wire_answer a = {.id = r->id,
                            .status = result->status,
                            .bytes = result->bytes,
                            .has_bytes = ok && (r->verb == WIRE_FIND || r->verb == WIRE_READ),
                            .now_ns = result->now_ns,
                            .has_now = ok && r->verb == WIRE_CHECK && r->sync,
                            .mtime_ns = r->verb == WIRE_READ ? result->mtime_ns : 0,
                            .unread = r->verb == WIRE_LIST ? result->unread : 0};
    int rc;

    if (result->status >= WIRE_ABSENT)
        reason_take(a.reason, result->reason);
    rc = answer_add(b, &a, NULL, 0);
    free(r);
    return rc;
}

static bool name_fits(const char *name)
{
    size_t n = strlen(name);

    for (size_t i = 0; i < n; i++)
        if (name[i] < ' ' || name[i] > '~')
            return false;
    return n > 0 && n <= WIRE_KEY_BYTES;
}

int ucm_backend_files(struct ucm_backend *b, struct ucm_backend_request *r,
                      const struct wire_file *files, uint32_t n)
{
    struct wire_answer a = {.id = r->id, .status = WIRE_MORE};
    struct wire_file *fit = malloc((n ? n : 1) * sizeof(*fit));
    uint32_t n_fit = 0;
    int rc;

    if (!fit)
        return -ENOMEM;
    for (uint32_t i = 0; i < n; i++)
        if (name_fits(files[i].name))
            fit[n_fit++] = files[i];
    rc = answer_add(b, &a, fit, n_fit);
    free(fit);
    return rc;
}

/* ---- receiving ---- */

int ucm_backend_fd(const struct ucm_backend *b)
{
    return b->fd;
}

static ssize_t packet_receive(struct ucm_backend *b, int flags)
{
    ssize_t n = recv(b->fd, b->packet, sizeof(b->packet), flags | MSG_TRUNC);

    if (n < 0)
        return errno == EAGAIN || errno == EINTR ? -EAGAIN : -EPIPE;
    if (n == 0)
        return -EPIPE;
    return n <= (ssize_t)sizeof(b->packet) ? n : -EPROTO;
}

static int request_make(struct ucm_backend *b, struct ucm_backend_request **out)
{
    struct request *r = calloc(1, sizeof(*r));
    struct wire_request *w;
    struct ucm_error e;
    bool data;

    if (!r)
        return -ENOMEM;
    w = &r->wire;
    if (wire_take_request(&b->reader, w, &e) < 0) {
        free(r);
        return protocol_error(&e);
    }
    data = w->verb == WIRE_READ || w->verb == WIRE_WRITE;
    if (data && (w->offset > b->hello.buffer || w->bytes > b->hello.buffer - w->offset)) {
        ucm_error_set(&e, UCM_WIRE_INVALID, "a span lies outside of the buffer");
        free(r);
        return protocol_error(&e);
    }
    r->public = (struct ucm_backend_request){.id = w->id,
                                             .verb = w->verb,
                                             .key = w->key,
                                             .temp = w->temp,
                                             .data = data ? b->buffer + w->offset : NULL,
                                             .bytes = w->bytes,
                                             .until_ms = clock_ms() + w->ms,
                                             .sync = w->sync};
    *out = &r->public;
    return 0;
}

static int next(struct ucm_backend *b, int flags, struct ucm_backend_request **out)
{
    struct ucm_error e;
    int rc;

    if (!b->reading) {
        ssize_t n = packet_receive(b, flags);

        if (n < 0)
            return (int)n;
        if (wire_open(&b->reader, b->packet, (size_t)n, &e) < 0)
            return protocol_error(&e);
        b->reading = true;
    }
    rc = request_make(b, out);
    if (rc < 0 || !wire_more(&b->reader)) {
        wire_close(&b->reader);
        b->reading = false;
    }
    return rc;
}

int ucm_backend_next(struct ucm_backend *b, struct ucm_backend_request **out)
{
    return next(b, MSG_DONTWAIT, out);
}

int ucm_backend_wait(struct ucm_backend *b, struct ucm_backend_request **out)
{
    int rc;

    do
        rc = next(b, 0, out);
    while (rc == -EAGAIN); /* a signal came */
    return rc;
}

/* ---- the handshake ---- */

/* The first packet, and the buffer's descriptor that comes with it. */
static int hello_receive(struct ucm_backend *b, int *buffer_fd)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec iov = {b->packet, sizeof(b->packet)};
    struct msghdr m = {.msg_iov = &iov,
                       .msg_iovlen = 1,
                       .msg_control = control.bytes,
                       .msg_controllen = sizeof(control.bytes)};
    struct ucm_error e = {.text = "the hello has no descriptor"};
    struct cmsghdr *h;
    ssize_t n;
    int rc;

    do
        n = recvmsg(b->fd, &m, MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    if (n <= 0)
        return n == 0 ? -EPIPE : -errno;
    h = CMSG_FIRSTHDR(&m);
    if (!h || h->cmsg_type != SCM_RIGHTS || h->cmsg_len != CMSG_LEN(sizeof(int)))
        return protocol_error(&e);
    memcpy(buffer_fd, CMSG_DATA(h), sizeof(int));
    rc = wire_open(&b->reader, b->packet, (size_t)n, &e);
    if (rc == 0) {
        rc = wire_take_hello(&b->reader, &b->hello, &e);
        wire_close(&b->reader);
    }
    return rc < 0 ? protocol_error(&e) : 0;
}

static int buffer_map(struct ucm_backend *b, int fd)
{
    struct stat st;
    void *p;

    if (fstat(fd, &st) < 0)
        return -errno;
    if ((uint64_t)st.st_size < b->hello.buffer)
        return -EPROTO;
    p = mmap(NULL, b->hello.buffer, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED)
        return -errno;
    b->buffer = p;
    return 0;
}

static int hello_answer(struct ucm_backend *b, const struct ucm_backend_about *about)
{
    struct wire_hello_answer h = {.version = WIRE_VERSION,
                                  .depth = about->depth ? about->depth : b->hello.depth,
                                  .touch = about->touch,
                                  .list = about->list};

    snprintf(h.name, sizeof(h.name), "%s", about->name);
    (void)wire_add_hello_answer(b->out, &h); /* it fits */
    return ucm_backend_flush(b);
}

int ucm_backend_open(const struct ucm_backend_about *about, struct ucm_backend **out)
{
    const char *text = getenv("UCM_BACKEND_FD");
    struct ucm_backend *b = text ? calloc(1, sizeof(*b)) : NULL;
    int rc, buffer_fd = -1;

    if (!b)
        return text ? -ENOMEM : -EBADF;
    b->fd = atoi(text);
    b->out = b->outs;
    wire_begin(b->out);
    pthread_mutex_init(&b->lock, NULL);
    pthread_cond_init(&b->sent, NULL);
    rc = fcntl(b->fd, F_SETFD, FD_CLOEXEC) < 0 ? -errno : hello_receive(b, &buffer_fd);
    if (rc == 0)
        rc = buffer_map(b, buffer_fd);
    if (buffer_fd >= 0)
        close(buffer_fd);
    if (rc == 0 && (b->hello.version_min > WIRE_VERSION || b->hello.version_max < WIRE_VERSION))
        rc = -EPROTO;
    if (rc == 0)
        rc = hello_answer(b, about);
    if (rc < 0)
        ucm_backend_close(b);
    else
        *out = b;
    return rc;
}

void ucm_backend_close(struct ucm_backend *b)
{
    if (!b)
        return;
    if (b->reading)
        wire_close(&b->reader);
    if (b->buffer)
        munmap(b->buffer, b->hello.buffer);
    close(b->fd);
    pthread_cond_destroy(&b->sent);
    pthread_mutex_destroy(&b->lock);
    free(b);
}

const struct wire_hello *ucm_backend_hello(const struct ucm_backend *b)
{
    return &b->hello;
}

enum wire_status ucm_backend_status(int error)
{
    switch (error) {
    case 0:
        return WIRE_OK;
    case ENOENT:
    case ESTALE:
        return WIRE_MISSING;
    case ENOTDIR:
    case EISDIR:
    case ELOOP:
        return WIRE_OTHER;
    case ENODEV:
        return WIRE_ABSENT;
    case ENOSPC:
    case EDQUOT:
        return WIRE_FULL;
    case EROFS:
        return WIRE_READ_ONLY;
    case EACCES:
    case EPERM:
        return WIRE_DENIED;
    case EHOSTUNREACH:
    case ENETUNREACH:
    case ECONNREFUSED:
    case ECONNRESET:
        return WIRE_UNREACHABLE;
    case ETIMEDOUT:
        return WIRE_TIMEOUT;
    default:
        return WIRE_FAILED;
    }
}
