#include "daemon/observe/observe.h"

#include "daemon/base/listener.h"
#include "daemon/base/log.h"
#include "daemon/config/config.h"
#include "daemon/config/unit.h"
#include "daemon/observe/http.h"
#include "daemon/observe/published.h"
#include "proto/errors.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define BACKLOG 64

struct observe {
    struct published *published;
    struct http *http;
    uv_timer_t timer;
    uv_async_t asked; /* the thread of http wants a publication */
    int handles;
    void (*fill_cb)(void *ctx, struct observe_snapshot *out);
    void *ctx;
};

/* ---- publishing ---- */

void observe_publish(struct observe *o)
{
    if (!o)
        return;
    o->fill_cb(o->ctx, published_begin(o->published));
    published_commit(o->published);
}

static void timer_cb(uv_timer_t *timer)
{
    observe_publish(timer->data);
}

/* The thread asks only when the newest is HTTP_FRESH_MS old, so at most ten times a second. */
static void asked_cb(uv_async_t *async)
{
    struct observe *o = async->data;

    observe_publish(o);
    http_published(o->http);
}

static void ask_cb(void *ctx)
{
    struct observe *o = ctx;

    uv_async_send(&o->asked);
}

/* ---- listening ---- */

/* A name without a directory lies next to the socket of the workers. */
static int socket_path(const struct config *c, char *buf, size_t n)
{
    const char *slash = strrchr(c->socket, '/');
    int directory = strchr(c->metrics_socket, '/') || !slash ? 0 : (int)(slash + 1 - c->socket);

    return snprintf(buf, n, "%.*s%s", directory, c->socket, c->metrics_socket);
}

/* -ENOENT: none is configured. */
static int listen_unix(const struct config *c, struct listener *out, struct ucm_error *e)
{
    char path[2 * LISTENER_PATH_BYTES];

    if (c->metrics_socket[0] == '\0')
        return -ENOENT;
    socket_path(c, path, sizeof(path));
    return listener_unix(out, "metrics.socket", path, c->metrics_socket_mode, c->socket_group,
                         BACKLOG, e);
}

static int listen_tcp(const struct config *c, struct listener *out, struct ucm_error *e)
{
    union listener_address a;

    if (c->metrics_listen[0] == '\0')
        return -ENOENT;
    if (listener_address_parse(c->metrics_listen, &a) != 0) /* config/table.c refuses it */
        return ucm_error_set(e, UCM_WIRE_INVALID, "%s is no address", c->metrics_listen), -EINVAL;
    return listener_tcp(out, &a, BACKLOG, e);
}

/* Why a listener that failed did, for an operator: a unit without network has no such addresses. */
static const char *hint(int rc)
{
    return rc == -EAFNOSUPPORT ? config_unit_hint() : "";
}

static void say_none(const char *key, const struct ucm_error *e, int rc)
{
    log_warn("http", "no-listener", "key=%s reason=\"%s%s\"", key, e->text, hint(rc));
}

/* Everything that can be listened on; the number of them. */
static size_t listen_all(const struct config *c, struct listener out[HTTP_LISTENERS])
{
    char text[LISTENER_TEXT_BYTES];
    struct ucm_error e;
    size_t n = 0;
    int rc = listen_unix(c, &out[n], &e);

    if (rc == 0)
        log_info("http", "listening", "path=%s", out[n++].path);
    else if (rc != -ENOENT)
        say_none("metrics.socket", &e, rc);
    rc = listen_tcp(c, &out[n], &e);
    if (rc == 0) {
        listener_text(&out[n++], text);
        log_info("http", "listening", "address=%s", text);
    } else if (rc != -ENOENT) {
        say_none("metrics.listen", &e, rc);
    }
    return n;
}

/* ---- starting and stopping ---- */

static int handles_start(struct observe *o, uv_loop_t *loop)
{
    int rc = uv_timer_init(loop, &o->timer);

    if (rc != 0)
        return rc;
    o->handles++;
    o->timer.data = o;
    rc = uv_async_init(loop, &o->asked, asked_cb);
    if (rc != 0)
        return rc;
    o->handles++;
    o->asked.data = o;
    return uv_timer_start(&o->timer, timer_cb, OBSERVE_EVERY_MS, OBSERVE_EVERY_MS);
}

static int start(struct observe *o, const struct observe_options *with,
                 struct http_options *options)
{
    int rc = published_new(&o->published);

