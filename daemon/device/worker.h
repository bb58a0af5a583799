/* A worker's process: is it the same one, and is it alive?
 *
 * Promise: worker_alive is true only while the process that had this pid at worker_open has not
 * begun to exit. Threads: one object at a time. */
#ifndef UCMD_DEVICE_WORKER_H
#define UCMD_DEVICE_WORKER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct worker {
    pid_t pid;
    uint64_t start; /* clock ticks after boot; differs between processes that had the same pid */
    int fd;         /* /proc/<pid>/stat, bound to the process and not to its number; -1: none */
};

/* 0, or -errno: the process is gone, or not visible from here. worker_close is harmless then. */
int worker_open(struct worker *w, pid_t pid);
bool worker_alive(const struct worker *w);
void worker_close(struct worker *w);

#endif
