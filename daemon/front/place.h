/* Where a peer runs: here, or in a container. By what the kernel says under /proc, which needs no
 * privilege.
 *
 * Promise: what is said is of the process that connected, not of another one that got its number
 * later. When that is not certain, the answer is PLACE_UNKNOWN. Before Linux 6.5 (SO_PEERPIDFD) it
 * can't be certain of the time between connect and accept: a peer that ends in that time, whose
 * number then goes to a process of another place, and whose connection a child of its own keeps
 * open, is taken for that process. The kernel gives numbers out in turn, so that takes as many new
 * processes as there are numbers (4,194,304 under systemd), within the milliseconds that a
 * connection waits. Who can't rule that out has no `admins` by uid that containers share, and a
 * kernel of 6.5.
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
