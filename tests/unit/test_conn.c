/* The front's connections under a session that a test plays: when close_cb runs, and how many
 * connections a uid may have. */
#include "daemon/front/internal.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* Lets a sanitizer's allocator fail as libc's does. Exported, for gcc's runtime is a library. */
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
    struct metrics metrics;
    struct front *front;
    struct conn *conn;
    int peer; /* the other end of its socket */
    int calls;
    bool in_call, closed;
    void (*on_frame)(void);
} rig;

static void *open_cb(void *ctx, struct conn *conn, const struct peer *peer)
{
    (void)ctx;
    (void)peer;
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

static void connect_peer(void)
{
    struct peer peer = {.uid = 1, .pid = getpid(), .tenant = "t"};
    struct ucm_error e;
    int fds[2];

    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds), 0);
    peer.fd = fds[0];
    cr_assert_eq(conn_new(rig.front, fds[0], &peer, &e), 0, "%s", e.text);
    rig.peer = fds[1];
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
    cr_assert_eq(front_new(&rig.loop, &rig.config, fd, &rig.deadlines, &rig.metrics, &handler,
                           &rig.front, &e),
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
    deadlines_close(&rig.deadlines);
    uv_run(&rig.loop, UV_RUN_DEFAULT);
    cr_expect_eq(uv_loop_close(&rig.loop), 0);
    config_free(&rig.config);
}

TestSuite(conn, .init = setup, .fini = teardown, .timeout = 20);

/* Runs the loop until the connection is closed. */
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

/* More than any allocator gives: the connection's buffer can't grow. */
static void send_too_much(void)
{
    uint8_t byte = 0;
    struct proto_buf b = {.p = &byte, .n = (size_t)1 << 60};

    conn_send(rig.conn, &b);
    cr_expect_eq(b.n, 0u);
    send_a_word();
}

Test(conn, without_memory_for_an_answer_the_connection_ends_after_the_call)
{
    rig.on_frame = send_too_much;
    send_frame();
    expect_closed();
    cr_expect_eq(rig.calls, 1);
}

/* The same outside a frame: a request that was waiting is answered. */
Test(conn, without_memory_for_a_late_answer)
{
    rig.in_call = true;
    send_too_much();
    rig.in_call = false;
    cr_expect_not(rig.closed);
    expect_closed();
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

Test(conn, a_dropped_connection_ends_after_the_call)
{
    rig.in_call = true;
    send_a_word();
    conn_drop(rig.conn, "test");
    rig.in_call = false;
    expect_closed();
}

/* ---- time ---- */

static void greet(void)
{
    conn_welcome(rig.conn);
}

/* The loop was held up for longer than a hello may take; meanwhile it arrived. */
Test(conn, a_late_daemon_blames_no_peer)
{
    rig.on_frame = greet;
    rig.config.handshake_ms = 20;
    front_drop_all(rig.front);
    close(rig.peer);
    connect_peer();
    send_frame();
    uv_sleep(60);
    for (int i = 0; i < 5; i++)
        uv_run(&rig.loop, UV_RUN_NOWAIT);
    cr_expect_eq(rig.calls, 1);
    cr_expect_not(rig.closed);
}

Test(conn, who_says_no_hello_is_dropped)
{
    rig.config.handshake_ms = 20;
    front_drop_all(rig.front);
    close(rig.peer);
    connect_peer();
    for (int i = 0; i < 200 && !rig.closed; i++) {
        uv_run(&rig.loop, UV_RUN_NOWAIT);
        uv_sleep(5);
    }
    cr_expect(rig.closed);
}

/* ---- how many a uid may have ---- */

/* 0, or the refusal's code; its sentence must have `word`. */
static int connect_as(uid_t uid, bool admin, const char *word)
{
    struct peer peer = {.uid = uid, .admin = admin, .pid = getpid(), .tenant = "t"};
    struct ucm_error e = {0};
    int fds[2], rc;

    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds), 0);
    close(fds[1]);
    peer.fd = fds[0];
    rc = conn_new(rig.front, fds[0], &peer, &e);
    if (rc != 0) {
        close(fds[0]);
        cr_expect_eq(e.code, UCM_WIRE_BUSY);
        cr_expect(word && strstr(e.text, word), "%s", e.text);
    }
    return rc;
}

static unsigned connect_many(uid_t uid, bool greet, const char *word)
{
    unsigned n = 0;

    while (connect_as(uid, false, word) == 0) {
        n++;
        if (greet)
            conn_welcome(rig.conn);
    }
    return n;
}

/* The limit is 128; a connection of uid 1 is there already. */
static void small_limit(void)
{
    rig.config.max_connections = 128;
    front_drop_all(rig.front);
}

Test(conn, silent_connections_of_one_uid_are_few)
{
    small_limit();
    cr_expect_eq(connect_many(1000, false, "hello"), 16u);
    cr_expect_eq(connect_as(1001, false, NULL), 0, "another uid is not concerned");
}

Test(conn, one_uid_has_half_and_the_last_are_for_operators)
{
    small_limit();
    cr_expect_eq(connect_many(1000, true, "uid 1000"), 64u);
    cr_expect_eq(connect_many(1001, true, "limits.connections"), 62u);
    cr_expect_eq(connect_as(1002, false, "limits.connections"), -EUSERS);
    cr_expect_eq(connect_as(0, true, NULL), 0);
    cr_expect_eq(connect_as(1000, true, NULL), 0, "an operator is exempt");
    cr_expect_eq(connect_as(0, true, "limits.connections"), -EUSERS);
}

Test(conn, who_leaves_makes_way)
{
    small_limit();
    cr_expect_eq(connect_many(1000, false, "hello"), 16u);
    front_drop_all(rig.front);
    cr_expect(list_empty(&rig.front->users), "nothing is kept of a uid that left");
    cr_expect_eq(connect_many(1000, false, "hello"), 16u);
}
