#include "daemon/device/worker.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

static pid_t child_new(void)
{
    pid_t pid = fork();

    cr_assert_geq(pid, 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (;;)
            pause();
    }
    return pid;
}

Test(worker, lives_until_it_begins_to_exit)
{
    pid_t pid = child_new();
    struct worker w;

    cr_assert_eq(worker_open(&w, pid), 0);
    cr_assert_eq(w.pid, pid);
    cr_assert_gt(w.start, 0);
    cr_assert(worker_alive(&w));
    kill(pid, SIGSTOP);
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
    pid_t pid = child_new();
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

/* The name is part of what the kernel tells, and the process chooses it. */
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
    pid = child_new();
    cr_assert_eq(worker_open(&b, pid), 0);
    cr_assert_gt(b.start, a.start);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    worker_close(&a);
    worker_close(&b);
}
