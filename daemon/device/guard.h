/* Guards copies from and to memory that a client shares. A client may punch holes into its memfd
 * after the registration (FALLOC_FL_PUNCH_HOLE). If the daemon touched them, the kernel would
 * allocate new pages and charge the daemon, without bound. Under a guard a touched hole ends the
 * copy instead. Inside this module only. */
#ifndef UCMD_DEVICE_GUARD_H
#define UCMD_DEVICE_GUARD_H

#include "daemon/device/device.h"

#include <stdbool.h>
#include <stddef.h>

/* Once a device. Its descriptor, which the caller closes, or -errno where the kernel or a seccomp
 * filter has no userfaultfd for us: then holes are filled, as without guards. */
int guard_open(void);
/* From now on, until it is unmapped, touching this mapping of a memfd allocates no page. guard:
 * from guard_open; -1: does nothing. 0 or -errno. */
int guard_add(int guard, void *p, size_t bytes);

/* Runs copy_cb, which must hold nothing that it would have to give back. False: it touched a page
 * of the region that is not there, and was left in the middle. Any thread. */
bool guard_run(const struct device_region *r, void (*copy_cb)(void *ctx), void *ctx);

#endif
