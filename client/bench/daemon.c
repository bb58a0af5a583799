#include "client/bench/daemon.h"

#include "ucmclient.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static pid_t daemon_spawn(const char *const *argv)
{
    pid_t pid = fork();

    if (pid == 0) {
        int null = open("/dev/null", O_RDWR);

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (null < 0 || dup2(null, 1) < 0 || dup2(null, 2) < 0)
            _exit(127);
        execv(argv[0], (char *const *)argv);
        _exit(127);
    }
    return pid;
}

int daemon_start(struct daemon *d, const char *const *sets)
{
    char socket_set[192];
    const char *argv[2 * DAEMON_MAX_SETS + 4] = {d->path, "--set", socket_set};
    unsigned n = 3;

    snprintf(d->socket, sizeof(d->socket), "%s/s", d->dir);
    snprintf(socket_set, sizeof(socket_set), "socket=%s", d->socket);
    for (; *sets && n < 2 * DAEMON_MAX_SETS + 3; sets++) {
        argv[n++] = "--set";
        argv[n++] = *sets;
    }
    d->pid = daemon_spawn(argv);
    return d->pid > 0 ? 0 : -errno;
}

/* The library tries again until somebody listens; hello is the first request. */
int daemon_wait(const struct daemon *d, int timeout_ms)
{
    struct ucm_options o = {.socket = d->socket, .name = "ucm-bench"};
    struct ucm_client *client;
    int rc = ucm_connect(&o, timeout_ms, &client);

    if (rc == 0)
        ucm_close(client);
    return rc;
}

int daemon_stop(struct daemon *d)
{
    char lock[192];
    int status;

    if (kill(d->pid, SIGTERM) != 0 || waitpid(d->pid, &status, 0) != d->pid)
        return -errno;
    snprintf(lock, sizeof(lock), "%s.lock", d->socket);
    unlink(lock);
    return status == 0 ? 0 : -EPROTO;
}

static int remove_cb(const char *path, const struct stat *st, int kind, struct FTW *at)
{
    (void)st;
    (void)kind;
    (void)at;
    return remove(path);
}

static double process_cpu_s(pid_t pid)
{
    struct timespec t;
    clockid_t clock;

    if (clock_getcpuclockid(pid, &clock) != 0 || clock_gettime(clock, &t) < 0)
        return 0;
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static pid_t parent_of(pid_t pid)
{
    char path[64];
    int parent = 0;
    FILE *f;

    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    f = fopen(path, "re");
    if (!f)
        return 0;
    /* The name may have blanks, but ends with the last parenthesis of the line. */
    if (fscanf(f, "%*d (%*[^)]) %*c %d", &parent) != 1)
        parent = 0;
    fclose(f);
    return parent;
}

double daemon_cpu_s(const struct daemon *d)
{
    double all = process_cpu_s(d->pid);
    DIR *processes = opendir("/proc");
    struct dirent *e;

    while (processes && (e = readdir(processes)) != NULL) {
        pid_t pid = (pid_t)atoi(e->d_name);

        if (pid > 0 && parent_of(pid) == d->pid)
            all += process_cpu_s(pid);
    }
    if (processes)
        closedir(processes);
    return all;
}

int daemon_directory_remove(const char *dir)
{
    return nftw(dir, remove_cb, 16, FTW_DEPTH | FTW_PHYS) == 0 ? 0 : -errno;
}