    if (rc == 0)
        rc = handles_start(o, with->loop);
    if (rc != 0) {
        for (size_t i = 0; i < options->n_listeners; i++)
            listener_close(&options->listeners[i]);
        return rc;
    }
    observe_publish(o);
    options->published = o->published;
    return http_new(options, &o->http);
}

int observe_new(const struct observe_options *with, struct observe **out)
{
    struct listener listeners[HTTP_LISTENERS];
    struct http_options options = {.listeners = listeners, .ask_cb = ask_cb};
    struct observe *o;
    int rc;

    options.n_listeners = listen_all(with->config, listeners);
    *out = NULL;
    if (options.n_listeners == 0)
        return 0;
    o = calloc(1, sizeof(*o));
    if (!o) {
        for (size_t i = 0; i < options.n_listeners; i++)
            listener_close(&listeners[i]);
        return -ENOMEM;
    }
    o->fill_cb = with->fill_cb;
    o->ctx = with->ctx;
    options.ctx = o;
    rc = start(o, with, &options);
    if (rc != 0) {
        observe_free(o);
        return rc;
    }
    *out = o;
    return 0;
}

static void release(struct observe *o)
{
    published_free(o->published);
    free(o);
}

static void closed_cb(uv_handle_t *handle)
{
    struct observe *o = handle->data;

    if (--o->handles == 0)
        release(o);
}

void observe_free(struct observe *o)
{
    int handles;

    if (!o)
        return;
    http_free(o->http); /* first: it reads what was published, and asks */
    handles = o->handles;
    if (handles == 0)
        release(o);
    if (handles > 0)
        uv_close((uv_handle_t *)&o->timer, closed_cb);
    if (handles > 1)
        uv_close((uv_handle_t *)&o->asked, closed_cb);
}

/* ---- checking ---- */

/* Whether a ucmd answers at the address: then --check runs alongside it. */
static bool is_ours(const union listener_address *a)
{
    static const char request[] = "HEAD /live HTTP/1.0\r\n\r\n";
    struct timeval limit = {.tv_sec = 1};
    char answer[512];
    ssize_t n = -1;
    int fd = socket(a->any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (fd < 0)
        return false;
    if (setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit)) == 0 &&
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)) == 0 &&
        connect(fd, &a->any, a->any.sa_family == AF_INET6 ? sizeof(a->in6) : sizeof(a->in4)) == 0 &&
        send(fd, request, sizeof(request) - 1, MSG_NOSIGNAL) == sizeof(request) - 1)
        n = recv(fd, answer, sizeof(answer) - 1, MSG_WAITALL);
    close(fd);
    answer[n > 0 ? n : 0] = '\0';
    return strstr(answer, "Server: ucmd\r\n") != NULL;
}

__attribute__((format(printf, 2, 3))) static void warn(void (*warn_cb)(const char *text),
                                                       const char *format, ...)
{
    char text[400];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    warn_cb(text);
}

static void check_tcp(const struct config *c, void (*warn_cb)(const char *text))
{
    union listener_address a;
    struct listener l;
    struct ucm_error e;
    int rc = listener_address_parse(c->metrics_listen, &a);

    if (rc != 0)
        return; /* config/table.c refuses it */
    if (!listener_address_loopback(&a))
        warn(warn_cb,
             "metrics.listen: %s is reachable from other hosts; their users can read the names of "
             "tenants and disks",
             c->metrics_listen);
    rc = listener_tcp(&l, &a, 1, &e);
    if (rc == 0)
        listener_close(&l);
    else if (rc != -EADDRINUSE || !is_ours(&a))
        warn(warn_cb, "metrics.listen: %s; the daemon runs without it%s", e.text, hint(rc));
}

static void check_unix(const struct config *c, void (*warn_cb)(const char *text))
{
    char path[2 * LISTENER_PATH_BYTES];
    int n = socket_path(c, path, sizeof(path));

    if (n >= LISTENER_PATH_BYTES) {
        warn(warn_cb, "metrics.socket: %.100s... has more than %d bytes; the daemon runs without",
             path, LISTENER_PATH_BYTES - 1);
        return;
    }
    *strrchr(path, '/') = '\0';
    if (access(path[0] ? path : "/", W_OK | X_OK) != 0)
        warn(warn_cb, "metrics.socket: directory %s: %s; the daemon runs without it", path,
             strerror(errno));
}

void observe_check(const struct config *c, void (*warn_cb)(const char *text))
{
    if (c->metrics_socket[0] != '\0')
        check_unix(c, warn_cb);
    if (c->metrics_listen[0] != '\0')
        check_tcp(c, warn_cb);
}
