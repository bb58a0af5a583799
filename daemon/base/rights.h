/* Descriptors that a peer sends (SCM_RIGHTS) and nobody has received yet. The kernel closes those
 * that a read has no room for, and those in a socket that is closed, in the calling thread; a peer
 * can make their close() wait. Here one finds out first. No call waits, and none closes a
 * descriptor of a peer.
 *
 * Threads: any. */
#ifndef UCMD_BASE_RIGHTS_H
#define UCMD_BASE_RIGHTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define RIGHTS_MOST 253u /* with one message: the kernel's SCM_MAX_FD */

/* Whether peers may send some to this unix socket, or to those that a listening one accepts. 0, or
 * -errno: not before Linux 6.16. */
int rights_pass(int fd, bool may);
/* How many lie in a connected unix socket; UINT32_MAX: the kernel does not say (before Linux 5.6,
 * or without /proc). */
uint32_t rights_unread(int fd);
/* Shuts a connected unix socket down for both sides. True: no descriptor lies in it, and none comes
 * any more, so its close() does not wait. */
bool rights_end(int fd);
/* Copies into p, and leaves in the socket, what a read of n bytes would bring now. *some:
 * descriptors may come with it; if not, none come with as many bytes later. The bytes, or
 * -errno. */
ssize_t rights_peek(int fd, void *p, size_t n, bool *some);

#endif
