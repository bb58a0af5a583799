/* A daemon is killed while it moves parts out of a segment that is to be reused. At every moment a
 * whole copy of each part lies on storage, and no wrong byte is served. The same where the disk has
 * a volatile cache and the power fails (volatile_disk.h), UCM_MOVE_KILL_ROUNDS=N times (8).
 * UCM_MOVE_KILL_SEED=SEED UCM_MOVE_KILL_ROUNDS=20 repeats a run that failed. */
#include "tests/fault/kill_worker.h"
#include "tests/fault/power.h"
#include "tests/runner/environment.h"

#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define BATCH 32u            /* blocks: about a segment */
#define HOT 3u               /* of each batch, its first, are read again and again, */
#define BACK 14u             /* until so many batches later; the file holds 12 */
#define FIRST (BACK * BATCH) /* number of the first block */
#define BATCHES_MAX 200u
#define GROUP 20u     /* power failures on fresh files */
#define CLIENT_MS 500 /* what a call takes to give up a daemon that is gone */

static struct host host;
static struct worker w;
static char ucmd_kill[256];
static uint64_t base; /* the first block of this run: the daemon has forgotten earlier reads */

/* False: the daemon is gone. */
static bool dump(uint64_t first)
{
    uint8_t keys[BATCH * WORKER_KEY_BYTES], status[BATCH];
    uint32_t blocks[BATCH];
    struct ucm_transfer t = {
        .keys = keys, .blocks = blocks, .n_keys = BATCH, .durability = UCM_DURABLE_ON_NVME};
    struct ucm_task *task = NULL;
    int rc;

    keys_make(first, BATCH, keys);
    for (uint32_t i = 0; i < BATCH; i++) {
        blocks[i] = i;
        worker_fill(&w, i, first + i);
    }
    rc = ucm_dump(w.region, &t, CLIENT_MS, &task);
    if (kill_task_run(rc, task, BATCH, status) != 0)
        return false;
    for (uint32_t i = 0; i < BATCH; i++)
        cr_assert(status[i] == UCM_BLOCK_IS_OK || status[i] == UCM_BLOCK_IS_EXISTS, "%u",
                  status[i]); /* the second: blocks of a batch that a kill cut off */
    return true;
}

/* Checks that the hot blocks of the last batches before `next` are on NVMe, with their bytes.
 * False: the daemon is gone. */
static bool hot_are_right(uint64_t next)
{
    uint8_t keys[BACK * HOT * WORKER_KEY_BYTES], status[BACK * HOT];
    uint64_t number[BACK * HOT];
    uint32_t blocks[BACK * HOT], n = 0;
    struct ucm_transfer t = {.keys = keys, .blocks = blocks};
    struct ucm_task *task = NULL;
    int rc;

    for (uint64_t first = next - BACK * BATCH; first < next; first += BATCH)
        for (uint64_t i = 0; i < HOT && first >= base; i++, n++) {
            number[n] = first + i;
            blocks[n] = n;
            key_make(number[n], keys + n * WORKER_KEY_BYTES);
        }
    t.n_keys = n;
    worker_clear(&w);
    if (n == 0)
        return true;
    if (evict_dram(w.client, 1, CLIENT_MS) != 0) /* the only namespace */
        return false;
    rc = ucm_load(w.region, &t, CLIENT_MS, &task);
    if (kill_task_run(rc, task, n, status) != 0)
        return false;
    for (uint32_t i = 0; i < n; i++) {
        cr_assert_eq(status[i], UCM_BLOCK_IS_OK, "block %llu of %llu is lost: %u",
                     (unsigned long long)number[i], (unsigned long long)next, status[i]);
        cr_assert_eq(worker_differs(&w, i, number[i]), 0u, "WRONG BYTES");
    }
    return true;
}

static bool gone(void)
{
    siginfo_t info = {0};

    cr_assert_eq(waitid(P_PID, (id_t)host.pid, &info, WEXITED | WNOHANG | WNOWAIT), 0);
    return info.si_pid != 0;
}

