#include "tests/unit/shared/shared_clock.h"

#include <stdbool.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

uint64_t rig_clock_ns;

#pragma GCC visibility push(default) /* libuv calls these */

int clock_gettime(clockid_t id, struct timespec *t)
{
    if (rig_clock_ns == 0 || (id != CLOCK_MONOTONIC && id != CLOCK_MONOTONIC_COARSE))
        return (int)syscall(SYS_clock_gettime, id, t);
    t->tv_sec = (time_t)(rig_clock_ns / 1000000000u);
    t->tv_nsec = (long)(rig_clock_ns % 1000000000u);
    return 0;
}

int epoll_pwait(int fd, struct epoll_event *events, int n, int timeout, const sigset_t *mask)
{
    bool jumps = rig_clock_ns > 0 && timeout > 0;
    int got =
        (int)syscall(SYS_epoll_pwait, fd, events, n, jumps ? 0 : timeout, mask, sizeof(uint64_t));

    if (got == 0 && jumps)
        rig_clock_ns += (uint64_t)timeout * 1000000u;
    return got;
}

int epoll_wait(int fd, struct epoll_event *events, int n, int timeout)
{
    return epoll_pwait(fd, events, n, timeout, NULL);
}

#pragma GCC visibility pop
