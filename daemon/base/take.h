/* Locks and devices that another process may still hold. A process that was killed holds its files
 * until its last transfers have ended, under load for seconds, so both calls retry for TAKE_WAIT_MS;
 * a process that lives holds them longer. Threads: any; both block. */
#ifndef UCMD_BASE_TAKE_H
#define UCMD_BASE_TAKE_H

#include <stdbool.h>

#define TAKE_WAIT_MS 10000u

/* The exclusive flock of fd. 0; -EWOULDBLOCK: another process has it; -errno. */
int take_lock(int fd);
/* As open(2) with O_EXCL of a device. A descriptor; -EBUSY: somebody else has it; -errno. */
int take_open(const char *path, int flags);
/* Does this -errno mean that a device fails, and not that somebody named a wrong one? */
bool take_failed(int rc);

#endif
