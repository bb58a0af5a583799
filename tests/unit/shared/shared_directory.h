/* A root in a directory, for tests: the backend program of the build, next to the tested daemon. */
#ifndef UCMD_TESTS_SHARED_DIRECTORY_H
#define UCMD_TESTS_SHARED_DIRECTORY_H

#include "daemon/config/roots.h"

#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* An absolute path of what the build made. */
static inline void shared_built(const char *program, char out[256])
{
    const char *ucmd = getenv("UCMD") ? getenv("UCMD") : "build/ucmd";
    char *real = realpath(ucmd, NULL);

    cr_assert(real, "%s", ucmd);
    cr_assert_lt(snprintf(out, 256, "%.*s/%s", (int)(strrchr(real, '/') - real), real, program),
                 256);
    free(real);
}

static inline void shared_directory_process(struct config_process *p, const char *directory)
{
    char program[256];

    shared_built("ucmd-backend-directory", program);
    signal(SIGPIPE, SIG_IGN); /* as the daemon does */
    *p = (struct config_process){.buffer_bytes = 8u << 20, .pause_ms = 10};
    snprintf(p->command, sizeof(p->command), "%s %s", program, directory);
    /* the only thing that it may write to */
    snprintf(p->directory, sizeof(p->directory), "%s", directory);
}

#endif
