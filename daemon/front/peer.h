/* Peers: a process's tenant, whether it is an operator, and whether it is stopped.
 *
 * An operator is root, has the daemon's own uid, or is one of `admins`, and runs in the daemon's
 * user namespace: the same uid in another one is a different user. In another PID namespace (a
 * container whose root is the host's) it is an operator only if `container_admins` says so. A peer
 * whose place is unknown is not an operator.
 *
 * The tenant is that of the longest `cgroup:` member that contains the peer's cgroup, else of the
 * first that lists its uid or primary gid: root in a container may take any uid, but can't leave
 * its cgroup. So where there are such members, a peer whose cgroup is not known is turned away.
 * Loop only. */
#ifndef UCMD_FRONT_PEER_H
#define UCMD_FRONT_PEER_H

#include "daemon/front/front.h"

#include <sys/socket.h>

/* Fills *peer with what the kernel says of the process that connected. 0, or a negative code with
 * *e. */
int peer_identify(int fd, const struct config *config, struct peer *peer, struct ucm_error *e);
/* Whether the peer is of the tenant that the daemon's own process would be. */
bool peer_is_own(const struct peer *peer, const struct config *config);
/* Whether somebody with these credentials is an operator, if its process runs in the right
 * place. */
bool peer_may_be_admin(const struct config *config, const struct ucred *cred);
/* Whether the process is stopped, by SIGSTOP or a debugger. */
bool peer_stopped(pid_t pid);

#endif
