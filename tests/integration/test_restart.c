/* The cache over a restart of the daemon: after TERM and after SIGKILL it serves what lay on NVMe.
 */
/* Sanitizers: address */
#include "tests/integration/harness.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static struct host host;
static struct worker w;

#define BLOCKS 64u

static void open_host(void)
{
    host = (struct host){.nvme = true};
    host_start(&host);
    worker_open(&w, &host, &(struct worker_options){0});
}

static void close_host(void)
{
    worker_close(&w);
    host_remove(&host);
}

TestSuite(restart, .fini = close_host, .timeout = 90);

/* A restart with a new connection. Returns when the daemon has found all that it can find. */
static void restart(void (*stop)(struct host *h), const struct worker_options *o)
{
    worker_close(&w);
    stop(&host);
    host_restart(&host);
    worker_open(&w, &host, o ? o : &(struct worker_options){0});
    wait_ok(w.client);
}

static void stop_clean(struct host *h)
{
    cr_assert_eq(host_stop(h), 0);
}

static int open_file(const char *name, int flags)
{
    char path[128];
    int fd;

    snprintf(path, sizeof(path), "%s/%s", host.dir, name);
    fd = open(path, flags | O_CLOEXEC, 0600);
    cr_assert_geq(fd, 0, "%s", path);
    return fd;
}

static void wait_written(uint64_t parts)
{
    cr_assert(metric_reaches(w.client, "nvme_writes", parts, 20000));
}

Test(restart, after_a_kill_what_was_written_is_there_again)
{
    open_host();
    for (unsigned round = 0; round < 3; round++) {
        worker_store(&w, round * BLOCKS, BLOCKS);
        wait_written(BLOCKS);
        restart(host_kill, NULL);
        cr_expect_eq(metric(w.client, "nvme_recovered_parts"), (round + 1) * BLOCKS);
        for (unsigned i = 0; i <= round; i++)
            worker_expect(&w, i * BLOCKS, BLOCKS);
    }
}

Test(restart, another_namespace_finds_nothing)
{
    open_host();
    worker_store(&w, 0, BLOCKS);
    wait_written(BLOCKS);
    restart(host_kill, &(struct worker_options){.salt = "another"});
    cr_expect_eq(metric(w.client, "nvme_recovered_parts"), BLOCKS);
    cr_expect_eq(worker_hits(&w, 0, BLOCKS), 0u);
}

Test(restart, without_its_names_the_cache_is_empty_and_works)
{
    char path[128];

    open_host();
    worker_store(&w, 0, BLOCKS);
    wait_written(BLOCKS);
    snprintf(path, sizeof(path), "%s/ucmd.namespaces", host.dir);
    cr_assert_eq(unlink(path), 0);
    restart(host_kill, NULL);
    cr_expect_eq(metric(w.client, "nvme_recovered_parts"), 0u);
    worker_store(&w, 0, BLOCKS);
    wait_written(BLOCKS);
    restart(host_kill, NULL);
    worker_expect(&w, 0, BLOCKS);
}

/* ---- durability ---- */

Test(restart, what_was_acknowledged_as_durable_is_there_after_a_kill)
{
    open_host();
    worker_store_durable(&w, 0, BLOCKS, UCM_BLOCK_IS_OK);
    restart(host_kill, NULL);
    worker_expect(&w, 0, BLOCKS);
    cr_expect_eq(metric(w.client, "nvme_syncs"), 0u);
    /* blocks that are there already are made durable as well */
    worker_store_durable(&w, 0, BLOCKS, UCM_BLOCK_IS_EXISTS);
    cr_expect_geq(metric(w.client, "nvme_syncs"), 1u);
    worker_store(&w, 100, BLOCKS);
    worker_store_durable(&w, 100, BLOCKS, UCM_BLOCK_IS_EXISTS);
    cr_expect_eq(metric(w.client, "dump_blocks_durable"), 2 * BLOCKS);
    restart(host_kill, NULL);
    worker_expect(&w, 0, BLOCKS);
    worker_expect(&w, 100, BLOCKS);
}

/* ---- checkpoints ---- */

