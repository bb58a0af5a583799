/* An NFS server for tests: nfs-ganesha with its VFS backend, on loopback of a network namespace of
 * its own. The process that starts it moves there. Server, rpcbind (which ganesha needs to start)
 * and namespace end with that process. One a process. */
#ifndef UCMD_TESTS_NFS_SERVER_H
#define UCMD_TESTS_NFS_SERVER_H

#include <stdbool.h>
#include <sys/types.h>

#define NFS_SERVER_PORT 20490
#define NFS_SERVER_MOUNT_PORT 20491

struct nfs_server {
    char directory[96]; /* of the test; the server's own */
    char export[128];   /* what lies on the shared tier, seen from the server */
    char url[160];      /* of the shared tier, with both ports */
    pid_t names, pid;   /* rpcbind; ganesha, or 0 */
};

/* What this machine lacks for it, in words, or NULL. Moves the process to its own namespace. */
const char *nfs_server_lacks(void);
/* Returns when the server answers; fails the test when it does not. */
void nfs_server_open(struct nfs_server *s);
void nfs_server_close(struct nfs_server *s);
void nfs_server_kill(struct nfs_server *s); /* as when its host dies: it tells nobody */
void nfs_server_start(struct nfs_server *s);
void nfs_server_hang(struct nfs_server *s, bool hang);

#endif
