/* The listening socket. */
#include "daemon/front/front.h"
#include "daemon/front/internal.h"
#include "daemon/front/peer.h"

#include "daemon/base/log.h"
#include "daemon/base/rights.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#define BACKLOG 1024
#define BACKOFF_MS 100
#define ACCEPTS_PER_TURN 8
/* A uid's token bucket of connects: its size, and its rate per millisecond. Identifying a peer
 * takes the event loop some 30 us, refusing one 5 us. */
#define CONNECTS_AT_ONCE 512u
#define CONNECTS_PER_MS 1u
/* Time that a tenant may take after idling, before the others' next turn. */
#define BURST_NS 500000u
#define SILENT_PART 4 /* of limits.connections, and so many at least: */
#define SILENT_LEAST 16u
#define FILES_PER_CONNECTION 8u /* with less the log says that there are few */

static void listener_cb(uv_poll_t *poll, int status, int events);

static void backoff_cb(uv_timer_t *timer)
{
    struct front *f = timer->data;

    if (!f->stopped && uv_poll_start(&f->listener, UV_READABLE, listener_cb) != 0)
        log_error("front", "listener-stopped", "%s", "");
}

/* Whose descriptor the socket of a refused peer is until it is closed. *peer: as far as it is
 * known. NULL: no memory. */
static struct limit_owner *refused_owner(struct front *f, int fd, const struct peer *peer)
{
    struct ucred cred = {.uid = UINT32_MAX};
    socklen_t len = sizeof(cred);
    char tenant[32];

    if (peer->tenant[0])
        return limits_uid(f->limits, peer->tenant, peer->uid, peer->admin);
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &len) != 0)
        cred.uid = UINT32_MAX;
    snprintf(tenant, sizeof(tenant), "uid:%u", (unsigned)cred.uid);
    return limits_uid(f->limits, tenant, cred.uid, false);
}

/* A byte out of band is read like any other, with its descriptors. Otherwise the kernel skips it,
 * and closes them in this thread. */
static bool oob_inline(int fd)
{
    int on = 1;

    return setsockopt(fd, SOL_SOCKET, SO_OOBINLINE, &on, sizeof(on)) == 0;
}

/* Before Linux 6.16, or when it connected before the daemon listened, the peer may have sent
 * descriptors already. */
static void refused_close(struct front *f, int fd, const struct peer *peer)
{
    struct limit_owner *owner;

    if (rights_end(fd)) {
        close(fd);
        return;
    }
    owner = refused_owner(f, fd, peer);
    reaper_close_refused(f->reaper, fd, owner);
    if (owner)
        limit_owner_unref(owner);
}

/* Refuses a peer and says why. */
static void turn_away(struct front *f, int fd, const struct peer *peer, const struct ucm_error *e)
{
    struct proto_buf b;

    f->metrics->connections_refused++;
    log_warn("front", "refused", "reason=\"%s\"", e->text);
    proto_buf_init(&b, 4096);
    if (proto_notification_error(&b, e) == 0 &&
        send(fd, b.p, b.n, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)b.n)
        log_debug("front", "refusal-unsent", "errno=%d", errno);
    proto_buf_free(&b);
    refused_close(f, fd, peer);
}

/* Whether that uid may connect once more now. */
static int connects_check(struct front *f, uid_t uid, struct ucm_error *e)
{
    struct connects *c = &f->connects[uid * UINT32_C(2654435761) >> (32 - CONNECTS_BITS)];
    uint64_t now_ms = uv_now(f->loop), back = (now_ms - c->counted_ms) * CONNECTS_PER_MS;

    c->n = c->uid == uid && back < c->n ? c->n - (uint32_t)back : 0;
    c->uid = uid;
    c->counted_ms = now_ms;
    if (c->n >= CONNECTS_AT_ONCE)
        return ucm_error_set(e, UCM_WIRE_BUSY,
                             "uid %u connects more than %u times a second; keep connections open",
                             (unsigned)uid, 1000 * CONNECTS_PER_MS);
    c->n++;
    return 0;
}

/* A peer that connects too often is refused before it is identified. If its uid may be an
 * operator's, it is identified first: root of a container must not keep root of the host out. The
 * limit then applies unless it is an operator. */
static int connects_admit(struct front *f, int fd, struct peer *peer, struct ucm_error *e)
{
    struct ucred cred;
    socklen_t len = sizeof(cred);
    bool maybe;
    int rc = 0;

    maybe = getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &len) != 0 ||
            peer_may_be_admin(f->config, &cred);
    if (!maybe)
        rc = connects_check(f, cred.uid, e);
    if (rc == 0)
        rc = peer_identify(fd, f->config, peer, e);
    return rc == 0 && maybe && !peer->admin ? connects_check(f, peer->uid, e) : rc;
}

static void admit(struct front *f, int fd)
{
    struct conn *c = NULL;
    struct peer peer = {0};
    struct ucm_error e;
    int rc = connects_admit(f, fd, &peer, &e);

    if (rc == 0 && !oob_inline(fd))
        rc = ucm_error_set(&e, UCM_WIRE_IO, "SO_OOBINLINE: %s", strerror(errno));
    if (rc == 0)
        rc = conn_new(f, fd, &peer, &c, &e);
    if (rc != 0)
        turn_away(f, fd, &peer, &e);
    else if (c)
        conn_start(c);
}

