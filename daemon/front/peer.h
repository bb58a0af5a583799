/* Peers: a process's tenant, whether it is an operator, and whether it is stopped. Loop only.
 */
#ifndef UCMD_FRONT_PEER_H
#define UCMD_FRONT_PEER_H

#include "daemon/front/front.h"

/* Fills *peer with what the kernel says of the process that connected. 0 or -errno. */
int peer_identify(int fd, const struct config *config, struct peer *peer);
/* Whether the process is stopped, by SIGSTOP or a debugger. */
bool peer_stopped(pid_t pid);

#endif
