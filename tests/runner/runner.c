/* Runs a program's Criterion tests, in place of Criterion's own main.
 *
 * Criterion starts each test through a memory map at an address that ThreadSanitizer does not
 * allow. It takes a test that leaked for passed, and now and then waits for ever for a worker that
 * has ended. Here every test is a fork whose exit status counts, so that a sanitizer's finding at
 * exit fails the test. The functions below replace those of libcriterion that Test(), cr_assert and
 * cr_skip call. Options: --filter SUITE/TEST (a part of it, or with wildcards), -jN, --timeout
 * SECONDS, --tap=FILE, -v (with the output of tests that passed). */
#include <criterion/criterion.h>

#include <fnmatch.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_JOBS 16
#define STATUS_FAILED 101
#define STATUS_SKIPPED 102

extern struct criterion_test *__start_cr_tst[], *__stop_cr_tst[];
extern struct criterion_suite *__start_cr_sts[], *__stop_cr_sts[];
#pragma weak __start_cr_sts
#pragma weak __stop_cr_sts

/* ---- in the child: what a test calls ---- */

static const struct criterion_test *present;
static bool failed;

static const struct criterion_suite *suite_of(const struct criterion_test *t)
{
    for (struct criterion_suite **s = __start_cr_sts; s && s < __stop_cr_sts; s++)
        if (*s && strcmp((*s)->name, t->category) == 0)
            return *s;
    return NULL;
}

void criterion_internal_test_setup(void)
{
    const struct criterion_suite *s = suite_of(present);

    if (s && s->data && s->data->init)
        s->data->init();
    if (present->data->init)
        present->data->init();
}

void criterion_internal_test_main(void (*fn)(void))
{
    fn();
}

void criterion_internal_test_teardown(void)
{
    const struct criterion_suite *s = suite_of(present);

    if (present->data->fini)
        present->data->fini();
    if (s && s->data && s->data->fini)
        s->data->fini();
}

void criterion_send_assert(struct criterion_assert_stats *stats)
{
    if (stats->passed)
        return;
    failed = true;
    fprintf(stderr, "%s:%u: assertion failed: %s\n", stats->file, stats->line, stats->message);
}

/* Memory that an aborted test still holds is no leak of the program. */
static _Noreturn void leave(int status)
{
    fflush(NULL);
    _exit(status);
}

void criterion_abort_test(void)
{
    leave(STATUS_FAILED);
}

void criterion_continue_test(void)
{
}

void criterion_test_die(const char *msg, ...)
{
    fprintf(stderr, "%s\n", msg);
    leave(STATUS_FAILED);
}

void criterion_skip_test(const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    leave(STATUS_SKIPPED);
}

/* ---- in the parent ---- */

struct job {
    pid_t pid; /* 0: free */
    const struct criterion_test *test;
    double deadline_s;
    bool timed_out;
    FILE *output;
};

static struct {
    FILE *tap;
    const char *filter;
    double timeout_s;
    unsigned jobs, passed, failed, skipped;
    sigset_t mask, child_ended; /* the tests' mask; SIGCHLD, which waits to be taken */
} run = {.timeout_s = 180, .jobs = 2};

static double now_s(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static bool disabled(const struct criterion_test *t)
{
    const struct criterion_suite *s = suite_of(t);

    return t->data->disabled || (s && s->data && s->data->disabled);
}

/* Sanitizers, and hosts with other work, are slow, so a test's own timeout is tripled. */
static double timeout_of(const struct criterion_test *t)
{
    const struct criterion_suite *s = suite_of(t);
    double own = t->data->timeout;

    if (own <= 0 && s && s->data)
        own = s->data->timeout;
    return own > 0 ? own * 3 : run.timeout_s;
}

static _Noreturn void child(const struct criterion_test *t, FILE *output, pid_t runner)
{
    setpgid(0, 0);
    sigprocmask(SIG_SETMASK, &run.mask, NULL);
    /* If the runner is killed, its tests end, too. Otherwise they could run for ever. */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != runner)
        _exit(1);
    dup2(fileno(output), STDOUT_FILENO);
    dup2(fileno(output), STDERR_FILENO);
    present = t;
    t->test();
    if (failed)
        leave(STATUS_FAILED);
    exit(0); /* not _exit, because exit looks for leaks */
}

static void start(struct job *j, const struct criterion_test *t)
{
    FILE *output = tmpfile();
    pid_t runner = getpid(), pid;

    fflush(NULL);
    pid = output ? fork() : -1;
    if (pid < 0) {
        perror("runner: can't start a test");
        exit(1);
    }
    if (pid == 0)
        child(t, output, runner);
    setpgid(pid, pid);
    *j = (struct job){.pid = pid, .test = t, .output = output};
    j->deadline_s = now_s() + timeout_of(t);
}

