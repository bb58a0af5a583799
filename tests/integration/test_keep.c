/* DRAM over a planned restart (arena.persist_dir). After TERM every block is there again, with its
 * bytes and without NVMe. After any other end no block is there, or those that are have their
 * bytes. */
#include "tests/integration/harness.h"
#include "tests/runner/environment.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static struct host host;
static struct worker w;
static char keep[64], keep_set[96], kill_ucmd[256];

#define BLOCKS 64u
#define PART 8192

static const struct worker_options options = {.layers = 4, .layer_bytes = PART / 4};

static void close_keep(void)
{
    char path[96];

    if (w.client)
        worker_close(&w);
    host_remove(&host);
    snprintf(path, sizeof(path), "%s/ucmd.arena", keep);
    (void)unlink(path); /* there or not */
    snprintf(path, sizeof(path), "%s/ucmd.kept", keep);
    (void)unlink(path);
    snprintf(path, sizeof(path), "%s/ucmd.kept.tmp", keep);
    (void)unlink(path);
    cr_expect_eq(rmdir(keep), 0, "something is left in %s", keep);
}

TestSuite(keep, .fini = close_keep, .timeout = 120);

static const char *arena_size; /* how the next daemon ends; NULL: as usual */

static void open_keep(bool nvme)
{
    snprintf(keep, sizeof(keep), "/dev/shm/ucm-keep-XXXXXX");
    cr_assert(mkdtemp(keep), "no /dev/shm?");
    snprintf(keep_set, sizeof(keep_set), "arena.persist_dir=%s", keep);
    host = (struct host){.nvme = nvme, .sets = {keep_set, arena_size}};
    host_start(&host);
    worker_open(&w, &host, &options);
    arena_wait(w.client);
}

static void worker_leave(void)
{
    worker_close(&w);
    w = (struct worker){0};
}

static void start_again(void)
{
    host_restart(&host);
    worker_open(&w, &host, &options);
    wait_ok(w.client);
    arena_wait(w.client);
}

static void restart(void (*stop)(struct host *h))
{
    worker_leave();
    stop(&host);
    start_again();
}

static void stop_clean(struct host *h)
{
    cr_assert_eq(host_stop(h), 0);
}

static void expect_cold(uint64_t first, uint32_t n)
{
    cr_expect_eq(metric(w.client, "arena_kept_parts"), 0u);
    cr_expect_eq(worker_found(&w, first, n, NULL), 0u);
    /* and it works, and keeps */
    worker_store(&w, first, n);
    restart(stop_clean);
    worker_expect(&w, first, n);
}

/* A block that was not worth a write when it was dumped is not worth one after a restart. */
Test(keep, a_restart_is_no_use_of_a_block)
{
    open_keep(true);
    worker_leave();
    cr_assert_eq(host_stop(&host), 0);
    host.sets[1] = "nvme.admission=reuse";
    start_again();
    worker_store(&w, 0, BLOCKS);
    cr_expect_eq(metric(w.client, "nvme_write_refused"), BLOCKS);
    restart(stop_clean);
    cr_expect_eq(metric(w.client, "arena_kept_parts"), BLOCKS);
    restart(stop_clean); /* after all pending writes were done */
    cr_expect_eq(metric(w.client, "nvme_recovered_parts"), 0u);
    worker_expect(&w, 0, BLOCKS);
}

static int keep_file(const char *name, int flags)
{
    char path[96];
    int fd;

    snprintf(path, sizeof(path), "%s/%s", keep, name);
    fd = open(path, flags | O_CLOEXEC, 0600);
    cr_assert_geq(fd, 0, "%s", path);
    return fd;
}

static bool keep_has(const char *name)
{
    char path[96];

    snprintf(path, sizeof(path), "%s/%s", keep, name);
    return access(path, F_OK) == 0;
}

/* ---- in order ---- */

Test(keep, dram_is_there_again_after_term)
{
    open_keep(false);
    worker_store(&w, 0, BLOCKS);
    for (unsigned round = 1; round <= 3; round++) {
        restart(stop_clean);
        cr_expect_not(keep_has("ucmd.kept"), "a snapshot serves once");
        cr_expect_eq(metric(w.client, "arena_kept_parts"), round * BLOCKS);
        cr_expect_eq(metric(w.client, "blocks"), round * BLOCKS);
        cr_expect_eq(metric(w.client, "arena_bytes_used"), round * BLOCKS * PART);
        for (unsigned i = 0; i < round; i++)
            worker_expect(&w, i * BLOCKS, BLOCKS);
        worker_store(&w, round * BLOCKS, BLOCKS);
    }
    cr_expect_eq(metric(w.client, "load_blocks_nvme"), 0u);
}

