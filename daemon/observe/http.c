#include "daemon/observe/http.h"

#include "daemon/base/closer.h"
#include "daemon/base/log.h"
#include "daemon/base/rights.h"
#include "daemon/observe/pages.h"
#include "proto/clock.h"

#include <assert.h>
#include <errno.h>
#include <microhttpd.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#define PLACES (HTTP_LISTENERS * HTTP_CONNECTIONS)
#define STACK_BYTES (256u << 10)
#define REST_MS 100   /* of a listener, when the process is out of descriptors */
#define NICE 5        /* on a full machine the daemon's other threads go first */
#define ARRIVAL_MS 20 /* between looks for the rest of a request */
#define FOREVER UINT64_MAX

struct place {
    int fd; /* -1: free, or `closing` has it */
    const struct listener *listener;
    uint64_t since_ms;
    bool arriving;           /* libmicrohttpd does not have it yet */
    bool begun;              /* some of its request is there */
    bool asked;              /* its request's head is there */
    bool ended;              /* shut down; libmicrohttpd closes it in its next iteration */
    struct closing *closing; /* of one that arrived with descriptors */
    uint64_t waits_until_ms; /* for a publication; 0: not */
    bool waited;
    struct MHD_Connection *connection;
};

/* The page of one publication, in one format. */
struct rendered {
    struct MHD_Response *response; /* NULL: none yet */
    unsigned status;
    uint64_t number; /* of the publication */
};

struct http {
    struct MHD_Daemon *mhd;
    int mhd_fd, wake_fd;
    struct listener listener[HTTP_LISTENERS];
    bool arrivals[HTTP_LISTENERS]; /* by listener: its peers may send descriptors */
    size_t n_listeners;
    uint64_t rest_until_ms;
    struct place place[PLACES];
    struct rendered metrics[2]; /* by whether it is OpenMetrics */
    struct published *published;
    void (*ask_cb)(void *ctx);
    void *ctx;
    uint64_t now_ms; /* of this iteration */
    atomic_bool stopping;
    pthread_t thread;
};

/* ---- answers ---- */

/* Takes `text`. NULL: no memory. */
static struct MHD_Response *response_new(char *text, size_t n, const char *type)
{
    struct MHD_Response *r = MHD_create_response_from_buffer(n, text, MHD_RESPMEM_MUST_FREE);

    if (!r) {
        free(text);
        return NULL;
    }
    if (MHD_add_response_header(r, "Content-Type", type) == MHD_YES &&
        MHD_add_response_header(r, "Cache-Control", "no-store") == MHD_YES &&
        MHD_add_response_header(r, "Server", "ucmd") == MHD_YES &&
        MHD_add_response_header(r, "Connection", "close") == MHD_YES)
        return r;
    MHD_destroy_response(r);
    return NULL;
}

static int render(const struct http *h, enum page_name name, bool openmetrics,
                  const struct published_view *view, struct rendered *out)
{
    struct page page;
    int rc = page_make(name, view, h->now_ms, openmetrics, &page);

    if (rc != 0)
        return rc;
    out->response = response_new(page.text, page.n, page.type);
    out->status = page.status;
    out->number = view->number;
    return out->response ? 0 : -ENOMEM;
}

/* The text of /metrics is long: kept, for as long as it is the newest. */
static int metrics_render(struct http *h, bool openmetrics, const struct published_view *view,
                          struct rendered *out)
{
    struct rendered *kept = &h->metrics[openmetrics];

    if (!kept->response || kept->number != view->number) {
        struct rendered fresh;
        int rc = render(h, PAGE_METRICS, openmetrics, view, &fresh);

        if (rc != 0)
            return rc;
        if (kept->response)
            MHD_destroy_response(kept->response); /* lives on in answers under way */
        *kept = fresh;
    }
    *out = *kept;
    return 0;
}

