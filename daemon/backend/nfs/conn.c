#include "daemon/backend/nfs/nfs.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <nfsc/libnfs-raw-mount.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#define PORTMAP_PORT 111
#define MIN_TRANSFER_BYTES 4096u
#define TELL_MS 1000u
#define NUMBERS (1u << 20) /* of calls of one connection */

/* A line for the log, but not a flood of them: `ucmctl shared` has the last reason anyway. */
static void tell(struct nfs *n, const char *what, const char *why, const char *said)
{
    if (n->conn.told_ms > 0 && n->now_ms - n->conn.told_ms < TELL_MS)
        return;
    n->conn.told_ms = n->now_ms;
    fprintf(stderr, "ucmd-backend-nfs: %s%s: %s%s%s%s\n", n->target.server, n->target.export, what,
            why, said[0] ? "; libnfs says: " : "", said);
}

static void rpc_close(struct nfs_conn *c)
{
    struct rpc_context *rpc = c->rpc;

    c->rpc = NULL; /* first: calls end now, and belong to no connection */
    c->connected = c->over = false;
    if (!rpc)
        return;
    (void)rpc_disconnect(rpc, "the connection ended");
    rpc_destroy_context(rpc);
}

static void step_over(struct nfs_conn *c, int error, const char *said)
{
    if (c->over)
        return;
    c->over = true;
    c->error = error;
    snprintf(c->said, sizeof(c->said), "%s", error < 0 && said ? said : "");
}

void nfs_conn_drop(struct nfs *n, int error, const char *said)
{
    if (n->conn.state != NFS_DOWN)
        step_over(&n->conn, error, said);
}

bool nfs_conn_up(const struct nfs *n)
{
    return n->conn.state == NFS_UP && !n->conn.over && n->conn.rpc;
}

/* ---- the steps' calls ---- */

static int limits_take(struct nfs *n, void *data)
{
    struct nfs_conn *c = &n->conn;
    struct nfs_reply r = {0};
    int err = nfs_reply_take(NFS_FSINFO, data, &r);

    if (err < 0 || r.err < 0)
        return err < 0 ? err : r.err;
    if (r.read_bytes < MIN_TRANSFER_BYTES || r.write_bytes < MIN_TRANSFER_BYTES)
        return -EPROTO;
    c->read_bytes = r.read_bytes < NFS_MAX_TRANSFER_BYTES ? r.read_bytes : NFS_MAX_TRANSFER_BYTES;
    c->write_bytes =
        r.write_bytes < NFS_MAX_TRANSFER_BYTES ? r.write_bytes : NFS_MAX_TRANSFER_BYTES;
    return 0;
}

static int mount_take(struct nfs_conn *c, const mountres3 *m)
{
    const fhandle3 *handle = &m->mountres3_u.mountinfo.fhandle;

    if (m->fhs_status != MNT3_OK)
        return nfs_mount_errno((int)m->fhs_status);
    return nfs_handle_take(&c->root, handle->fhandle3_len, handle->fhandle3_val) ? 0 : -EPROTO;
}

static int port_take(struct nfs_conn *c, const uint32_t *port)
{
    c->mount_port = (uint16_t)*port;
    return *port == 0 || *port > UINT16_MAX ? -ECONNREFUSED : 0;
}

static void step_replied(struct rpc_context *rpc, int status, void *data, void *ctx)
{
    struct nfs *n = ctx;
    struct nfs_conn *c = &n->conn;
    int err;

    if (c->rpc != rpc)
        return;
    if (status != RPC_STATUS_SUCCESS || !data) {
        step_over(c, -ECONNRESET, status == RPC_STATUS_ERROR ? data : NULL);
        return;
    }
    c->heard_ms = n->now_ms;
    err = c->state == NFS_PORT    ? port_take(c, data)
          : c->state == NFS_MOUNT ? mount_take(c, data)
                                  : limits_take(n, data);
    if (err == 0 && c->state == NFS_SERVER)
        c->state = NFS_UP;
    else
        step_over(c, err, NULL);
    if (c->state == NFS_UP) {
        nfs_directories_forget(n);
        nfs_known_forget_all(n);
        if (c->refused < 0)
            tell(n, "connected", "", "");
        c->refused = 0;
    }
}

/* Keep-alive: the kernel notices a vanished server while no call is under way. */
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
        (void)setsockopt(fd, options[i].level, options[i].name, &options[i].value, sizeof(int));
}

static void connected(struct rpc_context *rpc, int status, void *data, void *ctx)
{
    struct nfs *n = ctx;
    struct nfs_conn *c = &n->conn;
    FSINFO3args limits = {{{c->root.n, c->root.bytes}}};
    int rc;

    if (c->rpc != rpc)
        return;
    if (status != RPC_STATUS_SUCCESS) {
        step_over(c, -ECONNREFUSED, status == RPC_STATUS_ERROR ? data : NULL);
        return;
    }
    c->connected = true;
    c->heard_ms = n->now_ms;
    rc = c->state == NFS_PORT
             ? rpc_pmap2_getport_async(rpc, MOUNT_PROGRAM, MOUNT_V3, IPPROTO_TCP, step_replied, n)
         : c->state == NFS_MOUNT ? rpc_mount3_mnt_async(rpc, step_replied, n->target.export, n)
                                 : rpc_nfs3_fsinfo_async(rpc, step_replied, &limits, n);
    if (rc < 0)
        step_over(c, -ENOMEM, rpc_get_error(rpc));
}

