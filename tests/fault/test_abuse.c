/* A peer that lies, floods, dawdles or asks for what is not its
 * own. Whatever it does, another client's lookups go on. */
/* Sanitizers: address */
#include "tests/integration/harness.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static struct host host;
static struct worker bystander;

static void setup(void)
{
    host = (struct host){.sets = {"request.handshake=2s", "limits.connections=64"}};
    host_start(&host);
    worker_open(&bystander, &host, &(struct worker_options){0});
    worker_store(&bystander, 1, 1);
}

static void teardown(void)
{
    uint8_t key[WORKER_KEY_BYTES];

    key_make(1, key);
    cr_expect_eq(worker_hits(&bystander, key, 1), 1u, "the bystander was harmed");
    cr_expect_eq(ucm_generation(bystander.client), 1u, "the bystander was dropped");
    worker_close(&bystander);
    host_remove(&host);
}

TestSuite(abuse, .init = setup, .fini = teardown, .timeout = 60);

static void expect_dropped(const void *bytes, size_t n)
{
    int fd = raw_connect(&host);

    raw_hello(fd);
    raw_write(fd, bytes, n);
    cr_expect(raw_closed(fd, 5000));
    close(fd);
}

Test(abuse, giant_length)
{
    expect_dropped("\xff\xff\xff\xff", 4);
    expect_dropped("\x00\x10\x00\x01", 4);
    expect_dropped("\x00\x00\x00\x00", 4);
}

Test(abuse, five_bytes_that_promise_gigabytes)
{
    expect_dropped("\x00\x00\x00\x05\xdd\xff\xff\xff\xff", 9);
    expect_dropped("\x00\x00\x00\x05\xdf\xff\xff\xff\xff", 9);
    expect_dropped("\x00\x00\x00\x05\xc6\xff\xff\xff\xff", 9);
}

Test(abuse, deep_nesting)
{
    uint8_t frame[4 + 1000];

    memset(frame, 0x91, sizeof(frame));
    memcpy(frame, "\x00\x00\x03\xe8", 4);
    expect_dropped(frame, sizeof(frame));
}

Test(abuse, responses_and_noise)
{
    expect_dropped("\x00\x00\x00\x05\x94\x01\x01\xc0\xc0", 9);
    expect_dropped("\x00\x00\x00\x01\xc1", 5);
}

/* What a bad request costs is an error and nothing more: the connection serves on. */
Test(abuse, bad_requests_are_answered_and_forgiven)
{
    /* [0, 7, "nope", {}], then [0, 8, "lookup", {}] */
    static const char nope[] = "\x00\x00\x00\x09\x94\x00\x07\xa4nope\x80";
    static const char bare[] = "\x00\x00\x00\x0b\x94\x00\x08\xa6lookup\x80";
    uint8_t buf[1024];
    int fd = raw_connect(&host);

    raw_hello(fd);
    cr_assert(raw_write(fd, nope, sizeof(nope) - 1));
    cr_assert_gt(raw_frame(fd, buf, sizeof(buf), 5000), 4);
    cr_expect_eq(memcmp(buf, "\x94\x01\x07", 3), 0);
    cr_expect_neq(buf[3], 0xc0, "an error was expected");
    cr_assert(raw_write(fd, bare, sizeof(bare) - 1));
    cr_assert_gt(raw_frame(fd, buf, sizeof(buf), 5000), 4);
    cr_expect_eq(memcmp(buf, "\x94\x01\x08", 3), 0);
    cr_expect_neq(buf[3], 0xc0, "an error was expected");
    close(fd);
}

Test(abuse, nothing_before_hello)
{
    static const char stats[] = "\x00\x00\x00\x0a\x94\x00\x01\xa5stats\x80";
    uint8_t buf[1024];
    int fd = raw_connect(&host);

    cr_assert(raw_write(fd, stats, sizeof(stats) - 1));
    cr_assert_gt(raw_frame(fd, buf, sizeof(buf), 5000), 4);
    cr_expect_neq(buf[3], 0xc0, "an error was expected");
    close(fd);
}

Test(abuse, one_byte_a_second)
{
    int fd = raw_connect(&host);
    uint64_t start = now_ms();

    raw_hello(fd);
    raw_write(fd, "\x00\x00\x00\x09\x94", 5);
    cr_expect(raw_closed(fd, 5000));
    cr_expect_lt(now_ms() - start, 9000u); /* before the default of 10 s */
    close(fd);
}

