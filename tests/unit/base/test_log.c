/* Sanitizers: thread */
#include "daemon/base/log.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* Standard error goes to a file of our own while a test logs. */
static int capture_fd, saved_fd;

static void capture(void)
{
    char path[] = "/tmp/ucmd-test-log-XXXXXX";

    capture_fd = mkstemp(path);
    cr_assert_geq(capture_fd, 0);
    unlink(path);
    saved_fd = dup(STDERR_FILENO);
    dup2(capture_fd, STDERR_FILENO);
}

static char text[1 << 18]; /* what was logged between capture() and captured() */

static void captured(void)
{
    ssize_t n = pread(capture_fd, text, sizeof(text) - 1, 0);

    dup2(saved_fd, STDERR_FILENO);
    cr_assert(n >= 0 && n < (ssize_t)sizeof(text) - 1);
    text[n] = '\0';
    close(capture_fd);
}

static size_t lines(void)
{
    size_t n = 0;

    for (const char *at = text; *at; at++)
        n += *at == '\n';
    return n;
}

Test(log, a_line_has_time_level_module_event_and_values)
{
    int year;

    unsetenv("JOURNAL_STREAM");
    capture();
    log_warn("nvme", "read-failed", "path=%s errno=%d", "/a", 5);
    captured();
    cr_assert_eq(sscanf(text, "%d-", &year), 1);
    cr_assert_geq(year, 2024);
    cr_assert_str_eq(strchr(text, ' '), " warn nvme read-failed path=/a errno=5\n");
}

Test(log, the_journal_gets_a_priority_and_no_time)
{
    char stream[64];
    struct stat st;

    capture();
    cr_assert_eq(fstat(STDERR_FILENO, &st), 0);
    snprintf(stream, sizeof(stream), "%llu:%llu", (unsigned long long)st.st_dev,
             (unsigned long long)st.st_ino);
    setenv("JOURNAL_STREAM", stream, 1);
    log_error("a", "b", "c=%d", 1);
    log_info("a", "b", "c=%d", 2);
    captured();
    cr_assert_str_eq(text, "<3>a b c=1\n<6>a b c=2\n");
}

Test(log, an_inherited_journal_variable_is_not_believed)
{
    setenv("JOURNAL_STREAM", "1:1", 1);
    capture();
    log_error("a", "b", "");
    captured();
    cr_assert_neq(text[0], '<');
}

Test(log, levels_below_the_set_one_are_silent)
{
    capture();
    log_debug("a", "hidden", "");
    log_set_level(LOG_ERROR);
    log_warn("a", "hidden", "");
    log_set_level(LOG_DEBUG);
    log_debug("a", "shown", "");
    captured();
    cr_assert_null(strstr(text, "hidden"));
    cr_assert_not_null(strstr(text, "debug a shown"));
}

Test(log, a_flood_is_held_back_and_counted)
{
    struct log_site site = {0};

    capture();
    for (int i = 0; i < 1000; i++)
        log_line(&site, LOG_INFO, "a", "flood", "i=%d", i);
    cr_assert_eq(site.held, 1000 - LOG_BURST);
    site.window_ms -= 10001; /* the next window has begun */
    log_line(&site, LOG_INFO, "a", "flood", "i=%d", 1000);
    captured();
    cr_assert_eq(lines(), LOG_BURST + 1);
    cr_assert_not_null(strstr(text, "flood held=980 i=1000\n"));
}

Test(log, audit_lines_pass_whatever_the_level_and_are_never_held_back)
{
    log_set_level(LOG_ERROR);
    capture();
    for (int i = 0; i < 1000; i++)
        log_audit("evict", "uid=%d blocks=%d", 7, i);
    captured();
    log_set_level(LOG_INFO);
    cr_assert_eq(lines(), 1000);
    cr_assert_not_null(strstr(text, " info audit evict uid=7 blocks=999\n"));
}

Test(log, a_value_in_quotes_is_escaped)
{
    capture();
    log_audit("evict", "model=\"%s\"", "a \"b\" c\\d");
    captured();
    cr_assert_not_null(strstr(text, " model=\"a \\\"b\\\" c\\\\d\"\n"), "%s", text);
}

