/* Layer by layer against a real daemon. A load's layers lie in memory when they are reported. A
 * dump's blocks appear when the last layer is stored. */
#include "tests/integration/harness.h"
#include "tests/runner/bytes.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#define LAYERS 8
#define BLOCKS 256
#define LAYER_BYTES 8192
#define LARGE 24 /* blocks of 1 MiB; the arena has 16 MiB */

/* 16 MiB of blocks. */
struct rig {
    struct host h;
    struct worker w;
    uint8_t keys[BLOCKS * WORKER_KEY_BYTES], result[BLOCKS];
    uint32_t blocks[BLOCKS];
    uint8_t *want;
};
static struct rig rig;

static void setup(void)
{
    struct worker_options o = {.layers = LAYERS, .blocks = BLOCKS, .layer_bytes = LAYER_BYTES};

    rig.h.nvme = true;
    host_start(&rig.h);
    worker_open(&rig.w, &rig.h, &o);
    keys_make(100, BLOCKS, rig.keys);
    for (uint32_t i = 0; i < BLOCKS; i++)
        rig.blocks[i] = i;
    worker_store(&rig.w, 100, BLOCKS);
    rig.want = malloc(rig.w.memory_bytes);
    cr_assert_not_null(rig.want);
    memcpy(rig.want, rig.w.memory, rig.w.memory_bytes);
    worker_clear(&rig.w);
}

static void teardown(void)
{
    worker_close(&rig.w);
    host_remove(&rig.h);
    free(rig.want);
}

TestSuite(layers, .init = setup, .fini = teardown, .timeout = 60);

/* How many bytes of a layer are not as they were dumped. A layer's planes lie together. */
static size_t layer_differs(uint32_t layer, uint32_t block)
{
    size_t half = LAYER_BYTES / 2, differs = 0;

    for (uint32_t plane = 2 * layer; plane < 2 * layer + 2; plane++)
        differs += bytes_unlike(rig.w.memory + (plane * BLOCKS + block) * half,
                                rig.want + (plane * BLOCKS + block) * half, half);
    return differs;
}

static struct ucm_task *load_begin(struct ucm_transfer t)
{
    struct ucm_task *task = NULL;

    t.keys = rig.keys;
    t.blocks = rig.blocks;
    t.n_keys = BLOCKS;
    cr_assert_eq(ucm_load(rig.w.region, &t, -1, &task), 0, "%s", ucm_errmsg());
    return task;
}

static void load_end(struct ucm_task *task, uint32_t n_ok)
{
    struct ucm_result r;

    cr_assert_eq(ucm_task_wait(task, 30000, &r), 0, "%s", ucm_errmsg());
    cr_assert_eq(r.n_ok, n_ok);
    ucm_task_free(task);
}

static void assert_layers(struct ucm_task *task, uint32_t step, uint32_t missing)
{
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        cr_assert_eq(ucm_task_wait_layers(task, layer + 1, 30000, rig.result), 0, "%s",
                     ucm_errmsg());
        for (uint32_t i = 0; i < BLOCKS; i++) {
            cr_assert_eq(rig.result[i], i == missing ? UCM_BLOCK_IS_MISS : UCM_BLOCK_IS_OK);
            if (i != missing)
                cr_assert_eq(layer_differs(layer, i), 0, "step %u, layer %u of block %u", step,
                             layer, i);
        }
    }
}

Test(layers, of_a_load_lie_there_when_told)
{
    for (uint32_t step = 1; step <= LAYERS; step += step == 3 ? 5 : 1) {
        struct ucm_task *task = load_begin((struct ucm_transfer){.progress_interval = step});

        assert_layers(task, step, UINT32_MAX);
        load_end(task, BLOCKS);
        worker_clear(&rig.w);
    }
}

