/* A worker's process: is it the same one, and is it alive?
 *
 * Promise: worker_alive is true only while the process that had this pid at worker_open has not
 * begun to exit. Threads: one object at a time. */
#ifndef UCMD_CUDA_WORKER_H
#define UCMD_CUDA_WORKER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct worker {
    pid_t pid;
    uint64_t start;   /* clock ticks after boot; differs between processes that had the same pid */
    int fd;           /* /proc/<pid>/stat, bound to the process and not to its number; -1: none */
    uint64_t seen_ms; /* worker_seen looked then, */
    bool seen;        /* and saw that */
};

/* 0, or -errno: the process is gone, or not visible from here. worker_close is harmless then. */
int worker_open(struct worker *w, pid_t pid);
bool worker_alive(const struct worker *w);
/* Alive, and not hung up. May be WORKER_SEEN_MS old. */
#define WORKER_SEEN_MS 10
bool worker_seen(struct worker *w, const int *peer_fd, uint64_t now_ms);
/* NULL: the CUDA driver finds the worker's events under their names. Otherwise why it may find
 * none, or another process's: it names them /dev/shm/cuda.shm.UID.PID.N, by the opener's user and
 * the number that the worker has in its own pid namespace. */
const char *worker_events_foreign(const struct worker *w);
void worker_close(struct worker *w);

#endif
