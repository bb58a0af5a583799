/* A root in a directory, for tests: the backend program of the build, next to the tested daemon. */
#ifndef UCMD_TESTS_SHARED_DIRECTORY_H
#define UCMD_TESTS_SHARED_DIRECTORY_H

#include "daemon/config/roots.h"
#include "tests/runner/environment.h"

#include <signal.h>
#include <stdio.h>

static inline void shared_directory_process(struct config_process *p, const char *directory)
{
    char program[256];

    signal(SIGPIPE, SIG_IGN); /* as the daemon does */
    *p = (struct config_process){.buffer_bytes = 8u << 20, .pause_ms = 10};
    snprintf(p->command, sizeof(p->command), "%s %s", built("ucmd-backend-directory", program),
             directory);
    /* the only thing that it may write to */
    snprintf(p->directory, sizeof(p->directory), "%s", directory);
}

#endif
