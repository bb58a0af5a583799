/* What the daemon keeps of its namespaces, when it is killed at points compiled into ucmd-kill. A
 * namespace whose purge was answered never comes back. A purge that was not answered leaves
 * everything or nothing. */
/* Sanitizers: address */
#include "tests/integration/harness.h"
#include "tests/runner/environment.h"

#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define BLOCKS 32u
#define CALL_MS 20000

static struct host host;
static struct worker w;
static char ucmd_kill[256];

static void open_host(void)
{
    host = (struct host){
        .nvme = true, .ucmd = built("ucmd-kill", ucmd_kill), .sets = {"nvme.segment=1MiB"}};
    host_start(&host);
    worker_open(&w, &host, &(struct worker_options){0});
}

static void close_host(void)
{
    unsetenv("UCMD_KILL_AT");
    worker_close(&w);
    host_remove(&host);
}

TestSuite(names, .fini = close_host, .timeout = 120);

/* Starts the daemon again. It dies at `at`, if that is given. */
static void start_again(const char *at)
{
    if (at)
        setenv("UCMD_KILL_AT", at, 1);
    host_restart(&host);
    unsetenv("UCMD_KILL_AT");
    worker_open(&w, &host, &(struct worker_options){0});
    wait_ok(w.client);
}

static void expect_killed(void)
{
    host_killed(&host);
    worker_drop(&w);
}

static void restart_killed(void)
{
    worker_close(&w);
    host_kill(&host);
    start_again(NULL);
}

static void store(void)
{
    worker_store_durable(&w, 0, BLOCKS, IS_STORED);
}

static uint32_t hits(void)
{
    return worker_hits(&w, 0, BLOCKS);
}

/* What ucm_call returned. */
static int purge(uint8_t ns)
{
    return purge_ns(w.client, ns, CALL_MS);
}

static long long names_pages(void)
{
    struct stat st;
    char path[128];

    snprintf(path, sizeof(path), "%s/ucmd.namespaces", host.dir);
    cr_assert_eq(stat(path, &st), 0);
    return st.st_size / 4096;
}

Test(names, a_purge_is_answered_when_it_is_kept)
{
    static const struct {
        const char *at;
        uint32_t left;
    } point[] = {
        {"ns-append-begin:1", BLOCKS}, {"ns-append-torn:1", BLOCKS}, {"ns-append-done:1", 0}};

    open_host();
    for (unsigned i = 0; i < sizeof(point) / sizeof(point[0]); i++) {
        store();
        worker_close(&w);
        host_kill(&host);
        start_again(point[i].at);
        cr_assert_eq(hits(), BLOCKS);
        cr_assert_neq(purge(1), 0, "%s: answered before it was kept", point[i].at);
        expect_killed();
        start_again(NULL);
        cr_expect_eq(hits(), point[i].left, "%s", point[i].at);
    }
}

Test(names, what_was_purged_never_comes_back)
{
    open_host();
    for (unsigned i = 0; i < 5; i++) {
        store();
        cr_assert_eq(purge(1), 0, "%s", ucm_errmsg());
        cr_expect_eq(hits(), 0u);
        if (i % 2 == 0)
            restart_killed();
        cr_expect_eq(hits(), 0u);
    }
    store();
    restart_killed();
    cr_expect_eq(hits(), BLOCKS, "dumped after the purge");
}

Test(names, a_purge_that_can_not_be_kept_says_so)
{
    char path[128], away[128];

    open_host();
    store();
    snprintf(path, sizeof(path), "%s/ucmd.namespaces", host.dir);
    snprintf(away, sizeof(away), "%s/away", host.dir);
    cr_assert_eq(rename(path, away), 0);
    cr_assert_eq(mkdir(path, 0700), 0);
    cr_expect_eq(purge(1), -UCM_EIO, "%s", ucm_errmsg());
    cr_expect_eq(hits(), 0u);
    cr_assert_eq(rmdir(path), 0);
    cr_assert_eq(rename(away, path), 0);
    cr_expect_eq(purge(1), 0, "%s", ucm_errmsg());
    restart_killed();
    cr_expect_eq(hits(), 0u);
}

/* Purges until the file of names is written again, and interrupts that at each point. All that was
 * acknowledged stays: the other namespace's blocks are there, purged ones are not. */
Test(names, a_file_that_is_written_again_may_be_interrupted)
{
    static const char *const point[] = {"ns-rewrite-begin:1", "ns-rewrite-torn:1",
                                        "ns-rewrite-torn:2", "ns-rewrite-written:1",
                                        "ns-rewrite-renamed:1"};
    unsigned purges;

    open_host();
    store();
    worker_close(&w);
    worker_open(&w, &host, &(struct worker_options){.model = "purged"});
    for (unsigned i = 0; i < sizeof(point) / sizeof(point[0]); i++) {
        worker_close(&w);
        host_kill(&host);
        start_again(point[i]);
        worker_close(&w);
        worker_open(&w, &host, &(struct worker_options){.model = "purged"});
        store();
        for (purges = 0; purges < 80 && purge(2) == 0; purges++)
            cr_assert_eq(hits(), 0u);
        cr_assert_lt(purges, 80u, "%s: the file was not written again", point[i]);
        expect_killed();
        start_again(NULL);
        cr_expect_eq(hits(), BLOCKS, "%s", point[i]);
        worker_close(&w);
        worker_open(&w, &host, &(struct worker_options){.model = "purged"});
        /* of the purge that was not answered, all or nothing */
        cr_expect(hits() == 0 || (purges == 0 && hits() == BLOCKS), "%s", point[i]);
    }
    for (purges = 0; purges < 200; purges++)
        cr_assert_eq(purge(2), 0, "%s", ucm_errmsg());
    cr_expect_lt(names_pages(), 80);
}

static void states_lose(void)
{
    uint8_t bad[2 * 4096];
    char path[128];
    FILE *f;

    memset(bad, 0x5a, sizeof(bad));
    snprintf(path, sizeof(path), "%s/ucmd.cache", host.dir);
    f = fopen(path, "r+");
    cr_assert(f && fseek(f, 4096, SEEK_SET) == 0);
    cr_assert_eq(fwrite(bad, 1, sizeof(bad), f), sizeof(bad));
    cr_assert_eq(fclose(f), 0);
}

/* Sequence numbers may not begin below that of a purge. Blocks stored then would count as purged.
 */
Test(names, what_is_stored_after_a_purge_stays_when_the_state_is_lost)
{
    open_host();
    store();
    for (unsigned i = 0; i < 3; i++) /* that no segment names */
        restart_killed();
    cr_assert_eq(purge(1), 0, "%s", ucm_errmsg());
    worker_close(&w);
    host_kill(&host);
    states_lose();
    start_again(NULL);
    cr_assert_eq(hits(), 0u);
    store();
    restart_killed();
    cr_expect_eq(hits(), BLOCKS);
}
