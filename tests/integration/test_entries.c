/* Entries of nvme.paths that are used as they are: a block device (a loop device here), a file. */
#include "tests/integration/harness.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define BLOCKS 64u
#define MIB (1u << 20)
#define FILE_BYTES (96 * MIB)

static struct host host;
static struct worker w;
static bool connected;
static char image[128], device[64], paths[320], state[128];

static int ctl_format(const char *path, const char *options, char *out, size_t cap)
{
    return ucmctl(out, cap, "format %s %s 2>&1", options, path);
}

/* Drops what it says of a lock, because a killed daemon's lock is held for a while. */
static int ctl_offline(const char *path, const char *options, char *out, size_t cap)
{
    return ucmctl(out, cap, "verify --json --offline %s %s 2>/dev/null", path, options);
}

static void image_make(off_t bytes)
{
    int fd;

    host =
        (struct host){.nvme = true, .sets = {paths, state, "nvme.segment=1MiB", "nvme.size=64MiB"}};
    host_prepare(&host);
    snprintf(image, sizeof(image), "%s/image", host.dir);
    snprintf(state, sizeof(state), "nvme.state=%s", host.dir);
    fd = open(image, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    cr_assert_geq(fd, 0);
    cr_assert_eq(ftruncate(fd, bytes), 0);
    close(fd);
    snprintf(paths, sizeof(paths), "nvme.paths=%s", image);
}

static void device_make(const char *options)
{
    image_make(FILE_BYTES);
    if (shell(device, sizeof(device), "losetup -f --show %s %s 2>/dev/null", options, image) != 0 ||
        strncmp(device, "/dev/", 5) != 0) {
        device[0] = '\0';
        cr_skip_test("no loop device is available here");
    }
    snprintf(paths, sizeof(paths), "nvme.paths=%s", device);
}

static void close_host(void)
{
    char out[64];

    if (connected)
        worker_close(&w);
    connected = false;
    host_remove(&host);
    if (device[0])
        (void)shell(out, sizeof(out), "losetup -d %s 2>&1", device);
    device[0] = '\0';
}

static void formatted_device_make(const char *options)
{
    char out[256];

    device_make(options);
    cr_assert_eq(ctl_format(device, "", out, sizeof(out)), 0, "%s", out);
}

TestSuite(entries, .fini = close_host, .timeout = 90);

static void write_at(const char *path, off_t at, const void *p, size_t n)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);

    cr_assert_geq(fd, 0);
    cr_assert_eq(pwrite(fd, p, n, at), (ssize_t)n);
    cr_assert_eq(fsync(fd), 0);
    close(fd);
}

static void open_worker(void)
{
    worker_open(&w, &host, &(struct worker_options){0});
    connected = true;
    wait_ok(w.client);
}

static void stop(void)
{
    worker_close(&w);
    connected = false;
    cr_assert_eq(host_stop(&host), 0);
}

static void start(void)
{
    host_restart(&host);
    open_worker();
}

static void restart(bool kill)
{
    if (kill) {
        worker_close(&w);
        connected = false;
        host_kill(&host);
    } else {
        stop();
    }
    start();
}

/* It is a cache like any other: over a kill, over a stop (with its checkpoint), and when full. */
static void expect_a_cache(uint64_t capacity_bytes)
{
    start();
    cr_expect_eq(metric(w.client, "nvme_bytes_capacity"), capacity_bytes);
    worker_store_durable(&w, 0, BLOCKS, UCM_BLOCK_IS_OK);
    restart(true);
    worker_expect(&w, 0, BLOCKS);
    worker_store_durable(&w, 100, BLOCKS, UCM_BLOCK_IS_OK);
    restart(false);
    cr_expect_eq(metric(w.client, "nvme_recovered_parts"), 2 * BLOCKS);
    worker_expect(&w, 0, BLOCKS);
    worker_expect(&w, 100, BLOCKS);
    for (unsigned i = 10; i < 60; i++)
        worker_store_durable(&w, i * 100, BLOCKS, UCM_BLOCK_IS_OK);
    restart(true);
    worker_expect(&w, 5900, BLOCKS);
    cr_expect_leq(metric(w.client, "nvme_bytes_used"), capacity_bytes);
}

