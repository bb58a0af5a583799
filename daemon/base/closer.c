#include "daemon/base/closer.h"

#include "daemon/base/detached.h"

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
    atomic_uint owners; /* the caller that began it, and the thread while it closes */
    int fd;
};

static void let_go(struct closing *c)
{
    if (atomic_fetch_sub(&c->owners, 1) == 1)
        free(c);
}

static void *closing_main(void *arg)
{
    struct closing *c = arg;
    struct closer closer;

    closer_init(&closer);
    closer_close(&closer, c->fd);
    closer_end(&closer);
    let_go(c);
    return NULL;
}

struct closing *closing_begin(int fd)
{
    struct closing *c = malloc(sizeof(*c));

    if (c) {
        atomic_init(&c->owners, 2);
        c->fd = fd;
    }
    if (c && detached_start(DETACHED_STACK_BYTES, closing_main, c) == 0)
        return c;
    free(c);
    close(fd); /* it may wait; without memory or threads much else has stopped */
    return NULL;
}

bool closing_done(const struct closing *c)
{
    return !c || atomic_load(&c->owners) == 1;
}

void closing_free(struct closing *c)
{
    if (c)
        let_go(c);
}
