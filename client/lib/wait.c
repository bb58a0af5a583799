/* Time, sleeping on the client's lock, and waking programs that poll ucm_fd. */
#include "client/lib/internal.h"

#include <errno.h>
#include <time.h>
#include <unistd.h>

int64_t client_now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int64_t client_deadline(const struct ucm_client *c, int timeout_ms)
{
    if (timeout_ms == 0)
        return 0; /* long past: nothing blocks, and nobody reads the clock */
    if (timeout_ms < 0)
        timeout_ms = c->default_timeout_ms;
    return client_now_ns() + (int64_t)timeout_ms * 1000000;
}

int client_cond_wait(struct ucm_client *c, pthread_cond_t *cond, int64_t deadline_ns)
{
    struct timespec t = {.tv_sec = (time_t)(deadline_ns / 1000000000),
                         .tv_nsec = (long)(deadline_ns % 1000000000)};

    return pthread_cond_clockwait(cond, &c->lock, CLOCK_MONOTONIC, &t);
}

int client_turn(struct ucm_client *c, bool *busy, const char *what, int64_t deadline_ns)
{
    while (*busy)
        if (client_cond_wait(c, &c->idle, deadline_ns) == ETIMEDOUT && *busy)
            return client_fail(UCM_EDEADLINE, "another thread %s", what);
    *busy = true;
    return 0;
}

void client_turn_end(struct ucm_client *c, bool *busy)
{
    *busy = false;
    pthread_cond_broadcast(&c->idle);
}

void client_signal(struct ucm_client *c)
{
    uint64_t one = 1;

    /* Cannot block: the counter is 0 or 1. */
    if (c->polled && !c->signalled && write(c->event_fd, &one, sizeof one) > 0)
        c->signalled = true;
}