/* The daemon refuses to start, and at once. */
static void expect_refused(void)
{
    cr_assert_not(host_try_restart(&host), "it was taken");
    cr_expect(WIFEXITED(host.status) && WEXITSTATUS(host.status) != 0, "status %#x", host.status);
}

Test(entries, a_block_device)
{
    char out[256];

    device_make("");
    expect_refused();
    cr_assert_eq(ctl_format(device, "", out, sizeof(out)), 0, "%s", out);
    expect_a_cache(63 * MIB);
}

Test(entries, a_block_device_of_large_blocks_smaller_than_the_configured_size)
{
    formatted_device_make("-b 4096");
    host.sets[3] = "nvme.size=1GiB";
    expect_a_cache(95 * MIB);
}

Test(entries, an_empty_file)
{
    image_make(0);
    expect_a_cache(63 * MIB);
}

Test(entries, what_is_somebody_elses_is_not_touched)
{
    char out[256], before[4096], after[4096];
    int fd;

    device_make("");
    write_at(device, 0x438, "\x53\xef", 2);
    expect_refused();
    cr_expect_neq(ctl_format(device, "", out, sizeof(out)), 0);
    cr_expect_not_null(strstr(out, "an ext file system"), "%s", out);
    cr_expect_neq(ctl_format(device, "--force </dev/null", out, sizeof(out)), 0, "nobody said yes");
    expect_refused();
    fd = open(device, O_RDONLY | O_CLOEXEC);
    memset(before, 0, sizeof(before));
    memcpy(before + 0x438, "\x53\xef", 2);
    cr_assert_eq(pread(fd, after, sizeof(after), 0), (ssize_t)sizeof(after));
    cr_expect_eq(memcmp(before, after, sizeof(after)), 0);
    close(fd);
    cr_assert_eq(ctl_format(device, "--force --yes", out, sizeof(out)), 0, "%s", out);
    start();
    worker_store_durable(&w, 0, BLOCKS, UCM_BLOCK_IS_OK);
    worker_expect(&w, 0, BLOCKS);
}

Test(entries, a_file_with_anything_in_it_is_not_touched)
{
    char out[256];
    struct stat st;

    image_make(FILE_BYTES);
    write_at(image, 50000, "my thesis", 9);
    expect_refused();
    cr_assert_neq(ctl_format(image, "", out, sizeof(out)), 0);
    cr_expect_not_null(strstr(out, "something"), "%s", out);
    cr_assert_eq(stat(image, &st), 0);
    cr_expect_eq(st.st_size, (off_t)FILE_BYTES);
    cr_assert_eq(shell(out, sizeof(out), "grep -c 'my thesis' %s", image), 0);
}

Test(entries, one_that_runs_is_not_formatted_nor_shared)
{
    struct host other;
    char out[256];

    formatted_device_make("");
    start();
    worker_store_durable(&w, 0, BLOCKS, UCM_BLOCK_IS_OK);
    cr_expect_neq(ctl_format(device, "--force --yes", out, sizeof(out)), 0);
    other = host;
    snprintf(other.socket, sizeof(other.socket), "%s/t", host.dir);
    cr_expect_not(host_try_restart(&other));
    worker_expect(&w, 0, BLOCKS);
    restart(true);
    worker_expect(&w, 0, BLOCKS);
    /* a new beginning, when it is wanted */
    stop();
    cr_expect_neq(ctl_format(device, "", out, sizeof(out)), 0);
    cr_expect_not_null(strstr(out, "a cache of ucmd"), "%s", out);
    cr_assert_eq(ctl_format(device, "--force --yes", out, sizeof(out)), 0, "%s", out);
    start();
    cr_expect_eq(metric(w.client, "nvme_recovered_parts"), 0u);
    cr_expect_eq(metric(w.client, "blocks"), 0u);
}

