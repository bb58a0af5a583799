/* faults.md 10, 12 and 13: the daemon is killed again and again, at random moments and at points
 * compiled into ucmd-kill, its files are damaged in between, and an oracle that knows what was
 * acknowledged looks at what is served afterwards: what was acknowledged as durable is there with
 * its bytes, everything else has its bytes or is absent.
 *
 * UCM_KILL_ROUNDS=N rounds (100; fewer under sanitizers), in groups of 20 on fresh files, those of
 * odd seeds with DRAM that is kept over orderly stops (arena.keep). The seed
 * of a group that failed is printed: UCM_KILL_SEED=SEED UCM_KILL_ROUNDS=20 runs it again, with
 * UCM_KILL_LOG=1 telling more. */
#include "tests/fault/kill_oracle.h"
#include "tests/integration/harness.h"

#include <criterion/criterion.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define GROUP 20u
#define BATCH 32u
#define CLIENT_MS 500 /* also what a call takes to give up a daemon that is gone */

static struct host host;
static struct worker w;
static struct oracle oracle;
static char ucmd_kill[256], keep[64], keep_set[96];
static unsigned durable_checked, found, absent, points, damages;

static const char *const kill_points[] = {
    "write-begin",        "write-torn",       "write-done",   "write-told",      "sync-begin",
    "sync-done",          "name-begin",       "name-torn",    "name-done",       "checkpoint-begin",
    "checkpoint-written", "checkpoint-named", "recover-slot", "recover-segment", "start-begin",
    "start-written",      "keep-written",     "keep-named",   "keep-take",       "keep-taken"};
#define POINTS (sizeof(kill_points) / sizeof(kill_points[0]))

static unsigned rounds_wanted(void)
{
    const char *rounds = getenv("UCM_KILL_ROUNDS"), *phase = getenv("UCM_PHASE");

    if (rounds)
        return (unsigned)strtoul(rounds, NULL, 10);
    return phase && strcmp(phase, "plain") != 0 ? 20 : 100;
}

static const char *log_level(void)
{
    return getenv("UCM_KILL_LOG") ? "log.level=debug" : "log.level=error";
}

/* ---- the daemon ---- */

/* In every second run it is to die at a point of its own. */
static void start(void)
{
    char at[64];

    if (oracle_below(&oracle, 2) == 0) {
        snprintf(at, sizeof(at), "%s:%u", kill_points[oracle_below(&oracle, POINTS)],
                 1 + oracle_below(&oracle, oracle_below(&oracle, 2) ? 3 : 40));
        setenv("UCMD_KILL_AT", at, 1);
    }
    while (!host_try_restart(&host)) {
        cr_assert(WIFSIGNALED(host.status) && WTERMSIG(host.status) == SIGKILL,
                  "the daemon refuses to start: status %#x", host.status);
        points++;
        unsetenv("UCMD_KILL_AT");
    }
    unsetenv("UCMD_KILL_AT");
}

struct killer {
    pthread_t thread;
    unsigned after_us;
    int signal;
};

static void *killer_main(void *arg)
{
    const struct killer *k = arg;

    usleep(k->after_us);
    kill(host.pid, k->signal);
    return NULL;
}

static void reap(void)
{
    uint64_t end = now_ms() + 20000;
    int status = 0;
    pid_t rc;

    while ((rc = waitpid(host.pid, &status, WNOHANG)) == 0) {
        cr_assert_lt(now_ms(), end, "the daemon does not stop");
        usleep(500);
    }
    cr_assert_eq(rc, host.pid);
    host.pid = 0;
    oracle_run_ended(&oracle, WIFEXITED(status) && WEXITSTATUS(status) == 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
        cr_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "status %#x", status);
}

/* ---- the worker; false: the daemon is gone ---- */

static bool connect_worker(void)
{
    static const uint32_t layers = 4;
    struct ucm_options options = {.socket = host.socket, .name = "oracle"};
    struct ucm_identity id = {.model = "kill",
                              .dtype = "bf16",
                              .layout = "test/1",
                              .block_tokens = 16,
                              .key_bytes = WORKER_KEY_BYTES,
                              .parts = 1,
                              .shards = &layers,
                              .n_shards = 1,
                              .shard_bytes = 8192};

    w = (struct worker){.layers = 4, .blocks = BATCH, .shard_bytes = 8192};
    if (ucm_connect(&options, CLIENT_MS, &w.client) != 0)
        return false;
    if (ucm_namespace_open(w.client, &id, CLIENT_MS, &w.ns) != 0)
        return false;
    return worker_region_try(&w) == 0;
}

