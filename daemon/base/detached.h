/* Threads that nobody joins, since what they wait for may never come. */
#ifndef UCMD_BASE_DETACHED_H
#define UCMD_BASE_DETACHED_H

#include <stddef.h>

#define DETACHED_STACK_BYTES (256u << 10) /* for what calls little */

/* stack_bytes: 0: the system's. 0 or -errno. */
int detached_start(size_t stack_bytes, void *(*run_cb)(void *arg), void *arg);

#endif
