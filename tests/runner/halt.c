#include "tests/runner/halt.h"

#include <criterion/criterion.h>
#include <ctype.h>
#include <dirent.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define HALT_POLL_NS 1000000
#define HALT_POLLS 60000 /* a minute or more */

/* A thread that is gone, or about to go, counts as stopped. */
static bool thread_runs(pid_t pid, const char *thread)
{
    char path[300], stat[256] = "", *end;
    FILE *f;

    snprintf(path, sizeof(path), "/proc/%d/task/%s/stat", (int)pid, thread);
    f = fopen(path, "r");
    if (!f)
        return false;
    stat[fread(stat, 1, sizeof(stat) - 1, f)] = '\0';
    fclose(f);
    end = strrchr(stat, ')'); /* of its name, which may hold anything */
    return end && strlen(end) > 2 && !strchr("TXZ", end[2]);
}

static bool process_runs(pid_t pid)
{
    bool runs = false;
    char path[64];
    DIR *threads;

    snprintf(path, sizeof(path), "/proc/%d/task", (int)pid);
    threads = opendir(path);
    cr_assert(threads, "%s", path);
    for (struct dirent *e; !runs && (e = readdir(threads)) != NULL;)
        runs = isdigit((unsigned char)e->d_name[0]) && thread_runs(pid, e->d_name);
    closedir(threads);
    return runs;
}

void halt(pid_t pid)
{
    cr_assert_eq(kill(pid, SIGSTOP), 0);
    for (unsigned polls = 0; process_runs(pid); polls++) {
        cr_assert_lt(polls, HALT_POLLS, "process %d does not stop", (int)pid);
        nanosleep(&(struct timespec){.tv_nsec = HALT_POLL_NS}, NULL);
    }
}