/* Slots of two sizes, and more blocks than fit: a restart finds exactly those that were in DRAM at
 * the end. */
Test(keep, a_full_arena_is_there_again)
{
    struct worker_options large = {.model = "large", .layer_bytes = 3 * PART / 4};
    uint64_t blocks, used;

    open_keep(false);
    for (unsigned i = 0; i < 24; i++)
        worker_store(&w, i * BLOCKS, BLOCKS);
    worker_leave();
    worker_open(&w, &host, &large);
    for (unsigned i = 0; i < 6; i++)
        worker_store(&w, i * BLOCKS, BLOCKS);
    blocks = metric(w.client, "blocks");
    used = metric(w.client, "arena_bytes_used");
    restart(stop_clean);
    cr_expect_eq(metric(w.client, "blocks"), blocks);
    cr_expect_eq(metric(w.client, "arena_bytes_used"), used);
    cr_expect_eq(metric(w.client, "arena_kept_refused"), 0u);
    cr_expect_eq(worker_found(&w, 0, 24 * BLOCKS, NULL), blocks - 6 * BLOCKS);
    worker_leave();
    worker_open(&w, &host, &large);
    worker_expect(&w, 0, 6 * BLOCKS);
    /* room is made in it as before */
    for (unsigned i = 6; i < 20; i++)
        worker_store(&w, i * BLOCKS, BLOCKS);
    worker_expect(&w, 16 * BLOCKS, 4 * BLOCKS);
}

/* A stop does not wait until the daemon has taken over all blocks, which the growing arena holds
 * up. */
Test(keep, restarts_in_a_hurry_lose_nothing)
{
    open_keep(false);
    for (uint32_t i = 0; i < 24; i++)
        worker_store(&w, i * BLOCKS, BLOCKS);
    worker_leave();
    stop_clean(&host);
    host.sets[1] = "shutdown.drain=0s";
    for (unsigned i = 0; i < 10; i++) {
        host_restart_at_once(&host);
        stop_clean(&host);
    }
    start_again();
    worker_expect(&w, 0, 24 * BLOCKS);
    cr_expect_eq(metric(w.client, "arena_kept_refused"), 0u);
}

Test(keep, what_was_purged_does_not_come_back)
{
    open_keep(false);
    for (unsigned i = 0; i < 24; i++)
        worker_store(&w, i * BLOCKS, BLOCKS);
    worker_leave();
    stop_clean(&host);
    host_restart_at_once(&host);
    worker_open(&w, &host, &options);
    cr_assert_eq(purge_ns(w.client, 1, -1), 0, "%s", ucm_errmsg());
    wait_ok(w.client);
    cr_expect_eq(worker_found(&w, 0, 24 * BLOCKS, NULL), 0u);
    cr_expect_eq(metric(w.client, "arena_bytes_used"), 0u);
}

Test(keep, with_a_tier_each_finds_its_own_and_nothing_is_written_again)
{
    open_keep(true);
    for (unsigned i = 0; i < 8; i++)
        worker_store(&w, i * BLOCKS, BLOCKS);
    for (unsigned round = 0; round < 2; round++) {
        restart(stop_clean);
        cr_expect_eq(metric(w.client, "arena_kept_parts"), 8 * BLOCKS);
        cr_expect_eq(metric(w.client, "nvme_recovered_parts"), 8 * BLOCKS);
        cr_expect_eq(metric(w.client, "blocks"), 8 * BLOCKS);
        worker_expect(&w, 0, 8 * BLOCKS);
        cr_expect_eq(metric(w.client, "load_blocks_nvme"), 0u);
        cr_expect_eq(metric(w.client, "nvme_writes"), 0u);
    }
    cr_assert_eq(evict_dram(w.client, 1, -1), 0, "%s", ucm_errmsg());
    worker_expect(&w, 0, 8 * BLOCKS);
    cr_expect_eq(metric(w.client, "load_blocks_nvme"), 8 * BLOCKS, "both copies were known");
}

