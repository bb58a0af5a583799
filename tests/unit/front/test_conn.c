/* The front's connections with a session that a test plays: when close_cb runs, and descriptors
 * that go to a peer. tests/integration/test_limits.py checks bounds. */
/* Sanitizers: thread */
#include "daemon/front/internal.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* Lets a sanitizer's allocator fail as libc's does. Exported, because gcc's runtime is a library.
 */
#define EXPORTED __attribute__((visibility("default")))
EXPORTED const char *__asan_default_options(void);
EXPORTED const char *__asan_default_options(void)
{
    return "allocator_may_return_null=1";
}
EXPORTED const char *__tsan_default_options(void);
EXPORTED const char *__tsan_default_options(void)
{
    return "allocator_may_return_null=1";
}

static struct {
    uv_loop_t loop;
    struct config config;
    struct deadlines deadlines;
    struct limits *limits;
    struct reaper *reaper;
    struct metrics metrics;
    struct front *front;
    struct conn *conn;
    int peer; /* the other end of its socket */
    int calls;
    bool in_call, closed, refuses;
    void (*on_frame)(void);
} rig;

static void *open_cb(void *ctx, struct conn *conn, const struct peer *peer)
{
    (void)ctx;
    (void)peer;
    if (rig.refuses)
        return NULL;
    rig.conn = conn;
    rig.closed = false;
    return conn;
}

static void frame_cb(void *session, struct proto_envelope *env, int *fds, uint32_t n_fds)
{
    (void)session;
    (void)env;
    (void)fds;
    (void)n_fds;
    rig.calls++;
    rig.in_call = true;
    rig.on_frame();
    rig.in_call = false;
}

static void close_cb(void *session)
{
    cr_assert_not(rig.in_call, "close_cb ran inside a call of the session");
    rig.closed = true;
    conn_free(session);
}

/* Returns the other end of its socket. */
static int connect_as(unsigned uid, const char *tenant, struct conn **c)
{
    struct peer peer = {.uid = uid, .pid = getpid()};
    struct ucm_error e;
    int fds[2];

    strcpy(peer.tenant, tenant);
    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds), 0);
    peer.fd = fds[0];
    cr_assert_eq(conn_new(rig.front, fds[0], &peer, c, &e), 0, "%s", e.text);
    return fds[1];
}

static void connect_peer(void)
{
    struct conn *c;

    rig.peer = connect_as(1, "t", &c);
    conn_start(c);
}

static void setup(void)
{
    struct front_handler handler = {open_cb, frame_cb, close_cb, &rig};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0); /* listens to nobody */
    struct ucm_error e;

    cr_assert_geq(fd, 0);
    cr_assert_eq(uv_loop_init(&rig.loop), 0);
    cr_assert_eq(deadlines_init(&rig.deadlines, &rig.loop), 0);
    config_init(&rig.config);
    rig.limits = limits_new();
    cr_assert(rig.limits);
    cr_assert_eq(reaper_new(&rig.loop, &rig.reaper), 0);
    cr_assert_eq(front_new(&rig.loop, &rig.config, fd, &rig.deadlines, rig.limits, rig.reaper,
                           &rig.metrics, &handler, &rig.front, &e),
                 0, "%s", e.text);
    front_stop(rig.front);
    connect_peer();
}

static void teardown(void)
{
    front_drop_all(rig.front);
    cr_expect(rig.closed);
    close(rig.peer);
    front_free(rig.front);
    reaper_stop(rig.reaper);
    deadlines_close(&rig.deadlines);
    uv_run(&rig.loop, UV_RUN_DEFAULT);
    cr_expect_eq(uv_loop_close(&rig.loop), 0);
    reaper_free(rig.reaper);
    for (unsigned i = 0; i < LIMIT_KINDS; i++)
        cr_expect_eq(limits_used(rig.limits, (enum limit)i), 0u);
    limits_free(rig.limits);
    config_free(&rig.config);
}