/* A connection that is silent between frames may be silent for ever. */
Test(abuse, an_idle_peer_is_not_reaped)
{
    static const char stats[] = "\x00\x00\x00\x0a\x94\x00\x02\xa5stats\x80";
    static uint8_t buf[65536];
    int fd = raw_connect(&host);

    raw_hello(fd);
    sleep_ms(4500);
    cr_assert(raw_write(fd, stats, sizeof(stats) - 1));
    cr_expect_gt(raw_frame(fd, buf, sizeof(buf), 5000), 100);
    close(fd);
}

/* Stopped in the middle of a frame for longer than the 2 s that a frame may take: the daemon looks
 * at 2 s. At 4 s it finds the peer running, but not done, and gives it until 6 s. */
Test(abuse, a_stopped_peer_is_not_reaped)
{
    static const char stats[] = "\x00\x00\x00\x0a\x94\x00\x02\xa5stats\x80";
    static uint8_t buf[65536];
    int status;
    pid_t pid = fork();

    if (pid == 0) {
        int fd = raw_connect(&host);

        raw_hello(fd);
        raw_write(fd, stats, 6);
        raise(SIGSTOP);
        sleep_ms(2000);
        raw_write(fd, stats + 6, sizeof(stats) - 1 - 6);
        _exit(raw_frame(fd, buf, sizeof(buf), 5000) > 100 ? 0 : 1);
    }
    cr_assert_eq(waitpid(pid, &status, WUNTRACED), pid);
    sleep_ms(2700);
    kill(pid, SIGCONT);
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    cr_expect_eq(status, 0, "the stopped peer was dropped");
}

/* A frame of a MiB, but for its end. */
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

/* They are not to blame for being stopped, until others need what they hold. */
Test(abuse, who_holds_memory_and_does_not_move_on_makes_way)
{
    enum { KEYS = 16384 };
    static uint8_t keys[KEYS * WORKER_KEY_BYTES];
    struct ucm_lookup l = {.keys = keys, .n_keys = KEYS};
    struct worker w;
    pid_t pids[2];
    uint32_t hits, lease;
    int rc;

    worker_close(&bystander);
    host_remove(&host);
    host = (struct host){.sets = {"request.handshake=1s", "limits.frame_memory=2MiB"}};
    host_start(&host);
    worker_open(&bystander, &host, &(struct worker_options){0});
    worker_store(&bystander, 1, 1);
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

Test(abuse, descriptors_nobody_asked_for)
{
    char control[CMSG_SPACE(sizeof(int) * 60)] = {0};
    struct iovec iov = {"\x00\x00\x00\x0a\x94\x00\x02\xa5stats\x80", 14};
    struct msghdr m = {.msg_iov = &iov,
                       .msg_iovlen = 1,
                       .msg_control = control,
                       .msg_controllen = sizeof(control)};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    uint8_t buf[1024];
    int fds[60], fd = raw_connect(&host);

    raw_hello(fd);
    for (int i = 0; i < 60; i++)
        fds[i] = fd;
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(fds));
    memcpy(CMSG_DATA(c), fds, sizeof(fds));
    for (int i = 0; i < 50; i++) {
        cr_assert_eq(sendmsg(fd, &m, MSG_NOSIGNAL), 14);
        cr_assert_gt(raw_frame(fd, buf, sizeof(buf), 5000), 4);
        cr_assert_neq(buf[3], 0xc0, "an error was expected");
    }
    close(fd);
}

Test(abuse, thousands_of_connections)
{
    uint64_t left;
    int fds[200];

    for (int i = 0; i < 200; i++)
        fds[i] = raw_connect(&host);
    cr_expect(metric_reaches(bystander.client, "connections_refused", 100, 5000));
    for (int i = 0; i < 200; i++)
        close(fds[i]);
    /* Some of them the daemon may find only now, and then that they are gone. */
    left = metric(bystander.client, "connections");
    for (int i = 0; i < 1000 && left > 1; i++) {
        sleep_ms(20);
        left = metric(bystander.client, "connections");
    }
    cr_expect_eq(left, 1u);
}

