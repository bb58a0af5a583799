#include "daemon/share/nfs_conn.h"

#include "daemon/base/log.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PORTMAP_PORT 111
#define MIN_TRANSFER_BYTES 4096u
#define RESERVED_PORTS 512u /* below 1024 */

/* One TCP connection. Freed when the loop has closed it. */
struct nfs_link {
    uv_poll_t poll;
    struct nfs_conn *conn;
    struct nfs_rpc rpc;
    struct nfs_rpc_call call; /* of the steps up to NFS_UP, one at a time */
    int events;
    bool connected;
    bool serving; /* its poll_cb runs, and sends what is queued meanwhile */
    bool over;    /* its step is done, or failed with `error` */
    int error;
};

/* ---- links ---- */

static void link_closed_cb(uv_handle_t *handle)
{
    free(handle->data);
}

/* Not from inside nfs_rpc_read of this link. */
static void link_close(struct nfs_conn *c)
{
    struct nfs_link *l = c->link;

    if (!l)
        return;
    c->link = NULL;
    c->next_number = l->rpc.next_number;
    l->over = true;
    uv_close((uv_handle_t *)&l->poll, link_closed_cb); /* before the descriptor goes */
    nfs_rpc_close(&l->rpc, -ECONNRESET);
}

static void conn_over(struct nfs_conn *c);
static void conn_ask(struct nfs_link *l);

static void link_over(struct nfs_link *l, int error)
{
    if (l->over)
        return;
    l->over = true;
    l->error = error;
}

static void watch_cb(struct deadline *d);

/* From anywhere: the next turn of the loop closes the link. */
static void link_drop(struct nfs_link *l, int error)
{
    link_over(l, error);
    deadline_arm(l->conn->deadlines, &l->conn->watch, uv_now(l->conn->loop), watch_cb);
}

static void link_poll_cb(uv_poll_t *poll, int status, int events);

static void link_arm(struct nfs_link *l)
{
    int events = UV_READABLE;

    if (!l->connected || nfs_rpc_sending(&l->rpc))
        events |= UV_WRITABLE;
    if (l->over || l->serving || events == l->events)
        return;
    if (uv_poll_start(&l->poll, events, link_poll_cb) < 0)
        link_drop(l, -EIO);
    else
        l->events = events;
}

static int link_connected(struct nfs_link *l)
{
    int error;
    socklen_t n = sizeof(error);

    if (getsockopt(l->rpc.fd, SOL_SOCKET, SO_ERROR, &error, &n) < 0 || error != 0)
        return -ECONNREFUSED;
    l->connected = true;
    conn_ask(l);
    return 0;
}

static int link_serve(struct nfs_link *l, int events)
{
    int err = 0;

    if (!l->connected)
        return events & UV_WRITABLE ? link_connected(l) : 0;
    if (events & UV_READABLE)
        err = nfs_rpc_read(&l->rpc);
    if (err == 0 && !l->over)
        err = nfs_rpc_flush(&l->rpc);
    return err;
}

static void link_poll_cb(uv_poll_t *poll, int status, int events)
{
    struct nfs_link *l = poll->data;

    l->serving = true;
    if (status == 0)
        status = link_serve(l, events);
    l->serving = false;
    if (status < 0 && status != -EPROTO)
        status = l->connected ? -ECONNRESET : -ECONNREFUSED;
    if (status < 0)
        link_over(l, status);
    if (l->over)
        conn_over(l->conn);
    else
        link_arm(l);
}

/* Keep-alive: the kernel notices a vanished server while no request is under way. */
static void socket_tune(int fd)
{
    static const struct {
        int level, name, value;
    } options[] = {{IPPROTO_TCP, TCP_NODELAY, 1},
                   {SOL_SOCKET, SO_KEEPALIVE, 1},
                   {IPPROTO_TCP, TCP_KEEPIDLE, 60},
                   {IPPROTO_TCP, TCP_KEEPINTVL, 15},
                   {IPPROTO_TCP, TCP_KEEPCNT, 4}};

    for (size_t i = 0; i < sizeof(options) / sizeof(options[0]); i++)
        if (setsockopt(fd, options[i].level, options[i].name, &options[i].value, sizeof(int)) < 0)
            log_warn("share", "nfs-socket", "option=%d error=%s", options[i].name, strerror(errno));
}

