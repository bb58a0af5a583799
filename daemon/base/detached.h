/* Threads that nobody joins, since what they wait for may never come; and what others wait for them
 * with. */
#ifndef UCMD_BASE_DETACHED_H
#define UCMD_BASE_DETACHED_H

#include <pthread.h>
#include <stddef.h>

#define DETACHED_STACK_BYTES (256u << 10) /* for what calls little */

/* stack_bytes: 0: the system's. 0 or -errno. */
int detached_start(size_t stack_bytes, void *(*run_cb)(void *arg), void *arg);
/* Its timed waits count by CLOCK_MONOTONIC. 0 or -errno. */
int detached_cond_init(pthread_cond_t *cond);

#endif