/* Records of the former cache in segments of the new one are no damage. */
Test(entries, a_device_that_was_a_cache_before)
{
    char out[256];

    formatted_device_make("");
    start();
    worker_store_durable(&w, 0, BLOCKS, UCM_BLOCK_IS_OK);
    worker_close(&w);
    connected = false;
    host_kill(&host);
    cr_assert_eq(ctl_format(device, "--force --yes", out, sizeof(out)), 0, "%s", out);
    start();
    worker_store_durable(&w, 0, 3, UCM_BLOCK_IS_OK);
    restart(true);
    cr_expect_eq(metric(w.client, "nvme_recovered_parts"), 3u);
    cr_expect_eq(metric(w.client, "nvme_damaged_pages"), 0u);
    stop();
    cr_expect_eq(ctl_offline(device, "", out, sizeof(out)), 0, "%s", out);
}

/* ---- without a daemon ---- */

/* Where the first slot of the first segment has its payload. */
#define FIRST_PAYLOAD (MIB + 3 * 4096)

static void offline_is_as_good_as_in_a_directory(const char *path)
{
    char out[512], with_state[192], salvage[224];

    snprintf(salvage, sizeof(salvage), "--state %s --salvage", host.dir);
    snprintf(with_state, sizeof(with_state), "--state %s", host.dir);
    start();
    worker_store_durable(&w, 0, 8, UCM_BLOCK_IS_OK);
    cr_expect_eq(ctl_offline(path, salvage, out, sizeof(out)), 1, "it runs");
    worker_close(&w);
    connected = false;
    host_kill(&host);
    cr_expect_eq(ctl_offline(path, "", out, sizeof(out)), 0, "%s", out);
    cr_expect_null(strstr(out, "\"named\":\ttrue"), "%s", out);
    cr_expect_eq(ctl_offline(path, with_state, out, sizeof(out)), 0, "%s", out);
    cr_expect_not_null(strstr(out, "\"named\":\ttrue"), "%s", out);
    write_at(path, FIRST_PAYLOAD, "bad", 3);
    cr_expect_eq(ctl_offline(path, with_state, out, sizeof(out)), 5, "%s", out);
    cr_expect_eq(ctl_offline(path, "--salvage", out, sizeof(out)), 2, "%s", out);
    cr_expect_eq(ctl_offline(path, "--salvage --state /nowhere", out, sizeof(out)), 1, "%s", out);
    cr_expect_eq(ctl_offline(path, with_state, out, sizeof(out)), 5, "nothing was changed");
    cr_expect_eq(ctl_offline(path, salvage, out, sizeof(out)), 5, "%s", out);
    cr_expect_eq(ctl_offline(path, with_state, out, sizeof(out)), 0, "%s", out);
    start();
    cr_expect_eq(metric(w.client, "nvme_recovered_parts"), 7u);
    cr_expect_eq(metric(w.client, "nvme_damaged_pages"), 0u);
}

Test(entries, a_device_is_verified_and_salvaged_without_a_daemon)
{
    formatted_device_make("");
    offline_is_as_good_as_in_a_directory(device);
}

Test(entries, a_file_is_verified_and_salvaged_without_a_daemon)
{
    image_make(0);
    offline_is_as_good_as_in_a_directory(image);
}

