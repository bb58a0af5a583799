#include "daemon/base/closer.h"

#include "daemon/base/detached.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif

/* Ignored by default, and by nobody awaited. */
#define POKE SIGURG

static void poke_cb(int number)
{
    (void)number;
}

static void poke_handle(void)
{
    struct sigaction action = {.sa_handler = poke_cb};

    (void)sigaction(POKE, &action, NULL); /* a valid signal */
}

void closer_init(struct closer *c)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct sigevent how = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = POKE};
    sigset_t set;

    (void)pthread_once(&once, poke_handle); /* a valid function */
    how.sigev_notify_thread_id = gettid();
    sigemptyset(&set);
    sigaddset(&set, POKE);
    c->poked = pthread_sigmask(SIG_UNBLOCK, &set, NULL) == 0 &&
               timer_create(CLOCK_MONOTONIC, &how, &c->timer) == 0;
}

void closer_end(struct closer *c)
{
    if (c->poked)
        timer_delete(c->timer);
}

void closer_close(struct closer *c, int fd)
{
    const struct itimerspec begin = {{0, CLOSER_POKE_MS * 1000000}, {0, CLOSER_POKE_NS}}, end = {0};
    const struct linger at_once = {0, 0};

    if (c->poked)
        (void)timer_settime(c->timer, 0, &begin, NULL); /* a valid timer and time */
    (void)setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once)); /* if it is one */
    close(fd); /* gone, whatever it says */
    if (c->poked)
        (void)timer_settime(c->timer, 0, &end, NULL);
}

/* ---- */

struct closing {
    atomic_uint owners; /* closing_new's caller, threads that close, and other holders */
    int fd;
};

struct closing *closing_new(void)
{
    struct closing *c = calloc(1, sizeof(*c));

    if (c)
        atomic_init(&c->owners, 1);
    return c;
}

static void *closing_main(void *arg)
{
    struct closing *c = arg;
    struct closer closer;

    closer_init(&closer);
    closer_close(&closer, c->fd);
    closer_end(&closer);
    closing_drop(c);
    return NULL;
}

/* Without memory or threads much else has stopped: then it may wait. */
void closing_begin(struct closing *c, int fd)
{
    if (!c) {
        close(fd);
        return;
    }
    c->fd = fd;
    (void)closing_hold(c);
    if (detached_start(DETACHED_STACK_BYTES, closing_main, c) < 0)
        (void)closing_main(c);
}

bool closing_done(const struct closing *c)
{
    return atomic_load(&c->owners) == 1;
}

struct closing *closing_hold(struct closing *c)
{
    atomic_fetch_add(&c->owners, 1);
    return c;
}

void closing_drop(struct closing *c)
{
    if (c && atomic_fetch_sub(&c->owners, 1) == 1)
        free(c);
}