static enum MHD_Result answer_page(struct http *h, struct MHD_Connection *c, enum page_name name,
                                   const struct published_view *view)
{
    bool openmetrics = page_openmetrics(MHD_lookup_connection_value(c, MHD_HEADER_KIND, "Accept"));
    bool keep = name == PAGE_METRICS && h->now_ms < view->at_ms + PAGES_STUCK_MS / 2;
    enum MHD_Result queued;
    struct rendered r;
    int rc =
        keep ? metrics_render(h, openmetrics, view, &r) : render(h, name, openmetrics, view, &r);

    if (rc != 0)
        return MHD_NO; /* closes the connection */
    queued = MHD_queue_response(c, r.status, r.response);
    if (!keep)
        MHD_destroy_response(r.response);
    return queued;
}

static enum MHD_Result answer_method(struct MHD_Connection *c)
{
    static const char text[] = "only GET and HEAD are allowed\n";
    char *copy = strdup(text);
    struct MHD_Response *r =
        copy ? response_new(copy, sizeof(text) - 1, "text/plain; charset=utf-8") : NULL;
    enum MHD_Result queued;

    if (!r)
        return MHD_NO;
    queued = MHD_add_response_header(r, "Allow", "GET, HEAD") == MHD_YES
                 ? MHD_queue_response(c, MHD_HTTP_METHOD_NOT_ALLOWED, r)
                 : MHD_NO;
    MHD_destroy_response(r);
    return queued;
}

/* ---- requests ---- */

static struct place *place_of(struct MHD_Connection *c)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(c, MHD_CONNECTION_INFO_SOCKET_CONTEXT);

    return info ? info->socket_context : NULL;
}

/* Puts the connection aside until http_published, or for as long as is worth it. */
static void wait_begin(struct http *h, struct place *p, struct MHD_Connection *c)
{
    p->waited = true;
    p->waits_until_ms = h->now_ms + HTTP_FRESH_MS;
    p->connection = c;
    MHD_suspend_connection(c);
    h->ask_cb(h->ctx);
}

/* Runs once the head of a request is there, and again after a wait. */
static enum MHD_Result request_cb(void *ctx, struct MHD_Connection *c, const char *url,
                                  const char *method, const char *version, const char *upload,
                                  size_t *upload_bytes, void **request)
{
    struct http *h = ctx;
    struct place *p = place_of(c);
    enum page_name name = page_find(url);
    struct published_view view;

    (void)version, (void)upload, (void)upload_bytes, (void)request;
    if (!p)
        return MHD_NO;
    p->asked = true;
    if (strcmp(method, "GET") != 0 && strcmp(method, "HEAD") != 0)
        return answer_method(c);
    view = published_latest(h->published);
    if (name != PAGE_INDEX && name != PAGE_NONE && !p->waited &&
        h->now_ms >= view.at_ms + HTTP_FRESH_MS) {
        wait_begin(h, p, c);
        return MHD_YES;
    }
    return answer_page(h, c, name, &view);
}

static void wait_end(struct place *p)
{
    p->waits_until_ms = 0;
    MHD_resume_connection(p->connection);
}

/* Ends the waits that are over, or all. */
static void waits_end(struct http *h, bool all)
{
    for (size_t i = 0; i < PLACES; i++)
        if (h->place[i].waits_until_ms > 0 && (all || h->now_ms >= h->place[i].waits_until_ms))
            wait_end(&h->place[i]);
}

/* ---- arrivals ----
 *
 * Before Linux 6.16 peers can send descriptors to a Unix socket. libmicrohttpd would have the
 * kernel close them in this thread, and a peer can make that wait. So a request stays in the socket
 * until it is complete. Then the socket is shut for reading, and libmicrohttpd gets it if it has no
 * descriptor. */

static void arrival_end(struct place *p)
{
    p->arriving = false;
    p->ended = true;
    if (!rights_end(p->fd))
        p->closing = closing_new();
    closing_begin(p->closing, p->fd);
    p->fd = -1;
}

/* 1: the request is whole, without descriptors, and nothing comes any more; 0: not yet; or
 * -errno. */
