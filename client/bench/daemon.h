/* A daemon of the benchmark's own, in a temporary directory. It dies with the benchmark. */
#ifndef UCM_BENCH_DAEMON_H
#define UCM_BENCH_DAEMON_H

#include <sys/types.h>

#define DAEMON_MAX_SETS 12

struct daemon {
    const char *path, *dir; /* the program, and an existing directory; borrowed */
    char socket[160];
    pid_t pid;
};

/* sets: "key=value" next to the socket's, NULL-terminated, at most DAEMON_MAX_SETS. 0 or -errno. */
int daemon_start(struct daemon *d, const char *const *sets);
/* Waits until it answers; 0 or a negative enum ucm_status. */
int daemon_wait(const struct daemon *d, int timeout_ms);
/* 0, -errno, or -EPROTO when it did not end in order. Removes its socket's lock. */
int daemon_stop(struct daemon *d);
/* Processor time that it and its children (backends of roots) have had, in seconds, without children that have ended. 0: can't be read. */
double daemon_cpu_s(const struct daemon *d);
/* The directory and what is in it. 0 or -errno. */
int daemon_directory_remove(const char *dir);

#endif
