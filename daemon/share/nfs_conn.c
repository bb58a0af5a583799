#include "daemon/share/nfs_conn.h"

#include "daemon/base/log.h"
#include "daemon/share/nfs_status.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define PORTMAP_PORT 111
#define MIN_TRANSFER_BYTES 4096u

/* One connection of TCP: its descriptor never changes. Freed when the loop has let it go. */
struct nfs_link {
    uv_poll_t poll;
    struct nfs_conn *conn;
    struct rpc_context *rpc;
    int fd, events;
    bool connected;
    bool over; /* what it was for is done, or failed: `error` */
    int error;
};

bool nfs_handle_set(struct nfs_handle *h, const char *bytes, uint32_t n)
{
    if (n == 0 || n > sizeof(h->bytes))
        return false;
    memcpy(h->bytes, bytes, n);
    h->n = n;
    return true;
}

/* ---- links ---- */

static void link_closed_cb(uv_handle_t *handle)
{
    free(handle->data);
}

/* Not from inside rpc_service of this link. */
static void link_close(struct nfs_conn *c)
{
    struct nfs_link *l = c->link;

    if (!l)
        return;
    c->link = NULL;
    l->over = true;
    uv_close((uv_handle_t *)&l->poll, link_closed_cb); /* before the descriptor goes */
    rpc_destroy_context(l->rpc);
}

static void link_arm(struct nfs_link *l);
static void conn_over(struct nfs_conn *c);

static void link_over(struct nfs_link *l, int error)
{
    if (l->over)
        return;
    l->over = true;
    l->error = error;
}

static void link_poll_cb(uv_poll_t *poll, int status, int events)
{
    struct nfs_link *l = poll->data;
    int revents = (events & UV_READABLE ? POLLIN : 0) | (events & UV_WRITABLE ? POLLOUT : 0);

    if (status < 0 || rpc_service(l->rpc, revents) < 0)
        link_over(l, l->connected ? -ECONNRESET : -ECONNREFUSED);
    if (l->over)
        conn_over(l->conn);
    else
        link_arm(l);
}

static void link_arm(struct nfs_link *l)
{
    int wanted = rpc_which_events(l->rpc);
    int events = (wanted & POLLIN ? UV_READABLE : 0) | (wanted & POLLOUT ? UV_WRITABLE : 0);

    if (l->over || events == l->events)
        return;
    if (uv_poll_start(&l->poll, events, link_poll_cb) < 0) {
        nfs_conn_drop(l->conn, -EIO);
        return;
    }
    l->events = events;
}

/* A server that is gone without a word is noticed by the kernel also while nobody asks it. */
static void socket_tune(int fd)
{
    static const struct {
        int level, name, value;
    } options[] = {{IPPROTO_TCP, TCP_NODELAY, 1},
                   {SOL_SOCKET, SO_KEEPALIVE, 1},
                   {IPPROTO_TCP, TCP_KEEPIDLE, 60},
                   {IPPROTO_TCP, TCP_KEEPINTVL, 15},
                   {IPPROTO_TCP, TCP_KEEPCNT, 4}};
    int flags = fcntl(fd, F_GETFD);

    if (flags < 0 || fcntl(fd, F_SETFD, flags | FD_CLOEXEC) < 0)
        log_warn("share", "nfs-socket", "error=%s", strerror(errno));
    for (size_t i = 0; i < sizeof(options) / sizeof(options[0]); i++)
        if (setsockopt(fd, options[i].level, options[i].name, &options[i].value, sizeof(int)) < 0)
            log_warn("share", "nfs-socket", "option=%d error=%s", options[i].name, strerror(errno));
}

