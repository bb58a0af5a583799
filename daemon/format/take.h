/* Locks and devices that another process may still hold. A process that was killed holds its files
 * until its last transfers have ended, under load for seconds, so both calls retry for wait_ms; a
 * process that lives holds them longer. Threads: any; both block. */
#ifndef UCMD_FORMAT_TAKE_H
#define UCMD_FORMAT_TAKE_H

#include <stdbool.h>

#define TAKE_WAIT_MS 10000u /* the daemon's */

/* The exclusive flock of fd. 0; -EWOULDBLOCK: another process has it; -errno. */
int take_lock(int fd, unsigned wait_ms);
/* As open(2), with O_CLOEXEC. A descriptor; -EBUSY: with O_EXCL, somebody else has the device;
 * -errno. */
int take_open(const char *path, int flags, unsigned wait_ms);
/* Does this -errno mean that a device fails, and not that somebody named a wrong one? */
bool take_failed(int rc);

#endif