/* Waits until the daemon is gone, not only late. */
static bool work(uint64_t *next)
{
    uint64_t end = now_ms() + 60000;

    for (unsigned i = 0; i < BATCHES_MAX;) {
        if (hot_are_right(*next) && dump(*next)) {
            *next += BATCH;
            i++;
        } else if (gone()) {
            return false;
        }
        cr_assert(now_ms() < end, "%u batches", i);
    }
    return true;
}

/* Nobody kills the daemon meanwhile. */
static void expect_hot(uint64_t next)
{
    uint64_t end = now_ms() + 60000;

    while (!hot_are_right(next))
        cr_assert(!gone() && now_ms() < end, "no answer");
}

static void kill_at(const char *point, unsigned n, uint64_t *next)
{
    char at[64];

    snprintf(at, sizeof(at), "%s:%u", point, n);
    setenv("UCMD_KILL_AT", at, 1);
    host_restart(&host);
    unsetenv("UCMD_KILL_AT");
    worker_open(&w, &host, &(struct worker_options){0});
    wait_ok(w.client);
    base = *next;
    cr_assert_not(work(next), "%s: nothing is moved", at);
    host_killed(&host);
    worker_drop(&w);
}

Test(move_kill, what_is_moved_is_there_before_and_after, .timeout = 120)
{
    static const char *const points[] = {"move-read", "move-written", "move-synced"};
    uint64_t next = FIRST;

    host = (struct host){
        .nvme = true,
        .ucmd = built("ucmd-kill", ucmd_kill),
        .sets = {"nvme.size=16MiB", "nvme.segment=1MiB", "arena.size=8MiB", "log.level=error"}};
    host_prepare(&host);
    for (unsigned i = 0; i < 6; i++) {
        kill_at(points[i % 3], 1 + 5 * i, &next);
        host_restart(&host);
        worker_open(&w, &host, &(struct worker_options){0});
        wait_ok(w.client);
        expect_hot(next);
        next += BATCH; /* some of the last may be there */
        host_kill(&host);
        worker_drop(&w);
    }
    host_remove(&host);
}

/* ---- and the power fails ---- */

static struct power power;
static char paths[192];

static bool disk_begin(void)
{
    char disk[256];

    if (access(built("volatile_disk.so", disk), R_OK) < 0)
        return false;
    host = (struct host){.sets = {"nvme.size=16MiB", "nvme.segment=1MiB", "arena.size=8MiB",
                                  "nvme.io=threads", "log.level=error", paths}};
    host_prepare(&host);
    power_open(&power, host.dir, 1);
    snprintf(paths, sizeof(paths), "nvme.paths=%s", power.directories[0]);
    return true;
}

static void power_round(struct oracle *o, uint64_t *next)
{
    struct power_loss loss = {0};

    host_restart(&host);
    worker_open(&w, &host, &(struct worker_options){0});
    wait_ok(w.client);
    expect_hot(*next);
    base = *next += BATCH; /* some of the last may be there */
    power.journal->sync_us = oracle_below(o, 2) * 3000;
    /* full after some 400 steps; then each batch moves some parts */
    power.journal->kill_at = power.journal->steps + 400 + oracle_below(o, 600);
    cr_assert_not(work(next));
    power.journal->kill_at = 0;
    host_killed(&host);
    worker_drop(&w);
    if (oracle_below(o, 8) > 0)
        power_fail(&power, o, &loss);
}

Test(move_kill, what_is_moved_survives, .timeout = 3600)
{
    uint64_t seed = number_given("UCM_MOVE_KILL_SEED", (uint64_t)time(NULL) * 1000);
    unsigned rounds = (unsigned)number_given("UCM_MOVE_KILL_ROUNDS", 8), blocks = 0;

    for (unsigned done = 0; done < rounds; seed++) {
        struct oracle o = {.seed = seed};
        uint64_t next = base = FIRST;

        fprintf(stderr, "move_kill: UCM_MOVE_KILL_SEED=%llu\n", (unsigned long long)seed);
        if (!disk_begin())
            cr_skip("the disk is not built with sanitizers");
        for (unsigned i = 0; i < GROUP && done < rounds; i++, done++)
            power_round(&o, &next);
        blocks += (unsigned)(next - FIRST);
        power_close(&power);
        host_remove(&host);
    }
    kill_report("%u rounds, %u blocks\n", rounds, blocks);
}
