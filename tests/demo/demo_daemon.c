#include "tests/demo/demo.h"

#include "client/bench/daemon.h"
#include "client/bench/gpu.h"
#include "client/ctl/answer.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MIB (UINT64_C(1) << 20)
#define START_MS 15000
#define STOP_MS 15000
#define GPU_MS 15000
#define POLL_MS 50
#define MIN_NVME (256 * MIB)
#define MIN_ARENA (64 * MIB)
#define LOG_TAIL 2000

static void pause_ms(long ms)
{
    const struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};

    nanosleep(&t, NULL);
}

/* ---- the directory ---- */

static uint64_t memory_available(void)
{
    FILE *f = fopen("/proc/meminfo", "re");
    unsigned long long kib = 0;
    char line[128];

    while (f != NULL && fgets(line, sizeof line, f) != NULL)
        if (sscanf(line, "MemAvailable: %llu kB", &kib) == 1)
            break;
    if (f != NULL)
        fclose(f);
    return kib * 1024;
}

/* Fits the sizes to a small machine, and says so. */
static int fit_sizes(struct demo *d)
{
    struct demo_options *o = &d->options;
    uint64_t memory = memory_available(), room;
    struct statvfs fs;

    if (statvfs(d->directory, &fs) < 0) {
        fprintf(stderr, "ucm-demo: %s: %s\n", d->directory, strerror(errno));
        return -1;
    }
    room = (uint64_t)fs.f_bavail * fs.f_frsize;
    if (room < o->nvme_bytes + 512 * MIB) {
        o->nvme_bytes = room / 2 / (64 * MIB) * (64 * MIB);
        printf("note: %llu MiB are free in %s; the NVMe tier gets %llu MiB of them\n",
               (unsigned long long)(room / MIB), d->directory,
               (unsigned long long)(o->nvme_bytes / MIB));
    }
    if (o->nvme_bytes < MIN_NVME) {
        fprintf(stderr,
                "ucm-demo: %s is too full; set TMPDIR to a directory with 1 GiB free or more\n",
                d->directory);
        return -1;
    }
    if (memory > 0 && memory < 3 * o->arena_bytes) {
        o->arena_bytes = memory / 4 / (16 * MIB) * (16 * MIB);
        printf("note: %llu MiB of memory are free; the arena gets %llu MiB of them\n",
               (unsigned long long)(memory / MIB), (unsigned long long)(o->arena_bytes / MIB));
    }
    if (memory > 0 && o->arena_bytes < MIN_ARENA) {
        fprintf(stderr, "ucm-demo: not enough free memory; 512 MiB are needed\n");
        return -1;
    }
    return 0;
}

static void tell_direct(const struct demo *d)
{
    char path[DEMO_PATH + 32];
    int fd;

    snprintf(path, sizeof path, "%s/direct", d->directory);
    fd = open(path, O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600);
    if (fd < 0 && errno == EINVAL)
        printf("note: the file system of %s has no O_DIRECT; the NVMe tier does without\n",
               d->directory);
    if (fd >= 0)
        close(fd);
    unlink(path);
}

static int make_directory(struct demo *d)
{
    const char *base = getenv("TMPDIR");

    snprintf(d->directory, sizeof d->directory, "%s/ucm-demo.XXXXXX",
             base != NULL && base[0] != '\0' ? base : "/tmp");
    if (mkdtemp(d->directory) == NULL) {
        fprintf(stderr, "ucm-demo: %s: %s; set TMPDIR to a directory that can be written\n",
                d->directory, strerror(errno));
        d->directory[0] = '\0';
        return -1;
    }
    snprintf(d->socket, sizeof d->socket, "%s/s", d->directory);
    snprintf(d->log, sizeof d->log, "%s/ucmd.log", d->directory);
    return 0;
}

static void remove_directory(struct demo *d)
{
    int rc = 0;

    if (d->directory[0] == '\0')
        return;
    if (d->options.keep)
        printf("kept: %s\n", d->directory);
    else
        rc = daemon_directory_remove(d->directory);
    if (rc < 0)
        fprintf(stderr, "ucm-demo: %s could not be removed: %s\n", d->directory, strerror(-rc));
    d->directory[0] = '\0';
}

