#include "daemon/cuda/worker.h"
#include "tests/runner/halt.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

/* apart: what it does first, or NULL. */
static pid_t child_new(void (*apart)(void))
{
    pid_t pid = fork();

    cr_assert_geq(pid, 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (apart)
            apart();
        for (;;)
            pause();
    }
    return pid;
}

static void child_end(pid_t pid)
{
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

Test(worker, lives_until_it_begins_to_exit)
{
    pid_t pid = child_new(NULL);
    struct worker w;

    cr_assert_eq(worker_open(&w, pid), 0);
    cr_assert_eq(w.pid, pid);
    cr_assert_gt(w.start, 0);
    cr_assert(worker_alive(&w));
    halt(pid);
    cr_assert(worker_alive(&w), "a stopped worker is not dead");
    kill(pid, SIGKILL);
    for (int i = 0; i < 5000 && worker_alive(&w); i++)
        usleep(1000);
    cr_assert_not(worker_alive(&w), "dead, though nobody has waited for it");
    waitpid(pid, NULL, 0);
    cr_assert_not(worker_alive(&w), "gone");
    worker_close(&w);
    cr_assert_not(worker_alive(&w));
    worker_close(&w);
}

Test(worker, zombies_and_the_gone_are_not_opened)
{
    pid_t pid = child_new(NULL);
    struct worker w;

    kill(pid, SIGKILL);
    waitid(P_PID, (id_t)pid, NULL, WEXITED | WNOWAIT);
    cr_assert_eq(worker_open(&w, pid), -ESRCH);
    cr_assert_not(worker_alive(&w));
    waitpid(pid, NULL, 0);
    cr_assert_lt(worker_open(&w, pid), 0);
    cr_assert_lt(worker_open(&w, 0), 0);
    cr_assert_lt(worker_open(&w, -1), 0);
    worker_close(&w);
}

/* The kernel's line has the process's name in it, and the process chooses that. */
Test(worker, names_that_look_like_fields)
{
    char old[16];
    struct worker plain, odd;

    cr_assert_eq(worker_open(&plain, getpid()), 0);
    prctl(PR_GET_NAME, old);
    prctl(PR_SET_NAME, "a) R 1 4 ) 7");
    cr_assert_eq(worker_open(&odd, getpid()), 0);
    cr_assert(worker_alive(&odd));
    cr_assert_eq(odd.start, plain.start);
    prctl(PR_SET_NAME, old);
    worker_close(&plain);
    worker_close(&odd);
}

Test(worker, processes_differ_by_start)
{
    struct worker a, b;
    pid_t pid;

    cr_assert_eq(worker_open(&a, getpid()), 0);
    usleep(30000);
    pid = child_new(NULL);
    cr_assert_eq(worker_open(&b, pid), 0);
    cr_assert_gt(b.start, a.start);
    child_end(pid);
    worker_close(&a);
    worker_close(&b);
}

static void apart_mount(void)
{
    if (unshare(CLONE_NEWNS) < 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
        mount("none", "/dev/shm", "tmpfs", 0, NULL) < 0)
        _exit(77);
}

static void apart_user(void)
{
    if (setresuid(65534, 65534, 65534) < 0)
        _exit(77);
}

static void apart_pid(void)
{
    pid_t pid;

    if (unshare(CLONE_NEWPID) < 0)
        _exit(77);
    pid = fork();
    if (pid > 0)
        _exit(waitpid(pid, NULL, 0) < 0);
}

/* Until the reason is the expected one; skips where the kernel forbids such a process. */
static void expect_foreign(pid_t pid, const char *why)
{
    const char *said = NULL;
    struct worker w;

    for (int i = 0; i < 5000; i++) {
        if (worker_open(&w, pid) < 0)
            cr_skip_test("not allowed here");
        said = worker_events_foreign(&w);
        worker_close(&w);
        if (said && strstr(said, why))
            return;
        usleep(1000);
    }
    cr_assert_fail("%s", said ? said : "found");
}

static void apart_groups(void)
{
    gid_t groups[5000];

    for (unsigned i = 0; i < 5000; i++)
        groups[i] = 100000 + i;
    if (setgroups(5000, groups) < 0)
        _exit(77);
}

/* /proc lists groups before the pid namespaces. Many groups must not hide those. */
Test(worker, many_groups_hide_no_pid_namespace, .timeout = 60)
{
    pid_t pid;

    if (geteuid() != 0)
        cr_skip_test("groups of one's own need root");
    pid = child_new(apart_groups);
    expect_foreign(pid, "can't be seen");
    child_end(pid);
}

Test(worker, events_are_found_by_pid_user_and_directory, .timeout = 60)
{
    struct worker w;
    pid_t pid = child_new(NULL);

    cr_assert_eq(worker_open(&w, pid), 0);
    cr_assert_null(worker_events_foreign(&w), "%s", worker_events_foreign(&w));
    child_end(pid);
    cr_assert_not_null(worker_events_foreign(&w));
    worker_close(&w);
    cr_assert(strstr(worker_events_foreign(&w), "can't be seen"));
    if (geteuid() != 0)
        cr_skip_test("namespaces of one's own need root");
    pid = child_new(apart_user);
    expect_foreign(pid, "another user");
    child_end(pid);
    pid = child_new(apart_mount);
    expect_foreign(pid, "/dev/shm");
    child_end(pid);
}

Test(worker, events_of_another_pid_namespace_are_not_found, .timeout = 60)
{
    char path[64], text[16] = "";
    pid_t pid;
    int fd;

    if (geteuid() != 0)
        cr_skip_test("namespaces of one's own need root");
    pid = child_new(apart_pid);
    snprintf(path, sizeof(path), "/proc/%ld/task/%ld/children", (long)pid, (long)pid);
    for (int i = 0; i < 5000 && text[0] == '\0'; i++) {
        usleep(1000);
        fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            cr_skip_test("the kernel lists no children");
        if (read(fd, text, sizeof(text) - 1) <= 0)
            text[0] = '\0';
        close(fd);
    }
    if (text[0] == '\0')
        cr_skip_test("not allowed here");
    expect_foreign((pid_t)atol(text), "pid namespace of its own");
    kill((pid_t)atol(text), SIGKILL);
    waitpid(pid, NULL, 0);
}
