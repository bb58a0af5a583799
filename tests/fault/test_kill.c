/* The daemon is killed again and again, at random moments and at points compiled into ucmd-kill.
 * Its files are damaged in between. An oracle that knows what was acknowledged checks what is
 * served afterwards. Blocks acknowledged as durable are there with their bytes. All others have
 * their bytes or are absent.
 *
 * UCM_KILL_ROUNDS=N rounds (42; fewer under sanitizers), in groups of 14 on fresh files. Groups of
 * odd seeds keep DRAM over orderly stops (arena.persist_dir). The seed of a group that failed is
 * printed: UCM_KILL_SEED=SEED UCM_KILL_ROUNDS=14 runs it again, with UCM_KILL_LOG=1 telling more.
 */
#include "tests/fault/kill_worker.h"
#include "tests/runner/environment.h"

#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>

#define GROUP 14u

static struct host host;
static struct oracle oracle;
static struct kill_worker w = {.oracle = &oracle};
static char ucmd_kill[256], keep[64], keep_set[96];
static unsigned points, damages;

static const char *const kill_points[] = {
    "write-begin",      "write-torn",       "write-done",         "write-reported",
    "sync-begin",       "sync-done",        "ns-append-begin",    "ns-append-torn",
    "ns-append-done",   "checkpoint-begin", "checkpoint-written", "checkpoint-named",
    "recover-record",   "recover-segment",  "start-begin",        "start-written",
    "persist-written",  "persist-named",    "persist-take",       "persist-taken",
    "ns-rewrite-begin", "ns-rewrite-torn",  "ns-rewrite-written", "ns-rewrite-renamed"};
#define POINTS (sizeof(kill_points) / sizeof(kill_points[0]))

/* ---- the daemon ---- */

/* In every second run the daemon dies at a point of its own code. */
static void start(void)
{
    char at[64];

    if (oracle_below(&oracle, 2) == 0) {
        snprintf(at, sizeof(at), "%s:%u", kill_points[oracle_below(&oracle, POINTS)],
                 1 + oracle_below(&oracle, oracle_below(&oracle, 2) ? 3 : 40));
        setenv("UCMD_KILL_AT", at, 1);
    }
    while (!kill_restarted(&host)) {
        points++;
        unsetenv("UCMD_KILL_AT");
    }
    unsetenv("UCMD_KILL_AT");
}

/* ---- rounds ---- */

/* Until the daemon is gone. */
static void work(void)
{
    if (!kill_worker_connect(&w, &host))
        return;
    if (oracle_below(&oracle, 4) == 0) /* into a tier that is still recovering */
        if (!kill_worker_dump(&w, 1 + oracle_below(&oracle, KILL_BATCH)))
            return;
    if (!kill_worker_recovered(&w) || !kill_worker_check(&w))
        return;
    for (unsigned i = 0; i < 3; i++)
        if (!kill_worker_dump(&w, 1 + oracle_below(&oracle, KILL_BATCH)))
            return;
    kill_worker_purges(&w, oracle_below(&oracle, 3));
    (void)kill_worker_dump_again(&w, 1 + oracle_below(&oracle, KILL_BATCH), true);
}

static void one_round(void)
{
    struct killer k = {.signal = oracle_below(&oracle, 6) == 0 ? SIGTERM : SIGKILL};
    const char *what;

    w.patient = false;
    start();
    /* Every third time, the daemon first completes all of its work. */
    k.after_us = oracle_below(&oracle, 3) == 0 ? 150000 : oracle_below(&oracle, 60000);
    killer_start(&k, &host);
    work();
    killer_reap(&k, &host, &oracle);
    worker_drop(&w.w);
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
    snprintf(keep_set, sizeof(keep_set), "arena.persist_dir=%s", keep);
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

/* Soon the file of names has to be written again. */
static void names_fill(void)
{
    host_restart(&host);
    w.patient = true;
    cr_assert(kill_worker_connect(&w, &host));
    kill_worker_purges(&w, 60);
    worker_drop(&w.w);
    host_kill(&host);
}

/* Blocks that are there at the end of a group must be right as well. */
static void last_look(void)
{
    host_restart(&host);
    w.patient = true;
    cr_assert(kill_worker_connect(&w, &host) && kill_worker_recovered(&w) && kill_worker_check(&w));
    cr_assert_eq(metric(w.w.client, "nvme_reclaimed_blocks"), 0u, "the test's keys must all fit");
    worker_drop(&w.w);
    host_remove(&host);
    keep_end();
}

Test(kill, what_was_acknowledged_survives, .timeout = 3600)
{
    uint64_t seed = number_given("UCM_KILL_SEED", (uint64_t)time(NULL) * 1000);
    unsigned rounds = (unsigned)number_given("UCM_KILL_ROUNDS", phase_is_slow() ? 20 : 40);

    for (unsigned done = 0; done < rounds; seed++) {
        host = (struct host){.nvme = true,
                             .ucmd = built("ucmd-kill", ucmd_kill),
                             .sets = {"nvme.size=128MiB", "nvme.segment=1MiB", "arena.size=16MiB",
                                      "arena.prefault=true",
                                      "nvme.quarantine=100", /* damage shall not stop the writes */
                                      "nvme.scrub=1GiB", "nvme.scrub_interval=10ms",
                                      kill_log_level()}};
        oracle = (struct oracle){.seed = seed, .keeps = seed % 2};
        if (oracle.keeps)
            keep_begin();
        fprintf(stderr, "kill: UCM_KILL_SEED=%llu, round %u of %u\n", (unsigned long long)seed,
                done, rounds);
        host_prepare(&host);
        if (seed % 3 == 0)
            names_fill();
        for (unsigned i = 0; i < GROUP && done < rounds; i++, done++)
            one_round();
        last_look();
    }
    kill_report("%u rounds: %u times killed at start, %u times damaged; %u loads of durable "
                "keys, %u found, %u absent\n",
                rounds, points, damages, w.durable_checked, w.found, w.absent);
}