/* A peer that asks and never reads is stopped by its own full socket; memory is bounded. */
Test(abuse, a_peer_that_never_reads)
{
    static const char stats[] = "\x00\x00\x00\x0a\x94\x00\x02\xa5stats\x80";
    int fd = raw_connect(&host);
    size_t sent = 0;

    raw_hello(fd);
    cr_assert_eq(fcntl(fd, F_SETFL, O_NONBLOCK), 0);
    for (uint64_t end = now_ms() + 3000; now_ms() < end && sent < (64u << 20);) {
        ssize_t n = send(fd, stats, sizeof(stats) - 1, MSG_NOSIGNAL);

        if (n == (ssize_t)sizeof(stats) - 1) {
            sent += (size_t)n;
            continue;
        }
        if (n > 0 || errno != EAGAIN)
            break;
        sleep_ms(10);
        if (metric(bystander.client, "requests_total") > 0 && now_ms() > end - 500)
            break;
    }
    cr_expect_lt(sent, 16u << 20, "the daemon took in %zu bytes of requests that nobody reads",
                 sent);
    close(fd);
}

/* ---- regions ---- */

struct bad_region {
    const char *what;
    struct ucm_plane planes[8];
    uint64_t bytes;
    uint32_t n_planes, blocks, part;
};

static int try_region(const struct bad_region *b, int fd)
{
    struct ucm_memory memory = {.kind = UCM_MEMORY_MEMFD, .bytes = b->bytes, .fd = fd};
    struct ucm_region_spec spec = {.part = b->part,
                                   .blocks = b->blocks,
                                   .device = "cpu",
                                   .memory = &memory,
                                   .n_memory = 1,
                                   .planes = b->planes,
                                   .n_planes = b->n_planes};
    struct ucm_region *region;

    return ucm_region_register(bystander.ns, &spec, -1, &region);
}

/* The namespace has 4 shards of 8192 bytes. */
Test(abuse, regions_out_of_bounds_are_refused)
{
    struct bad_region good = {"good",
                              {{0, 0, 8192, 8192, 0},
                               {0, 65536, 8192, 8192, 1},
                               {0, 131072, 8192, 8192, 2},
                               {0, 196608, 8192, 8192, 3}},
                              262144,
                              4,
                              8,
                              0};
    struct bad_region bad[10];
    void *address;
    int fd, n = 0;

    cr_assert_eq(ucm_shared_memory(262144, &fd, &address), 0);
    cr_assert_eq(try_region(&good, fd), 0, "%s", ucm_errmsg());
#define BAD(why) (bad[n] = good, bad[n].what = why, &bad[n++])
    BAD("a block too many")->blocks = 9;
    BAD("handle longer than its memory")->bytes = 262145;
    BAD("offset past the end")->planes[3].offset = 262144;
    BAD("offset that wraps round")->planes[3].offset = UINT64_MAX - 4096;
    BAD("stride that wraps round")->planes[0].stride = UINT64_MAX / 2;
    BAD("stride shorter than its chunk")->planes[0].stride = 4096;
    BAD("a chunk too short")->planes[1].chunk_bytes = 8191;
    BAD("a shard that is not there")->planes[3].shard = 4;
    BAD("a part that is not there")->part = 1;
    for (int i = 0; i < n; i++) {
        cr_expect_eq(try_region(&bad[i], fd), -UCM_EINVALID, "%s: %s", bad[i].what, ucm_errmsg());
        cr_expect_gt(strlen(ucm_errmsg()), 20u, "%s: no sentence", bad[i].what);
    }
    munmap(address, 262144);
    close(fd);
}

/* A worker could shrink unsealed memory under the daemon's feet. */
Test(abuse, unsealed_memory_is_refused)
{
    struct bad_region r = {"unsealed",
                           {{0, 0, 8192, 8192, 0},
                            {0, 65536, 8192, 8192, 1},
                            {0, 131072, 8192, 8192, 2},
                            {0, 196608, 8192, 8192, 3}},
                           262144,
                           4,
                           8,
                           0};
    int fd = memfd_create("unsealed", MFD_CLOEXEC);

    cr_assert_eq(ftruncate(fd, 262144), 0);
    cr_expect_lt(try_region(&r, fd), 0);
    cr_expect(strstr(ucm_errmsg(), "seal"), "%s", ucm_errmsg());
    close(fd);
    fd = open("/etc/hostname", O_RDONLY);
    cr_expect_lt(try_region(&r, fd), 0);
    close(fd);
}

