/* The connection to an NFS server, with the export mounted: name looked up, ports asked for, mountd
 * and the server's limits asked, one after the other and none of it waited for. Requests of a
 * connection that is lost end with it, none is sent twice.
 *
 * Promise: a server that does not answer loses its connection after NFS_STALL_MS, one that is being
 * connected to after NFS_CONNECT_MS, one that says what can't be said at once. changed_cb may run
 * from inside nfs_conn_want, nothing else does. Without requests under way nothing here wakes the
 * loop. Threads: the loop's. */
#ifndef UCMD_SHARE_NFS_CONN_H
#define UCMD_SHARE_NFS_CONN_H

#include "daemon/base/nfs_target.h"
#include "daemon/share/nfs_proc.h"
#include "daemon/share/nfs_rpc.h"

#include <stdbool.h>
#include <sys/socket.h>
#include <uv.h>

#define NFS_WATCH_MS 1000u
#define NFS_CONNECT_MS 5000u              /* for each step of it */
#define NFS_STALL_MS 15000u               /* without any reply while replies are awaited */
#define NFS_PAUSE_MS 250u                 /* after one that could not be made */
#define NFS_MAX_TRANSFER_BYTES (1u << 20) /* of one request: others wait behind it */

enum nfs_conn_state { NFS_DOWN, NFS_NAME, NFS_PORT, NFS_MOUNT, NFS_SERVER, NFS_UP };

struct nfs_link;
struct nfs_conn {
    uv_loop_t *loop;
    struct nfs_target target;
    enum nfs_conn_state state;
    struct nfs_link *link;    /* of PORT and what comes after it */
    uv_getaddrinfo_t *naming; /* of NAME */
    struct sockaddr_storage address;
    socklen_t address_bytes;
    uint32_t next_number; /* of a request: none is used twice by connections of this one */
    uint16_t mount_port;
    struct nfs_handle root;
    uint32_t read_bytes, write_bytes; /* of one request */
    int error;                        /* why it is down */
    uint64_t refused_until;           /* by uv_now */
    uv_timer_t watch;                 /* runs while somebody waits */
    unsigned silent;                  /* ticks of it since the server was heard of: a loop that was
                                       * held up has not waited for anybody */
    bool waiting;                     /* requests are under way, its user says */
    /* Up (0), or down: requests that were under way have ended, or this attempt has. */
    void (*changed_cb)(void *ctx, int status);
    void *ctx;
    void (*closed_cb)(void *ctx);
};

int nfs_conn_init(struct nfs_conn *c, uv_loop_t *loop, const struct nfs_target *target,
                  void (*changed_cb)(void *ctx, int status), void *ctx);
/* Requests under way end with -ECONNRESET before it returns. closed_cb runs later. */
void nfs_conn_close(struct nfs_conn *c, void (*closed_cb)(void *ctx));
/* Begins to connect when it is down. 0: it is up, or changed_cb will run; else why not now. */
int nfs_conn_want(struct nfs_conn *c);
bool nfs_conn_up(const struct nfs_conn *c);
/* For requests, when it is up. Make them, then nfs_conn_send. */
struct nfs_rpc *nfs_conn_rpc(struct nfs_conn *c);
void nfs_conn_send(struct nfs_conn *c);
/* Are replies awaited? Keeps the loop alive and watches over them. */
void nfs_conn_await(struct nfs_conn *c, bool waiting);
/* A reply came. */
void nfs_conn_heard(struct nfs_conn *c);
/* Down it goes, at the next turn of the loop: its handles are no good, or it lies. */
void nfs_conn_drop(struct nfs_conn *c, int error);

#endif