/* ---- the process ---- */

static void program_path(const struct demo *d, const char *variable, const char *name, char *path,
                         size_t n)
{
    const char *set = getenv(variable);

    if (set != NULL && set[0] != '\0')
        snprintf(path, n, "%s", set);
    else
        snprintf(path, n, "%s/%s", d->programs, name);
}

static void exec_daemon(const struct demo *d, const char *path)
{
    char socket[DEMO_PATH + 32], paths[DEMO_PATH + 32], arena[64], nvme[64], segment[64];
    int log = open(d->log, O_WRONLY | O_CREAT | O_APPEND, 0600);

    snprintf(socket, sizeof socket, "socket=%s", d->socket);
    snprintf(paths, sizeof paths, "nvme.paths=%s", d->directory);
    snprintf(arena, sizeof arena, "arena.size=%lluMiB",
             (unsigned long long)(d->options.arena_bytes / MIB));
    snprintf(nvme, sizeof nvme, "nvme.size=%lluMiB",
             (unsigned long long)(d->options.nvme_bytes / MIB));
    snprintf(segment, sizeof segment, "nvme.segment=16MiB");
    if (log < 0 || dup2(log, STDERR_FILENO) < 0 || dup2(log, STDOUT_FILENO) < 0)
        _exit(127);
    setpgid(0, 0); /* a terminal's Ctrl-C is for the demo, which stops the daemon in order */
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    execl(path, path, "--set", socket, "--set", arena, "--set", "arena.slab=16MiB", "--set", paths,
          "--set", nvme, "--set", segment, (char *)NULL);
    fprintf(stderr, "%s: %s\n", path, strerror(errno));
    _exit(127);
}

static void print_log_tail(const struct demo *d)
{
    char text[LOG_TAIL + 1];
    FILE *f = fopen(d->log, "re");
    size_t n;

    if (f == NULL)
        return;
    if (fseek(f, -LOG_TAIL, SEEK_END) < 0)
        rewind(f);
    n = fread(text, 1, LOG_TAIL, f);
    text[n] = '\0';
    fclose(f);
    fprintf(stderr, "%s", text);
}

