/* The connection itself: peers that say nothing, send half a frame, or read answers late or never.
 * And descriptors that arrive together with frames sent before theirs. */
/* Sanitizers: address */
#include "proto/proto.h"
#include "tests/integration/harness.h"
#include "tests/runner/halt.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static const char stats_frame[] = "\x00\x00\x00\x0a\x94\x00\x02\xa5stats\x80";
#define STATS_BYTES (sizeof(stats_frame) - 1)
#define BEHIND 150 /* answers of some 4 KiB: more than a socket holds, less than the daemon keeps */

static struct host host;
static struct ucm_client *watcher;

static void setup(void)
{
    struct ucm_options options = {.socket = host.socket, .name = "watcher"};
    const char *asan = getenv("ASAN_OPTIONS");
    char more[512];

    /* Otherwise a sanitizer keeps up to 256 MiB of freed memory, and less only if its threads get
     * to it in time. */
    snprintf(more, sizeof(more), "%s:quarantine_size_mb=16", asan ? asan : "");
    cr_assert_eq(setenv("ASAN_OPTIONS", more, 1), 0);
    host = (struct host){.sets = {"request.handshake=2s", "arena.size=4MiB"}};
    host_start(&host);
    cr_assert_eq(ucm_connect(&options, 5000, &watcher), 0);
}

static void teardown(void)
{
    cr_expect_eq(ucm_connection_epoch(watcher), 1u, "the watcher was dropped");
    ucm_close(watcher);
    host_remove(&host);
}

TestSuite(front, .init = setup, .fini = teardown, .timeout = 60);

static bool connections_fall_to(uint64_t n, int timeout_ms)
{
    for (uint64_t end = now_ms() + (uint64_t)timeout_ms; now_ms() < end; sleep_ms(10))
        if (metric(watcher, "connections") <= n)
            return true;
    return false;
}

/* One answer; asserts that it is a result and no error. */
static void expect_result(int fd)
{
    static uint8_t buf[UCM_MAX_FRAME_BYTES];
    struct proto_envelope env;
    struct ucm_error e = {0};
    bool answerable;
    ssize_t n = raw_frame(fd, buf, sizeof(buf), 10000);

    cr_assert_gt(n, 0, "an answer was expected, not %zd", n);
    cr_assert_eq(proto_envelope_open(&env, buf, (size_t)n, &answerable, &e), 0, "%s", e.text);
    cr_assert_eq(env.error.code, 0, "%s", env.error.text);
    proto_envelope_close(&env);
}

/* Other frames are no hello. */
Test(front, who_asks_without_hello_is_dropped)
{
    int fd = raw_connect(&host);

    while (raw_write(fd, stats_frame, STATS_BYTES))
        sleep_ms(20);
    close(fd);
}

/* ---- frames that do not end ---- */

/* A frame of a MiB, except its end. */
static pid_t hoarder(void)
{
    static uint8_t most[1 << 20];
    int status;
    pid_t pid = fork();

    if (pid == 0) {
        int fd = raw_connect(&host);

        raw_hello(fd);
        most[1] = 0x10; /* the length, big-endian */
        raw_write(fd, most, sizeof(most) - 64);
        raise(SIGSTOP);
        _exit(0);
    }
    cr_assert_eq(waitpid(pid, &status, WUNTRACED), pid);
    return pid;
}

/* Stopped clients are not dropped until others need what they hold. */
Test(front, who_holds_memory_and_does_not_move_on_makes_way)
{
    enum { KEYS = 16384 };
    static uint8_t keys[KEYS * WORKER_KEY_BYTES];
    struct ucm_options options = {.socket = host.socket, .name = "watcher"};
    struct ucm_lookup l = {.keys = keys, .n_keys = KEYS};
    struct worker w;
    pid_t pids[2];
    uint32_t hits, lease;
    int rc;

    teardown();
    host = (struct host){.sets = {"request.handshake=1s", "limits.frame_memory=2MiB"}};
    host_start(&host);
    cr_assert_eq(ucm_connect(&options, 5000, &watcher), 0);
    worker_open(&w, &host, &(struct worker_options){0});
    keys_make(1, KEYS, keys);
    for (unsigned i = 0; i < 2; i++)
        pids[i] = hoarder();
    for (uint64_t end = now_ms() + 20000;; sleep_ms(100)) {
        rc = ucm_lookup_prefix(w.ns, &l, -1, &hits, NULL, &lease);
        if (rc == 0)
            break;
        cr_assert_lt(now_ms(), end, "%s", ucm_errmsg());
    }
    for (unsigned i = 0; i < 2; i++) {
        kill(pids[i], SIGKILL);
        cr_assert_eq(waitpid(pids[i], NULL, 0), pids[i]);
    }
    worker_close(&w);
}