TestSuite(conn, .init = setup, .fini = teardown, .timeout = 20);

/* Runs the event loop until the connection is closed. */
static void expect_closed(void)
{
    for (int i = 0; i < 1000 && !rig.closed; i++)
        uv_run(&rig.loop, UV_RUN_NOWAIT);
    cr_expect(rig.closed);
}

static void send_frame(void)
{
    static const char stats[] = "\x00\x00\x00\x0a\x94\x00\x02\xa5stats\x80";

    cr_assert_eq(write(rig.peer, stats, sizeof(stats) - 1), (ssize_t)sizeof(stats) - 1);
}

static void send_a_word(void)
{
    uint8_t byte[] = {1};
    struct proto_buf b = {.p = byte, .n = sizeof(byte)};

    conn_send(rig.conn, &b);
}

/* More memory than any allocator gives, so the connection's buffer can't grow. */
static void send_too_much(void)
{
    uint8_t byte = 0;
    struct proto_buf b = {.p = &byte, .n = (size_t)1 << 60};
    int fd = dup(rig.peer);

    conn_send_fds(rig.conn, &b, &fd, 1);
    cr_expect_eq(b.n, 0u);
    cr_expect_lt(fcntl(fd, F_GETFD), 0, "closed, as it can't be sent");
    send_a_word();
}

Test(conn, without_memory_for_an_answer_the_connection_ends_after_the_call)
{
    rig.on_frame = send_too_much;
    send_frame();
    expect_closed();
    cr_expect_eq(rig.calls, 1);
}

/* Outside a frame: a waiting request is answered. */
Test(conn, without_memory_for_a_late_answer)
{
    rig.in_call = true;
    send_too_much();
    rig.in_call = false;
    cr_expect_not(rig.closed);
    expect_closed();
}

/* teardown checks that nothing counts for it any more. */
Test(conn, without_a_session_it_ends_at_once)
{
    struct conn *c = rig.conn;
    char byte;
    int other;

    rig.refuses = true;
    other = connect_as(2, "u", &c);
    cr_expect_null(c);
    while (read(other, &byte, 1) != 0)
        uv_run(&rig.loop, UV_RUN_NOWAIT);
    close(other);
    cr_expect_not(rig.closed, "the other one stays");
}

static void offend(void)
{
    struct ucm_error e;

    ucm_error_set(&e, UCM_WIRE_INVALID, "no");
    conn_offend(rig.conn, &e);
}

Test(conn, an_offender_that_hung_up_ends_after_the_call)
{
    close(rig.peer);
    rig.in_call = true;
    offend();
    rig.in_call = false;
    expect_closed();
}

Test(conn, an_offender_hears_why_before_the_end)
{
    uint8_t answer[256];

    rig.on_frame = offend;
    send_frame();
    expect_closed();
    cr_expect_gt(read(rig.peer, answer, sizeof(answer)), 4);
}

/* ---- descriptors to the peer ---- */

#define FRAME_BYTES 300000 /* more than a socket takes at once */

/* A frame of that many bytes, each `fill`, with n descriptors. */
static void send_with_fds(uint8_t fill, size_t bytes, uint32_t n)
{
    struct proto_buf b = {.p = malloc(bytes), .n = bytes};
    int fds[UCM_MAX_FRAME_FDS];

    memset(b.p, fill, bytes);
    for (uint32_t i = 0; i < n; i++)
        fds[i] = dup(rig.peer);
    conn_send_fds(rig.conn, &b, fds, n);
    cr_expect_eq(b.n, 0u);
    free(b.p);
}

/* Reads what is there. Returns how many descriptors came, and closes them. *bytes grows by the
 * bytes read. *with: the last byte of the read that brought descriptors. */
