#include "client/lib/internal.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define RETRY_MIN_NS (2 * 1000000)
#define RETRY_MAX_NS (100 * 1000000)

static int hello_take_cb(struct client_call *call, const union proto_any *any)
{
    struct ucm_client *c = call->client;
    const struct msg_hello_r *m = &any->hello_r;

    if (m->version < UCM_PROTOCOL_VERSION_MIN || m->version > UCM_PROTOCOL_VERSION)
        return ucm_error_set(&call->error, UCM_EUNSUPPORTED,
                             "ucmd speaks version %u, this library %d to %d", (unsigned)m->version,
                             UCM_PROTOCOL_VERSION_MIN, UCM_PROTOCOL_VERSION);
    snprintf(c->info.server, sizeof c->info.server, "%.*s", (int)m->server.n, m->server.p);
    snprintf(c->info.tenant, sizeof c->info.tenant, "%.*s", (int)m->tenant.n, m->tenant.p);
    memcpy(c->info.instance, m->instance.p, sizeof c->info.instance);
    c->info.admin = m->admin;
    c->info.max_keys = (uint32_t)(m->max_keys < UCM_MAX_KEYS ? m->max_keys : UCM_MAX_KEYS);
    c->info.max_requests = (uint32_t)m->max_requests;
    c->info.max_regions = (uint32_t)m->max_regions;
    c->info.max_leases = (uint32_t)m->max_leases;
    c->info.max_lease_ms = (uint32_t)m->max_lease_ms;
    c->info.max_timeout_ms = (uint32_t)m->max_timeout_ms;
    c->max_frame_bytes = (uint32_t)(m->max_frame_bytes < UCM_MAX_FRAME_BYTES ? m->max_frame_bytes
                                                                             : UCM_MAX_FRAME_BYTES);
    return 0;
}

static void hello_done_cb(struct client_call *call)
{
    struct ucm_client *c = call->client;

    if (c->link != LINK_HELLO) /* the link broke before */
        return;
    if (call->status) {
        client_link_break(c, -call->status, call->error.text);
        return;
    }
    c->link = LINK_UP;
    c->connection_epoch++;
    c->up_since_ns = client_now_ns();
    c->stale = !TAILQ_EMPTY(&c->handles);
    pthread_cond_broadcast(&c->idle);
}

void client_link_init(struct ucm_client *c)
{
    backoff_init(&c->retry, RETRY_MIN_NS, RETRY_MAX_NS, 0);
    client_call_init(&c->hello, c, hello_take_cb, hello_done_cb);
}

int client_link_settle(struct ucm_client *c, int64_t deadline_ns)
{
    while (c->link == LINK_BREAKING)
        if (client_read(c, 0, 0, deadline_ns) != 0)
            return client_fail(UCM_EDEADLINE, "the connection to ucmd broke, and a copy agent's "
                                              "copy did not end in time");
    return 0;
}

/* A try to connect failed. */
static void not_opened(struct ucm_client *c, int status, const char *what, int error)
{
    c->why = -status;
    c->refused = status != UCM_ENODAEMON && status != UCM_EBUSY;
    snprintf(c->why_text, sizeof c->why_text, "%s %s: %s%s", what, c->socket, strerror(error),
             status == UCM_ENODAEMON
                 ? "; start ucmd, or name its socket in ucm_options or UCM_SOCKET"
                 : "");
    backoff_fail(&c->retry, (uint64_t)client_now_ns());
}

static void connect_failed(struct ucm_client *c, int error)
{
    /* On a later try it may be a daemon that has bound its socket and not set the mode yet. */
    if ((error == EACCES || error == EPERM) && c->connection_epoch == 0)
        not_opened(c, UCM_EDENIED, "this user may not connect to", error);
    else if (error == EAGAIN)
        not_opened(c, UCM_EBUSY, "too many clients wait to be accepted on", error);
    else
        not_opened(c, UCM_ENODAEMON, "no ucmd listens on", error);
}

/* The socket is empty, so the send neither blocks nor stops half-way. */
static void say_hello(struct ucm_client *c)
{
    struct msg_hello m = {
        .version_min = UCM_PROTOCOL_VERSION_MIN,
        .version_max = UCM_PROTOCOL_VERSION,
        .client = {c->name, (uint32_t)strlen(c->name)},
    };
    int r;

    c->writing = true;
    r = client_request(&c->hello, &(struct client_request){UCM_METHOD_HELLO, .params = &m}, 0);
    if (r)
        client_link_break(c, -r, ucm_errmsg());
}

static void link_open(struct ucm_client *c)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP};
    size_t n = strlen(c->socket);
    int fd;

    client_link_reap(c);
    c->attempts++;
    c->farewell.code = 0;
    if (n >= sizeof address.sun_path) {
        not_opened(c, UCM_EINVALID,
                   "the path of a socket must be shorter than 108 bytes:", ENAMETOOLONG);
        return;
    }
    memcpy(address.sun_path, c->socket, n);
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        not_opened(c, UCM_ENOMEMORY, "no descriptor for a connection to", errno);
    } else if (connect(fd, (struct sockaddr *)&address, sizeof address) < 0) {
        connect_failed(c, errno);
        close(fd);
    } else if (epoll_ctl(c->epoll_fd, EPOLL_CTL_ADD, fd, &event) < 0) {
        not_opened(c, UCM_ENOMEMORY, "epoll does not take the connection to", errno);
        close(fd);
    } else {
        c->fd = fd;
        c->link = LINK_HELLO;
        c->refused = false;
        client_fds_close(c);
        c->in.begin = c->in.end = 0;
        c->max_frame_bytes = UCM_MAX_FRAME_BYTES;
        say_hello(c);
    }
}

/* While down: a try, or a wait for the next one. */
static int down_step(struct ucm_client *c, int64_t deadline_ns)
{
    int64_t now = client_now_ns();
    bool held = c->reading || c->writing;
    int64_t next_ns = (int64_t)c->retry.until;
    int64_t until = held || next_ns > deadline_ns ? deadline_ns : next_ns;

    if (!held && now >= next_ns) {
        link_open(c);
        return 0;
    }
    if (now >= deadline_ns)
        return client_fail_as(c->why, c->why_text);
    client_cond_wait(c, &c->idle, until);
    return 0;
}

int client_link_up(struct ucm_client *c, int64_t deadline_ns)
{
    uint64_t attempts = c->attempts;
    int r;

    while (c->link != LINK_UP) {
        if (c->closing)
            return client_fail(UCM_EDISCONNECTED, "the client is being closed");
        if (c->link == LINK_BREAKING) {
            r = client_link_settle(c, deadline_ns);
            if (r)
                return r;
            continue;
        }
        if (c->link == LINK_HELLO) {
            if (client_call_wait(&c->hello, deadline_ns) != 0)
                return client_fail(UCM_EDEADLINE, "ucmd at %s has not answered hello in time",
                                   c->socket);
            continue;
        }
        if (c->refused && c->attempts != attempts)
            return client_fail_as(c->why, c->why_text);
        r = down_step(c, deadline_ns);
        if (r)
            return r;
    }
    return 0;
}
