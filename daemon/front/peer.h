/* Peers: which tenant a uid is, who is an operator, and what /proc tells of a process. Loop only.
 */
#ifndef UCMD_FRONT_PEER_H
#define UCMD_FRONT_PEER_H

#include "daemon/front/front.h"

/* Fills *peer from the kernel's word about the socket. 0 or -errno. */
int peer_identify(int fd, const struct config *config, struct peer *peer);
/* The peer's process is stopped (SIGSTOP, a debugger): it can't be blamed for being slow. */
bool peer_stopped(pid_t pid);

#endif
