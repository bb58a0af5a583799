/* The filter by itself: where Landlock does not keep signals inside, and numbers that no header
 * knows. tests/integration/test_shared_attempts.py tries the other calls from inside a daemon's
 * sandbox. */
#include "daemon/shared/process/filter.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* -errno of the call, in a process under the filter. */
static int errno_behind(bool scoped, long (*call_cb)(void))
{
    int status;
    pid_t pid = fork();

    cr_assert_geq(pid, 0);
    if (pid == 0) {
        (void)setpgid(0, 0);
        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || process_filter_enter(false, scoped) < 0)
            _exit(255);
        _exit(call_cb() < 0 ? errno : 0);
    }
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) != 255);
    return -WEXITSTATUS(status);
}

static long kill_parent(void)
{
    return kill(getppid(), 0);
}
static long tgkill_parent(void)
{
    return syscall(SYS_tgkill, getppid(), getppid(), 0);
}
static long tkill_self(void)
{
    return syscall(SYS_tkill, gettid(), 0);
}
static long queue_parent(void)
{
    siginfo_t info = {.si_code = SI_QUEUE, .si_signo = SIGURG};

    return syscall(SYS_rt_sigqueueinfo, getppid(), SIGURG, &info);
}
static long kill_everybody(void)
{
    return kill(-1, 0);
}
static long kill_self(void)
{
    return kill(getpid(), 0);
}
static long kill_group(void)
{
    return kill(0, 0);
}
static long raise_self(void)
{
    return pthread_kill(pthread_self(), 0) == 0 && raise(SIGURG) == 0 ? 0 : -1;
}
static long child_kills_parent(void)
{
    int status;
    pid_t pid = fork();

    if (pid == 0)
        _exit(kill(getppid(), 0) < 0 ? errno : 0); /* allowed: that pid installed the filter */
    (void)waitpid(pid, &status, 0);
    errno = WEXITSTATUS(status);
    return errno ? -1 : 0;
}
static long newest(void)
{
    return syscall(1000);
}
static long x32(void)
{
    return syscall(0x40000000 | SYS_getpid);
}

Test(process_filter, without_landlock_signals_stay_inside)
{
    cr_expect_eq(errno_behind(false, kill_parent), -EPERM);
    cr_expect_eq(errno_behind(false, tgkill_parent), -EPERM);
    cr_expect_eq(errno_behind(false, tkill_self), -EPERM);
    cr_expect_eq(errno_behind(false, queue_parent), -EPERM);
    cr_expect_eq(errno_behind(false, kill_everybody), -EPERM);
    cr_expect_eq(errno_behind(false, kill_self), 0);
    cr_expect_eq(errno_behind(false, kill_group), 0);
    cr_expect_eq(errno_behind(false, raise_self), 0);
    cr_expect_eq(errno_behind(false, child_kills_parent), 0);
}

/* Landlock decides which processes get signals. */
Test(process_filter, with_landlock_signals_pass)
{
    cr_expect_eq(errno_behind(true, kill_parent), 0);
    cr_expect_eq(errno_behind(true, tgkill_parent), 0);
    cr_expect_eq(errno_behind(true, tkill_self), 0);
    cr_expect_eq(errno_behind(true, queue_parent), 0);
    cr_expect_eq(errno_behind(true, kill_self), 0);
}

/* A C library then does what it did before there was such a call. */
Test(process_filter, numbers_that_are_not_known)
{
    cr_expect_eq(errno_behind(true, newest), -ENOSYS);
#if defined(__x86_64__)
    cr_expect_eq(errno_behind(true, x32), -ENOSYS);
#else
    (void)x32;
#endif
}