static int arrival_look(struct place *p)
{
    char head[HTTP_HEAD_BYTES];
    bool some;
    ssize_t n = rights_peek(p->fd, head, sizeof(head), &some);

    if (n == -EAGAIN)
        return 0;
    if (n <= 0 || some)
        return -EPROTO;
    p->begun = true;
    if ((size_t)n < sizeof(head) && !memmem(head, (size_t)n, "\r\n\r\n", 4) &&
        !memmem(head, (size_t)n, "\n\n", 2))
        return 0;
    shutdown(p->fd, SHUT_RD);
    n = rights_peek(p->fd, head, sizeof(head), &some);
    return n > 0 && (size_t)n < sizeof(head) && !some ? 1 : -EPROTO;
}

/* A path's client has no address, and libmicrohttpd asks for one. */
static void hand_over(struct http *h, struct place *p, const struct sockaddr *address, socklen_t n)
{
    p->arriving = false;
    if (MHD_add_connection(h->mhd, p->fd, address, n) != MHD_YES)
        p->fd = -1; /* closed */
}

static void arrivals_turn(struct http *h)
{
    const struct sockaddr address = {.sa_family = AF_UNIX};

    for (size_t i = 0; i < PLACES; i++) {
        struct place *p = &h->place[i];
        int rc = p->arriving ? arrival_look(p) : 0;

        if (rc > 0)
            hand_over(h, p, &address, sizeof(address.sa_family));
        else if (rc < 0)
            arrival_end(p);
        if (p->closing && closing_done(p->closing)) {
            closing_drop(p->closing);
            p->closing = NULL;
        }
    }
}

/* At the end. */
static void arrivals_drop(struct http *h)
{
    for (size_t i = 0; i < PLACES; i++) {
        if (h->place[i].arriving)
            arrival_end(&h->place[i]);
        closing_drop(h->place[i].closing);
    }
}

/* ---- connections ---- */

static void connection_cb(void *ctx, struct MHD_Connection *c, void **socket_context,
                          enum MHD_ConnectionNotificationCode what)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD);
    struct http *h = ctx;
    struct place *p = *socket_context;

    if (what == MHD_CONNECTION_NOTIFY_CLOSED) {
        if (p)
            p->fd = -1;
        return;
    }
    for (size_t i = 0; info && i < PLACES; i++)
        if (h->place[i].fd == info->connect_fd)
            *socket_context = &h->place[i];
}

static struct place *place_free(struct http *h, const struct listener *l)
{
    struct place *from = &h->place[(size_t)(l - h->listener) * HTTP_CONNECTIONS];

    for (size_t i = 0; i < HTTP_CONNECTIONS; i++)
        if (from[i].fd < 0 && !from[i].closing)
            return &from[i];
    return NULL;
}

/* libmicrohttpd sees that the connection is over, and closes it. */
static void place_end(struct place *p)
{
    if (p->arriving) {
        arrival_end(p);
        return;
    }
    if (p->waits_until_ms > 0)
        wait_end(p);
    p->ended = true;
    shutdown(p->fd, SHUT_RDWR); /* fails when the peer was faster */
}

/* When p may be ended for another client's sake. */
static uint64_t place_yields_ms(const struct place *p)
{
    return p->closing ? FOREVER : p->since_ms + (p->asked ? HTTP_BUSY_MS : 0);
}

/* The one that yields first; it may not do so yet. */
static struct place *place_yielding(struct http *h, const struct listener *l)
{
    struct place *from = &h->place[(size_t)(l - h->listener) * HTTP_CONNECTIONS], *best = from;

    for (size_t i = 1; i < HTTP_CONNECTIONS; i++)
        if (place_yields_ms(&from[i]) < place_yields_ms(best))
            best = &from[i];
    return best;
}