Test(log, a_site_does_not_silence_another)
{
    capture();
    for (int i = 0; i < 100; i++)
        log_info("a", "flood", "");
    log_info("a", "other", "");
    captured();
    cr_assert_not_null(strstr(text, "a other\n"));
}

Test(log, a_value_can_not_begin_a_line_or_drive_a_terminal)
{
    capture();
    log_info("front", "client", "name=%s", "x\n2030 error front forged\x1b[2J\x7f");
    captured();
    cr_assert_eq(lines(), 1);
    cr_assert_not_null(strstr(text, "name=\"x?2030 error front forged?[2J?\"\n"));
}

Test(log, a_parser_can_split_every_line)
{
    capture();
    log_warn("share", "x", "a=%s b=\"%s: %s\" c=%d", "Connection refused", "key \"k\"", "c:\\d", 7);
    log_warn("share", "y", "a=%s b=%s c=%.*s d=%llu e=%zu%s", "", "nfs://h/x?version=3", 3, "a cat",
             1ull << 40, (size_t)9, " f=1");
    captured();
    cr_assert_not_null(strstr(text, "share x a=\"Connection refused\" "
                                    "b=\"key \\\"k\\\": c:\\\\d\" c=7\n"),
                       "%s", text);
    cr_assert_not_null(strstr(text, "share y a=\"\" b=nfs://h/x?version=3 c=\"a c\" "
                                    "d=1099511627776 e=9 f=1\n"),
                       "%s", text);
}

Test(log, a_long_line_is_cut_and_says_so)
{
    char *big = malloc(100000);

    cr_assert_not_null(big);
    memset(big, 'x', 99999);
    big[99999] = '\0';
    capture();
    log_info("a", "b", "big=%s", big);
    captured();
    cr_assert_eq(strlen(text), 1024);
    cr_assert_str_eq(text + 1024 - 4, "...\n");
    free(big);
}

static void *log_many(void *arg)
{
    for (int i = 0; i < 200; i++) {
        struct log_site site = {0};

        log_line(&site, LOG_INFO, "t", "line", "thread=%d tail=%s", *(int *)arg,
                 "0123456789abcdef");
        log_info("t", "shared", "");
    }
    return NULL;
}

Test(log, lines_of_threads_do_not_mix)
{
    pthread_t thread[4];
    int number[4] = {0, 1, 2, 3};
    size_t whole = 0;

    capture();
    for (int i = 0; i < 4; i++)
        cr_assert_eq(pthread_create(&thread[i], NULL, log_many, &number[i]), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(thread[i], NULL);
    captured();
    for (char *at = text; (at = strstr(at, "tail=0123456789abcdef\n")); at++)
        whole++;
    cr_assert_eq(whole, 800);
    cr_assert_eq(lines(), 800 + LOG_BURST);
}

/* ---- the thread that writes ---- */

/* Its standard error is a pipe of one page. */
static void ends_with_its_last_line(void (*end)(void))
{
    int status, fd[2];
    char line[2048];
    pid_t child;
    FILE *in;

    cr_assert_eq(pipe(fd), 0);
    cr_assert_geq(fcntl(fd[1], F_SETPIPE_SZ, 4096), 4096);
    saved_fd = dup(STDERR_FILENO);
    dup2(fd[1], STDERR_FILENO);
    close(fd[1]);
    in = fdopen(fd[0], "r");
    child = fork();
    if (child == 0) {
        log_start();
        log_error("a", "last", "");
        end();
        _exit(0);
    }
    dup2(saved_fd, STDERR_FILENO);
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    do
        cr_assert_not_null(fgets(line, sizeof(line), in));
    while (!strstr(line, " error a last\n"));
    fclose(in);
}

Test(log, abort_waits_for_the_last_line, .timeout = 60)
{
    ends_with_its_last_line(abort);
}

static void killed(void)
{
    (void)kill(getpid(), SIGABRT);
}

/* Like a process that a watchdog ends. */
Test(log, sigabrt_ends_the_process_after_its_last_line, .timeout = 60)
{
    ends_with_its_last_line(killed);
}