static void show_output(FILE *output)
{
    char buf[4096];
    size_t n;

    rewind(output);
    while ((n = fread(buf, 1, sizeof(buf), output)) > 0)
        fwrite(buf, 1, n, stderr);
}

static bool as_expected(const struct criterion_test *t, int status)
{
    if (t->data->signal != 0)
        return WIFSIGNALED(status) && WTERMSIG(status) == t->data->signal;
    return WIFEXITED(status) && WEXITSTATUS(status) == t->data->exit_code;
}

static void finish(struct job *j, int status)
{
    const struct criterion_test *t = j->test;

    kill(-j->pid, SIGKILL); /* whatever the test left running */
    if (WIFEXITED(status) && WEXITSTATUS(status) == STATUS_SKIPPED) {
        run.skipped++;
        fprintf(run.tap, "ok - %s::%s # SKIP\n", t->category, t->name);
    } else if (!j->timed_out && as_expected(t, status)) {
        run.passed++;
        fprintf(run.tap, "ok - %s::%s\n", t->category, t->name);
        if (run.tap == stdout)
            show_output(j->output);
    } else {
        run.failed++;
        fprintf(run.tap, "not ok - %s::%s\n", t->category, t->name);
        show_output(j->output);
        fprintf(stderr, "[FAIL] %s::%s: %s %d\n", t->category, t->name,
                j->timed_out          ? "timed out, status"
                : WIFSIGNALED(status) ? "signal"
                                      : "exit status",
                WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    }
    fclose(j->output);
    j->pid = 0;
}

/* Looks at each job once: finishes those that ended, and kills those that take too long. Returns
 * the time of the next deadline; 0: none runs. */
static double look(struct job *jobs)
{
    double now = now_s(), next = 0;

    for (unsigned i = 0; i < run.jobs; i++) {
        struct job *j = &jobs[i];
        int status;

        if (j->pid != 0 && waitpid(j->pid, &status, WNOHANG) == j->pid)
            finish(j, status);
        if (j->pid != 0 && !j->timed_out && now > j->deadline_s) {
            j->timed_out = true;
            kill(-j->pid, SIGKILL);
        }
        if (j->pid != 0 && (next == 0 || j->deadline_s < next))
            next = j->deadline_s;
    }
    return next;
}

/* Waits until one of the jobs is free, or all are, and returns one. */
static struct job *free_job(struct job *jobs, bool all)
{
    for (;;) {
        double next = look(jobs), wait_s = next - now_s();

        for (unsigned i = 0; i < run.jobs; i++)
            if (jobs[i].pid == 0 && (!all || next == 0))
                return &jobs[i];
        wait_s = wait_s < 0.01 ? 0.01 : wait_s;
        sigtimedwait(&run.child_ended, NULL,
                     &(struct timespec){(time_t)wait_s, (long)(fmod(wait_s, 1) * 1e9)});
    }
}

static void options(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], "--tap=", 6) == 0)
            run.tap = fopen(argv[i] + 6, "w");
        else if (strcmp(argv[i], "--timeout") == 0 && i + 1 < argc)
            run.timeout_s = atof(argv[++i]);
        else if (strcmp(argv[i], "--filter") == 0 && i + 1 < argc)
            run.filter = argv[++i];
        else if (strncmp(argv[i], "-j", 2) == 0)
            run.jobs = (unsigned)atoi(argv[i] + 2);
        else if (strcmp(argv[i], "-v") == 0)
            run.tap = stdout;
    }
    if (!run.tap)
        run.tap = fopen("/dev/null", "w");
    if (!run.tap) {
        perror("runner: --tap");
        exit(1);
    }
    if (run.jobs < 1 || run.jobs > MAX_JOBS)
        run.jobs = 1;
}

static bool wanted(const struct criterion_test *t)
{
    const char *name = t->data->identifier_; /* "suite/test" */

    return !run.filter || strstr(name, run.filter) || fnmatch(run.filter, name, 0) == 0;
}

int main(int argc, char **argv)
{
    struct job jobs[MAX_JOBS] = {0};

    options(argc, argv);
    sigemptyset(&run.child_ended);
    sigaddset(&run.child_ended, SIGCHLD);
    sigprocmask(SIG_BLOCK, &run.child_ended, &run.mask);
    for (struct criterion_test **t = __start_cr_tst; t < __stop_cr_tst; t++) {
        if (!*t || !wanted(*t))
            continue;
        if (disabled(*t)) {
            run.skipped++;
            fprintf(run.tap, "ok - %s::%s # SKIP\n", (*t)->category, (*t)->name);
            continue;
        }
        start(free_job(jobs, false), *t);
    }
    free_job(jobs, true);
    fprintf(stderr, "[====] Synthesis: Tested: %u | Passing: %u | Failing: %u | Skipped: %u\n",
            run.passed + run.failed, run.passed, run.failed, run.skipped);
    return run.failed > 0 || run.passed + run.skipped == 0;
}
