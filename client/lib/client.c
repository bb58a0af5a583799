#include "client/lib/internal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

static int set_options(struct ucm_client *c, const struct ucm_options *options)
{
    const char *path = options ? options->socket : NULL;
    const char *name = options ? options->name : NULL;
    int timeout_ms = options ? options->default_timeout_ms : 0;

    if (timeout_ms < 0)
        return client_fail(UCM_EINVALID, "default_timeout_ms is %d; it must be 0 or more",
                           timeout_ms);
    if (!path)
        path = getenv("UCM_SOCKET");
    if (!path || !*path)
        path = UCM_DEFAULT_SOCKET;
    if (!name || !*name)
        name = program_invocation_short_name;
    c->default_timeout_ms = timeout_ms ? timeout_ms : CLIENT_DEFAULT_TIMEOUT_MS;
    snprintf(c->name, sizeof c->name, "%s", *name ? name : "unnamed");
    c->socket = strdup(path);
    return c->socket ? 0 : client_fail(UCM_ENOMEMORY, "no memory for the client");
}

static int open_descriptors(struct ucm_client *c)
{
    struct epoll_event event = {.events = EPOLLIN};

    c->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    c->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    c->settle_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (c->epoll_fd < 0 || c->event_fd < 0 || c->settle_fd < 0 ||
        epoll_ctl(c->epoll_fd, EPOLL_CTL_ADD, c->event_fd, &event) < 0 ||
        epoll_ctl(c->epoll_fd, EPOLL_CTL_ADD, c->settle_fd, &event) < 0)
        return client_fail(UCM_ENOMEMORY, "no descriptor for the client: %s", strerror(errno));
    return 0;
}

static void client_free(struct ucm_client *c)
{
    struct client_handle *h;

    client_hooks_closed(c);
    client_task_free_all(c);
    while ((h = TAILQ_FIRST(&c->handles)) != NULL) {
        client_handle_unlist(h);
        client_handle_unref(h);
    }
    client_close_descriptors(c);
    client_call_close(&c->hello);
    client_call_close(&c->prover.challenge);
    pthread_cond_destroy(&c->idle);
    pthread_mutex_destroy(&c->lock);
    proto_buf_free(&c->out);
    proto_buf_free(&c->followups);
    client_fds_close(c);
    free(c->in.p);
    free(c->leases);
    free(c->socket);
    free(c);
}

static struct ucm_client *client_new(void)
{
    struct ucm_client *c = calloc(1, sizeof *c);

    if (!c)
        return NULL;
    c->lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    c->idle = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    c->fd = c->epoll_fd = c->event_fd = c->settle_fd = -1;
    c->next_msgid = 1;
    c->next_lease = 1;
    TAILQ_INIT(&c->waiting);
    TAILQ_INIT(&c->handles);
    TAILQ_INIT(&c->tasks);
    client_link_init(c);
    client_prove_init(c);
    proto_buf_init(&c->out, PROTO_HEADER_BYTES + UCM_MAX_FRAME_BYTES);
    proto_buf_init(&c->followups, CLIENT_FOLLOWUPS_BYTES);
    return c;
}

int ucm_connect(const struct ucm_options *options, int timeout_ms, struct ucm_client **out)
{
    struct ucm_client *c;
    int r;

    if (!out)
        return client_fail(UCM_EINVALID, "out is NULL");
    r = client_fork_init();
    if (r)
        return r;
    c = client_new();
    if (!c)
        return client_fail(UCM_ENOMEMORY, "no memory for the client");
    client_fork_watch(c);
    r = set_options(c, options);
    if (r == 0)
        r = open_descriptors(c);
    if (r == 0)
        r = client_enter(c);
    if (r == 0)
        r = client_leave(c, client_link_up(c, client_deadline(c, timeout_ms)));
    if (r != 0) {
        ucm_close(c);
        return r;
    }
    *out = c;
    return 0;
}

void ucm_disconnect(struct ucm_client *c)
{
    if (!c || c->forked)
        return;
    pthread_mutex_lock(&c->lock);
    c->closing = true;
    client_link_break(c, UCM_EDISCONNECTED, "the client was closed");
    pthread_cond_broadcast(&c->idle); /* wakes threads that wait for a link that was down already */
    /* No deadline: nothing blocks any more, and the threads inside are on their way out. */
    (void)client_link_settle(c, INT64_MAX);
    while (c->users > 0)
        pthread_cond_wait(&c->idle, &c->lock);
    if (c->rest_cb)
        c->rest_cb(c);
    client_close_descriptors(c);
    pthread_mutex_unlock(&c->lock);
}

void ucm_close(struct ucm_client *c)
{
    if (!c || c->forked)
        return;
    client_fork_forget(c);
    ucm_disconnect(c);
    while (atomic_load(&c->entering) > 0) /* those threads see `closing` when they get the lock */
        (void)nanosleep(&(struct timespec){.tv_nsec = 10000}, NULL);
    client_free(c);
}

uint64_t ucm_connection_epoch(struct ucm_client *c)
{
    uint64_t connection_epoch;

    if (!c || client_enter(c) != 0)
        return 0;
    connection_epoch = c->connection_epoch;
    client_leave(c, 0);
    return connection_epoch;
}

int ucm_server_info(struct ucm_client *c, struct ucm_server_info *out)
{
    int r = client_enter_given(out ? c : NULL, "client or out");

    if (r)
        return r;
    *out = c->info;
    return client_leave(c, 0);
}

int ucm_fd(struct ucm_client *c)
{
    int r = client_enter_given(c, "client");

    if (r)
        return r;
    c->polled = true;
    if (c->tasks_done > 0)
        client_signal(c);
    return client_leave(c, c->epoll_fd);
}

/* Makes ucm_fd unreadable until another task is done. */
static void unsignal(struct ucm_client *c)
{
    uint64_t count;

    if (c->signalled && read(c->event_fd, &count, sizeof count) >= 0)
        c->signalled = false;
}

int ucm_process(struct ucm_client *c)
{
    bool was_up;
    int r = client_enter_given(c, "client");

    if (r)
        return r;
    was_up = c->link != LINK_DOWN;
    client_read_ready(c);
    unsignal(c);
    r = (int)c->tasks_done;
    c->tasks_done = 0;
    if (r == 0 && was_up && c->link == LINK_DOWN)
        r = client_fail_as(c->why, c->why_text);
    return client_leave(c, r);
}