static void drop_worker(void)
{
    if (w.region)
        (void)ucm_region_unregister(w.region, 1000); /* its daemon is gone */
    if (w.ns)
        ucm_namespace_close(w.ns);
    if (w.client)
        ucm_close(w.client);
    if (w.memory)
        munmap(w.memory, w.memory_bytes);
    w = (struct worker){0};
}

static int task_run(int rc, struct ucm_task *task, uint32_t n, uint8_t *status)
{
    struct ucm_result r;

    if (rc != 0)
        return rc;
    rc = ucm_task_wait(task, 20000, &r);
    if (rc == 0)
        memcpy(status, r.result, n);
    ucm_task_free(task);
    return rc;
}

static void transfer_make(struct ucm_transfer *t, uint32_t first, uint32_t n, bool durable)
{
    static uint8_t keys[BATCH * WORKER_KEY_BYTES];
    static uint32_t blocks[BATCH];

    keys_make(first, n, keys);
    for (uint32_t i = 0; i < n; i++)
        blocks[i] = i;
    *t = (struct ucm_transfer){.keys = keys, .blocks = blocks, .n_keys = n, .durability = durable};
}

static bool dump(uint32_t n)
{
    bool durable = oracle_below(&oracle, 2);
    uint32_t first = oracle.keys;
    uint8_t status[BATCH];
    struct ucm_transfer t;
    struct ucm_task *task = NULL;
    int rc;

    for (uint32_t i = 0; i < n; i++) {
        worker_fill(&w, i, first + i);
        oracle.state[oracle.keys++] = ORACLE_MAYBE;
    }
    transfer_make(&t, first, n, durable);
    rc = ucm_dump(w.region, &t, CLIENT_MS, &task);
    if (task_run(rc, task, n, status) != 0)
        return false;
    for (uint32_t i = 0; i < n; i++) {
        cr_assert_eq(status[i], UCM_BLOCK_IS_OK, "key %u: status %u", first + i, status[i]);
        oracle.held[first + i] = true;
        if (durable)
            oracle.state[first + i] = ORACLE_DURABLE;
    }
    return true;
}

static void check_key(uint32_t key, uint32_t block, uint8_t status)
{
    if (status == UCM_BLOCK_IS_OK) {
        cr_assert_eq(worker_differs(&w, block, key), 0u, "key %u has WRONG BYTES", key);
        cr_assert_neq(oracle.state[key], ORACLE_NOTHING, "key %u was never dumped", key);
        oracle.held[key] = true;
        found++;
    } else {
        cr_assert_neq(oracle.state[key], ORACLE_DURABLE, "key %u is LOST: status %u", key, status);
        absent++;
    }
    durable_checked += oracle.state[key] == ORACLE_DURABLE;
}

/* Every key, and some that were never dumped. */
static bool check_all(void)
{
    uint32_t end = oracle.keys + 8;

    for (uint32_t first = 0; first < end; first += BATCH) {
        uint32_t n = end - first < BATCH ? end - first : BATCH;
        uint8_t status[BATCH];
        struct ucm_transfer t;
        struct ucm_task *task = NULL;
        int rc;

        worker_clear(&w);
        transfer_make(&t, first, n, false);
        rc = ucm_load(w.region, &t, CLIENT_MS, &task);
        if (task_run(rc, task, n, status) != 0)
            return false;
        for (uint32_t i = 0; i < n; i++)
            check_key(first + i, i, status[i]);
    }
    return true;
}

static bool recovered(void)
{
    uint8_t *p;
    size_t n;
    bool is = false;

    for (uint64_t end = now_ms() + 20000; !is && now_ms() < end;) {
        if (ucm_call(w.client, "health", NULL, 0, CLIENT_MS, &p, &n) != 0)
            return false;
        is = memmem(p, n, "recovering", 10) == NULL;
        free(p);
    }
    cr_assert(is, "recovery does not end");
    return true;
}

