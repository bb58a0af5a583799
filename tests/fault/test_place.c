/* Two daemons on one storage directory, and a wall clock that is set while the daemon runs. */
#include "tests/integration/harness.h"
#include "tests/runner/environment.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define BLOCKS 32u
#define YEARS (INT64_C(365) * 86400)

static struct host host;
static struct worker w;
static bool connected;

static void open_worker(void)
{
    worker_open(&w, &host, &(struct worker_options){0});
    connected = true;
    wait_ok(w.client);
}

static void drop_worker(void)
{
    if (connected)
        worker_close(&w);
    connected = false;
}

static void close_host(void)
{
    drop_worker();
    host_remove(&host);
}

TestSuite(place, .fini = close_host, .timeout = 90);

/* ---- two daemons ---- */

/* A second one comes while the first starts, again and again. One of them serves. */
Test(place, of_two_that_start_together_one_serves)
{
    struct host other;
    int status;

    host = (struct host){.nvme = true};
    host_prepare(&host);
    for (unsigned round = 0; round < 3; round++) {
        other = host;
        snprintf(other.socket, sizeof(other.socket), "%s/t", host.dir);
        other.pid = fork();
        cr_assert_geq(other.pid, 0);
        if (other.pid == 0) {
            _exit(host_try_restart(&other) ? (host_kill(&other), 0) : 1);
        }
        if (host_try_restart(&host))
            host_kill(&host);
        cr_assert_eq(waitpid(other.pid, &status, 0), other.pid);
    }
    host_restart(&host);
    open_worker();
    worker_store_durable(&w, 0, BLOCKS, UCM_BLOCK_IS_OK);
    worker_expect(&w, 0, BLOCKS);
}

/* ---- the clock ---- */

static int64_t *offset_s;

/* A daemon whose wall clock is *offset_s off. */
static void start_with_clock(void)
{
    char file[128];
    int fd;

    if (phase_is_slow())
        cr_skip_test("nothing is preloaded alongside a sanitizer");
    host = (struct host){.nvme = true};
    host_prepare(&host);
    snprintf(file, sizeof(file), "%s/clock", host.dir);
    fd = open(file, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    cr_assert_geq(fd, 0);
    cr_assert_eq(ftruncate(fd, sizeof(*offset_s)), 0);
    offset_s = mmap(NULL, sizeof(*offset_s), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    cr_assert_neq(offset_s, MAP_FAILED);
    close(fd);
    setenv("UCM_CLOCK", file, 1);
    preload("clock.so");
}

static void restart(bool kill)
{
    if (connected && kill) {
        drop_worker();
        host_kill(&host);
    } else if (connected) {
        drop_worker();
        cr_assert_eq(host_stop(&host), 0);
    }
    host_restart(&host);
    open_worker();
}

static uint32_t lease_take(uint32_t lease_ms)
{
    uint8_t keys[BLOCKS * WORKER_KEY_BYTES];
    struct ucm_lookup l = {.keys = keys, .n_keys = BLOCKS, .lease_ms = lease_ms};
    uint32_t hits, lease;

    keys_make(0, BLOCKS, keys);
    cr_assert_eq(ucm_lookup_prefix(w.ns, &l, -1, &hits, NULL, &lease), 0, "%s", ucm_errmsg());
    cr_assert_eq(hits, BLOCKS);
    return lease;
}

static void wait_for_leases(uint64_t n)
{
    while (metric(w.client, "leases") != n)
        sleep_ms(5);
}

/* A connection that has not said hello yet is not late just because the clock jumped. A lease that
 * ends meanwhile shows that the daemon has checked its deadlines. */
static void expect_patience(int64_t jump_s)
{
    int fd = raw_connect(&host);

    *offset_s += jump_s;
    (void)lease_take(50);
    wait_for_leases(1);
    raw_hello(fd);
    close(fd);
}

Test(place, nothing_expires_when_the_clock_is_set)
{
    static const int64_t jump_s[] = {10 * YEARS, -20 * YEARS, 3600, -3600, 1, -1};

    start_with_clock();
    restart(false);
    worker_store_durable(&w, 0, BLOCKS, UCM_BLOCK_IS_OK);
    for (unsigned i = 0; i < sizeof(jump_s) / sizeof(jump_s[0]); i++) {
        uint32_t lease = lease_take(60000);

        expect_patience(jump_s[i]);
        cr_expect_eq(metric(w.client, "leases"), 1u, "a jump of %lld s", (long long)jump_s[i]);
        cr_assert_eq(ucm_release(w.client, lease, -1), 0);
        cr_expect_eq(metric(w.client, "leases"), 0u);
        /* and what is to expire does so */
        (void)lease_take(100);
        *offset_s -= jump_s[i];
        wait_for_leases(0);
        *offset_s += jump_s[i];
        worker_expect(&w, 0, BLOCKS);
    }
    cr_expect_eq(metric(w.client, "requests_deadline"), 0u);
    cr_expect_eq(ucm_connection_epoch(w.client), 1u, "the connection was dropped");
}

/* Which of two writes is the later one does not depend on a clock. */
Test(place, a_restart_with_the_clock_set_back_finds_everything)
{
    start_with_clock();
    *offset_s = 10 * YEARS;
    restart(false);
    worker_store_durable(&w, 0, BLOCKS, UCM_BLOCK_IS_OK);
    *offset_s = -10 * YEARS;
    restart(true);
    worker_expect(&w, 0, BLOCKS);
    cr_assert_eq(purge_ns(w.client, 1, -1), 0, "%s", ucm_errmsg());
    worker_store_durable(&w, 100, BLOCKS, UCM_BLOCK_IS_OK);
    *offset_s = 5 * YEARS;
    restart(false);
    *offset_s = -30 * YEARS;
    restart(true);
    cr_expect_eq(worker_hits(&w, 0, BLOCKS), 0u, "purged");
    worker_expect(&w, 100, BLOCKS);
}
