/* The daemon is killed while its disk (volatile_disk.h) still has most writes in a volatile cache.
 * Then the power fails, or does not yet. The oracle knows what was acknowledged: durable blocks are
 * there with their bytes, all others have their bytes or are absent.
 *
 * UCM_POWER_ROUNDS=N rounds (20), in groups of 10 on fresh files; every second group's disk also
 * fails syncs and writes. The seed of a group that failed is printed: UCM_POWER_SEED=SEED
 * UCM_POWER_ROUNDS=10 runs it again, with UCM_KILL_LOG=1 telling more. */
#include "tests/fault/kill_worker.h"
#include "tests/fault/power.h"
#include "tests/runner/environment.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

#define GROUP 10u
#define DUMP 16u

static struct host host;
static struct power power;
static struct oracle oracle;
static struct kill_worker w = {.oracle = &oracle};
static char paths[600], ucmd_kill[256];
static bool small; /* segments are used again and again: nothing is certain to be there */
static struct power_loss lost;
static unsigned failures, at_start;

/* ---- the power ---- */

static void power_goes(void)
{
    struct oracle seed = {.seed = oracle_random(&oracle)};
    struct power_loss loss = {0};

    if (oracle_below(&oracle, 4) == 0)
        return; /* killed only: what is in doubt stays so */
    power_fail(&power, &seed, &loss);
    failures++;
    lost.writes += loss.writes;
    lost.sectors += loss.sectors;
    lost.kept += loss.kept;
    lost.sizes += loss.sizes;
    lost.names += loss.names;
    if (getenv("UCM_KILL_LOG"))
        fprintf(stderr, "power: %u writes in doubt, %u sectors lost, %u kept; %u sizes, %u names\n",
                loss.writes, loss.sectors, loss.kept, loss.sizes, loss.names);
}

/* In two of three runs, the daemon dies at its Nth step from now on. */
static void death_plan(void)
{
    uint32_t range = oracle_below(&oracle, 3) == 0 ? 40 : 600;

    power.journal->kill_at = 0;
    if (oracle_below(&oracle, 3) > 0)
        power.journal->kill_at = power.journal->steps + 1 + oracle_below(&oracle, range);
}

static void faults_plan(void)
{
    struct volatile_journal *j = power.journal;

    j->sync_us = oracle_below(&oracle, 2) * 5000;
    j->syncs_failing = j->writes_failing = j->writes_short = 0;
    if (!w.disk_fails)
        return;
    j->write_error = oracle_below(&oracle, 3) == 0 ? ENOSPC : EIO;
    switch (oracle_below(&oracle, 4)) {
    case 0:
        j->syncs_failing = 1 + oracle_below(&oracle, 2);
        break;
    case 1:
        j->writes_failing = 1 + oracle_below(&oracle, 8);
        break;
    case 2:
        j->writes_short = 1 + oracle_below(&oracle, 8);
        break;
    default:
        break;
    }
}

static void start(void)
{
    power.journal->syncs_failing = power.journal->writes_failing = power.journal->writes_short = 0;
    power.journal->page_read_us = oracle_below(&oracle, 3) == 0 ? 2000 : 0;
    death_plan();
    while (!kill_restarted(&host)) {
        at_start++;
        power.journal->kill_at = 0;
        power_goes();
    }
}

/* ---- rounds ---- */

/* Until the daemon is gone. */
static void work(void)
{
    if (!kill_worker_connect(&w, &host))
        return;
    if (oracle_below(&oracle, 4) == 0) /* into a tier that is still recovering */
        if (!kill_worker_dump(&w, 1 + oracle_below(&oracle, DUMP)))
            return;
    if (oracle_below(&oracle, 3) == 0)
        if (!kill_worker_dump_again(&w, KILL_BATCH, oracle_below(&oracle, 2)))
            return;
    if (!kill_worker_recovered(&w))
        return;
    if (oracle_below(&oracle, 3) == 0) /* what nobody has read yet */
        if (!kill_worker_dump_again(&w, 1 + oracle_below(&oracle, DUMP), true))
            return;
    if (small) /* blocks promised in this run may have had to make room since */
        oracle_doubt(&oracle);
    if (!kill_worker_check(&w))
        return;
    faults_plan();
    if (oracle_below(&oracle, 2))
        kill_worker_purges(&w, oracle_below(&oracle, 12));
    for (unsigned i = 0; i < 4; i++) {
        if (!kill_worker_dump(&w, 1 + oracle_below(&oracle, DUMP)) ||
            (oracle_below(&oracle, 2) &&
             !kill_worker_dump_again(&w, 1 + oracle_below(&oracle, DUMP), true)))
            return;
    }
}

