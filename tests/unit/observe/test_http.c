/* The listener of monitoring, with real sockets and clients of every kind. */
/* Sanitizers: thread */
#include "daemon/observe/http.h"
#include "proto/clock.h"
#include "proto/errors.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <malloc.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define PATIENCE_MS 60000 /* on a busy machine */
#define ANSWER_BYTES (4u << 20)
#define CROWD 1000

enum { UNIX, TCP };

static char directory[64], path[96];
static union listener_address tcp;
static struct published *published;
static struct http *http;
static atomic_uint asks;
static atomic_bool loop_stuck;
static pthread_t loop;
static char answer[ANSWER_BYTES];

/* ---- the rig ---- */

static void publish(uint64_t uptime_ms)
{
    struct observe_snapshot *s = published_begin(published);

    memset(s, 0, sizeof(*s));
    s->shown.uptime_ms = uptime_ms;
    s->shown.n_tenants = EXPOSITION_TENANTS;
    s->shown.n_devices = EXPOSITION_DEVICES;
    for (int i = 0; i < EXPOSITION_TENANTS; i++)
        snprintf(s->shown.tenant[i].name, sizeof(s->shown.tenant[i].name), "tenant-%d", i);
    for (int i = 0; i < EXPOSITION_DEVICES; i++)
        snprintf(s->shown.device[i].name, sizeof(s->shown.device[i].name), "device-%d", i);
    published_commit(published);
}

/* In place of the daemon's event loop: publishes when it is asked. */
static void *loop_main(void *arg)
{
    unsigned seen = 0;

    (void)arg;
    for (;;) {
        unsigned now = atomic_load(&asks);

        if (now == UINT32_MAX)
            return NULL;
        if (now != seen && !atomic_load(&loop_stuck)) {
            seen = now;
            publish(1000000 + now);
            http_published(http);
        }
        poll(NULL, 0, 1);
    }
}

static void ask_cb(void *ctx)
{
    (void)ctx;
    atomic_fetch_add(&asks, 1);
}

static void start(void)
{
    struct listener listeners[HTTP_LISTENERS];
    struct http_options o = {.listeners = listeners, .n_listeners = 2, .ask_cb = ask_cb};
    char text[LISTENER_TEXT_BYTES];
    struct ucm_error e;

    strcpy(directory, "/tmp/ucmd-http-XXXXXX");
    cr_assert_not_null(mkdtemp(directory));
    snprintf(path, sizeof(path), "%s/s", directory);
    cr_assert_eq(listener_unix(&listeners[UNIX], "metrics.socket", path, 0600, "", 64, &e), 0);
    cr_assert_eq(listener_address_parse("0", &tcp), 0);
    cr_assert_eq(listener_tcp(&listeners[TCP], &tcp, 64, &e), 0);
    listener_text(&listeners[TCP], text);
    cr_assert_eq(listener_address_parse(text, &tcp), 0);
    cr_assert_eq(published_new(&published), 0);
    publish(1);
    o.published = published;
    cr_assert_eq(http_new(&o, &http), 0);
    cr_assert_eq(pthread_create(&loop, NULL, loop_main, NULL), 0);
}

static void end(void)
{
    char lock[112];

    atomic_store(&asks, UINT32_MAX);
    pthread_join(loop, NULL);
    http_free(http);
    published_free(published);
    cr_assert_eq(access(path, F_OK), -1, "the path goes with the listener");
    snprintf(lock, sizeof(lock), "%s.lock", path);
    cr_assert_eq(unlink(lock), 0);
    cr_assert_eq(rmdir(directory), 0);
}

TestSuite(http, .init = start, .fini = end);

/* ---- clients ---- */

static int dial(int which)
{
    struct sockaddr_un un = {.sun_family = AF_UNIX};
    struct timeval limit = {.tv_sec = PATIENCE_MS / 1000};
    int fd = socket(which == TCP ? AF_INET : AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    strcpy(un.sun_path, path);
    cr_assert_geq(fd, 0);
    cr_assert_eq(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)), 0);
    cr_assert_eq(setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit)), 0);
    cr_assert_eq(connect(fd, which == TCP ? &tcp.any : (struct sockaddr *)&un,
                         which == TCP ? sizeof(tcp.in4) : sizeof(un)),
                 0, "%s", strerror(errno));
    return fd;
}

static bool say(int fd, const char *text)
{
    return send(fd, text, strlen(text), MSG_NOSIGNAL) == (ssize_t)strlen(text);
}

/* Reads to the end; the bytes, or -1 when the connection broke or nothing came in time. */
static ssize_t read_all(int fd)
{
    size_t n = 0;
    ssize_t r;

    while ((r = recv(fd, answer + n, sizeof(answer) - 1 - n, 0)) > 0)
        n += (size_t)r;
    answer[n] = '\0';
    return r < 0 ? -1 : (ssize_t)n;
}