/* ---- out of order ---- */

Test(keep, after_a_kill_dram_is_empty_and_nvme_is_there)
{
    open_keep(false);
    worker_store(&w, 0, BLOCKS);
    restart(host_kill);
    expect_cold(0, BLOCKS);
    restart(host_kill);
    expect_cold(0, BLOCKS);
    close_keep();
    open_keep(true);
    worker_store(&w, 0, BLOCKS);
    restart(stop_clean);
    restart(host_kill);
    cr_expect_eq(metric(w.client, "arena_kept_parts"), 0u);
    worker_expect(&w, 0, BLOCKS);
    cr_expect_eq(metric(w.client, "load_blocks_nvme"), BLOCKS);
}

static off_t damage_at;
static unsigned damage_kind;

static void stop_and_damage(struct host *h)
{
    int fd;
    uint8_t byte;

    stop_clean(h);
    fd = keep_file("ucmd.kept", O_RDWR);
    if (damage_kind == 0) {
        cr_assert_eq(ftruncate(fd, damage_at), 0);
    } else {
        cr_assert_eq(pread(fd, &byte, 1, damage_at), 1);
        byte ^= (uint8_t)(1u << damage_kind % 8);
        cr_assert_eq(pwrite(fd, &byte, 1, damage_at), 1);
    }
    close(fd);
}

Test(keep, a_damaged_snapshot_is_a_cold_start)
{
    static const struct {
        unsigned kind;
        off_t at;
    } cases[] = {
        {0, 0},  {0, 100}, {0, 4096}, {0, 4200}, {0, 6000},          /* cut */
        {1, 0},  {1, 8},   {2, 9},    {3, 20},   {4, 33},            /* magic, version, boot */
        {5, 41}, {6, 50},  {7, 57},   {1, 64},   {3, 72},   {2, 80}, /* sizes, counts */
        {2, 90}, {1, 900}, {3, 4090}, {4, 4100}, {5, 4400}, {1, 4096 + 400},
    };

    arena_size = "arena.size=4MiB"; /* each start reads all of it */
    open_keep(false);
    worker_store(&w, 0, BLOCKS);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        damage_kind = cases[i].kind;
        damage_at = cases[i].at;
        restart(stop_and_damage);
        cr_expect_eq(metric(w.client, "arena_kept_parts"), 0u, "case %zu", i);
        cr_assert_eq(worker_found(&w, 0, BLOCKS, NULL), 0u, "case %zu", i);
        worker_store(&w, 0, BLOCKS);
    }
    restart(stop_clean);
    worker_expect(&w, 0, BLOCKS);
}

static void stop_and_resize(struct host *h)
{
    stop_clean(h);
    h->sets[1] = h->sets[1] ? NULL : "arena.size=17MiB";
}

static void stop_and_reextend(struct host *h)
{
    stop_clean(h);
    h->sets[1] = h->sets[1] ? NULL : "arena.slab=2MiB";
}

Test(keep, another_arena_is_a_cold_start)
{
    open_keep(false);
    worker_store(&w, 0, BLOCKS);
    for (unsigned i = 0; i < 4; i++) {
        restart(i < 2 ? stop_and_resize : stop_and_reextend);
        expect_cold(0, BLOCKS);
    }
}

/* Flips bits of the memory itself. Each part with a flipped bit is a miss; the others are there. */
static void stop_and_flip(struct host *h)
{
    int fd;
    uint8_t byte;

    stop_clean(h);
    fd = keep_file("ucmd.arena", O_RDWR);
    for (off_t slot = 0; slot < 16; slot++) { /* the first 128 lie in the first slab */
        off_t at = slot * PART + slot * 511;

        cr_assert_eq(pread(fd, &byte, 1, at), 1);
        byte ^= 0x10;
        cr_assert_eq(pwrite(fd, &byte, 1, at), 1);
    }
    close(fd);
}

Test(keep, no_part_with_other_bytes_is_served)
{
    open_keep(false);
    worker_store(&w, 0, BLOCKS);
    restart(stop_and_flip);
    cr_expect_eq(metric(w.client, "arena_kept_parts"), BLOCKS - 16);
    cr_expect_eq(metric(w.client, "arena_kept_refused"), 16u);
    cr_expect_eq(worker_found(&w, 0, BLOCKS, NULL), BLOCKS - 16);
    /* with a copy on NVMe nothing is lost by it */
    close_keep();
    open_keep(true);
    worker_store(&w, 0, BLOCKS);
    restart(stop_and_flip);
    worker_expect(&w, 0, BLOCKS);
    cr_expect_eq(metric(w.client, "load_blocks_nvme"), 16u);
}