bool demo_daemon_died(struct demo *d)
{
    int status;

    if (d->daemon <= 0 || waitpid(d->daemon, &status, WNOHANG) != d->daemon)
        return false;
    d->daemon = 0;
    fprintf(stderr, "\nucm-demo: the daemon ended by itself (%s %d); the end of its log:\n",
            WIFSIGNALED(status) ? "signal" : "exit code",
            WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    print_log_tail(d);
    return true;
}

static int wait_until_there(struct demo *d, struct ucm_client **client)
{
    struct ucm_options options = {
        .socket = d->socket, .name = "ucm-demo", .default_timeout_ms = 5000};

    snprintf(d->device, sizeof d->device, "cpu");
    for (long ms = 0; ms < START_MS; ms += POLL_MS) {
        if (answer_connect(&options, 5000, client) == 0)
            return 0;
        if (demo_daemon_died(d))
            return -1;
        if (atomic_load(&d->shared->stop) != 0)
            return -1;
        pause_ms(POLL_MS);
    }
    fprintf(stderr, "ucm-demo: the daemon did not answer in %d s; the end of its log:\n",
            START_MS / 1000);
    print_log_tail(d);
    return -1;
}

/* Runs in a process of its own, because one that has used CUDA must not fork. "" when the GPU can
 * be used. */
static void try_gpu(char *why, size_t n)
{
    int pair[2];
    ssize_t got = 0;
    pid_t pid;

    snprintf(why, n, "it could not be tried");
    if (pipe(pair) < 0)
        return;
    fflush(NULL);
    pid = fork();
    if (pid == 0) {
        struct gpu g;
        int rc = gpu_open(&g, 0, MIB);

        if (rc == 0)
            gpu_close(&g);
        _exit(write(pair[1], g.why, rc < 0 ? strlen(g.why) : 0) < 0);
    }
    close(pair[1]);
    if (pid > 0) {
        got = read(pair[0], why, n - 1);
        why[got > 0 ? got : 0] = '\0';
        waitpid(pid, NULL, 0);
    }
    close(pair[0]);
}

/* The name of the first GPU that the daemon lists, "" when it lists none. */
static int listed_gpu(struct ucm_client *client, char *name, size_t n)
{
    struct answer stats;

    name[0] = '\0';
    if (answer_call(client, UCM_METHOD_STATS, NULL, 5000, &stats) < 0)
        return -1;
    for (uint32_t i = 0; i < answer_count(stats.root, "devices") && name[0] == '\0'; i++) {
        const msgpack_object *o = answer_at(stats.root, "devices", i);

        if (answer_flag(o, "cuda"))
            answer_text(o, "name", name, n);
    }
    answer_close(&stats);
    return 0;
}

/* The GPU is used when both an engine and the daemon can. The daemon serves before its driver has
 * started, so one that it does not list yet is waited for. */
static void find_device(struct demo *d, struct ucm_client *client)
{
    char name[64] = "", why[200] = "";

    try_gpu(why, sizeof why);
    if (why[0] != '\0') {
        snprintf(d->device, sizeof d->device, "cpu (no GPU found: %s)", why);
        return;
    }
    for (long ms = 0; ms < GPU_MS && atomic_load(&d->shared->stop) == 0; ms += POLL_MS) {
        if (listed_gpu(client, name, sizeof name) < 0 || name[0] != '\0')
            break;
        pause_ms(POLL_MS);
    }
    d->options.gpu = name[0] != '\0';
    if (d->options.gpu)
        snprintf(d->device, sizeof d->device, "cuda (%s)", name);
    else
        snprintf(
            d->device, sizeof d->device,
            "cpu (there is a GPU, but the daemon listed none in %d s; its log is %s with --keep)",
            GPU_MS / 1000, d->log);
}

int demo_daemon_start(struct demo *d)
{
    struct ucm_client *client = NULL;
    char path[DEMO_PATH + 16];

    program_path(d, "UCMD", "ucmd", path, sizeof path);
    if (access(path, X_OK) < 0) {
        fprintf(stderr, "ucm-demo: %s: %s; build it with 'make demo', or name it with $UCMD\n",
                path, strerror(errno));
        return -1;
    }
    if (make_directory(d) < 0 || fit_sizes(d) < 0)
        return -1;
    tell_direct(d);
    fflush(NULL);
    d->daemon = fork();
    if (d->daemon < 0) {
        perror("ucm-demo: fork");
        return -1;
    }
    if (d->daemon == 0)
        exec_daemon(d, path);
    if (wait_until_there(d, &client) < 0)
        return -1;
    find_device(d, client);
    ucm_close(client);
    return 0;
}

void demo_daemon_stop(struct demo *d)
{
    if (d->daemon > 0) {
        long ms;

        kill(d->daemon, SIGTERM);
        for (ms = 0; ms < STOP_MS && waitpid(d->daemon, NULL, WNOHANG) == 0; ms += POLL_MS)
            pause_ms(POLL_MS);
        if (ms >= STOP_MS) {
            fprintf(stderr, "ucm-demo: the daemon did not stop in %d s and was killed\n",
                    STOP_MS / 1000);
            kill(d->daemon, SIGKILL);
            waitpid(d->daemon, NULL, 0);
        }
        d->daemon = 0;
    }
    remove_directory(d);
}

int demo_run_ucmctl(const struct demo *d, const char *const *words)
{
    char path[DEMO_PATH + 16];
    const char *argv[16] = {NULL};
    size_t n = 0;
    int status;
    pid_t pid;

    program_path(d, "UCMCTL", "ucmctl", path, sizeof path);
    argv[n++] = path;
    argv[n++] = "--socket";
    argv[n++] = d->socket;
    while (*words != NULL && n + 1 < sizeof argv / sizeof argv[0])
        argv[n++] = *words++;
    fflush(NULL);
    pid = fork();
    if (pid == 0) {
        execv(path, (char *const *)(uintptr_t)argv);
        fprintf(stderr, "ucm-demo: %s: %s\n", path, strerror(errno));
        _exit(127);
    }
    if (pid < 0 || waitpid(pid, &status, 0) != pid)
        return -1;
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : -1;
}
