/* Dumps faster than the disk writes: writes are dropped and counted, or dumps are slowed. Durable
 * ones are never falsely acknowledged. */
/* Sanitizers: thread */
#include "tests/integration/harness.h"

#include <criterion/criterion.h>
#include <string.h>

#define BLOCKS 64u /* of 512 KiB: half the arena */

static struct host host;
static struct worker w;
static const struct worker_options options = {.layer_bytes = 128 << 10, .blocks = BLOCKS};

static void open_host(const char *pressure, const char *wait)
{
    host = (struct host){
        .nvme = true, .sets = {"arena.size=64MiB", "nvme.write_queue_size=1MiB", pressure, wait}};
    host_start(&host);
    worker_open(&w, &host, &options);
    arena_wait(w.client);
}

static void close_host(void)
{
    worker_close(&w);
    host_remove(&host);
}

TestSuite(pressure, .fini = close_host, .timeout = 90);

/* Every part is written in the end, or counted as dropped. */
static void expect_accounted(uint64_t parts)
{
    uint64_t end = now_ms() + 20000;

    while (metric(w.client, "nvme_writes") + metric(w.client, "nvme_write_dropped") < parts) {
        cr_assert_lt(now_ms(), end);
        sleep_ms(5);
    }
    sleep_ms(20);
    cr_expect_eq(metric(w.client, "nvme_writes") + metric(w.client, "nvme_write_dropped"), parts);
}

Test(pressure, drop_answers_at_once_and_counts_what_is_not_written)
{
    open_host("nvme.on_write_stall=drop", NULL);
    for (unsigned i = 0; i < 6; i++)
        worker_store(&w, i * BLOCKS, BLOCKS);
    expect_accounted(6 * BLOCKS);
    cr_expect_eq(metric(w.client, "dumps_slowed"), 0u);
}

Test(pressure, slow_holds_answers_back)
{
    open_host("nvme.on_write_stall=slow", "nvme.write_stall_max=20s");
    for (unsigned i = 0; i < 6; i++)
        worker_store(&w, i * BLOCKS, BLOCKS);
    cr_expect_gt(metric(w.client, "dumps_slowed"), 0u);
    expect_accounted(6 * BLOCKS);
    cr_expect_eq(metric(w.client, "nvme_write_dropped"), 0u, "engines were as slow as the disk");
}

Test(pressure, slow_holds_an_answer_for_so_long_and_no_longer)
{
    open_host("nvme.on_write_stall=slow", "nvme.write_stall_max=1ms");
    for (unsigned i = 0; i < 6; i++)
        worker_store(&w, i * BLOCKS, BLOCKS);
    cr_expect_gt(metric(w.client, "nvme_write_dropped") + metric(w.client, "nvme_write_waits"), 0u,
                 "answers came with the disk, not before");
    expect_accounted(6 * BLOCKS);
}

/* Answers that say durable are right: a kill loses none of these blocks. */
Test(pressure, durable_dumps_tell_the_truth)
{
    static uint8_t keys[BLOCKS * WORKER_KEY_BYTES], status[6][BLOCKS];
    uint32_t blocks[BLOCKS], acknowledged = 0;

    open_host("nvme.on_write_stall=drop", NULL);
    for (uint32_t i = 0; i < BLOCKS; i++)
        blocks[i] = i;
    for (unsigned round = 0; round < 6; round++) {
        for (uint32_t i = 0; i < BLOCKS; i++)
            worker_fill(&w, i, round * BLOCKS + i);
        keys_make(round * BLOCKS, BLOCKS, keys);
        if (round % 2) {
            cr_assert_eq(worker_dump(&w, keys, blocks, BLOCKS, NULL), 0, "%s", ucm_errmsg());
            memset(status[round], UCM_BLOCK_IS_NOT_DURABLE, BLOCKS);
            continue;
        }
        cr_assert_eq(worker_dump_durable(&w, keys, blocks, BLOCKS, status[round]), 0, "%s",
                     ucm_errmsg());
    }
    worker_close(&w);
    host_kill(&host);
    host_restart(&host);
    worker_open(&w, &host, &options);
    wait_ok(w.client);
    for (unsigned i = 0; i < 6 * BLOCKS; i++) {
        uint8_t answer = status[i / BLOCKS][i % BLOCKS], got;
        uint32_t first = 0;

        if (answer != UCM_BLOCK_IS_OK) {
            cr_expect_eq(answer, UCM_BLOCK_IS_NOT_DURABLE);
            continue;
        }
        acknowledged++;
        key_make(i, keys);
        cr_assert_eq(worker_load(&w, keys, &first, 1, &got), 0, "%s", ucm_errmsg());
        cr_assert_eq(got, UCM_BLOCK_IS_OK, "block %u was acknowledged", i);
        cr_assert_eq(worker_differs(&w, 0, i), 0u);
    }
    cr_expect_gt(acknowledged, 0u);
}
