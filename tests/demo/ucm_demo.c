#include "tests/demo/demo.h"

#include "client/bench/figure.h"

#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define KIB UINT64_C(1024)
#define MIB (KIB * 1024)
#define GIB (MIB * 1024)
#define FINISH_S 40 /* after `stop`: a rank's last call has a deadline of 30 s */

static volatile sig_atomic_t interrupted;
static struct demo_shared *shared_; /* for the handler; set before it is installed */

static void on_signal(int number)
{
    (void)number;
    interrupted = 1;
    atomic_store(&shared_->stop, 1);
}

static const char usage[] =
    "Usage: ucm-demo [OPTIONS] [TRACE]\n"
    "\n"
    "Starts a private ucmd on a temporary directory, plays a multi-turn workload on it as two "
    "engines "
    "of\n"
    "two ranks each, checks every loaded byte and says what came of it.\n"
    "\n"
    "TRACE                 requests in Mooncake's format, one JSON object a line ($TRACE);\n"
    "                      without one, conversations are generated\n"
    "--seconds N           play for so long (25); 0: until the trace ends\n"
    "--keep                keep the temporary directory (made in $TMPDIR, else /tmp)\n"
    "--help                this text\n"
    "\n"
    "$UCMD and $UCMCTL name other programs than those next to this one.\n"
    "The exit code is 0 when blocks were hit and no byte differed.\n";

static int parse(int argc, char **argv, struct demo_options *o)
{
    static const struct option options[] = {{"seconds", required_argument, NULL, 's'},
                                            {"keep", no_argument, NULL, 'k'},
                                            {"help", no_argument, NULL, 'h'},
                                            {NULL, 0, NULL, 0}};
    char *end;
    int c;

    while ((c = getopt_long(argc, argv, "h", options, NULL)) != -1) {
        if (c == 's') {
            o->seconds = strtod(optarg, &end);
            if (*end != '\0' || !(o->seconds >= 0 && o->seconds < 1e6)) {
                fprintf(stderr, "ucm-demo: --seconds %s: wanted a number from 0 to 1000000\n",
                        optarg);
                return 2;
            }
        } else if (c == 'k') {
            o->keep = true;
        } else {
            fputs(usage, c == 'h' ? stdout : stderr);
            return c == 'h' ? -1 : 2;
        }
    }
    if (optind + 1 < argc) {
        fprintf(stderr, "ucm-demo: one trace at most; '%s' is too much\n", argv[optind + 1]);
        return 2;
    }
    if (optind < argc)
        o->trace = argv[optind];
    else if (getenv("TRACE") != NULL && getenv("TRACE")[0] != '\0')
        o->trace = getenv("TRACE");
    return 0;
}

/* Reports mistakes of the trace before anything is started; its later lines are checked when they
 * are played. */
static int check_trace(const char *path)
{
    struct workload_request q;
    struct workload_error e;
    struct workload *w;
    int rc = workload_trace(path, &w, &e);

    if (rc == 0) {
        rc = workload_next(w, &q, &e);
        workload_free(w);
        if (rc == 0)
            snprintf(e.text, sizeof e.text, "%s: no request in it", path);
    }
    if (rc > 0)
        return 0;
    fprintf(stderr, "ucm-demo: %s\n", e.text);
    return -1;
}

/* A trace has many more blocks than a minute of talk, so they are made smaller. */
static void choose_sizes(struct demo_options *o)
{
    o->arena_bytes = 256 * MIB;
    o->nvme_bytes = 2 * GIB;
    o->part_bytes = o->trace != NULL ? 64 * KIB : 256 * KIB;
    o->fragment_bytes = o->trace != NULL ? 8 * KIB : 16 * KIB;
}

static int find_programs(struct demo *d)
{
    ssize_t n = readlink("/proc/self/exe", d->programs, sizeof d->programs - 1);
    char *slash;

    if (n <= 0)
        return -1;
    d->programs[n] = '\0';
    slash = strrchr(d->programs, '/');
    if (slash != NULL)
        *slash = '\0';
    return 0;
}

