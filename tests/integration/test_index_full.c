/* As many blocks as index.max_blocks allows. Those that were not used for longest make way, in DRAM
 * and on NVMe. Stored blocks are found, also after a restart. */
#include "tests/integration/harness.h"

#include <criterion/criterion.h>

#define MAX 1024u
#define WIDE 256u /* parts */
#define NARROW 16384u
#define BATCH 256u
#define BATCHES 12u

static struct host host;
static struct worker w;
static const struct worker_options options = {.layer_bytes = 4 << 10, .blocks = BATCH};

static void close_host(void)
{
    worker_close(&w);
    host_remove(&host);
}

TestSuite(index_full, .fini = close_host, .timeout = 90);

static void store_written(uint64_t first)
{
    uint64_t written = metric(w.client, "nvme_writes");

    worker_store(&w, first, BATCH);
    cr_assert(metric_reaches(w.client, "nvme_writes", written + BATCH, 20000));
}

/* More blocks than the index holds have been stored. */
static void open_full(const char *arena)
{
    host = (struct host){.nvme = true, .sets = {"index.max_blocks=1024", arena}};
    host_start(&host);
    worker_open(&w, &host, &options);
    arena_wait(w.client);
    for (uint64_t i = 0; i < BATCHES; i++)
        store_written(i * BATCH);
    cr_expect_eq(metric(w.client, "dump_blocks_skipped"), 0u);
    cr_expect_eq(metric(w.client, "index_evicted"), BATCHES * BATCH - MAX);
    cr_expect_eq(metric(w.client, "blocks"), MAX);
}

static void restart(bool orderly)
{
    worker_close(&w);
    if (orderly)
        cr_assert_eq(host_stop(&host), 0);
    else
        host_kill(&host);
    host_restart(&host);
    worker_open(&w, &host, &options);
    wait_ok(w.client);
}

/* A quarter of them fits in DRAM. */
Test(index_full, what_left_dram_first_makes_way)
{
    open_full("arena.size=4MiB");
    worker_expect(&w, BATCHES * BATCH - MAX, MAX);
    cr_expect_eq(worker_hits(&w, BATCHES * BATCH - MAX - 1, 1), 0u);
    restart(true);
    worker_expect(&w, BATCHES * BATCH - MAX, MAX);
    store_written(BATCHES * BATCH);
    worker_expect(&w, BATCHES * BATCH, BATCH);
}

/* Dropped blocks still lie on NVMe, but the newest blocks count more. */
Test(index_full, a_killed_daemons_newest_blocks_are_found)
{
    open_full("arena.size=4MiB");
    restart(false);
    cr_expect_eq(metric(w.client, "blocks"), MAX);
    worker_expect(&w, BATCHES * BATCH - MAX, MAX);
}

Test(index_full, the_coldest_in_dram_makes_way)
{
    open_full("arena.size=64MiB");
    worker_expect(&w, (BATCHES - 1) * BATCH, BATCH);
}

/* Two workers store the two parts of 1,024 blocks, one after the other. After a kill, no block is
 * left with one part restored and the other not. */
Test(index_full, a_killed_daemons_blocks_are_whole)
{
    static const struct worker_options first = {
        .parts = 2, .layer_bytes = 4 << 10, .blocks = BATCH};
    struct worker_options second_options = first;
    struct worker second;

    host = (struct host){.nvme = true, .sets = {"index.max_blocks=1280", "arena.size=12MiB"}};
    host_start(&host);
    worker_open(&w, &host, &first);
    arena_wait(w.client);
    second_options.part = 1;
    worker_open(&second, &host, &second_options);
    for (uint64_t i = 0; i < BATCHES; i++) {
        uint64_t written = metric(w.client, "nvme_writes");

        worker_store(&w, i * BATCH, BATCH);
        worker_store(&second, i * BATCH, BATCH);
        cr_assert(metric_reaches(w.client, "nvme_writes", written + 2 * BATCH, 20000));
    }
    worker_close(&second);
    restart(false);
    for (uint64_t end = now_ms() + 10000; metric(w.client, "blocks_partial") > 0; sleep_ms(5))
        cr_assert_lt(now_ms(), end, "%u", (unsigned)metric(w.client, "blocks_partial"));
    cr_expect_gt(metric(w.client, "blocks"), MAX * 9 / 10);
}

/* One part is stored of each block of many parts. The index stays as small as with blocks of one
 * part. A tenant that uses its blocks keeps them. */
Test(index_full, blocks_of_many_parts_count_as_more)
{
    static const struct worker_options wide_options = {
        .model = "wide", .parts = WIDE, .layer_bytes = 16, .blocks = BATCH};
    struct worker wide;
    uint64_t before;

    host = (struct host){.sets = {"index.max_blocks=16384", "arena.size=64MiB"}};
    host_start(&host);
    worker_open(&w, &host, &options);
    arena_wait(w.client);
    worker_store(&w, 0, BATCH);
    before = metric(w.client, "index_bytes");
    worker_open(&wide, &host, &wide_options);
    for (uint64_t i = 0; i < 4 * BATCHES; i++) {
        worker_expect(&w, 0, BATCH);
        worker_store(&wide, (1 + i) * BATCH, BATCH);
    }
    cr_expect_eq(metric(w.client, "dump_blocks_skipped"), 0u);
    cr_expect_leq(metric(w.client, "blocks_partial"), NARROW * 128 / (WIDE * 24));
    cr_expect_lt(metric(w.client, "index_bytes") - before, NARROW * 128 + (3u << 20));
    worker_expect(&w, 0, BATCH);
    worker_store(&w, 1000 * BATCH, BATCH);
    worker_expect(&w, 1000 * BATCH, BATCH);
    worker_close(&wide);
}
