/* A daemon of our own, for commands that must choose its configuration.
 * Threads: one. */
#ifndef UCM_TESTS_BENCH_DAEMON_H
#define UCM_TESTS_BENCH_DAEMON_H

#include <sys/types.h>

struct daemon {
    const char *path, *dir; /* the program; a folder for its socket */
    char socket[160];
    pid_t pid;
};

/* A program without input and output that ends with this one; -1 with errno. */
pid_t daemon_spawn(const char *const *argv);
/* sets: "key=value" each, then NULL; at most 14. 0 or -errno. */
int daemon_start(struct daemon *d, const char *const *sets);
/* Until it answers: 0 or a negative enum ucm_status. */
int daemon_wait(const struct daemon *d);
/* 0 when it ended well. */
int daemon_stop(struct daemon *d);

#endif