static void one_round(void)
{
    struct killer k = {.signal = oracle_below(&oracle, 4) == 0 ? SIGTERM : SIGKILL,
                       .may_fail = w.disk_fails};

    w.patient = false;
    start();
    k.after_us = oracle_below(&oracle, 3) == 0 ? 150000 : oracle_below(&oracle, 60000);
    killer_start(&k, &host);
    work();
    if (w.disk_fails) /* a clean stop does not keep what a failed sync lost */
        memset(oracle.held, 0, sizeof(oracle.held));
    killer_reap(&k, &host, &oracle);
    worker_drop(&w.w);
    if (small)
        oracle_doubt(&oracle);
    power_goes();
}

static void run_and_check(void)
{
    power.journal->kill_at = 0;
    host_restart(&host);
    w.patient = true;
    cr_assert(kill_worker_connect(&w, &host) && kill_worker_recovered(&w) && kill_worker_check(&w));
}

static void last_look(void)
{
    power.journal->syncs_failing = power.journal->writes_failing = power.journal->writes_short = 0;
    run_and_check();
    if (!small)
        cr_assert_eq(metric(w.w.client, "nvme_reclaimed_blocks"), 0u, "all keys must fit");
}

static void host_make(unsigned disks, bool tmpfile)
{
    static char size[32];

    w = (struct kill_worker){.oracle = &oracle};
    host = (struct host){.ucmd = built("ucmd-kill", ucmd_kill)};
    host_prepare(&host);
    power_open(&power, host.dir, disks);
    if (tmpfile)
        unsetenv(VOLATILE_NO_TMPFILE);
    else
        setenv(VOLATILE_NO_TMPFILE, "1", 1);
    snprintf(paths, sizeof(paths), "nvme.paths=%s", power.directories[0]);
    for (unsigned i = 1; i < disks; i++)
        snprintf(paths + strlen(paths), sizeof(paths) - strlen(paths), ",%s", power.directories[i]);
    snprintf(size, sizeof(size), "nvme.size=%s", small ? "6MiB" : "96MiB");
    const char *sets[] = {paths,
                          size,
                          "nvme.io=threads",
                          "nvme.segment=1MiB",
                          "arena.size=16MiB",
                          "arena.prefault=false",
                          kill_log_level()};

    memcpy(host.sets, sets, sizeof(sets));
}

static void host_drop(void)
{
    worker_drop(&w.w);
    host_stop(&host);
    power_close(&power);
    host_remove(&host);
}

static unsigned rounds_wanted(void)
{
    return (unsigned)number_given("UCM_POWER_ROUNDS", 20);
}

static void group_begin(uint64_t seed)
{
    unsigned disks;
    bool tmpfile;

    oracle = (struct oracle){.seed = seed};
    disks = 1 + oracle_below(&oracle, POWER_DIRECTORIES);
    small = oracle_below(&oracle, 4) == 0;
    tmpfile = oracle_below(&oracle, 2);
    host_make(disks, tmpfile);
    w.disk_fails = oracle_below(&oracle, 2) == 0;
    w.full = small;
}

Test(power, what_was_durable_survives, .timeout = 7200)
{
    uint64_t seed = number_given("UCM_POWER_SEED", (uint64_t)time(NULL) * 1000);
    unsigned rounds = rounds_wanted(), checked = 0, not_durable = 0, found = 0, absent = 0;

    for (unsigned done = 0; done < rounds; seed++) {
        fprintf(stderr, "power: UCM_POWER_SEED=%llu, round %u of %u\n", (unsigned long long)seed,
                done, rounds);
        group_begin(seed);
        for (unsigned i = 0; i < GROUP && done < rounds; i++, done++)
            one_round();
        last_look();
        host_drop();
        checked += w.durable_checked;
        not_durable += w.not_durable;
        found += w.found;
        absent += w.absent;
    }
    kill_report(
        "%u rounds, the power failed %u times, %u deaths at start: %u writes, %u names "
        "and %u sizes in doubt, %u sectors lost, %u kept; %u loads of durable keys, %u found, "
        "%u absent; %u dumps not durable\n",
        rounds, failures, at_start, lost.writes, lost.names, lost.sizes, lost.sectors, lost.kept,
        checked, found, absent, not_durable);
}