/* One request and its answer; the status. */
static int ask(int which, const char *method, const char *url, const char *headers)
{
    char request[512];
    int fd = dial(which), status = 0;

    snprintf(request, sizeof(request), "%s %s HTTP/1.1\r\nHost: x\r\n%s\r\n", method, url, headers);
    cr_assert(say(fd, request));
    cr_assert_gt(read_all(fd), 0, "%s %s: no answer", method, url);
    close(fd);
    cr_assert_eq(sscanf(answer, "HTTP/1.1 %d ", &status), 1, "%.40s", answer);
    return status;
}

static const char *body(void)
{
    const char *at = strstr(answer, "\r\n\r\n");

    cr_assert_not_null(at);
    return at + 4;
}

/* The other side has closed. Discards what it said before. */
static bool is_over(int fd)
{
    char bytes[4096];
    ssize_t n;

    while ((n = recv(fd, bytes, sizeof(bytes), 0)) > 0)
        ;
    return n == 0 || errno == ECONNRESET;
}

/* ---- pages ---- */

Test(http, only_get_and_head)
{
    static const char *const others[] = {"POST", "PUT", "DELETE", "OPTIONS", "PATCH", "EVIL"};

    cr_assert_eq(ask(UNIX, "HEAD", "/metrics", ""), 200);
    cr_assert_str_empty(body());
    cr_assert_null(strstr(answer, "Content-Length: 0"));
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        cr_assert_eq(ask(UNIX, others[i], "/metrics", ""), 405, "%s", others[i]);
        cr_assert_not_null(strstr(answer, "Allow: GET, HEAD\r\n"));
    }
    cr_assert_eq(ask(TCP, "POST", "/metrics", "Content-Length: 100000000\r\n"), 405);
}

Test(http, one_request_a_connection)
{
    int fd = dial(TCP);
    const char *second;

    cr_assert(
        say(fd, "GET /live HTTP/1.1\r\nHost: x\r\n\r\nGET /ready HTTP/1.1\r\nHost: x\r\n\r\n"));
    cr_assert_geq(read_all(fd), -1); /* the rest that nobody read may reset it */
    second = strstr(answer, "HTTP/1.1");
    cr_assert(!second || !strstr(second + 1, "HTTP/1.1"), "%s", answer);
    close(fd);
    cr_assert_eq(ask(TCP, "GET", "/live", ""), 200);
}

Test(http, a_stuck_loop_delays_no_answer)
{
    const char *at;

    atomic_store(&loop_stuck, true);
    poll(NULL, 0, 2 * HTTP_FRESH_MS);
    cr_assert_eq(ask(TCP, "GET", "/metrics", ""), 200);
    at = strstr(body(), "\nucmd_uptime_seconds ");
    cr_assert_not_null(at);
    cr_assert_lt(strtod(at + strlen("\nucmd_uptime_seconds "), NULL), 1.0, "%.60s", at);
    cr_assert_eq(ask(UNIX, "GET", "/live", ""), 200);
    cr_assert_geq(atomic_load(&asks), 1);
    atomic_store(&loop_stuck, false);
}

/* ---- hostile clients ---- */

static size_t heap_bytes(void)
{
    struct mallinfo2 m = mallinfo2();

    return m.uordblks + m.hblkhd;
}

/* Each listener has places of its own. A client that sends its request is served before those that
 * send none. */
Test(http, a_thousand_that_say_nothing)
{
    static int crowd[CROWD];
    size_t before;
    struct rlimit files = {.rlim_cur = 4096, .rlim_max = 4096};

    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &files), 0);
    if (files.rlim_max < 2 * CROWD + 200)
        cr_skip_test("too few descriptors");
    cr_assert_eq(ask(UNIX, "GET", "/metrics", ""), 200);
    before = heap_bytes();
    for (int i = 0; i < CROWD; i++) {
        crowd[i] = dial(i % 2 ? TCP : UNIX);
        if (i % 3 == 0)
            cr_assert(say(crowd[i], "GET /metr") || errno == EPIPE || errno == ECONNRESET);
        if (i % 100 == 99) {
            cr_assert_eq(ask(TCP, "GET", "/metrics", ""), 200);
            cr_assert_eq(ask(UNIX, "GET", "/ready", ""), 200);
        }
    }
    cr_assert_lt(heap_bytes(), before + (2u << 20), "%zu bytes more", heap_bytes() - before);
    for (int i = 0; i < CROWD - 2 * HTTP_CONNECTIONS; i++)
        cr_assert(is_over(crowd[i]), "%d of the crowd has a place still", i);
    for (int i = 0; i < CROWD; i++)
        close(crowd[i]);
    cr_assert_eq(ask(TCP, "GET", "/metrics", ""), 200);
}

Test(http, a_request_drop_by_drop_ends_with_its_time)
{
    static const char request[] = "GET /metrics HTTP/1.1\r\nHost: x\r\nX: ";
    uint64_t begun_ms = clock_ms();
    int fd = dial(TCP);
    bool over = false;

    cr_assert(say(fd, request));
    while (!over && clock_ms() < begun_ms + PATIENCE_MS) {
        struct pollfd p = {.fd = fd, .events = POLLIN};

        over = !say(fd, "a") || poll(&p, 1, 50) > 0;
    }
    cr_assert(over);
    cr_assert(is_over(fd));
    cr_assert_geq(clock_ms() - begun_ms, HTTP_LIFE_MS - 10);
    close(fd);
}