Test(abuse, blocks_out_of_bounds_are_refused)
{
    uint8_t keys[2 * WORKER_KEY_BYTES];

    keys_make(1, 2, keys);
    cr_expect_eq(worker_load(&bystander, keys, (uint32_t[]){0, 64}, 2, NULL), -UCM_EINVALID);
    cr_expect_eq(worker_dump(&bystander, keys, (uint32_t[]){0, UINT32_MAX}, 2, NULL),
                 -UCM_EINVALID);
    cr_expect_eq(worker_load(&bystander, keys, (uint32_t[]){5, 5}, 2, NULL), -UCM_EINVALID,
                 "one block for two keys");
    cr_expect(strstr(ucm_errmsg(), "twice"), "%s", ucm_errmsg());
}

/* ---- identity ---- */

static uint32_t hits_under(const struct ucm_identity *id)
{
    struct ucm_options options = {.socket = host.socket};
    struct ucm_namespace *ns;
    struct ucm_client *c;
    uint8_t key[WORKER_KEY_BYTES];
    struct ucm_lookup l = {.keys = key, .n_keys = 1};
    uint32_t hits = 0, lease;

    key_make(1, key);
    cr_assert_eq(ucm_connect(&options, 5000, &c), 0);
    cr_assert_eq(ucm_namespace_open(c, id, -1, &ns), 0, "%s", ucm_errmsg());
    cr_assert_eq(ucm_lookup_prefix(ns, &l, -1, &hits, NULL, &lease), 0, "%s", ucm_errmsg());
    ucm_close(c);
    return hits;
}

Test(abuse, any_other_identity_is_a_miss)
{
    const struct ucm_identity same = {
        .model = "test",
        .dtype = "bf16",
        .layout = "test/1",
        .block_tokens = 16,
        .key_bytes = WORKER_KEY_BYTES,
        .parts = 1,
        .shards = &(uint32_t){4},
        .n_shards = 1,
        .shard_bytes = 8192,
    };
    struct ucm_identity other;

    cr_assert_eq(hits_under(&same), 1u);
#define OTHER(field, value)                                                                        \
    other = same;                                                                                  \
    other.field = value;                                                                           \
    cr_expect_eq(hits_under(&other), 0u, #field)
    OTHER(model, "test2");
    OTHER(revision, "main");
    OTHER(dtype, "fp8");
    OTHER(layout, "test/2");
    OTHER(block_tokens, 32);
    OTHER(parts, 2);
    OTHER(shards, &(uint32_t){8});
    OTHER(shard_bytes, 16384);
    other = same;
    other.salt = "x";
    other.salt_bytes = 1;
    cr_expect_eq(hits_under(&other), 0u, "salt");
}

Test(abuse, a_tenant_is_what_the_kernel_says)
{
    struct ucm_options options = {.socket = host.socket};
    struct ucm_identity id = {
        .tenant = "somebody-else",
        .model = "test",
        .dtype = "bf16",
        .layout = "test/1",
        .block_tokens = 16,
        .key_bytes = WORKER_KEY_BYTES,
        .parts = 1,
        .shards = &(uint32_t){4},
        .n_shards = 1,
        .shard_bytes = 8192,
    };
    struct ucm_namespace *ns;
    struct ucm_client *c;

    cr_assert_eq(ucm_connect(&options, 5000, &c), 0);
    cr_expect_eq(ucm_namespace_open(c, &id, -1, &ns), -UCM_EDENIED);
    ucm_close(c);
}

/* Another user sees nothing of the first one's blocks under the same identity. Needs root to become
 * somebody else. */
Test(abuse, another_uid_is_another_tenant)
{
    int status;
    pid_t pid;

    if (geteuid() != 0)
        cr_skip_test("needs root to act as another user");
    cr_assert_eq(chmod(host.dir, 0755), 0);
    cr_assert_eq(chmod(host.socket, 0666), 0);
    pid = fork();
    if (pid == 0) {
        struct worker w;
        uint8_t key[WORKER_KEY_BYTES];

        if (setgid(65534) != 0 || setuid(65534) != 0)
            _exit(3);
        worker_open(&w, &host, &(struct worker_options){0});
        key_make(1, key);
        if (worker_hits(&w, key, 1) != 0)
            _exit(4);
        _exit(0);
    }
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    cr_expect_eq(WIFEXITED(status) ? WEXITSTATUS(status) : -1, 0);
}