/* A part that can't be read today may be readable tomorrow. Its place is not reused, and no
 * checkpoint says that nothing lies there. */
static void unreadable_once(unsigned spared)
{
    oracle = (struct oracle){.seed = spared};
    small = true; /* five segments, of 28 slots */
    host_make(1, true);
    run_and_check();
    cr_assert(kill_worker_dump(&w, KILL_BATCH) && kill_worker_dump_again(&w, KILL_BATCH, true));
    worker_drop(&w.w);
    host_kill(&host);
    power.journal->page_reads_spared = spared;
    power.journal->page_reads_failing = 15; /* five, each tried three times */
    host_restart(&host);
    cr_assert(kill_worker_connect(&w, &host) && kill_worker_recovered(&w));
    cr_assert_eq(power.journal->page_reads_failing, 0u);
    w.disk_fails = true; /* it may well be full now */
    for (unsigned i = 0; i < 4; i++)
        cr_assert(kill_worker_dump(&w, 8));
    memset(oracle.held, 0, sizeof(oracle.held));
    worker_drop(&w.w);
    cr_assert_eq(host_stop(&host), 0);
    run_and_check();
    host_drop();
}

Test(power, an_unreadable_header_costs_nothing, .timeout = 60)
{
    unreadable_once(0); /* of segments */
    unreadable_once(5); /* of slots */
}

/* An earlier run could not sync a namespace's record, and the start can't either. The record is
 * written once more before any block of the namespace is promised. */
Test(power, a_name_in_doubt_is_written_once_more, .timeout = 60)
{
    struct power_loss loss = {0};

    oracle = (struct oracle){.seed = 1};
    small = false;
    host_make(1, true);
    run_and_check();
    w.disk_fails = true;
    power.journal->syncs_failing = 1; /* of the name */
    cr_assert(kill_worker_dump(&w, 4));
    cr_assert_eq(power.journal->syncs_failing, 0u);
    worker_drop(&w.w);
    host_kill(&host);
    power.journal->syncs_spared = 2; /* of the directory and of the state page */
    power.journal->syncs_failing = 2;
    memset(oracle.held, 0, sizeof(oracle.held));
    run_and_check();
    cr_assert_eq(power.journal->syncs_failing, 0u);
    w.disk_fails = false;
    cr_assert(kill_worker_dump_again(&w, 4, true));
    worker_drop(&w.w);
    host_kill(&host);
    power_fail(&power, NULL, &loss);
    run_and_check();
    cr_assert_geq(w.durable_checked, 4u);
    host_drop();
}

/* The daemon is killed at its Nth step. A second run finds what it left, and promises more on top
 * of it. Then the power fails. */
static void killed_at_first_start(unsigned step, bool tmpfile)
{
    struct power_loss loss = {0};

    fprintf(stderr, "power: killed at step %u, O_TMPFILE %d\n", step, tmpfile);
    oracle = (struct oracle){.seed = step};
    host_make(1, tmpfile);
    power.journal->kill_at = step;
    if (host_try_restart(&host)) {
        if (kill_worker_connect(&w, &host))
            (void)kill_worker_dump(&w, 4);
        host_kill(&host);
        worker_drop(&w.w);
    }
    run_and_check();
    cr_assert(kill_worker_dump(&w, 4) && kill_worker_dump_again(&w, 8, true));
    host_kill(&host);
    worker_drop(&w.w);
    power_fail(&power, NULL, &loss);
    run_and_check();
    host_drop();
}

Test(power, a_kill_at_every_step_of_the_first_start, .timeout = 3600)
{
    unsigned stride = rounds_wanted() > 100 ? 1 : 9;

    for (unsigned step = 1 + (unsigned)time(NULL) % stride; step < 80; step += stride)
        killed_at_first_start(step, step % 2);
}