/* ---- answers that are not read ---- */

/* Bytes that one side has written and the other has not read. */
struct unread {
    int daemon, client;
};

static struct unread unread(int fd)
{
    struct unread u;

    cr_assert_eq(ioctl(fd, SIOCOUTQ, &u.daemon), 0);
    cr_assert_eq(ioctl(fd, FIONREAD, &u.client), 0);
    return u;
}

/* Waits until the daemon neither reads from this connection nor answers on it, although it serves
 * another one. */
static void wait_until_it_stops(int fd)
{
    struct unread before = unread(fd);

    for (unsigned quiet = 0; quiet < 20;) {
        struct unread after;

        (void)metric(watcher, "connections");
        after = unread(fd);
        quiet = after.daemon == before.daemon && after.client == before.client ? quiet + 1 : 0;
        before = after;
    }
}

static void ask(int fd, size_t n)
{
    for (size_t i = 0; i < n; i++)
        cr_assert(raw_write(fd, stats_frame, STATS_BYTES));
}

/* Sends until neither the daemon nor the socket takes more. Returns how many bytes. */
static size_t ask_until_full(int fd)
{
    static char frames[STATS_BYTES * 4096];
    size_t sent = 0;
    bool full;

    for (size_t i = 0; i < sizeof(frames); i++)
        frames[i] = stats_frame[i % STATS_BYTES];
    do {
        ssize_t w;

        full = true;
        for (;;) {
            size_t at = sent % sizeof(frames);

            w = send(fd, frames + at, sizeof(frames) - at, MSG_NOSIGNAL | MSG_DONTWAIT);
            if (w <= 0)
                break;
            sent += (size_t)w;
            full = false;
        }
        cr_assert_eq(errno, EAGAIN, "%s", strerror(errno));
        wait_until_it_stops(fd);
    } while (!full);
    return sent;
}

/* A long request that is refused: it makes the daemon's buffer for this connection large. */
static void ask_long(int fd)
{
    static const uint8_t zeroes[60000];
    static uint8_t answer[4096];
    struct proto_builder pb;
    struct proto_buf b;
    struct ucm_error e = {0};

    proto_buf_init(&b, UCM_MAX_FRAME_BYTES);
    proto_request_begin(&pb, &b, 2, "stats");
    msgpack_pack_map(&pb.pk, 1);
    proto_pack_str(&pb.pk, "x");
    msgpack_pack_bin(&pb.pk, sizeof(zeroes));
    msgpack_pack_bin_body(&pb.pk, zeroes, sizeof(zeroes));
    cr_assert_eq(proto_frame_end(&pb, &e), 0, "%s", e.text);
    cr_assert(raw_write(fd, b.p, b.n));
    cr_assert_gt(raw_frame(fd, answer, sizeof(answer), 5000), 0);
    proto_buf_free(&b);
}

/* Half a megabyte of requests has 40 megabytes of answers, which are made as they are read. Each
 * request is answered in the end. */
Test(front, answers_are_made_as_they_are_read)
{
    size_t sent, n;
    uint64_t before;
    int fd = raw_connect(&host);

    raw_hello(fd);
    ask_long(fd);
    before = host_rss_bytes(&host);
    sent = ask_until_full(fd);
    cr_assert_gt(sent, 100000u);
    cr_expect_lt(host_rss_bytes(&host), before + (32u << 20), "the daemon grew by %llu bytes",
                 (unsigned long long)(host_rss_bytes(&host) - before));
    n = sent / STATS_BYTES;
    for (size_t i = 0; i < n; i++)
        expect_result(fd);
    close(fd);
}

#if defined(SANITIZED) && !defined(__SANITIZE_THREAD__)
#define ROUNDS 15000
#else
#define ROUNDS 5000
#endif

/* All answers are 4 KiB a round. A sanitizer keeps freed memory. */
#ifdef SANITIZED
#define GROWTH (48u << 20)
#else
#define GROWTH (16u << 20)
#endif

