/* The connection to an NFS server with its export mounted. Steps, none of which blocks:
 * DOWN -> NAME (resolver) -> PORT (portmapper, unless the target names mountd's port) -> MOUNT
 * (mountd) -> SERVER (limits) -> UP. When nothing accepts a connection at one of the server's
 * addresses, the steps from PORT on are taken at the next one.
 *
 * Promises:
 * - Requests of a lost connection end with it; none is sent twice.
 * - A silent server loses its connection after NFS_STALL_MS, in the steps before UP after
 *   NFS_CONNECT_MS; a reply that can't be decoded costs the connection at once.
 * - Only changed_cb may run from inside nfs_conn_want.
 * - Without requests under way nothing here wakes the loop.
 *
 * Threads: the loop. */
#ifndef UCMD_SHARE_NFS_CONN_H
#define UCMD_SHARE_NFS_CONN_H

#include "daemon/base/deadline.h"
#include "daemon/base/nfs_target.h"
#include "daemon/share/nfs_proc.h"
#include "daemon/share/nfs_rpc.h"

#include <stdbool.h>
#include <uv.h>

#define NFS_WATCH_MS 1000u
#define NFS_CONNECT_MS 5000u              /* for each step */
#define NFS_STALL_MS 15000u               /* without any reply while replies are awaited */
#define NFS_PAUSE_MS 250u                 /* after a failed attempt */
#define NFS_MAX_TRANSFER_BYTES (1u << 20) /* of one request: others wait behind it */

enum nfs_conn_state { NFS_DOWN, NFS_NAME, NFS_PORT, NFS_MOUNT, NFS_SERVER, NFS_UP };

struct nfs_link;
struct nfs_conn {
    uv_loop_t *loop;
    struct deadlines *deadlines;
    struct nfs_target target;
    enum nfs_conn_state state;
    struct nfs_link *link;      /* from PORT on */
    uv_getaddrinfo_t *naming;   /* of NAME */
    struct addrinfo *addresses; /* of the server; its own memory */
    struct addrinfo *address;   /* the one that is tried or used */
    uint32_t next_number;       /* of a request; unique over all reconnects */
    uint16_t mount_port;
    struct nfs_handle root;
    uint32_t read_bytes, write_bytes; /* of one request */
    int error;                        /* why it is down */
    uint64_t refused_until;           /* by uv_now */
    struct deadline watch;            /* every NFS_WATCH_MS while somebody waits */
    unsigned silent;                  /* its ticks without a word of the server; counted, because a
                                       * loop that stalled has not waited for the server */
    bool waiting;                     /* requests are under way */
    /* 0: up. Otherwise down: the attempt failed, or the requests under way have ended. */
    void (*changed_cb)(void *ctx, int status);
    void *ctx;
};

void nfs_conn_init(struct nfs_conn *c, uv_loop_t *loop, struct deadlines *deadlines,
                   const struct nfs_target *target, void (*changed_cb)(void *ctx, int status),
                   void *ctx);
/* Requests under way end with -ECONNRESET before it returns. */
void nfs_conn_close(struct nfs_conn *c);
/* Connects when it is down. 0: it is up, or changed_cb will run; -errno: why not now. */
int nfs_conn_want(struct nfs_conn *c);
bool nfs_conn_up(const struct nfs_conn *c);
/* For requests, while it is up: make them, then call nfs_conn_send. */
struct nfs_rpc *nfs_conn_rpc(struct nfs_conn *c);
void nfs_conn_send(struct nfs_conn *c);
/* Are replies awaited? If so the loop stays alive and the server's silence is counted. */
void nfs_conn_await(struct nfs_conn *c, bool waiting);
/* A reply came. */
void nfs_conn_heard(struct nfs_conn *c);
/* Closes the connection at the next turn of the loop: its handles are stale, or memory ran out. */
void nfs_conn_drop(struct nfs_conn *c, int error);

#endif