/* Alongside a directory; another name of the device is the same device. */
Test(entries, with_a_directory_and_under_another_name)
{
    char link[96];

    formatted_device_make("");
    snprintf(paths, sizeof(paths), "nvme.paths=%s,%s", host.dir, device);
    start();
    cr_expect_eq(metric(w.client, "nvme_bytes_capacity"), 2 * 63 * MIB);
    worker_store_durable(&w, 0, BLOCKS, UCM_BLOCK_IS_OK);
    restart(true);
    worker_expect(&w, 0, BLOCKS);
    snprintf(link, sizeof(link), "%s/disk", host.dir);
    cr_assert_eq(symlink(device, link), 0);
    snprintf(paths, sizeof(paths), "nvme.paths=%s,%s", link, host.dir);
    restart(false);
    worker_expect(&w, 0, BLOCKS);
}

/* ---- an entry that can't be used ---- */

static void restart_without_image(const char *why)
{
    char out[2048];

    host_restart(&host);
    worker_open(&w, &host, &(struct worker_options){0});
    connected = true;
    cr_expect(health_is(w.client, "degraded"));
    cr_expect_eq(metric(w.client, "nvme_files_lost"), 1u);
    cr_expect_eq(metric(w.client, "nvme_bytes_capacity"), 63 * MIB);
    cr_expect_eq(ucmctl(out, sizeof(out), "health --socket %s 2>&1", host.socket), 4);
    cr_expect_not_null(strstr(out, "left out until the next start"), "%s", out);
    cr_expect_not_null(strstr(out, image), "%s", out);
    cr_expect_not_null(strstr(out, why), "%s", out);
}

static void expect_back(void)
{
    start();
    cr_expect_eq(metric(w.client, "nvme_files_lost"), 0u);
    cr_expect_eq(metric(w.client, "nvme_bytes_capacity"), 2 * 63 * MIB);
    worker_expect(&w, 0, BLOCKS);
    worker_expect(&w, 100, BLOCKS);
}

Test(entries, one_that_is_gone_is_done_without)
{
    char away[160];

    image_make(0);
    snprintf(paths, sizeof(paths), "nvme.paths=%s,%s", image, host.dir);
    start();
    worker_store_durable(&w, 0, BLOCKS, UCM_BLOCK_IS_OK);
    stop();
    snprintf(away, sizeof(away), "%s-away", image);
    cr_assert_eq(rename(image, away), 0);
    restart_without_image("No such file");
    worker_store_durable(&w, 100, BLOCKS, UCM_BLOCK_IS_OK);
    worker_expect(&w, 100, BLOCKS);
    stop();
    cr_assert_eq(rename(away, image), 0);
    expect_back();
    /* with none of them left the configuration is wrong */
    stop();
    snprintf(paths, sizeof(paths), "nvme.paths=%s-1,%s-2", image, image);
    expect_refused();
}

Test(entries, one_whose_superblock_is_damaged_is_done_without_and_left_alone)
{
    char out[512], sum[2][128];

    image_make(0);
    snprintf(paths, sizeof(paths), "nvme.paths=%s,%s", image, host.dir);
    start();
    worker_store_durable(&w, 0, BLOCKS, UCM_BLOCK_IS_OK);
    stop();
    write_at(image, 2000, "x", 1);
    cr_assert_eq(shell(sum[0], sizeof(sum[0]), "cksum %s", image), 0);
    restart_without_image("superblock");
    worker_store_durable(&w, 100, BLOCKS, UCM_BLOCK_IS_OK);
    worker_expect(&w, 100, BLOCKS);
    stop();
    cr_assert_eq(shell(sum[1], sizeof(sum[1]), "cksum %s", image), 0);
    cr_expect_str_eq(sum[1], sum[0]);
    cr_expect_eq(
        ucmctl(out, sizeof(out), "verify --offline %s --salvage --state %s 2>&1", image, host.dir),
        5);
    cr_expect_not_null(strstr(out, "the superblock is damaged"), "%s", out);
    cr_expect_not_null(strstr(out, "ucmctl format --force"), "%s", out);
    cr_assert_eq(shell(sum[1], sizeof(sum[1]), "cksum %s", image), 0);
    cr_expect_str_eq(sum[1], sum[0]);
    write_at(image, 2000, "", 1);
    expect_back();
}