static int link_open(struct nfs_conn *c, uint16_t port, rpc_cb connected_cb)
{
    struct nfs_link *l = calloc(1, sizeof(*l));
    int err = -ENOMEM;

    if (!l)
        return -ENOMEM;
    l->conn = c;
    l->rpc = rpc_init_context();
    if (!l->rpc)
        goto err_after_new;
    if (c->target.uid >= 0)
        rpc_set_uid(l->rpc, (int)c->target.uid);
    if (c->target.gid >= 0)
        rpc_set_gid(l->rpc, (int)c->target.gid);
    if (rpc_connect_async(l->rpc, c->address, port, connected_cb, l) < 0) {
        err = -ECONNREFUSED; /* no route to it, say */
        goto err_after_rpc;
    }
    l->fd = rpc_get_fd(l->rpc);
    socket_tune(l->fd);
    err = uv_poll_init(c->loop, &l->poll, l->fd);
    if (err < 0)
        goto err_after_rpc;
    l->poll.data = l;
    uv_unref((uv_handle_t *)&l->poll);
    c->link = l;
    link_arm(l);
    return 0;

err_after_rpc:
    l->over = true; /* its callbacks run from inside */
    rpc_destroy_context(l->rpc);
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

static bool step_connected(struct nfs_link *l, int status)
{
    l->connected = status == RPC_STATUS_SUCCESS && !l->over;
    if (!l->connected)
        link_over(l, -ECONNREFUSED);
    return l->connected;
}

static bool step_replied(struct nfs_link *l, int status, const void *data)
{
    if (status != RPC_STATUS_SUCCESS || !data)
        link_over(l, -EPROTO);
    return !l->over;
}

static void server_info_cb(struct rpc_context *rpc, int status, void *data, void *arg)
{
    struct nfs_link *l = arg;
    struct nfs_conn *c = l->conn;
    const FSINFO3res *res = data;
    const FSINFO3resok *ok;

    (void)rpc;
    if (!step_replied(l, status, data))
        return;
    if (res->status != NFS3_OK) {
        link_over(l, nfs_status_errno(res->status));
        return;
    }
    ok = &res->FSINFO3res_u.resok;
    if (ok->rtmax < MIN_TRANSFER_BYTES || ok->wtmax < MIN_TRANSFER_BYTES) {
        link_over(l, -EPROTO);
        return;
    }
    c->read_bytes = ok->rtmax < NFS_MAX_TRANSFER_BYTES ? ok->rtmax : NFS_MAX_TRANSFER_BYTES;
    c->write_bytes = ok->wtmax < NFS_MAX_TRANSFER_BYTES ? ok->wtmax : NFS_MAX_TRANSFER_BYTES;
    conn_set(c, NFS_UP);
    c->error = 0;
    c->changed_cb(c->ctx, 0);
}

static void server_cb(struct rpc_context *rpc, int status, void *data, void *arg)
{
    struct nfs_link *l = arg;
    struct nfs_handle *root = &l->conn->root;
    FSINFO3args args = {.fsroot.data = {root->n, root->bytes}};

    (void)data;
    if (step_connected(l, status) && rpc_nfs3_fsinfo_async(rpc, server_info_cb, &args, l) < 0)
        link_over(l, -ENOMEM);
}

static void mount_reply_cb(struct rpc_context *rpc, int status, void *data, void *arg)
{
    struct nfs_link *l = arg;
    const mountres3 *res = data;
    const fhandle3 *root;

    (void)rpc;
    if (!step_replied(l, status, data))
        return;
    if (res->fhs_status != MNT3_OK) {
        link_over(l, nfs_mount_errno(res->fhs_status));
        return;
    }
    root = &res->mountres3_u.mountinfo.fhandle;
    link_over(l,
              nfs_handle_set(&l->conn->root, root->fhandle3_val, root->fhandle3_len) ? 0 : -EPROTO);
}

static void mount_cb(struct rpc_context *rpc, int status, void *data, void *arg)
{
    struct nfs_link *l = arg;

    (void)data;
    if (step_connected(l, status) &&
        rpc_mount3_mnt_async(rpc, mount_reply_cb, l->conn->target.export, l) < 0)
        link_over(l, -ENOMEM);
}

static void port_reply_cb(struct rpc_context *rpc, int status, void *data, void *arg)
{
    struct nfs_link *l = arg;
    uint32_t port;

    (void)rpc;
    if (!step_replied(l, status, data))
        return;
    port = *(uint32_t *)data;
    l->conn->mount_port = (uint16_t)port;
    link_over(l, port == 0 || port > UINT16_MAX ? -ECONNREFUSED : 0);
}

static void port_cb(struct rpc_context *rpc, int status, void *data, void *arg)
{
    struct nfs_link *l = arg;

    (void)data;
    if (step_connected(l, status) &&
        rpc_pmap2_getport_async(rpc, MOUNT_PROGRAM, MOUNT_V3, IPPROTO_TCP, port_reply_cb, l) < 0)
        link_over(l, -ENOMEM);
}

static const char *state_name(enum nfs_conn_state state)
{
    static const char *const names[] = {"down", "name", "portmapper", "mount", "server", "up"};

    return names[state];
}

static void conn_failed(struct nfs_conn *c, int error)
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
        uv_timer_stop(&c->watch);
    c->changed_cb(c->ctx, error);
}

static void conn_step(struct nfs_conn *c, enum nfs_conn_state state, uint16_t port, rpc_cb cb)
{
    int err;

    conn_set(c, state);
    err = link_open(c, port, cb);
    if (err < 0)
        conn_failed(c, err);
}