/* The backlog is never empty, and no longer than it was at first. */
Test(front, a_peer_that_is_always_behind)
{
    uint64_t before;
    int fd = raw_connect(&host);

    raw_hello(fd);
    ask(fd, BEHIND);
    wait_until_it_stops(fd);
    before = host_rss_bytes(&host);
    for (int i = 0; i < ROUNDS; i++) {
        ask(fd, 1);
        expect_result(fd);
    }
    cr_expect_lt(host_rss_bytes(&host), before + GROWTH, "the daemon grew by %llu bytes",
                 (unsigned long long)(host_rss_bytes(&host) - before));
    for (int i = 0; i < BEHIND; i++)
        expect_result(fd);
    close(fd);
}

/* A client that does not read why it is dropped is dropped all the same. */
Test(front, an_offender_that_does_not_read_is_dropped)
{
    int fd = raw_connect(&host);

    raw_hello(fd);
    ask(fd, BEHIND);
    cr_assert(raw_write(fd, "\x00\x00\x00\x05\x94\x01\x01\xc0\xc0", 9));
    cr_expect(connections_fall_to(1, 20000));
    close(fd);
}

/* ---- descriptors ---- */

static int memory_fd(size_t bytes)
{
    void *p;
    int fd;

    cr_assert_eq(ucm_shared_memory(bytes, &fd, &p), 0);
    munmap(p, bytes);
    return fd;
}

static void send_with_fd(int fd, const struct proto_buf *b, size_t first, int passed)
{
    char control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec iov = {b->p, first};
    struct msghdr m = {.msg_iov = &iov,
                       .msg_iovlen = 1,
                       .msg_control = control,
                       .msg_controllen = sizeof(control)};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);

    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(c), &passed, sizeof(int));
    cr_assert_eq(sendmsg(fd, &m, MSG_NOSIGNAL), (ssize_t)first);
    if (first < b->n)
        cr_assert(raw_write(fd, b->p + first, b->n - first));
}

static void open_namespace(int fd)
{
    struct msg_ns_open m = {.model = {"m", 1},
                            .dtype = {"b", 1},
                            .layout = {"l", 1},
                            .block_tokens = 16,
                            .key_bytes = 32,
                            .parts = 1,
                            .layers = {(const uint32_t[]){1}, 1},
                            .layer_bytes = 4096};
    struct proto_buf b;
    struct ucm_error e = {0};

    proto_buf_init(&b, 4096);
    cr_assert_eq(proto_request(&b, 3, UCM_METHOD_NS_OPEN, &proto_ns_open, &m, &e), 0, "%s", e.text);
    cr_assert(raw_write(fd, b.p, b.n));
    expect_result(fd); /* the first namespace of the daemon: number 1 */
    proto_buf_free(&b);
}

static void register_frame(struct proto_buf *b)
{
    struct msg_handle handle = {.kind = UCM_HANDLE_MEMFD, .bytes = 8 * 4096};
    struct msg_plane plane = {.stride = 4096, .block_bytes = 4096};
    struct msg_region_register m = {
        .ns = 1, .blocks = 8, .device = {"cpu", 3}, .handles = {&handle, 1}, .planes = {&plane, 1}};
    struct ucm_error e = {0};

    proto_buf_init(b, 4096);
    cr_assert_eq(proto_request(b, 4, UCM_METHOD_REGION_REGISTER, &proto_region_register, &m, &e), 0,
                 "%s", e.text);
}

/* Frames sent one by one arrive in one read if the daemon was busy meanwhile. */
Test(front, descriptors_belong_to_the_frame_that_they_were_sent_with)
{
    struct proto_buf b;
    int fd = raw_connect(&host), memory = memory_fd(8 * 4096);

    raw_hello(fd);
    open_namespace(fd);
    register_frame(&b);
    for (size_t first = b.n; first > 0; first = first > 20 ? 20 : first > 2 ? 2 : 0) {
        halt(host.pid);
        cr_assert(raw_write(fd, stats_frame, STATS_BYTES));
        cr_assert(raw_write(fd, stats_frame, STATS_BYTES));
        send_with_fd(fd, &b, first, memory);
        send_with_fd(fd, &b, first, memory);
        cr_assert(raw_write(fd, stats_frame, STATS_BYTES));
        send_with_fd(fd, &b, first, memory);
        cr_assert_eq(kill(host.pid, SIGCONT), 0);
        for (int i = 0; i < 6; i++)
            expect_result(fd);
    }
    cr_expect_eq(metric(watcher, "regions"), 9u);
    proto_buf_free(&b);
    close(memory);
    close(fd);
}