static void admit(struct http *h, const struct listener *l, struct place *p)
{
    struct sockaddr_storage address;
    socklen_t n = sizeof(address);
    int fd = accept4(l->fd, (struct sockaddr *)&address, &n, SOCK_CLOEXEC | SOCK_NONBLOCK);

    if (fd < 0) {
        if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
            log_warn("http", "accept-failed", "errno=%d", errno);
            h->rest_until_ms = h->now_ms + REST_MS;
        }
        return;
    }
    *p = (struct place){.fd = fd, .listener = l, .since_ms = h->now_ms};
    if (h->arrivals[l - h->listener])
        p->arriving = true;
    else
        hand_over(h, p, (struct sockaddr *)&address,
                  n < sizeof(address) ? n : (socklen_t)sizeof(address));
}

/* Somebody waits in the listener's backlog. */
static void listener_turn(struct http *h, const struct listener *l)
{
    struct place *p = place_free(h, l);

    if (p) {
        admit(h, l, p);
        return;
    }
    p = place_yielding(h, l);
    if (!p->ended && h->now_ms >= place_yields_ms(p))
        place_end(p);
}

static void lives_end(struct http *h)
{
    for (size_t i = 0; i < PLACES; i++) {
        struct place *p = &h->place[i];

        if (p->fd >= 0 && !p->ended && h->now_ms >= p->since_ms + HTTP_LIFE_MS)
            place_end(p);
    }
}

/* ---- the thread ---- */

static uint64_t sooner(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* When a listener whose client waits can do something for it. */
static uint64_t listener_due_ms(struct http *h, const struct listener *l)
{
    uint64_t due = place_free(h, l) ? 0 : place_yields_ms(place_yielding(h, l));

    return due > h->rest_until_ms ? due : h->rest_until_ms;
}

static int timeout_ms(struct http *h, uint64_t due_ms)
{
    MHD_UNSIGNED_LONG_LONG mhd_ms;

    for (size_t i = 0; i < PLACES; i++) {
        const struct place *p = &h->place[i];

        if (p->fd >= 0 && !p->ended)
            due_ms = sooner(due_ms, p->since_ms + HTTP_LIFE_MS);
        if ((p->arriving && p->begun) || p->closing)
            due_ms = sooner(due_ms, h->now_ms + ARRIVAL_MS);
        if (p->waits_until_ms > 0)
            due_ms = sooner(due_ms, p->waits_until_ms);
    }
    if (MHD_get_timeout(h->mhd, &mhd_ms) == MHD_YES)
        due_ms = sooner(due_ms, h->now_ms + mhd_ms);
    if (due_ms == FOREVER)
        return -1;
    return due_ms > h->now_ms ? (int)sooner(due_ms - h->now_ms, HTTP_LIFE_MS) : 0;
}

/* Waits for something to do, and does it. */
static void turn(struct http *h)
{
    struct pollfd p[2 + HTTP_LISTENERS + PLACES] = {{.fd = h->wake_fd, .events = POLLIN},
                                                    {.fd = h->mhd_fd, .events = POLLIN}};
    uint64_t due_ms = FOREVER, count;
    nfds_t n = 2 + h->n_listeners;

    h->now_ms = clock_ms();
    for (size_t i = 0; i < PLACES; i++)
        if (h->place[i].arriving && !h->place[i].begun)
            p[n++] = (struct pollfd){.fd = h->place[i].fd, .events = POLLIN};
    for (size_t i = 0; i < h->n_listeners; i++) {
        uint64_t at_ms = listener_due_ms(h, &h->listener[i]);

        /* One that can do nothing yet would end each poll at once. */
        p[2 + i] =
            (struct pollfd){.fd = at_ms <= h->now_ms ? h->listener[i].fd : -1, .events = POLLIN};
        if (at_ms > h->now_ms)
            due_ms = sooner(due_ms, at_ms);
    }
    if (poll(p, n, timeout_ms(h, due_ms)) < 0)
        return; /* interrupted, or no memory: again */
    h->now_ms = clock_ms();
    if (p[0].revents && read(h->wake_fd, &count, sizeof(count)) > 0)
        waits_end(h, true);
    waits_end(h, false);
    for (size_t i = 0; i < h->n_listeners; i++)
        if (p[2 + i].revents)
            listener_turn(h, &h->listener[i]);
    arrivals_turn(h);
    lives_end(h);
    MHD_run(h->mhd);
}

static void *thread_main(void *arg)
{
    struct http *h = arg;

    pthread_setname_np(pthread_self(), "http");
    if (setpriority(PRIO_PROCESS, 0, NICE) != 0) /* of this thread alone, on Linux */
        log_debug("http", "not-nice", "errno=%d", errno);
    while (!atomic_load(&h->stopping))
        turn(h);
    waits_end(h, true); /* libmicrohttpd can't stop before */
    return NULL;
}

static int thread_start(struct http *h)
{
    pthread_attr_t attr;
    sigset_t all, before;
    int rc = pthread_attr_init(&attr);

    if (rc != 0)
        return -rc;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the event loop's */
    rc = pthread_attr_setstacksize(&attr, STACK_BYTES);
    if (rc == 0)
        rc = pthread_create(&h->thread, &attr, thread_main, h);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attr);
    return -rc;
}

