/* The main job on a GPU, through the real daemon and client library. One process dumps its CUDA
 * memory and ends, and another loads it into its own, bit for bit. Meanwhile a third is killed in
 * the middle of a dump.
 *
 * usage: test_serve (starts $UCMD, default ucmd next to it); the roles are processes of their own, since
 * a process can't open its own IPC handle. */
#include "tests/gpu/serve.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

static int passed, failed;

static void check(bool ok, const char *what)
{
    printf("%s %s%s%s\n", ok ? "PASS" : "FAIL", what, ok ? "" : ": ", ok ? "" : ucm_errmsg());
    fflush(stdout);
    if (ok)
        passed++;
    else
        failed++;
}

static char self[512], dir[64];
static pid_t daemon_pid;

/* Starts a role; *out, when not NULL, receives the read end of its standard output. */
static pid_t role_start(const char *role, int *out)
{
    int fds[2];
    pid_t pid;

    if (pipe(fds) != 0)
        exit(1);
    pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(fds[1], 1);
        close(fds[0]);
        execl(self, self, role, (char *)NULL);
        _exit(127);
    }
    close(fds[1]);
    if (out)
        *out = fds[0];
    else
        close(fds[0]);
    return pid;
}

static bool role_ends(pid_t pid)
{
    int status;

    return waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static size_t free_bytes(void)
{
    char text[64] = "";
    int out;
    pid_t pid = role_start("free", &out);
    ssize_t n = read(out, text, sizeof(text) - 1);

    close(out);
    return role_ends(pid) && n > 0 ? strtoull(text, NULL, 10) : 0;
}

/* The socket's directory stays the same from one daemon to the next. */
static void daemon_start(void)
{
    const char *ucmd = getenv("UCMD");
    const char *strategy = getenv("UCM_TEST_STRATEGY");
    char beside[520], socket_set[128], paths_set[128], copy_set[64], pid[16];

    strategy = strategy ? strategy : "auto";
    snprintf(beside, sizeof(beside), "%.500s", self);
    strcpy(strrchr(beside, '/'), "/ucmd");
    if (!*dir) {
        snprintf(dir, sizeof(dir), "/tmp/ucm-gpu-XXXXXX");
        if (!mkdtemp(dir))
            exit(1);
    }
    snprintf(socket_set, sizeof(socket_set), "socket=%s/s", dir);
    snprintf(paths_set, sizeof(paths_set), "nvme.paths=%s", dir);
    snprintf(copy_set, sizeof(copy_set), "copy.strategy=%.*s", (int)strcspn(strategy, "+"), strategy);
    setenv("UCM_SOCKET", socket_set + strlen("socket="), 1);
    daemon_pid = fork();
    if (daemon_pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        execl(ucmd ? ucmd : beside, "ucmd", "--set", socket_set, "--set", paths_set, "--set",
              "nvme.size=1GiB", "--set", "arena.size=1GiB", "--set", "device.cuda=required",
              "--set", copy_set, (char *)NULL);
        _exit(127);
    }
    snprintf(pid, sizeof(pid), "%d", (int)daemon_pid);
    setenv("UCM_TEST_DAEMON", pid, 1);
}

/* How many of the victim's blocks a lookup finds. */
static uint32_t victim_hits(struct ucm_client *c)
{
    struct transfer t(5000, 64, false);
    uint32_t hits = 99, lease;
    struct ucm_identity id = identity();
    struct ucm_namespace *ns;
    struct ucm_lookup l = {};
    std::vector<uint8_t> found(64);

    if (ucm_namespace_open(c, &id, -1, &ns) != 0)
        return 99;
    l.keys = t.keys;
    l.n_keys = t.n_keys;
    if (ucm_lookup_per_key(ns, &l, -1, found.data(), &hits, &lease) != 0)
        hits = 99;
    ucm_namespace_close(ns);
    return hits;
}

static void evict_from_dram(struct ucm_client *c)
{
    static const uint8_t params[] = "\x82\xa2ns\x01\xa4tier\x01";
    uint8_t *p;
    size_t n;

    for (int i = 0; i < 100; i++) {
        usleep(50000); /* write-back comes first, because blocks that lie nowhere else stay */
        if (ucm_call(c, "evict", params, sizeof(params) - 1, -1, &p, &n) == 0)
            free(p);
    }
}

/* Do stats say that a device moved bytes through entries? */
static bool staged_moved(struct ucm_client *c)
{
    static const char name[] = "staged_bytes";
    const uint8_t *at;
    uint8_t *p;
    size_t n;
    bool moved = false;

    if (ucm_call(c, "stats", NULL, 0, -1, &p, &n) != 0)
        return false;
    at = p;
    while ((at = (const uint8_t *)memmem(at, n - (size_t)(at - p), name, sizeof(name) - 1)) != NULL) {
        at += sizeof(name) - 1;
        moved |= *at != 0;
    }
    free(p);
    return moved;
}

/* A worker's GPU is full when its copy agent claims orders of encoded blocks. So they can't be
 * done, and the worker dies. */
static void test_dies_with_claimed_orders(void)
{
    char said[16] = "";
    pid_t victim, beside;
    int out, status = 0;

    beside = role_start("encoded-hangs", NULL);
    victim = role_start("encoded-dies", &out);
    check(read(out, said, sizeof(said)) > 0 && strncmp(said, "claimed", 7) == 0,
          "a worker dies when its copy agent has claimed encoded dumps and loads");
    check(waitpid(victim, &status, 0) == victim && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL,
          "and does nothing after that");
    close(out);
    check(role_ends(beside), "another worker's encoded loads, over its death, are right");
    check(role_ends(role_start("encoded-after", NULL)),
          "of what it dumped nothing is found; others store and load the same keys");
}

/* The daemon is killed in the middle of a worker's loads. */
static void test_daemon_killed(struct ucm_client *c)
{
    char said[16] = "";
    int out, status;
    pid_t survivor = role_start("survivor", &out);
    double start;

    check(read(out, said, sizeof(said)) > 0, "a worker loads without a pause");
    usleep(3000);
    kill(daemon_pid, SIGKILL);
    waitpid(daemon_pid, &status, 0);
    daemon_start();
    check(role_ends(survivor), "it survives the daemon: nothing is written late, and loads go on");
    for (start = now_s(); !staged_moved(c) && now_s() < start + 1;)
        usleep(20000);
    if (!plans()) /* these are raw */
        check(staged_moved(c) == staged(), staged() ? "through a new ring" : "through none");
    close(out);
}

static void test_daemon_killed_under_streams(void)
{
    int status;

    check(role_ends(role_start("stream-orphan", NULL)), "streams that wait for a daemon come free when it dies");
    kill(daemon_pid, SIGKILL);
    waitpid(daemon_pid, &status, 0);
    daemon_start();
    check(role_ends(role_start("consume-stream", NULL)), "and wait for the next one's layers");
}

static int test_main(void)
{
    struct ucm_client *c = NULL;
    char said[16] = "";
    size_t before, after = 0;
    double start;
    pid_t consumer, victim;
    int out, status;

    daemon_start();
    for (start = now_s(); ucm_connect(NULL, 500, &c) != 0 && now_s() < start + 20;)
        usleep(20000);
    check(c != NULL, "the daemon answers");
    if (!c)
        return 1;
    check(role_ends(role_start("produce", NULL)), "a worker dumps after its event and ends");
    check(role_ends(role_start("consume", NULL)), "another loads it, bit for bit");
    check(role_ends(role_start("produce-layers", NULL)), "a worker dumps layer by layer, each after its event");
    check(role_ends(role_start("consume-layers", NULL)), "each layer of a load lies there when it is reported");
    check(role_ends(role_start("consume-stream", NULL)), "kernels after a stream's waits see each layer");
    check(role_ends(role_start("encoded", NULL)), "blocks stored encoded come back as the C reference decodes them");
    check(role_ends(role_start("encoded-hangs", NULL)), "and to a worker that stops in the middle of its loads");
    if (staged())
        test_dies_with_claimed_orders();
    before = free_bytes();

    victim = role_start("victim", &out);
    check(read(out, said, sizeof(said)) > 0, "a third is in the middle of a dump");
    consumer = role_start("consume", NULL);
    usleep(200000);
    start = now_s();
    kill(victim, SIGKILL);
    waitpid(victim, &status, 0);
    check(role_ends(consumer), "a load alongside it, over its death, is right");
    while (now_s() < start + 10) {
        after = free_bytes();
        if (after + (64u << 20) > before)
            break;
    }
    printf("     free GPU memory %zu MiB before, %zu MiB after, %.1f s after the kill\n", before >> 20,
           after >> 20, now_s() - start);
    check(now_s() - start < 5 && after + (64u << 20) > before, "its GPU memory is free in 5 s");
    check(victim_hits(c) == 0, "nothing of its dump is found");
    check(role_ends(role_start("consume", NULL)), "the daemon serves on, bit for bit");
    check(staged_moved(c) == staged(), staged() ? "through the workers' copy agents" : "and through no ring");
    evict_from_dram(c);
    check(role_ends(role_start("consume", NULL)), "the same from NVMe, bit for bit");
    test_daemon_killed(c);
    test_daemon_killed_under_streams();
    ucm_close(c);
    kill(daemon_pid, SIGTERM);
    check(role_ends(daemon_pid), "the daemon stops cleanly");
    return failed ? 1 : 0;
}

static const struct {
    const char *name;
    int (*run)(void);
} roles[] = {
    {"produce", role_produce},
    {"consume", role_consume},
    {"produce-layers", role_produce_layers},
    {"consume-layers", role_consume_layers},
    {"consume-stream", role_consume_stream},
    {"stream-orphan", role_stream_orphan},
    {"encoded", role_encoded},
    {"encoded-hangs", role_encoded_hangs},
    {"encoded-dies", role_encoded_dies},
    {"encoded-after", role_encoded_after},
    {"victim", role_victim},
    {"survivor", role_survivor},
    {"free", role_free_bytes},
};

int main(int argc, char **argv)
{
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    char remove[128];
    int rc;

    if (n <= 0)
        return 1;
    for (size_t r = 0; argc > 1 && r < sizeof(roles) / sizeof(roles[0]); r++)
        if (!strcmp(argv[1], roles[r].name))
            return roles[r].run();
    rc = test_main();
    snprintf(remove, sizeof(remove), "rm -rf %s", dir);
    if (system(remove) != 0)
        rc = 1;
    printf("%d passed, %d failed\n", passed, failed);
    return rc;
}
