/* How a connection ends. */
#include "client/lib/internal.h"

#include <stdio.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define STEADY_NS 1000000000 /* if the link was up for so long, the first retry comes at once */
/* How long a break waits for copy agents. Their kernels take microseconds, unless kernels of the
 * worker's leave no processor free. The daemon gives up after the same time. */
#define SETTLE_NS INT64_C(5000000000)

void client_fds_close(struct ucm_client *c)
{
    for (uint32_t i = 0; i < c->in.n_fds; i++)
        if (c->in.fds[i] >= 0)
            close(c->in.fds[i]);
    c->in.n_fds = 0;
    c->in.fds_lost = false;
    c->in.fds_end = 0;
}

void client_close_descriptors(struct ucm_client *c)
{
    int *fds[] = {&c->fd, &c->epoll_fd, &c->event_fd, &c->settle_fd};

    for (size_t i = 0; i < sizeof fds / sizeof *fds; i++) {
        if (*fds[i] >= 0)
            close(*fds[i]);
        *fds[i] = -1;
    }
}

void client_link_reap(struct ucm_client *c)
{
    if (c->link != LINK_DOWN || c->reading || c->writing)
        return;
    if (c->fd >= 0)
        close(c->fd);
    c->fd = -1;
}

/* BUSY and SHUTDOWN pass, and a daemon that hangs up may be shutting down. */
static bool is_final(int status)
{
    return status != UCM_EBUSY && status != UCM_ESHUTDOWN && status != UCM_EDISCONNECTED;
}

static void link_down(struct ucm_client *c)
{
    struct client_handle *h;

    c->link = LINK_DOWN;
    TAILQ_FOREACH(h, &c->handles, node)
        if (h->state != HANDLE_PENDING) /* its call ends, and handles this */
            h->state = HANDLE_STALE;
    client_call_finish_all(c, c->why, c->why_text);
    client_hooks_down(c);
    client_lease_end_all(c);
    c->followups.n = 0;
    client_link_reap(c);
    pthread_cond_broadcast(&c->idle);
}

/* A copy agent's kernel cannot be called back. While it runs, it writes to the worker's memory or
 * reads from it. So no call that is under way may return a failure until it has ended. Until then
 * the link stays in LINK_BREAKING, calls wait within their deadlines, and ucm_fd becomes readable
 * for each look. */
void client_link_break(struct ucm_client *c, int status, const char *text)
{
    enum client_link was = c->link;
    int64_t now = client_now_ns();

    if (!client_link_live(c))
        return;
    c->link = LINK_BREAKING;
    c->settled_by_ns = now + SETTLE_NS;
    shutdown(c->fd, SHUT_RDWR);
    epoll_ctl(c->epoll_fd, EPOLL_CTL_DEL, c->fd, NULL); /* else ucm_fd stays readable */
    c->why = -status;
    c->refused = was == LINK_HELLO && is_final(status);
    if (status == UCM_EDISCONNECTED && !c->closing)
        snprintf(c->why_text, sizeof c->why_text, "the connection to ucmd at %s broke: %s",
                 c->socket, c->farewell.code ? c->farewell.text : text);
    else
        snprintf(c->why_text, sizeof c->why_text, "%s", text);
    if (was == LINK_UP && now - c->up_since_ns >= STEADY_NS)
        backoff_reset(&c->retry);
    else
        backoff_fail(&c->retry, (uint64_t)now);
    client_link_try_settle(c);
}

void client_link_try_settle(struct ucm_client *c)
{
    struct itimerspec next = {.it_value.tv_nsec = CLIENT_SETTLE_NS};

    if (c->link != LINK_BREAKING)
        return;
    if (client_hooks_settled(c) || client_now_ns() >= c->settled_by_ns) {
        link_down(c);
        next.it_value.tv_nsec = 0; /* never */
    }
    (void)timerfd_settime(c->settle_fd, 0, &next, NULL); /* and ucm_fd is not readable until then */
}