static void conn_mount(struct nfs_conn *c)
{
    c->mount_port = c->target.mount_port;
    if (c->mount_port)
        conn_step(c, NFS_MOUNT, c->mount_port, mount_cb);
    else
        conn_step(c, NFS_PORT, PORTMAP_PORT, port_cb);
}

/* The link is over, and nothing of it is on the stack. */
static void conn_over(struct nfs_conn *c)
{
    int error = c->link->error;

    if (error < 0) {
        conn_failed(c, error);
        return;
    }
    link_close(c);
    if (c->state == NFS_PORT)
        conn_step(c, NFS_MOUNT, c->mount_port, mount_cb);
    else
        conn_step(c, NFS_SERVER, c->target.port, server_cb);
}

/* ---- names ---- */

static void named_cb(uv_getaddrinfo_t *naming, int status, struct addrinfo *found)
{
    struct nfs_conn *c = naming->data;

    if (c) {
        c->naming = NULL;
        if (status == 0 && getnameinfo(found->ai_addr, found->ai_addrlen, c->address,
                                       sizeof(c->address), NULL, 0, NI_NUMERICHOST) != 0)
            status = -EADDRNOTAVAIL;
        if (status == 0)
            conn_mount(c);
        else
            conn_failed(c, status == -ENOMEM ? -ENOMEM : -EADDRNOTAVAIL);
    }
    uv_freeaddrinfo(found);
    free(naming);
}

/* libnfs would look the name up itself, and have the loop wait: it is given addresses only. */
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

static void watch_cb(uv_timer_t *timer)
{
    struct nfs_conn *c = timer->data;
    uint64_t bound = c->state == NFS_UP ? NFS_STALL_MS : NFS_CONNECT_MS;

    if (c->link && c->link->over) { /* dropped from outside */
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

int nfs_conn_init(struct nfs_conn *c, uv_loop_t *loop, const struct nfs_target *target,
                  void (*changed_cb)(void *ctx, int status), void *ctx)
{
    int err;

    memset(c, 0, sizeof(*c));
    err = uv_timer_init(loop, &c->watch);
    if (err < 0)
        return err;
    c->watch.data = c;
    c->loop = loop;
    c->target = *target;
    c->changed_cb = changed_cb;
    c->ctx = ctx;
    return 0;
}

static void watch_closed_cb(uv_handle_t *handle)
{
    struct nfs_conn *c = handle->data;

    c->closed_cb(c->ctx);
}

void nfs_conn_close(struct nfs_conn *c, void (*closed_cb)(void *ctx))
{
    c->closed_cb = closed_cb;
    if (c->naming)
        c->naming->data = NULL;
    c->state = NFS_DOWN;
    link_close(c);
    uv_close((uv_handle_t *)&c->watch, watch_closed_cb);
}

static void watch_begin(struct nfs_conn *c)
{
    if (!uv_is_active((uv_handle_t *)&c->watch))
        uv_timer_start(&c->watch, watch_cb, NFS_WATCH_MS, NFS_WATCH_MS);
}

int nfs_conn_want(struct nfs_conn *c)
{
    struct in6_addr any;
    int err;

    if (c->state != NFS_DOWN)
        return 0;
    if (uv_now(c->loop) < c->refused_until)
        return c->error;
    conn_set(c, NFS_NAME);
    watch_begin(c);
    if (inet_pton(AF_INET, c->target.server, &any) == 1 ||
        inet_pton(AF_INET6, c->target.server, &any) == 1) {
        snprintf(c->address, sizeof(c->address), "%.*s", (int)sizeof(c->address) - 1,
                 c->target.server);
        conn_mount(c);
    } else {
        err = name_begin(c);
        if (err < 0)
            conn_failed(c, err);
    }
    return c->state == NFS_DOWN ? c->error : 0;
}

bool nfs_conn_up(const struct nfs_conn *c)
{
    return c->state == NFS_UP && !c->link->over;
}

struct rpc_context *nfs_conn_rpc(struct nfs_conn *c)
{
    return c->link->rpc;
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
        uv_timer_stop(&c->watch);
}

void nfs_conn_heard(struct nfs_conn *c)
{
    c->silent = 0;
}

void nfs_conn_drop(struct nfs_conn *c, int error)
{
    if (c->state != NFS_UP || c->link->over)
        return;
    link_over(c->link, error);
    uv_timer_start(&c->watch, watch_cb, 0, NFS_WATCH_MS);
}