/* Clients ask for more than their socket holds, and read nothing. */
Test(http, slow_readers_make_room)
{
    int slow[HTTP_CONNECTIONS], bytes = 4096;

    for (int i = 0; i < HTTP_CONNECTIONS; i++) {
        slow[i] = dial(TCP);
        cr_assert_eq(setsockopt(slow[i], SOL_SOCKET, SO_RCVBUF, &bytes, sizeof(bytes)), 0);
        cr_assert(say(slow[i], "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"));
    }
    cr_assert_eq(ask(UNIX, "GET", "/metrics", ""), 200, "the other socket has its own places");
    cr_assert_eq(ask(TCP, "GET", "/metrics", ""), 200);
    for (int i = 0; i < HTTP_CONNECTIONS; i++)
        close(slow[i]);
}

Test(http, heads_without_end_are_refused)
{
    static char line[64 << 10];
    size_t before;
    int fd;

    memset(line, 'a', sizeof(line) - 1);
    cr_assert_eq(ask(TCP, "GET", "/live", ""), 200);
    before = heap_bytes();
    for (int i = 0; i < 20; i++) {
        fd = dial(i % 2 ? TCP : UNIX);
        cr_assert(say(fd, "GET /live HTTP/1.1\r\nX: "));
        for (int k = 0; k < 16 && say(fd, line); k++)
            ;
        cr_assert(is_over(fd));
        close(fd);
    }
    cr_assert_lt(heap_bytes(), before + (1u << 20));
    cr_assert_eq(ask(TCP, "GET", "/live", ""), 200);
}

Test(http, what_is_no_http)
{
    static const char *const nonsense[] = {
        "\r\n\r\n\r\n\r\n",
        "\x16\x03\x01\x02\x01\x01\xfc\x03\x03", /* TLS */
        "GET\r\n\r\n",
        "GET /live\r\n\r\n",
        "GET /live HTTP/9.9\r\n\r\n",
        "GET /live HTTP/1.1\r\nHost x\r\n\r\n",
        "GET /live HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        "GET /live HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzzzz\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "GET /%00%ff%zz HTTP/1.1\r\nHost: x\r\n\r\n",
    };

    for (size_t i = 0; i < sizeof(nonsense) / sizeof(nonsense[0]); i++) {
        int fd = dial(i % 2 ? TCP : UNIX);

        (void)say(fd, nonsense[i]);
        shutdown(fd, SHUT_WR);
        cr_assert(is_over(fd), "%zu", i);
        close(fd);
    }
    cr_assert_eq(ask(UNIX, "GET", "/live", ""), 200);
}

Test(http, clients_that_leave_at_once)
{
    for (int i = 0; i < 200; i++) {
        struct linger reset = {.l_onoff = 1};
        int fd = dial(i % 2 ? TCP : UNIX);

        if (i % 3 > 0)
            (void)say(fd, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        if (i % 2)
            cr_assert_eq(setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset)), 0);
        close(fd);
    }
    cr_assert_eq(ask(UNIX, "GET", "/metrics", ""), 200);
    cr_assert_eq(ask(TCP, "GET", "/metrics", ""), 200);
}

/* The client's connection waits in the backlog until a descriptor is free. */
Test(http, without_descriptors_it_rests)
{
    int fd = dial(TCP), none;
    struct rlimit files, few;

    cr_assert(say(fd, "GET /live HTTP/1.1\r\nHost: x\r\n\r\n"));
    cr_assert_gt(read_all(fd), 0);
    close(fd);
    fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    none = dup(fd);
    cr_assert_eq(getrlimit(RLIMIT_NOFILE, &files), 0);
    few = files;
    few.rlim_cur = (rlim_t)none;
    close(none);
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &few), 0);
    cr_assert_eq(connect(fd, &tcp.any, sizeof(tcp.in4)), 0);
    cr_assert(say(fd, "GET /live HTTP/1.1\r\nHost: x\r\n\r\n"));
    poll(NULL, 0, 300);
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &files), 0);
    cr_assert_gt(read_all(fd), 0);
    cr_assert_not_null(strstr(answer, "200 OK"));
    close(fd);
}

/* Closing does not wait for clients that do not read, or did not ask. */
Test(http, the_end_waits_for_nobody)
{
    uint64_t begun_ms;
    int fd[8];

    atomic_store(&loop_stuck, true);
    poll(NULL, 0, 2 * HTTP_FRESH_MS);
    for (int i = 0; i < 8; i++) {
        fd[i] = dial(i % 2 ? TCP : UNIX);
        if (i % 4 > 1)
            cr_assert(say(fd[i], "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"));
    }
    begun_ms = clock_ms();
    http_free(http);
    cr_assert_lt(clock_ms() - begun_ms, HTTP_LIFE_MS - 1000);
    for (int i = 0; i < 8; i++) {
        cr_assert(is_over(fd[i]));
        close(fd[i]);
    }
    http = NULL;
}
