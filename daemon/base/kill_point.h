/* Places at which a test may have the daemon killed: UCMD_KILL_AT=POINT:N in the environment kills
 * it when it comes to POINT for the Nth time. Compiled in with UCMD_KILL_POINTS only, which nothing
 * but build/ucmd-kill is; see tests/fault/test_kill.c. A point's name occurs in one file. */
#ifndef UCMD_BASE_KILL_POINT_H
#define UCMD_BASE_KILL_POINT_H

#ifdef UCMD_KILL_POINTS

#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Whether the moment has come. */
static inline bool kill_point_due(const char *name)
{
    static unsigned hits;
    const char *at = getenv("UCMD_KILL_AT");
    size_t n = strlen(name);

    return at && strncmp(at, name, n) == 0 && at[n] == ':' &&
           __atomic_add_fetch(&hits, 1, __ATOMIC_RELAXED) == strtoul(at + n + 1, NULL, 10);
}

static inline void kill_point(const char *name)
{
    if (kill_point_due(name))
        kill(getpid(), SIGKILL);
}

#define KILL_POINT(name) kill_point(name)
#define KILL_POINT_WITH(name, last_words)                                                          \
    do {                                                                                           \
        if (kill_point_due(name)) {                                                                \
            last_words;                                                                            \
            kill(getpid(), SIGKILL);                                                               \
        }                                                                                          \
    } while (0)

#else

#define KILL_POINT(name) ((void)0)
#define KILL_POINT_WITH(name, last_words) ((void)0)

#endif
#endif