/* ---- steps ---- */

static void step_begin(struct nfs *n, enum nfs_state state, int port)
{
    struct nfs_conn *c = &n->conn;
    char address[INET6_ADDRSTRLEN + 32];

    rpc_close(c);
    c->state = state;
    c->heard_ms = n->now_ms;
    c->rpc = rpc_init_context();
    if (!c->rpc || getnameinfo(c->address->ai_addr, c->address->ai_addrlen, address,
                               sizeof(address), NULL, 0, NI_NUMERICHOST) != 0) {
        step_over(c, -ENOMEM, NULL);
        return;
    }
    rpc_set_uid(c->rpc, (int)n->target.uid);
    rpc_set_gid(c->rpc, (int)n->target.gid);
    rpc_set_next_xid(c->rpc, c->next_number += NUMBERS);
    errno = 0;
    if (rpc_connect_async(c->rpc, address, port, connected, n) == 0)
        socket_tune(rpc_get_fd(c->rpc));
    else if (errno == EAFNOSUPPORT && !c->address->ai_next) /* the sandbox forbids it */
        step_over(c, -EAFNOSUPPORT, NULL);
    else
        step_over(c, -ECONNREFUSED, rpc_get_error(c->rpc)); /* no route to it, say */
}

static void mount_begin(struct nfs *n)
{
    n->conn.mount_port = n->target.mount_port;
    if (n->conn.mount_port)
        step_begin(n, NFS_MOUNT, n->conn.mount_port);
    else
        step_begin(n, NFS_PORT, PORTMAP_PORT);
}

static void conn_down(struct nfs *n, int error)
{
    static const char *const steps[] = {
        "name: ", "portmapper: ", "mount: ", "server: ", "connection: "};
    struct nfs_conn *c = &n->conn;

    if (error != c->refused)
        tell(n, steps[c->state], strerror(-error), c->said);
    if (c->state != NFS_UP)
        c->refused_until_ms = n->now_ms + NFS_PAUSE_MS;
    c->refused = error;
    c->state = NFS_DOWN;
    rpc_close(c);
}

static void conn_failed(struct nfs *n, int error)
{
    struct nfs_conn *c = &n->conn;
    bool refused = error == -ECONNREFUSED || (error == -ETIMEDOUT && !c->connected);

    if (refused && c->state >= NFS_PORT && c->state < NFS_UP && c->address->ai_next) {
        c->address = c->address->ai_next;
        mount_begin(n);
    } else {
        conn_down(n, error);
    }
}

void nfs_conn_settle(struct nfs *n)
{
    struct nfs_conn *c = &n->conn;

    while (c->over) {
        if (c->error < 0)
            conn_failed(n, c->error);
        else if (c->state == NFS_PORT)
            step_begin(n, NFS_MOUNT, c->mount_port);
        else
            step_begin(n, NFS_SERVER, n->target.port);
    }
}

void nfs_conn_watch(struct nfs *n)
{
    struct nfs_conn *c = &n->conn;
    const struct nfs_call *oldest = TAILQ_FIRST(&n->calls);
    uint64_t silent = n->now_ms - c->heard_ms;

    if (c->state == NFS_DOWN || c->over)
        return;
    if (c->state != NFS_UP
            ? silent >= NFS_CONNECT_MS
            : oldest && (silent >= NFS_SILENT_MS || n->now_ms - oldest->sent_ms >= NFS_CALL_MS))
        step_over(c, -ETIMEDOUT, NULL);
}

/* Blocks while the name is resolved: without an address nothing could be done meanwhile. */
static int name_resolve(struct nfs *n)
{
    static const struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    struct nfs_conn *c = &n->conn;
    int err;

    if (c->addresses)
        freeaddrinfo(c->addresses);
    c->addresses = c->address = NULL;
    err = getaddrinfo(n->target.server, NULL, &hints, &c->addresses);
    c->address = c->addresses;
    if (err != 0)
        snprintf(c->said, sizeof(c->said), "%s", gai_strerror(err));
    return err == 0 ? 0 : err == EAI_MEMORY ? -ENOMEM : -EADDRNOTAVAIL;
}

int nfs_conn_want(struct nfs *n)
{
    struct nfs_conn *c = &n->conn;
    int err;

    if (c->state != NFS_DOWN)
        return 0;
    if (n->now_ms < c->refused_until_ms)
        return c->refused;
    err = name_resolve(n);
    if (err < 0)
        conn_down(n, err);
    else
        mount_begin(n);
    nfs_conn_settle(n);
    return c->state == NFS_DOWN ? c->refused : 0;
}