/* ---- rounds ---- */

/* Until the daemon is gone. */
static void work(void)
{
    if (!connect_worker())
        return;
    if (oracle_below(&oracle, 4) == 0) /* into a tier that is still recovering */
        if (!dump(1 + oracle_below(&oracle, BATCH)))
            return;
    if (!recovered() || !check_all())
        return;
    for (unsigned i = 0; i < 3; i++)
        if (!dump(1 + oracle_below(&oracle, BATCH)))
            return;
}

static void one_round(void)
{
    struct killer k = {.signal = oracle_below(&oracle, 6) == 0 ? SIGTERM : SIGKILL};
    const char *what;

    start();
    /* Every third time it gets to do all of its work first. */
    k.after_us = oracle_below(&oracle, 3) == 0 ? 150000 : oracle_below(&oracle, 60000);
    cr_assert_eq(pthread_create(&k.thread, NULL, killer_main, &k), 0);
    work();
    cr_assert_eq(pthread_join(k.thread, NULL), 0);
    reap();
    drop_worker();
    if (oracle_below(&oracle, 4) > 0)
        return;
    damages++;
    if (damage(&oracle, host.dir, &what))
        oracle_doubt(&oracle);
    if (getenv("UCM_KILL_LOG"))
        fprintf(stderr, "kill: %s\n", what);
}

static void keep_begin(void)
{
    size_t n = 0;

    snprintf(keep, sizeof(keep), "/dev/shm/ucm-keep-XXXXXX");
    cr_assert(mkdtemp(keep), "no /dev/shm?");
    snprintf(keep_set, sizeof(keep_set), "arena.keep=%s", keep);
    while (host.sets[n])
        n++;
    host.sets[n] = keep_set;
}

static void keep_end(void)
{
    static const char *const names[] = {"ucmd.arena", "ucmd.kept"};
    char path[96];

    if (keep[0] == '\0')
        return;
    for (size_t i = 0; i < 2; i++) {
        snprintf(path, sizeof(path), "%s/%s", keep, names[i]);
        (void)unlink(path); /* there or not */
    }
    cr_expect_eq(rmdir(keep), 0, "something is left in %s", keep);
    keep[0] = '\0';
}

/* What is there at the end of a group must be good as well. */
static void last_look(void)
{
    host_restart(&host);
    cr_assert(connect_worker() && recovered() && check_all());
    cr_assert_eq(metric(w.client, "nvme_reclaimed_blocks"), 0u, "the test's keys must all fit");
    drop_worker();
    host_remove(&host);
    keep_end();
}

Test(kill, what_was_acknowledged_survives, .timeout = 3600)
{
    const char *seed_text = getenv("UCM_KILL_SEED"), *ucmd = getenv("UCMD");
    uint64_t seed = seed_text ? strtoull(seed_text, NULL, 10) : (uint64_t)time(NULL) * 1000;
    unsigned rounds = rounds_wanted();

    snprintf(ucmd_kill, sizeof(ucmd_kill), "%s-kill", ucmd ? ucmd : "build/ucmd");
    for (unsigned done = 0; done < rounds; seed++) {
        host = (struct host){.nvme = true,
                             .ucmd = ucmd_kill,
                             .sets = {"nvme.size=128MiB", "nvme.segment=1MiB", "arena.size=16MiB",
                                      "nvme.quarantine=100", /* damage shall not stop the writes */
                                      "nvme.scrub=1GiB", "nvme.scrub_interval=10ms",
                                      /* all there at once: while it grows, blocks that wait to be
                                       * written may have to leave it again */
                                      "arena.prefault=false", log_level()}};
        oracle = (struct oracle){.seed = seed};
        if (seed % 2)
            keep_begin();
        fprintf(stderr, "kill: UCM_KILL_SEED=%llu, round %u of %u\n", (unsigned long long)seed,
                done, rounds);
        host_prepare(&host);
        for (unsigned i = 0; i < GROUP && done < rounds; i++, done++)
            one_round();
        last_look();
    }
    fprintf(stderr,
            "kill: %u rounds: %u times killed at start, %u times damaged; %u loads of durable "
            "keys, %u found, %u absent\n",
            rounds, points, damages, durable_checked, found, absent);
}
