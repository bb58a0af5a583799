/* Memory that a client shares, while the daemon copies from and to it. A client may take pages out
 * of its memfd past the registration (FALLOC_FL_PUNCH_HOLE). The kernel would make new ones for
 * whoever touches the hole, and charge them to him: to the daemon, as many as the client likes.
 * Under a guard a touched hole ends the copy instead. Inside this module only. */
#ifndef UCMD_DEVICE_GUARD_H
#define UCMD_DEVICE_GUARD_H

#include "daemon/device/device.h"

#include <stdbool.h>
#include <stddef.h>

/* Once a device. Its descriptor, which the caller closes, or -errno where the kernel or a seccomp
 * filter has no userfaultfd for us: then holes are filled, as without guards. */
int guard_open(void);
/* From now on no page comes into being by touching this mapping of a memfd; until it is unmapped.
 * guard: from guard_open; -1: does nothing. 0 or -errno. */
int guard_add(int guard, void *p, size_t bytes);

/* Runs copy_cb, which must hold nothing that it would have to give back. False: it touched a page
 * of the region that is not there, and was left in the middle. Any thread. */
bool guard_run(const struct device_region *r, void (*copy_cb)(void *ctx), void *ctx);

#endif