Test(layers, of_what_was_read_from_nvme_lie_there_too)
{
    struct ucm_task *task;

    cr_assert(metric_reaches(rig.w.client, "nvme_writes", BLOCKS, 20000));
    cr_assert_eq(evict_dram(rig.w.client, 1, -1), 0, "%s", ucm_errmsg());
    cr_assert_eq(ucm_evict(rig.w.ns, rig.keys + 7 * WORKER_KEY_BYTES, 1, -1, NULL, NULL), 0);
    task = load_begin((struct ucm_transfer){.progress_interval = 1});
    assert_layers(task, 1, 7);
    load_end(task, BLOCKS - 1);
}

Test(layers, of_a_range_count_from_its_first)
{
    struct ucm_task *task =
        load_begin((struct ucm_transfer){.layer = 3, .n_layers = 4, .progress_interval = 2});

    cr_assert_eq(ucm_task_wait_layers(task, 1, 30000, rig.result), 0, "%s", ucm_errmsg());
    for (uint32_t i = 0; i < BLOCKS; i++)
        cr_assert_eq(layer_differs(3, i), 0);
    load_end(task, BLOCKS);
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        cr_expect_eq(layer_differs(layer, 9) == 0, layer >= 3 && layer < 7, "layer %u", layer);
}

/* At any moment: the answer comes, each block that it calls OK is whole, and the daemon goes on. */
Test(layers, of_a_load_that_is_stopped_are_told_no_more)
{
    for (unsigned round = 0; round < 20; round++) {
        struct ucm_task *task = load_begin((struct ucm_transfer){.progress_interval = 1});
        struct ucm_result r;

        if (round > 0)
            cr_assert_eq(ucm_task_wait_layers(task, round % LAYERS, 30000, NULL), 0);
        if (round % 2)
            cr_assert_eq(ucm_task_cancel(task, -1), 0, "%s", ucm_errmsg());
        cr_assert_eq(ucm_task_wait_layers(task, LAYERS, 30000, rig.result), 0, "%s", ucm_errmsg());
        cr_assert_eq(ucm_task_wait(task, 30000, &r), 0, "%s", ucm_errmsg());
        cr_assert_arr_eq(rig.result, r.result, BLOCKS, "a done task's layers are its result");
        for (uint32_t i = 0; i < BLOCKS; i++)
            for (uint32_t layer = 0; layer < LAYERS && r.result[i] == UCM_BLOCK_IS_OK; layer++)
                cr_assert_eq(layer_differs(layer, i), 0);
        ucm_task_free(task);
        worker_clear(&rig.w);
    }
    cr_expect_eq(worker_hits(&rig.w, 100, BLOCKS), BLOCKS);
    cr_expect_eq(metric(rig.w.client, "requests_active"), 0u);
}

/* DRAM holds a third of the blocks. They come in turns, and all come. */
Test(layers, of_more_than_the_arena_holds_land)
{
    struct worker_options o = {
        .model = "large", .layers = LAYERS, .blocks = LARGE, .layer_bytes = 16 * LAYER_BYTES};
    struct ucm_transfer t = {
        .keys = rig.keys, .blocks = rig.blocks, .n_keys = LARGE, .progress_interval = 1};
    struct ucm_task *task;
    struct ucm_result r;
    struct worker w;

    worker_open(&w, &rig.h, &o);
    for (uint32_t i = 0; i < LARGE; i++) {
        uint8_t status;

        worker_fill(&w, i, i);
        cr_assert_eq(worker_dump_durable(&w, rig.keys + i * WORKER_KEY_BYTES, &i, 1, &status), 0);
        cr_assert_eq(status, UCM_BLOCK_IS_OK);
    }
    worker_clear(&w);
    cr_assert_eq(ucm_load(w.region, &t, -1, &task), 0, "%s", ucm_errmsg());
    for (uint32_t layer = 1; layer < LAYERS; layer++)
        cr_assert_eq(ucm_task_wait_layers(task, layer, 20000, NULL), 0, "%s", ucm_errmsg());
    cr_assert_eq(ucm_task_wait(task, 30000, &r), 0, "%s", ucm_errmsg());
    cr_assert_eq(r.n_ok, LARGE);
    for (uint32_t i = 0; i < LARGE; i++)
        cr_assert_eq(worker_differs(&w, i, i), 0u, "block %u", i);
    ucm_task_free(task);
    worker_close(&w);
}