/* ---- */

static int mhd_start(struct http *h)
{
    const union MHD_DaemonInfo *info;

    h->mhd = MHD_start_daemon(MHD_USE_EPOLL | MHD_USE_NO_LISTEN_SOCKET | MHD_ALLOW_SUSPEND_RESUME,
                              0, NULL, NULL, request_cb, h, MHD_OPTION_CONNECTION_LIMIT,
                              (unsigned)PLACES, MHD_OPTION_CONNECTION_MEMORY_LIMIT,
                              (size_t)HTTP_HEAD_BYTES, MHD_OPTION_SIGPIPE_HANDLED_BY_APP, 1,
                              MHD_OPTION_NOTIFY_CONNECTION, connection_cb, h, MHD_OPTION_END);
    if (!h->mhd)
        return errno > 0 ? -errno : -ENOMEM;
    info = MHD_get_daemon_info(h->mhd, MHD_DAEMON_INFO_EPOLL_FD);
    if (!info)
        return -ENOTSUP;
    h->mhd_fd = info->epoll_fd;
    return 0;
}

static void http_release(struct http *h)
{
    arrivals_drop(h);
    if (h->mhd)
        MHD_stop_daemon(h->mhd);
    for (size_t i = 0; i < 2; i++)
        if (h->metrics[i].response)
            MHD_destroy_response(h->metrics[i].response);
    for (size_t i = 0; i < h->n_listeners; i++)
        listener_close(&h->listener[i]);
    if (h->wake_fd >= 0)
        close(h->wake_fd);
    free(h);
}

int http_new(const struct http_options *o, struct http **out)
{
    struct http *h = calloc(1, sizeof(*h));
    int rc = 0;

    assert(o->n_listeners <= HTTP_LISTENERS);
    if (!h) {
        for (size_t i = 0; i < o->n_listeners; i++)
            listener_close(&o->listeners[i]);
        return -ENOMEM;
    }
    for (size_t i = 0; i < PLACES; i++)
        h->place[i].fd = -1;
    for (size_t i = 0; i < o->n_listeners; i++) {
        h->listener[i] = o->listeners[i];
        h->arrivals[i] = h->listener[i].path[0] && rights_pass(h->listener[i].fd, false) != 0;
    }
    h->n_listeners = o->n_listeners;
    h->published = o->published;
    h->ask_cb = o->ask_cb;
    h->ctx = o->ctx;
    h->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (h->wake_fd < 0)
        rc = -errno;
    if (rc == 0)
        rc = mhd_start(h);
    if (rc == 0)
        rc = thread_start(h);
    if (rc != 0) {
        http_release(h);
        return rc;
    }
    *out = h;
    return 0;
}

void http_published(struct http *h)
{
    uint64_t one = 1;

    if (write(h->wake_fd, &one, sizeof(one)) < 0)
        log_debug("http", "wake-failed", "errno=%d", errno);
}

void http_free(struct http *h)
{
    if (!h)
        return;
    atomic_store(&h->stopping, true);
    http_published(h);
    pthread_join(h->thread, NULL);
    http_release(h);
}