/* True while an engine runs. */
static bool reap(struct demo *d, int *bad)
{
    bool running = false;

    for (unsigned e = 0; e < DEMO_ENGINES; e++) {
        int status;

        if (d->engine[e] <= 0)
            continue;
        if (waitpid(d->engine[e], &status, WNOHANG) != d->engine[e]) {
            running = true;
            continue;
        }
        d->engine[e] = 0;
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
            *bad = 1;
            atomic_store(&d->shared->stop, 1);
        }
    }
    return running;
}

static void kill_engines(struct demo *d)
{
    for (unsigned e = 0; e < DEMO_ENGINES; e++) {
        if (d->engine[e] <= 0)
            continue;
        kill(d->engine[e], SIGKILL);
        waitpid(d->engine[e], NULL, 0);
        d->engine[e] = 0;
    }
}

/* Watches until the engines are done. 0, or -1 when one failed or had to be killed. */
static int watch(struct demo *d)
{
    const struct timespec pause = {.tv_nsec = 100000000};
    bool terminal = isatty(STDOUT_FILENO) != 0;
    uint64_t start = clock_ns();
    double seconds = 0, shown = 0, stopped = 0;
    int bad = 0;

    while (reap(d, &bad)) {
        nanosleep(&pause, NULL);
        seconds = (double)(clock_ns() - start) / 1e9;
        if (seconds - shown >= (terminal ? 0.2 : 2.0)) {
            demo_show_progress(d, seconds, terminal);
            shown = seconds;
        }
        if (demo_daemon_died(d))
            bad = 1;
        if (d->daemon == 0 || (d->options.seconds > 0 && seconds >= d->options.seconds))
            atomic_store(&d->shared->stop, 1);
        if (atomic_load(&d->shared->stop) != 0 && stopped <= 0)
            stopped = seconds;
        if (stopped > 0 && seconds - stopped > FINISH_S) {
            fprintf(stderr, "\nucm-demo: the engines did not end in %d s and were killed\n",
                    FINISH_S);
            kill_engines(d);
            bad = 1;
        }
    }
    d->played_seconds = seconds;
    if (terminal)
        printf("\r\033[K");
    return bad ? -1 : 0;
}

static int play(struct demo *d)
{
    static const char *const stats[] = {"stats", "--nonzero", NULL};
    int rc = 0;

    printf("device: %s\n", d->device);
    printf("daemon: arena %llu MiB, NVMe tier %llu MiB in %s\n",
           (unsigned long long)(d->options.arena_bytes / MIB),
           (unsigned long long)(d->options.nvme_bytes / MIB), d->directory);
    printf("workload: %s\n\n", d->options.trace != NULL
                                   ? d->options.trace
                                   : "40 conversations at a time that share 3 system "
                                     "prompts, each turn at any engine");
    for (unsigned e = 0; e < DEMO_ENGINES && rc == 0; e++)
        rc = demo_engine_start(d, e);
    if (rc < 0)
        atomic_store(&d->shared->stop, 1);
    if (watch(d) < 0)
        rc = -1;
    if (interrupted) {
        printf("interrupted\n");
        return -1;
    }
    if (d->daemon > 0) {
        printf("\n$ ucmctl stats --nonzero\n");
        if (demo_run_ucmctl(d, stats) < 0)
            rc = -1;
    }
    return demo_summary(d) < 0 ? -1 : rc;
}

int main(int argc, char **argv)
{
    /* SIGPIPE, too: a reader that stops reading must not leave a daemon and a directory. */
    static const int ending[] = {SIGINT, SIGTERM, SIGHUP, SIGPIPE};
    struct sigaction action = {.sa_handler = on_signal};
    static struct demo d;
    void *shared;
    int rc;

    d.options.seconds = 25;
    rc = parse(argc, argv, &d.options);
    if (rc != 0)
        return rc < 0 ? 0 : rc;
    if (d.options.trace != NULL && check_trace(d.options.trace) < 0)
        return 2;
    choose_sizes(&d.options);
    shared =
        mmap(NULL, sizeof *d.shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED || find_programs(&d) < 0) {
        perror("ucm-demo");
        return 1;
    }
    d.shared = shared_ = shared;
    for (size_t i = 0; i < sizeof ending / sizeof ending[0]; i++)
        sigaction(ending[i], &action, NULL);
    rc = demo_daemon_start(&d);
    if (rc == 0)
        rc = play(&d);
    kill_engines(&d);
    demo_daemon_stop(&d);
    return rc < 0 ? 1 : 0;
}
