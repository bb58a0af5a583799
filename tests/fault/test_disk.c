/* A real daemon on a disk that fails: errors, short transfers, a full or read-only file system. A
 * sync fails, and a ring is refused or breaks. Nobody gets a wrong byte, and nothing is called
 * durable that is not on stable storage. What failed works again when the disk does. */
/* Sanitizers: address */
#include "tests/inject/inject.h"
#include "tests/integration/harness.h"
#include "tests/runner/environment.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define BLOCKS 64u

static struct host host;
static struct worker w;
static struct inject *fault;
static char fault_path[64];

static void set(int *p, int value)
{
    __atomic_store_n(p, value, __ATOMIC_RELAXED);
}

static void fault_map(void)
{
    const char *tmp = getenv("TMPDIR");
    int fd;

    snprintf(fault_path, sizeof(fault_path), "%.40s/ucm-inject-XXXXXX", tmp ? tmp : "/tmp");
    fd = mkstemp(fault_path);
    cr_assert_geq(fd, 0);
    cr_assert_eq(ftruncate(fd, sizeof(*fault)), 0);
    fault = mmap(NULL, sizeof(*fault), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    cr_assert_neq(fault, MAP_FAILED);
    close(fd);
    setenv("UCM_INJECT", fault_path, 1);
}

static void daemon_start(void)
{
    preload("ucmd-inject.so");
    if (host.dir[0])
        host_restart(&host);
    else
        host_start(&host);
    unsetenv("LD_PRELOAD");
    worker_open(&w, &host, &(struct worker_options){0});
}

static void open_host(const char *io)
{
    host = (struct host){.nvme = true,
                         .sets = {io, "nvme.size=64MiB", "nvme.segment=1MiB", "log.level=error"}};
    fault_map();
    daemon_start();
}

static void close_host(void)
{
    worker_close(&w);
    host_remove(&host);
    unlink(fault_path);
    munmap(fault, sizeof(*fault));
}

TestSuite(disk, .fini = close_host, .timeout = 90);

/* Nothing is in DRAM afterwards. */
static void start_again(void)
{
    worker_close(&w);
    cr_assert_eq(host_stop(&host), 0);
    daemon_start();
}

static void store(uint64_t first)
{
    uint64_t before = metric(w.client, "nvme_writes");

    worker_store(&w, first, BLOCKS);
    cr_assert(metric_reaches(w.client, "nvme_writes", before + BLOCKS, 20000));
}

static unsigned load_all(uint64_t first)
{
    return worker_found(&w, first, BLOCKS, NULL);
}

/* ---- reads ---- */

Test(disk, errors_and_short_transfers_that_pass)
{
    static const int by[] = {4096, 512, 1}, errors[] = {EIO, EAGAIN, EINTR};

    open_host("nvme.io=threads");
    for (unsigned k = 0; k < 3; k++) {
        set(&fault->short_by, by[k]);
        set(&fault->write_error, errors[k]);
        set(&fault->writes, 2);
        store(k * 1000);
        start_again();
        cr_expect_eq(load_all(k * 1000), BLOCKS);
        start_again();
        set(&fault->short_by, 0); /* did the writes arrive whole? */
        set(&fault->read_error, errors[k]);
        set(&fault->reads, 2);
        cr_expect_eq(load_all(k * 1000), BLOCKS);
        cr_expect_eq(metric(w.client, "nvme_read_errors"), 0u);
        cr_expect_eq(metric(w.client, "nvme_write_errors"), 0u);
    }
}

Test(disk, reads_that_fail_are_misses)
{
    open_host("nvme.io=threads");
    store(0);
    store(1000);
    start_again();
    set(&fault->read_error, EIO);
    set(&fault->reads, -1);
    cr_expect_eq(load_all(0), 0u);
    cr_expect_eq(metric(w.client, "nvme_read_errors"), BLOCKS);
    set(&fault->reads, 0);
    cr_expect_eq(load_all(1000), BLOCKS);
    cr_expect_eq(metric(w.client, "nvme_quarantined_bytes"), 0u, "no bytes were wrong");
}

/* ---- writes ---- */

static void failing_writes(int error)
{
    uint64_t returned;

    open_host("nvme.io=threads");
    store(0);
    set(&fault->write_error, error);
    set(&fault->writes, -1);
    for (unsigned i = 0; i < 8; i++)
        cr_expect_eq(worker_dump_one(&w, 5000 + i), UCM_BLOCK_IS_NOT_DURABLE);
    for (uint64_t end = now_ms() + 20000; !health_is(w.client, "degraded"); sleep_ms(2))
        cr_assert_lt(now_ms(), end, "%s: not degraded", strerror(error));
    cr_expect_eq(load_all(0), BLOCKS, "%s: what is there is served", strerror(error));
    worker_store(&w, 2000, BLOCKS); /* DRAM takes it */
    cr_expect_eq(load_all(2000), BLOCKS);
    returned = metric(w.client, "nvme_returned");
    set(&fault->writes, 0);
    cr_assert(metric_reaches(w.client, "nvme_returned", returned + 1, 30000), "%s: stays off",
              strerror(error));
    cr_expect(health_is(w.client, "ok"));
    cr_expect_eq(worker_dump_one(&w, 6000), UCM_BLOCK_IS_OK);
    start_again();
    cr_expect_eq(load_all(0), BLOCKS);
}

/* The file holds whole segments, which is less than nvme.size. */
Test(disk, a_full_file_system_does_not_stop_a_restart)
{
    host = (struct host){.nvme = true,
                         .sets = {"nvme.size=64MiB", "nvme.segment=4MiB", "log.level=error"}};
    fault_map();
    daemon_start();
    store(0);
    worker_close(&w);
    cr_assert_eq(host_stop(&host), 0);
    set(&fault->no_room, 1);
    daemon_start();
    cr_expect_eq(load_all(0), BLOCKS);
}

Test(disk, what_failed_or_was_full_or_read_only_comes_back)
{
    failing_writes(EIO);
    close_host();
    failing_writes(ENOSPC);
    close_host();
    failing_writes(EROFS);
}

/* The first probes fail as well. */
Test(disk, a_disk_is_probed_again)
{
    int failed;

    open_host("nvme.io=threads");
    set(&fault->write_error, EROFS);
    set(&fault->writes, -1);
    cr_expect_eq(worker_dump_one(&w, 0), UCM_BLOCK_IS_NOT_DURABLE);
    failed = __atomic_load_n(&fault->failed, __ATOMIC_RELAXED);
    for (uint64_t end = now_ms() + 20000;
         __atomic_load_n(&fault->failed, __ATOMIC_RELAXED) < failed + 2; sleep_ms(2))
        cr_assert_lt(now_ms(), end, "nobody probes");
    cr_expect(health_is(w.client, "degraded"));
    set(&fault->writes, 0);
    cr_assert(metric_reaches(w.client, "nvme_returned", 1, 30000));
    store(1000);
}

/* ---- syncs ---- */

Test(disk, a_failed_sync_is_not_durable)
{
    open_host("nvme.io=auto");
    set(&fault->sync_error, EIO);
    cr_expect_eq(worker_dump_one(&w, 0), UCM_BLOCK_IS_NOT_DURABLE);
    cr_expect_eq(metric(w.client, "nvme_sync_errors"), 1u);
    set(&fault->sync_error, 0);
    cr_expect_eq(worker_dump_one(&w, 1), UCM_BLOCK_IS_OK);
    worker_close(&w);
    host_kill(&host);
    daemon_start();
}

Test(disk, a_stop_whose_sync_fails_says_so)
{
    open_host("nvme.io=auto");
    store(0);
    worker_close(&w);
    set(&fault->sync_error, EIO);
    cr_expect_eq(host_stop(&host), 1);
    set(&fault->sync_error, 0);
    daemon_start();
}

/* ---- the file is taken away ---- */

static void cache_file(const char *name, char out[128])
{
    snprintf(out, 128, "%.64s/%s", host.dir, name);
}

static void file_removed(const char *path)
{
    cr_assert_eq(unlink(path), 0);
}

static void file_replaced(const char *path)
{
    char other[128];
    int fd;

    cache_file("other", other);
    fd = open(other, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    cr_assert_geq(fd, 0);
    close(fd);
    cr_assert_eq(rename(other, path), 0);
    cr_assert_eq(unlink(path), 0); /* so that the next start has nothing to refuse */
}

static void file_cut(const char *path)
{
    cr_assert_eq(truncate(path, 8 << 20), 0);
}

/* No block that a kill would lose is called durable, and health says why. */
static void file_taken_away(void (*take_away)(const char *path), const char *reason)
{
    char path[128];

    open_host("nvme.io=auto");
    cr_expect_eq(worker_dump_one(&w, 0), UCM_BLOCK_IS_OK);
    cache_file("ucmd.cache", path);
    take_away(path);
    for (unsigned i = 1; i < 4; i++)
        cr_expect_eq(worker_dump_one(&w, i), UCM_BLOCK_IS_NOT_DURABLE, "%u", i);
    cr_expect(health_is(w.client, "degraded"));
    cr_expect(health_says(w.client, reason), "%s", reason);
    cr_expect_eq(metric(w.client, "nvme_files_lost"), 1u);
    cr_expect_geq(metric(w.client, "nvme_sync_errors"), 1u);
    worker_close(&w);
    host_kill(&host);
    daemon_start();
    wait_ok(w.client);
    cr_expect_eq(worker_dump_one(&w, 5), UCM_BLOCK_IS_OK);
}

Test(disk, a_file_that_is_removed_or_replaced_or_cut_while_in_use_takes_nothing_durable)
{
    file_taken_away(file_removed, "was removed");
    close_host();
    file_taken_away(file_replaced, "was removed");
    close_host();
    file_taken_away(file_cut, "was cut");
}

/* The daemon has the records in memory, and writes the file again before it promises anything. */
static void namespaces_taken_away(bool killed)
{
    char path[128];

    open_host("nvme.io=auto");
    cr_expect_eq(worker_dump_one(&w, 0), UCM_BLOCK_IS_OK);
    cache_file("ucmd.namespaces", path);
    cr_assert_eq(unlink(path), 0);
    if (killed)
        cr_expect_eq(worker_dump_one(&w, 1), UCM_BLOCK_IS_OK);
    worker_close(&w);
    if (killed)
        host_kill(&host);
    else
        cr_assert_eq(host_stop(&host), 0);
    daemon_start();
    cr_expect_eq(load_all(0), killed ? 2u : 1u);
}

Test(disk, namespaces_that_are_removed_while_in_use_are_there_after_a_kill_and_a_stop)
{
    namespaces_taken_away(true);
    close_host();
    namespaces_taken_away(false);
}

/* ---- the ring ---- */

Test(disk, a_ring_refused_and_back_the_same_bytes)
{
    open_host("nvme.io=auto");
    store(0);
    set(&fault->setup_error, EPERM);
    start_again();
    cr_expect_eq(load_all(0), BLOCKS);
    store(1000);
    set(&fault->setup_error, 0);
    start_again();
    cr_expect_eq(load_all(0), BLOCKS);
    cr_expect_eq(load_all(1000), BLOCKS);
}

/* A daemon with io_uring configured does not fall back to threads, as `auto` does. */
Test(disk, a_ring_that_is_named_and_refused_ends_the_start)
{
    open_host("nvme.io=auto");
    store(0);
    worker_close(&w);
    cr_assert_eq(host_stop(&host), 0);
    set(&fault->setup_error, EPERM);
    host.sets[0] = "nvme.io=uring";
    preload("ucmd-inject.so");
    cr_expect_not(host_try_restart(&host));
    cr_expect(WIFEXITED(host.status) && WEXITSTATUS(host.status) != 0, "%#x", host.status);
    host.sets[0] = "nvme.io=auto";
    daemon_start();
    cr_expect_eq(load_all(0), BLOCKS);
}

Test(disk, a_ring_that_breaks_while_it_is_used)
{
    open_host("nvme.io=auto");
    store(0);
    start_again();
    set(&fault->ring_error, EIO);
    cr_expect_eq(load_all(0), BLOCKS);
    store(1000);
    set(&fault->ring_error, 0);
    start_again();
    cr_expect_eq(load_all(0), BLOCKS);
    cr_expect_eq(load_all(1000), BLOCKS);
}
