/* ucmd-backend-nfs nfs://SERVER[:PORT]/EXPORT[?OPTIONS] [UID GID]: keeps blocks on an NFS server,
 * by libnfs. The daemon starts it for a root nfs://; see docs/shared-tier.md. UID and GID are the
 * identity that the server sees, unless the target names one; without them it is the process's
 * own. */
#include "daemon/backend/nfs/nfs.h"

#include "proto/clock.h"

#include <errno.h>
#include <malloc.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define PACKETS_BYTES (64 << 20) /* that are kept for reuse */

static const struct nfs_verb verbs[WIRE_VERBS] = {
    [WIRE_FIND] = {.first = nfs_directory_step, .in_directory = nfs_look_step},
    [WIRE_READ] = {.first = nfs_read_step, .in_directory = nfs_look_step},
    [WIRE_WRITE] = {.first = nfs_directory_step,
                    .in_directory = nfs_look_step,
                    .clean = nfs_unlink_temp_step},
    [WIRE_REMOVE] = {.first = nfs_directory_step, .in_directory = nfs_remove_step},
    [WIRE_TOUCH] = {.first = nfs_directory_step, .in_directory = nfs_look_step},
    [WIRE_LIST] = {.first = nfs_directory_step, .in_directory = nfs_list_step},
    [WIRE_CHECK] = {.first = nfs_check_step,
                    .in_directory = nfs_create_step,
                    .clean = nfs_unlink_temp_step},
};

/* 0 or -EPIPE: the daemon is gone; -EPROTO. */
static int requests_take(struct nfs *n)
{
    struct ucm_backend_request *r;
    int rc;

    while ((rc = ucm_backend_next(n->backend, &r)) == 0)
        nfs_task_new(n, r);
    return rc == -EAGAIN ? 0 : rc;
}

static void server_serve(struct nfs *n, int revents)
{
    struct nfs_conn *c = &n->conn;

    if (revents && c->rpc && rpc_service(c->rpc, revents) < 0)
        nfs_conn_drop(n, c->connected ? -ECONNRESET : -ECONNREFUSED, rpc_get_error(c->rpc));
}

static void cork(struct nfs *n, int on)
{
    if (n->conn.rpc)
        (void)setsockopt(rpc_get_fd(n->conn.rpc), IPPROTO_TCP, TCP_CORK, &on, sizeof(on));
}

/* libnfs sends its calls now, not after another poll. It sends each by itself: small ones go into
 * one packet. */
static void server_send(struct nfs *n)
{
    bool many = n->unsent > 1;

    n->unsent = 0;
    if (!nfs_conn_up(n) || !(rpc_which_events(n->conn.rpc) & POLLOUT))
        return;
    if (many)
        cork(n, 1);
    server_serve(n, POLLOUT);
    if (many)
        cork(n, 0);
}

/* Ticks only while there is something to wait for. */
static int turn(struct nfs *n)
{
    struct nfs_conn *c = &n->conn;
    bool busy = !TAILQ_EMPTY(&n->tasks) || (c->state != NFS_DOWN && c->state != NFS_UP);
    struct pollfd fds[2] = {{.fd = ucm_backend_fd(n->backend), .events = POLLIN},
                            {.fd = c->rpc ? rpc_get_fd(c->rpc) : -1,
                             .events = (short)(c->rpc ? rpc_which_events(c->rpc) : 0)}};
    int rc = poll(fds, 2, busy ? (int)NFS_TICK_MS : -1);

    n->now_ms = clock_ms();
    if (rc < 0)
        return errno == EINTR ? 0 : -errno;
    server_serve(n, fds[1].revents);
    nfs_conn_settle(n);
    rc = fds[0].revents ? requests_take(n) : 0;
    if (n->now_ms - n->tick_ms >= NFS_TICK_MS) {
        n->tick_ms = n->now_ms;
        nfs_tasks_watch(n);
        nfs_conn_watch(n);
        nfs_conn_settle(n);
    }
    nfs_pump(n);
    server_send(n);
    if (rc == 0)
        rc = ucm_backend_flush(n->backend);
    return rc == 0 && n->broken ? -EPIPE : rc;
}

/* libnfs allocates each packet: pages that went back to the kernel would come back one by one, as
 * zeroes. */
static void memory_keep(void)
{
    (void)mallopt(M_MMAP_THRESHOLD, PACKETS_BYTES / 2);
    (void)mallopt(M_TRIM_THRESHOLD, PACKETS_BYTES);
}

static void init(struct nfs *n)
{
    memory_keep();
    n->verbs = verbs;
    n->depth = (unsigned)ucm_backend_hello(n->backend)->depth;
    n->write_calls_max = n->depth > 1 ? n->depth - (n->depth + 3) / 4 : 1;
    TAILQ_INIT(&n->calls);
    TAILQ_INIT(&n->tasks);
    TAILQ_INIT(&n->reads);
    TAILQ_INIT(&n->writes);
    TAILQ_INIT(&n->later);
    n->now_ms = clock_ms();
    n->conn.next_number = (uint32_t)(n->now_ms * 2654435761u) ^ (uint32_t)getpid() << 16;
}

static int words_take(int argc, char **argv, struct nfs_target *target)
{
    const char *why = "";

    if (argc != 2 && argc != 4) {
        fprintf(stderr, "Usage: ucmd-backend-nfs nfs://SERVER/EXPORT [UID GID], which ucmd starts "
                        "for a root nfs://\n");
        return -EINVAL;
    }
    if (nfs_target_parse(argv[1], target, &why) < 0) {
        fprintf(stderr, "ucmd-backend-nfs: %s: %s\n", argv[1], why);
        return -EINVAL;
    }
    if (target->uid < 0)
        target->uid = argc == 4 ? atoll(argv[2]) : (int64_t)geteuid();
    if (target->gid < 0)
        target->gid = argc == 4 ? atoll(argv[3]) : (int64_t)getegid();
    return 0;
}

int main(int argc, char **argv)
{
    static const struct ucm_backend_about about = {.name = "nfs", .touch = true, .list = true};
    static struct nfs n;
    int rc;

    if (words_take(argc, argv, &n.target) < 0)
        return 2;
    rc = ucm_backend_open(&about, &n.backend);
    if (rc == 0) {
        init(&n);
        while ((rc = turn(&n)) == 0)
            ;
    }
    if (rc != -EPIPE)
        fprintf(stderr, "ucmd-backend-nfs: %s\n", strerror(-rc));
    return rc != -EPIPE;
}