static void port_set(struct sockaddr_storage *address, uint16_t port)
{
    if (address->ss_family == AF_INET6)
        ((struct sockaddr_in6 *)address)->sin6_port = htons(port);
    else
        ((struct sockaddr_in *)address)->sin_port = htons(port);
}

/* Servers may insist on a port below 1024. Without the privilege, or a free one, any port does. */
static void port_reserve(const struct nfs_conn *c, int fd)
{
    struct sockaddr_storage own = {.ss_family = (sa_family_t)c->address->ai_family};

    for (unsigned i = 0; i < RESERVED_PORTS; i++) {
        port_set(&own, (uint16_t)(RESERVED_PORTS + (c->next_number + i) % RESERVED_PORTS));
        if (bind(fd, (struct sockaddr *)&own, c->address->ai_addrlen) == 0 || errno != EADDRINUSE)
            return;
    }
}

static int socket_connect(const struct nfs_conn *c, uint16_t port)
{
    struct sockaddr_storage to;
    int fd = socket(c->address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (fd < 0) /* no IPv6 here, say; the reason if there is no other address */
        return errno == EAFNOSUPPORT && c->addresses->ai_next ? -ECONNREFUSED : -errno;
    socket_tune(fd);
    port_reserve(c, fd);
    memcpy(&to, c->address->ai_addr, c->address->ai_addrlen);
    port_set(&to, port);
    if (connect(fd, (struct sockaddr *)&to, c->address->ai_addrlen) < 0 && errno != EINPROGRESS) {
        close(fd);
        return -ECONNREFUSED; /* no route to it, say */
    }
    return fd;
}

static int link_open(struct nfs_conn *c, uint16_t port)
{
    struct nfs_link *l = calloc(1, sizeof(*l));
    uint32_t uid = c->target.uid >= 0 ? (uint32_t)c->target.uid : geteuid();
    uint32_t gid = c->target.gid >= 0 ? (uint32_t)c->target.gid : getegid();
    int fd, err;

    if (!l)
        return -ENOMEM;
    l->conn = c;
    fd = socket_connect(c, port);
    if (fd < 0) {
        err = fd;
        goto err_after_new;
    }
    err = nfs_rpc_init(&l->rpc, fd, c->next_number, uid, gid);
    if (err < 0)
        goto err_after_new;
    err = uv_poll_init(c->loop, &l->poll, fd);
    if (err < 0)
        goto err_after_rpc;
    l->poll.data = l;
    uv_unref((uv_handle_t *)&l->poll);
    c->link = l;
    link_arm(l);
    return 0;

err_after_rpc:
    nfs_rpc_close(&l->rpc, -ECONNRESET);
err_after_new:
    free(l);
    return err;
}

/* ---- steps ---- */

static void conn_set(struct nfs_conn *c, enum nfs_conn_state state)
{
    c->state = state;
    c->silent = 0;
}

static int limits_replied(struct nfs_conn *c, const struct nfs_reply *r)
{
    if (r->status != 0)
        return nfs_status_errno(r->status);
    if (r->read_bytes < MIN_TRANSFER_BYTES || r->write_bytes < MIN_TRANSFER_BYTES)
        return -EPROTO;
    c->read_bytes = r->read_bytes;
    if (c->read_bytes > NFS_MAX_TRANSFER_BYTES)
        c->read_bytes = NFS_MAX_TRANSFER_BYTES;
    c->write_bytes = r->write_bytes;
    if (c->write_bytes > NFS_MAX_TRANSFER_BYTES)
        c->write_bytes = NFS_MAX_TRANSFER_BYTES;
    conn_set(c, NFS_UP);
    c->error = 0;
    c->changed_cb(c->ctx, 0);
    return 0;
}

static int mount_replied(struct nfs_conn *c, const struct nfs_reply *r)
{
    if (r->status == 0)
        c->root = r->handle;
    return nfs_mount_errno(r->status);
}

static int port_replied(struct nfs_conn *c, const struct nfs_reply *r)
{
    c->mount_port = (uint16_t)r->port;
    return r->port == 0 || r->port > UINT16_MAX ? -ECONNREFUSED : 0;
}

static enum nfs_proc state_proc(enum nfs_conn_state state)
{
    return state == NFS_PORT ? NFS_GETPORT : state == NFS_MOUNT ? NFS_MOUNT_MNT : NFS_FSINFO;
}

static int step_done_cb(struct nfs_rpc_call *call, int status, struct nfs_xdr *x)
{
    struct nfs_link *l = LIST_ENTRY(call, struct nfs_link, call);
    struct nfs_conn *c = l->conn;
    enum nfs_conn_state state = c->state;
    struct nfs_reply reply;

    if (!x) /* it is being closed */
        return 0;
    if (status == 0)
        status = nfs_reply_decode(state_proc(state), x, &reply);
    if (status == 0)
        status = state == NFS_PORT    ? port_replied(c, &reply)
                 : state == NFS_MOUNT ? mount_replied(c, &reply)
                                      : limits_replied(c, &reply);
    if (status < 0 || state != NFS_SERVER)
        link_over(l, status);
    return 0;
}

/* The request of this step. */
static void conn_ask(struct nfs_link *l)
{
    struct nfs_conn *c = l->conn;
    const struct nfs_args args = {.handle = &c->root, .name = c->target.export};
    int err;

    nfs_rpc_begin(&l->rpc, &l->call, state_proc(c->state));
    l->call.done_cb = step_done_cb;
    nfs_put_args(&l->call.out, state_proc(c->state), &args);
    err = nfs_rpc_send(&l->rpc, &l->call);
    if (err < 0)
        link_over(l, err);
}

static const char *state_name(enum nfs_conn_state state)
{
    static const char *const names[] = {"down", "name", "portmapper", "mount", "server", "up"};

    return names[state];
}

static void conn_step(struct nfs_conn *c, enum nfs_conn_state state, uint16_t port);

static void conn_mount(struct nfs_conn *c)
{
    c->mount_port = c->target.mount_port;
    if (c->mount_port)
        conn_step(c, NFS_MOUNT, c->mount_port);
    else
        conn_step(c, NFS_PORT, PORTMAP_PORT);
}

/* Nothing accepted a connection at this address: true if there is another one to try. */
static bool address_next(struct nfs_conn *c, int error)
{
    bool refused =
        error == -ECONNREFUSED || (error == -ETIMEDOUT && c->link && !c->link->connected);

    if (!refused || c->state < NFS_PORT || c->state == NFS_UP || !c->address->ai_next)
        return false;
    c->address = c->address->ai_next;
    return true;
}

static void conn_down(struct nfs_conn *c, int error)
{
    log_warn("share", state_name(c->state)[0] == 'u' ? "nfs-lost" : "nfs-unreachable",
             "server=%s export=%s at=%s error=%s", c->target.server, c->target.export,
             state_name(c->state), strerror(-error));
    if (c->state != NFS_UP)
        c->refused_until = uv_now(c->loop) + NFS_PAUSE_MS;
    c->state = NFS_DOWN;
    c->error = error;
    link_close(c);
    if (!c->waiting)
        deadline_disarm(c->deadlines, &c->watch);
    c->changed_cb(c->ctx, error);
}

static void conn_failed(struct nfs_conn *c, int error)
{
    if (!address_next(c, error)) {
        conn_down(c, error);
        return;
    }
    link_close(c);
    conn_mount(c);
}

static void conn_step(struct nfs_conn *c, enum nfs_conn_state state, uint16_t port)
{
    int err;

    conn_set(c, state);
    err = link_open(c, port);
    if (err < 0)
        conn_failed(c, err);
}

/* Not from inside the link's own functions: closes it and takes the next step. */
static void conn_over(struct nfs_conn *c)
{
    int error = c->link->error;

    if (error < 0) {
        conn_failed(c, error);
        return;
    }
    link_close(c);
    if (c->state == NFS_PORT)
        conn_step(c, NFS_MOUNT, c->mount_port);
    else
        conn_step(c, NFS_SERVER, c->target.port);
}

/* ---- names ---- */

static void named_cb(uv_getaddrinfo_t *naming, int status, struct addrinfo *found)
{
    struct nfs_conn *c = naming->data;

    free(naming);
    if (!c) {
        uv_freeaddrinfo(found);
        return;
    }
    c->naming = NULL;
    uv_freeaddrinfo(c->addresses);
    c->addresses = c->address = found;
    if (status == 0)
        conn_mount(c);
    else
        conn_failed(c, status == -ENOMEM ? -ENOMEM : -EADDRNOTAVAIL);
}

static int name_begin(struct nfs_conn *c)
{
    static const struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    uv_getaddrinfo_t *naming = calloc(1, sizeof(*naming));
    int err;

    if (!naming)
        return -ENOMEM;
    naming->data = c;
    err = uv_getaddrinfo(c->loop, naming, named_cb, c->target.server, NULL, &hints);
    if (err < 0) {
        free(naming);
        return -EADDRNOTAVAIL;
    }
    c->naming = naming;
    return 0;
}

/* ---- its user ---- */

static void watch_begin(struct nfs_conn *c)
{
    if (!deadline_armed(&c->watch))
        deadline_arm(c->deadlines, &c->watch, uv_now(c->loop) + NFS_WATCH_MS, watch_cb);
}

static void watch_cb(struct deadline *d)
{
    struct nfs_conn *c = LIST_ENTRY(d, struct nfs_conn, watch);
    uint64_t bound = c->state == NFS_UP ? NFS_STALL_MS : NFS_CONNECT_MS;

    watch_begin(c);
    if (c->link && c->link->over) {
        conn_over(c);
        return;
    }
    if (c->state == NFS_DOWN || ++c->silent <= bound / NFS_WATCH_MS)
        return;
    if (c->naming) { /* the resolver has a thread, which can't be stopped */
        c->naming->data = NULL;
        c->naming = NULL;
    }
    conn_failed(c, -ETIMEDOUT);
}

void nfs_conn_init(struct nfs_conn *c, uv_loop_t *loop, struct deadlines *deadlines,
                   const struct nfs_target *target, void (*changed_cb)(void *ctx, int status),
                   void *ctx)
{
    *c = (struct nfs_conn){.loop = loop,
                           .deadlines = deadlines,
                           .target = *target,
                           .changed_cb = changed_cb,
                           .ctx = ctx};
    c->next_number = (uint32_t)(uv_hrtime() ^ (uint64_t)getpid() << 16);
}

void nfs_conn_close(struct nfs_conn *c)
{
    if (c->naming)
        c->naming->data = NULL;
    c->state = NFS_DOWN;
    link_close(c);
    uv_freeaddrinfo(c->addresses);
    deadline_disarm(c->deadlines, &c->watch);
}

int nfs_conn_want(struct nfs_conn *c)
{
    int err;

    if (c->state != NFS_DOWN)
        return 0;
    if (uv_now(c->loop) < c->refused_until)
        return c->error;
    conn_set(c, NFS_NAME);
    watch_begin(c);
    err = name_begin(c);
    if (err < 0)
        conn_failed(c, err);
    return c->state == NFS_DOWN ? c->error : 0;
}

bool nfs_conn_up(const struct nfs_conn *c)
{
    return c->state == NFS_UP && !c->link->over;
}

struct nfs_rpc *nfs_conn_rpc(struct nfs_conn *c)
{
    return &c->link->rpc;
}

void nfs_conn_send(struct nfs_conn *c)
{
    if (c->link)
        link_arm(c->link);
}

void nfs_conn_await(struct nfs_conn *c, bool waiting)
{
    if (waiting && !c->waiting)
        c->silent = 0;
    c->waiting = waiting;
    if (waiting)
        watch_begin(c);
    else if (c->state == NFS_DOWN || (c->state == NFS_UP && !c->link->over))
        deadline_disarm(c->deadlines, &c->watch);
}

void nfs_conn_heard(struct nfs_conn *c)
{
    c->silent = 0;
}

void nfs_conn_drop(struct nfs_conn *c, int error)
{
    if (c->state == NFS_UP && !c->link->over)
        link_drop(c->link, error);
}
