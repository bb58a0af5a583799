/* Where a peer runs: here, or in a container. By what the kernel says under /proc, which needs no
 * privilege.
 *
 * Promise: the answer is about the process that connected, not about another one that got its pid
 * later. If that is not certain, the answer is PLACE_UNKNOWN. Before Linux 6.5 (SO_PEERPIDFD) a
 * peer can end between connect and accept while its child keeps the connection open. If a process
 * of another place gets its pid then, the peer is taken for that process. The kernel assigns pids
 * in order. So that takes as many new processes as there are pids (4,194,304 under systemd), within
 * the milliseconds that a connection waits. A host that can't rule that out needs Linux 6.5, and no
 * uids in `admins` that containers share.
 * Thread: the event loop only. */
#ifndef UCMD_FRONT_PLACE_H
#define UCMD_FRONT_PLACE_H

#include <sys/types.h>

/* A path has at most PATH_MAX bytes; what is longer is not known. */
#define PLACE_CGROUP_BYTES 4096

enum peer_place {
    PLACE_HERE,      /* in the daemon's user namespace and its PID namespace */
    PLACE_CONTAINER, /* in another PID namespace: its root is the host's, but it is shut in */
    PLACE_USER_NS,   /* in another user namespace: its root is nobody here */
    PLACE_UNKNOWN,   /* it has ended, or the daemon does not see it */
};

/* fd: a connected socket; pid: as SO_PEERCRED has it. cgroup: the path of its cgroup, or "" where
 * that is not known; always with PLACE_UNKNOWN. */
enum peer_place place_read(int fd, pid_t pid, char cgroup[PLACE_CGROUP_BYTES]);
/* The daemon's own. */
void place_own_cgroup(char cgroup[PLACE_CGROUP_BYTES]);

#endif