static void listener_rest(struct front *f)
{
    uv_poll_stop(&f->listener);
    if (uv_timer_start(&f->backoff, backoff_cb, BACKOFF_MS, 0) != 0)
        log_error("front", "listener-stopped", "%s", "");
}

static void listener_cb(uv_poll_t *poll, int status, int events)
{
    struct front *f = poll->data;

    (void)events;
    if (reaper_refused(f->reaper) >= f->refused_most) {
        log_warn("front", "descriptors", "refused=%u closing=%u", reaper_refused(f->reaper),
                 reaper_waiting(f->reaper));
        listener_rest(f);
        return;
    }
    for (int i = 0; status == 0 && i < ACCEPTS_PER_TURN; i++) {
        int fd = accept4(f->socket.fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

        if (fd >= 0) {
            admit(f, fd);
            continue;
        }
        if (errno == EINTR || errno == ECONNABORTED)
            continue;
        if (errno != EAGAIN && errno != EWOULDBLOCK) {
            log_warn("front", "accept-failed", "errno=%d", errno);
            listener_rest(f);
        }
        break;
    }
}

static int handles_start(struct front *f)
{
    int rc = uv_idle_init(f->loop, &f->waker);

    if (rc == 0)
        rc = uv_check_init(f->loop, &f->server);
    if (rc == 0)
        rc = uv_timer_init(f->loop, &f->backoff);
    if (rc == 0)
        rc = uv_poll_init(f->loop, &f->listener, f->socket.fd);
    if (rc != 0)
        return rc; /* only out of memory or a bad descriptor: the daemon does not start */
    f->waker.data = f->server.data = f->backoff.data = f->listener.data = f;
    f->handles = 4;
    fair_queue_init(&f->ready, BURST_NS);
    (void)uv_check_start(&f->server, front_serve_cb); /* fails without a callback only */
    return uv_poll_start(&f->listener, UV_READABLE, listener_cb);
}

/* Descriptors: three quarters are clients', an eighth is for those of them that were refused. The
 * others are the daemon's own, for files, threads and devices. */
static void limits_init(struct front *f)
{
    uint64_t silent = f->config->max_connections / SILENT_PART;
    struct rlimit files;

    limits_set(f->limits, LIMIT_CONNECTIONS, f->config->max_connections);
    limits_set(f->limits, LIMIT_SILENT, silent < SILENT_LEAST ? SILENT_LEAST : silent);
    limits_set(f->limits, LIMIT_FRAMES, f->config->max_frame_memory);
    f->refused_most = UINT64_MAX;
    if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur == RLIM_INFINITY)
        return;
    limits_set(f->limits, LIMIT_DESCRIPTORS, files.rlim_cur / 4 * 3);
    f->refused_most = files.rlim_cur / 8;
    if (files.rlim_cur / FILES_PER_CONNECTION < f->config->max_connections)
        log_warn("front", "few-files", "most=%llu connections=%u",
                 (unsigned long long)files.rlim_cur, (unsigned)f->config->max_connections);
}

int front_new(uv_loop_t *loop, const struct config *config, int listen_fd,
              struct deadlines *deadlines, struct limits *limits, struct reaper *reaper,
              struct metrics *metrics, const struct front_handler *handler, struct front **out,
              struct ucm_error *e)
{
    struct front *f = calloc(1, sizeof(*f));
    int rc = 0;

    if (!f)
        return ucm_error_set(e, UCM_WIRE_NO_MEMORY, "no memory for the front"), -ENOMEM;
    f->loop = loop;
    f->config = config;
    f->deadlines = deadlines;
    f->limits = limits;
    f->reaper = reaper;
    f->metrics = metrics;
    f->handler = *handler;
    list_init(&f->conns);
    list_init(&f->unflushed);
    limits_init(f);
    if (listen_fd >= 0)
        listener_take(&f->socket, listen_fd);
    else
        rc = listener_unix(&f->socket, "socket", config->socket, config->socket_mode,
                           config->socket_group, BACKLOG, e);
    if (rc == 0) {
        rc = handles_start(f);
        if (rc != 0)
            ucm_error_set(e, UCM_WIRE_IO, "cannot poll the socket: %s", uv_strerror(rc));
    }
    if (rc != 0) {
        front_free(f);
        return rc;
    }
    *out = f;
    return 0;
}

void front_stop(struct front *f)
{
    f->stopped = true;
    uv_poll_stop(&f->listener);
    uv_timer_stop(&f->backoff);
}

void front_drop_all(struct front *f)
{
    struct list *node;

    while ((node = f->conns.next) != &f->conns) {
        struct conn *c = LIST_ENTRY(node, struct conn, link);

        conn_flush(c);
        conn_close(c, "the daemon stops", false);
    }
}

static void handle_closed_cb(uv_handle_t *handle)
{
    front_handle_closed(handle->data);
}

void front_free(struct front *f)
{
    assert(f->n_conns == 0);
    if (f->handles == 0) {
        front_release(f);
        return;
    }
    uv_close((uv_handle_t *)&f->listener, handle_closed_cb);
    uv_close((uv_handle_t *)&f->waker, handle_closed_cb);
    uv_close((uv_handle_t *)&f->server, handle_closed_cb);
    uv_close((uv_handle_t *)&f->backoff, handle_closed_cb);
}