/* Kills every slot's header in the cache file, so that only a checkpoint knows of them. */
static void headers_wipe(void)
{
    static char bytes[1 << 20];
    int fd = open_file("ucmd.cache", O_RDWR);
    ssize_t n;

    for (off_t at = 1 << 20; (n = pread(fd, bytes, sizeof(bytes), at)) > 0; at += n)
        for (ssize_t page = 0; page < n; page += 4096)
            if (memcmp(bytes + page, "UCMS", 4) == 0)
                cr_assert_eq(pwrite(fd, "dead", 4, at + page), 4);
    close(fd);
}

static void stop_clean_and_wipe(struct host *h)
{
    stop_clean(h);
    headers_wipe();
}

Test(restart, a_checkpoint_needs_no_slot_header)
{
    host = (struct host){.nvme = true, .sets = {"nvme.size=32MiB"}}; /* all of it is read below */
    host_start(&host);
    worker_open(&w, &host, &(struct worker_options){0});
    worker_store(&w, 0, BLOCKS);
    restart(stop_clean_and_wipe, NULL);
    cr_expect_eq(metric(w.client, "nvme_recovered_parts"), BLOCKS);
    worker_expect(&w, 0, BLOCKS);
    /* the next checkpoint is written from the last one */
    restart(stop_clean, NULL);
    worker_expect(&w, 0, BLOCKS);
}

static void stop_kill_with_old_checkpoint(struct host *h)
{
    static char bytes[1 << 20];
    int fd = open_file("ucmd.index", O_RDONLY);
    ssize_t n = read(fd, bytes, sizeof(bytes));

    close(fd);
    cr_assert_gt(n, 0);
    host_kill(h);
    fd = open_file("ucmd.index", O_WRONLY | O_TRUNC | O_CREAT);
    cr_assert_eq(write(fd, bytes, (size_t)n), n);
    close(fd);
}

Test(restart, the_tail_after_a_checkpoint_is_scanned)
{
    open_host();
    worker_store(&w, 0, BLOCKS);
    restart(stop_clean, NULL);
    worker_store(&w, 500, BLOCKS);
    wait_written(BLOCKS);
    restart(stop_kill_with_old_checkpoint, NULL);
    cr_expect_eq(metric(w.client, "nvme_recovered_parts"), 2 * BLOCKS);
    worker_expect(&w, 0, BLOCKS);
    worker_expect(&w, 500, BLOCKS);
}

/* A checkpoint is written while the daemon serves, when enough has been stored. */
Test(restart, a_running_daemon_writes_checkpoints)
{
    open_host();
    for (unsigned i = 0; i < 40; i++) { /* more than the arena holds */
        worker_store(&w, i * BLOCKS, BLOCKS);
        wait_written((i + 1) * BLOCKS);
    }
    cr_assert(metric_reaches(w.client, "nvme_checkpoints", 1, 20000));
    worker_store(&w, 40 * BLOCKS, BLOCKS);
    wait_written(41 * BLOCKS);
    restart(host_kill, NULL);
    cr_expect_eq(metric(w.client, "nvme_recovered_parts"), 41 * BLOCKS);
    for (unsigned i = 0; i <= 40; i++)
        worker_expect(&w, i * BLOCKS, BLOCKS);
}

/* The file is full. Recovered segments are reclaimed like others. */
Test(restart, a_full_file_goes_on)
{
    uint32_t found = 0;

    open_host();
    for (unsigned round = 0; round < 3; round++) {
        for (unsigned i = 0; i < 60; i++)
            worker_store(&w, (round * 60 + i) * BLOCKS, BLOCKS);
        restart(stop_clean, NULL);
        cr_expect_gt(metric(w.client, "nvme_recovered_parts"), 2000u);
        cr_expect_leq(metric(w.client, "nvme_bytes_used"), 256u << 20);
    }
    for (unsigned i = 0; i < 60; i++)
        found += worker_hits(&w, (2 * 60 + i) * BLOCKS, BLOCKS);
    cr_expect_gt(found, 2000u);
    worker_expect(&w, (2 * 60 + 59) * BLOCKS, BLOCKS);
}