/* An operator saves a snapshot, and puts it back after a run that was killed. */
Test(keep, a_stale_snapshot_brings_no_wrong_byte)
{
    static uint8_t bytes[1 << 20];
    uint32_t found;
    ssize_t n;
    int fd;

    open_keep(false);
    worker_store(&w, 0, BLOCKS);
    worker_leave();
    stop_clean(&host);
    fd = keep_file("ucmd.kept", O_RDONLY);
    n = read(fd, bytes, sizeof(bytes));
    close(fd);
    cr_assert_gt(n, 4096);
    start_again();
    for (unsigned i = 1; i < 40; i++) /* over most of it */
        worker_store(&w, i * BLOCKS, BLOCKS);
    worker_leave();
    host_kill(&host);
    fd = keep_file("ucmd.kept", O_WRONLY | O_CREAT | O_TRUNC);
    cr_assert_eq(write(fd, bytes, (size_t)n), n);
    close(fd);
    start_again();
    found = worker_found(&w, 0, 40 * BLOCKS, NULL);
    cr_expect_eq(found, metric(w.client, "arena_kept_parts"));
    cr_expect_lt(found, BLOCKS);
}

/* ---- killed while it stops or starts ---- */

static void kill_at(const char *point, bool at_start)
{
    worker_leave();
    if (at_start)
        stop_clean(&host);
    else
        host_kill(&host); /* loses what is in DRAM; the next one has it at the end */
    host.ucmd = built("ucmd-kill", kill_ucmd);
    setenv("UCMD_KILL_AT", point, 1);
    if (at_start) {
        cr_expect_not(host_try_restart(&host), "killed at %s", point);
    } else {
        host_restart(&host);
        worker_open(&w, &host, &options);
        worker_store(&w, 0, BLOCKS);
        worker_leave();
        cr_expect_eq(host_stop(&host), 128 + SIGKILL, "killed at %s", point);
    }
    unsetenv("UCMD_KILL_AT");
    host.ucmd = NULL;
    start_again();
}

Test(keep, killed_at_any_step_it_is_warm_or_cold_and_never_wrong)
{
    arena_size = "arena.size=4MiB";
    open_keep(false);
    kill_at("persist-written:1", false);
    expect_cold(0, BLOCKS);
    kill_at("persist-named:1", false);
    worker_expect(&w, 0, BLOCKS);
    kill_at("persist-take:1", true);
    worker_expect(&w, 0, BLOCKS);
    kill_at("persist-taken:1", true);
    expect_cold(0, BLOCKS);
}

Test(keep, a_second_daemon_is_refused)
{
    struct host other;
    char ucmd[256], out[512];

    open_keep(false);
    worker_store(&w, 0, BLOCKS);
    other = host;
    host_prepare(&other);
    cr_expect_eq(shell(out, sizeof(out),
                       "timeout 20 %s --set socket=%s --set arena.size=16MiB --set arena.slab=1MiB "
                       "--set device.cuda=off --set %s 2>&1",
                       built("ucmd", ucmd), other.socket, keep_set),
                 1, "%s", out);
    cr_expect_not_null(strstr(out, "another daemon uses it"), "%s", out);
    other.pid = 0;
    host_remove(&other);
    worker_expect(&w, 0, BLOCKS);
    restart(stop_clean);
    worker_expect(&w, 0, BLOCKS);
}

/* A start that is refused for another reason leaves what is kept for the next try. */
Test(keep, a_start_that_fails_loses_nothing)
{
    char socket[96];

    open_keep(false);
    worker_store(&w, 0, BLOCKS);
    worker_leave();
    stop_clean(&host);
    memcpy(socket, host.socket, sizeof(socket));
    snprintf(host.socket, sizeof(host.socket), "%s/a/b", host.dir);
    cr_expect_not(host_try_restart(&host));
    memcpy(host.socket, socket, sizeof(socket));
    start_again();
    worker_expect(&w, 0, BLOCKS);
}
