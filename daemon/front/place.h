/* Where a peer runs: here, or in a container. By what the kernel says under /proc, which needs no
 * privilege.
 *
 * Promise: what is said is of the process that connected, not of another one that got its number
 * later. When that is not certain, the answer is PLACE_UNKNOWN. Before Linux 6.5 (SO_PEERPIDFD) it
 * can't be certain of the time between connect and accept.
 * Thread: the loop only. */
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

/* fd: a connected socket; pid: as SO_PEERCRED has it. cgroup: the path of its cgroup, or "" where that
 * is not known; always with PLACE_UNKNOWN. */
enum peer_place place_read(int fd, pid_t pid, char cgroup[PLACE_CGROUP_BYTES]);

#endif
