/* Taking what another process may still hold. Promise: one that was killed is waited for, because
 * the kernel lets its files go only when its last transfers have ended, under load seconds later;
 * one that lives is not, for longer than that. Threads: any; both block. */
#ifndef UCMD_BASE_TAKE_H
#define UCMD_BASE_TAKE_H

#include <stdbool.h>

#define TAKE_WAIT_MS 10000u

/* The exclusive flock of fd. 0; -EWOULDBLOCK: another process has it; -errno. */
int take_lock(int fd);
/* As open(2) with O_EXCL of a device. A descriptor; -EBUSY: somebody else has it; -errno. */
int take_open(const char *path, int flags);
/* Does this -errno tell of a device that fails, and of no mistake of who named it? */
bool take_failed(int rc);

#endif