static uint32_t receive(size_t *bytes, uint8_t *with)
{
    static uint8_t buffer[2 * FRAME_BYTES];
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int) * UCM_MAX_FRAME_FDS)];
    } control;
    struct iovec iov = {buffer, sizeof(buffer)};
    struct msghdr m = {.msg_iov = &iov,
                       .msg_iovlen = 1,
                       .msg_control = control.bytes,
                       .msg_controllen = sizeof(control.bytes)};
    ssize_t n = recvmsg(rig.peer, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    struct cmsghdr *h = n > 0 ? CMSG_FIRSTHDR(&m) : NULL;
    uint32_t fds = 0;

    *bytes += n > 0 ? (size_t)n : 0;
    if (h) {
        *with = buffer[n - 1];
        fds = (uint32_t)((h->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        for (uint32_t i = 0; i < fds; i++)
            close(((int *)CMSG_DATA(h))[i]);
    }
    return fds;
}

static int open_fds(void)
{
    int n = 0;

    for (int fd = 0; fd < 1024; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

Test(conn, descriptors_come_with_their_frame)
{
    int before = open_fds();
    size_t bytes = 0;
    uint8_t with = 0;
    uint32_t got[3] = {0}, n = 0, fds;

    send_with_fds(1, FRAME_BYTES, 0);
    send_with_fds(2, FRAME_BYTES, 3);
    send_with_fds(3, 10, 64);
    send_with_fds(4, 10, 0);
    while (bytes < 2 * FRAME_BYTES + 20) {
        uv_run(&rig.loop, UV_RUN_NOWAIT);
        fds = receive(&bytes, &with);
        if (fds == 0)
            continue;
        cr_assert_lt(n, 2u);
        cr_expect_eq(with, n == 0 ? 2 : 3, "its frame's bytes end that read");
        got[n++] = fds;
    }
    cr_expect_eq(got[0], 3u);
    cr_expect_eq(got[1], 64u);
    cr_expect_eq(open_fds(), before);
}

Test(conn, a_peer_that_does_not_read_gets_few_descriptors)
{
    size_t bytes = 0;
    uint8_t with;

    cr_expect_eq(conn_fds_room(rig.conn), 128u);
    send_with_fds(1, 10, 64);
    cr_expect_eq(conn_fds_room(rig.conn), 64u);
    uv_run(&rig.loop, UV_RUN_NOWAIT);
    cr_expect_eq(conn_fds_room(rig.conn), 64u, "sent, and not read");
    cr_expect_eq(receive(&bytes, &with), 64u);
    cr_expect_eq(conn_fds_room(rig.conn), 128u);
}

Test(conn, descriptors_that_were_not_sent_are_closed)
{
    int before = open_fds();

    send_with_fds(1, 10, 5);
    send_with_fds(2, 10, 5);
    cr_expect_eq(open_fds(), before + 10);
    rig.in_call = true;
    conn_drop(rig.conn, "test");
    rig.in_call = false;
    close(rig.peer);
    expect_closed();
    cr_expect_eq(open_fds(), before - 1 - 1,
                 "the peer's and the connection's, once the event loop ran");
    rig.peer = dup(0);
}

/* ---- answers that nobody reads ---- */

static void greet(void)
{
    conn_welcome(rig.conn);
}

static void send_zeros(size_t bytes)
{
    struct proto_buf b = {.p = calloc(1, bytes), .n = bytes};

    cr_assert(b.p);
    conn_send(rig.conn, &b);
    free(b.p);
}

Test(conn, who_reads_slowly_is_not_dropped)
{
    static char some[64 << 10];

    rig.config.unread_ms = 50;
    rig.on_frame = greet;
    send_frame();
    send_zeros(8 << 20);
    for (int i = 0; i < 60; i++) {
        uv_run(&rig.loop, UV_RUN_NOWAIT);
        cr_assert_gt(read(rig.peer, some, sizeof(some)), 0);
        uv_sleep(5);
    }
    cr_expect(conn_backed_up(rig.conn));
    cr_expect_not(rig.closed);
}
