/* The main road: dump, look up, load; in one process and across them; whole, by part, by layer. */
/* Sanitizers: address, thread */
#include "tests/integration/harness.h"

#include <criterion/criterion.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static void setup(struct host *h, bool nvme)
{
    h->nvme = nvme;
    host_start(h);
}

Test(serve, loads_what_another_connection_dumped)
{
    struct host h = {0};
    struct worker a, b;
    uint8_t keys[16 * WORKER_KEY_BYTES], status[16];
    uint32_t blocks[16];

    setup(&h, false);
    worker_open(&a, &h, &(struct worker_options){0});
    worker_store(&a, 100, 16);
    worker_close(&a);

    worker_open(&b, &h, &(struct worker_options){0});
    worker_clear(&b);
    keys_make(100, 16, keys);
    cr_assert_eq(worker_hits(&b, keys, 16), 16u);
    for (uint32_t i = 0; i < 16; i++)
        blocks[i] = 63 - 2 * i;
    cr_assert_eq(worker_load(&b, keys, blocks, 16, status), 0, "%s", ucm_errmsg());
    for (uint32_t i = 0; i < 16; i++) {
        cr_expect_eq(status[i], UCM_BLOCK_IS_OK);
        cr_expect_eq(worker_differs(&b, blocks[i], 100 + i), 0u);
        cr_expect_eq(b.memory[(blocks[i] - 1) * 4096], 0xEE, "a neighbouring block was written");
    }
    worker_close(&b);
    host_remove(&h);
}

Test(serve, outlives_the_process_that_dumped)
{
    struct host h = {0};
    struct worker b;
    uint8_t key[WORKER_KEY_BYTES], status;
    int exit_status;
    pid_t pid;

    setup(&h, false);
    pid = fork();
    if (pid == 0) {
        struct worker a;

        worker_open(&a, &h, &(struct worker_options){0});
        worker_store(&a, 1, 1);
        _exit(0); /* without a word to the daemon */
    }
    cr_assert_eq(waitpid(pid, &exit_status, 0), pid);
    cr_assert_eq(exit_status, 0);
    worker_open(&b, &h, &(struct worker_options){0});
    key_make(1, key);
    cr_assert_eq(worker_load(&b, key, &(uint32_t){5}, 1, &status), 0);
    cr_assert_eq(status, UCM_BLOCK_IS_OK);
    cr_assert_eq(worker_differs(&b, 5, 1), 0u);
    worker_close(&b);
    host_remove(&h);
}

Test(serve, is_no_hit_until_every_part_is_there)
{
    struct host h = {0};
    struct worker rank[2];
    uint8_t keys[4 * WORKER_KEY_BYTES], status[4];
    uint32_t blocks[4] = {0, 1, 2, 3};

    setup(&h, false);
    for (uint32_t r = 0; r < 2; r++)
        worker_open(&rank[r], &h, &(struct worker_options){.parts = 2, .part = r});
    keys_make(7, 4, keys);
    worker_store(&rank[0], 7, 4);
    cr_assert_eq(worker_hits(&rank[0], keys, 4), 0u);
    cr_assert_eq(worker_load(&rank[0], keys, blocks, 4, status), 0);
    cr_assert_eq(status[0], UCM_BLOCK_IS_MISS);

    worker_store(&rank[1], 7, 4);
    cr_assert_eq(worker_hits(&rank[0], keys, 4), 4u);
    for (uint32_t r = 0; r < 2; r++) {
        worker_clear(&rank[r]);
        cr_assert_eq(worker_load(&rank[r], keys, blocks, 4, status), 0);
        for (uint32_t i = 0; i < 4; i++)
            cr_assert_eq(worker_differs(&rank[r], i, 7 + i), 0u);
        worker_close(&rank[r]);
    }
    host_remove(&h);
}

static int dump_layers(struct worker *w, const uint8_t *key, uint32_t first, uint32_t n,
                       uint8_t *status)
{
    struct ucm_transfer t = {
        .keys = key, .blocks = &(uint32_t){3}, .n_keys = 1, .shard = first, .n_shards = n};
    struct ucm_task *task;
    struct ucm_result r;
    int rc;

    cr_assert_eq(ucm_dump(w->region, &t, -1, &task), 0, "%s", ucm_errmsg());
    rc = ucm_task_wait(task, 30000, &r);
    if (rc == 0)
        *status = r.result[0];
    ucm_task_free(task);
    return rc;
}

/* The original library published a block when its last layer arrived, though earlier ones had not.
 */
Test(serve, layers_in_any_order_publish_when_all_are_there)
{
    static const uint32_t order[] = {3, 0, 2, 1};
    struct host h = {0};
    struct worker w;
    uint8_t key[WORKER_KEY_BYTES], status;

    setup(&h, false);
    worker_open(&w, &h, &(struct worker_options){0});
    key_make(50, key);
    worker_fill(&w, 3, 50);
    for (int i = 0; i < 4; i++) {
        cr_assert_eq(worker_hits(&w, key, 1), 0u, "visible after %d of 4 layers", i);
        cr_assert_eq(dump_layers(&w, key, order[i], 1, &status), 0);
        cr_assert_eq(status, UCM_BLOCK_IS_OK);
    }
    cr_assert_eq(worker_hits(&w, key, 1), 1u);
    cr_assert_eq(dump_layers(&w, key, 1, 1, &status), 0);
    cr_assert_eq(status, UCM_BLOCK_IS_EXISTS);
    worker_clear(&w);
    cr_assert_eq(worker_load(&w, key, &(uint32_t){9}, 1, &status), 0);
    cr_assert_eq(worker_differs(&w, 9, 50), 0u);
    worker_close(&w);
    host_remove(&h);
}

Test(serve, a_layer_twice_does_not_stand_for_another)
{
    struct host h = {0};
    struct worker w;
    uint8_t key[WORKER_KEY_BYTES], status;

    setup(&h, false);
    worker_open(&w, &h, &(struct worker_options){0});
    key_make(51, key);
    for (int i = 0; i < 4; i++)
        cr_assert_eq(dump_layers(&w, key, 1, 1, &status), 0);
    cr_assert_eq(status, UCM_BLOCK_IS_IN_PROGRESS);
    cr_assert_eq(worker_hits(&w, key, 1), 0u);
    worker_close(&w);
    host_remove(&h);
}

Test(serve, unfinished_layers_vanish_with_their_connection)
{
    struct host h = {0};
    struct worker a, b;
    uint8_t key[WORKER_KEY_BYTES], status;

    setup(&h, false);
    worker_open(&a, &h, &(struct worker_options){0});
    worker_open(&b, &h, &(struct worker_options){0});
    key_make(60, key);
    cr_assert_eq(dump_layers(&a, key, 0, 2, &status), 0);
    cr_assert_eq(dump_layers(&b, key, 2, 2, &status), 0);
    cr_assert_eq(status, UCM_BLOCK_IS_IN_PROGRESS, "two workers' layers must not make one part");
    worker_close(&a);
    cr_assert(metric_reaches(b.client, "dump_blocks_dropped", 1, 5000));
    cr_assert_eq(worker_hits(&b, key, 1), 0u);
    cr_assert_eq(metric(b.client, "arena_bytes_used"), 0u);
    worker_fill(&b, 3, 60);
    cr_assert_eq(dump_layers(&b, key, 0, 4, &status), 0);
    cr_assert_eq(status, UCM_BLOCK_IS_OK);
    cr_assert_eq(worker_hits(&b, key, 1), 1u);
    worker_close(&b);
    host_remove(&h);
}

Test(serve, loads_single_layers)
{
    struct host h = {0};
    struct worker w;
    struct ucm_transfer t;
    struct ucm_task *task;
    struct ucm_result r;
    uint8_t key[WORKER_KEY_BYTES];
    size_t half;

    setup(&h, false);
    worker_open(&w, &h, &(struct worker_options){0});
    half = w.shard_bytes / 2;
    worker_store(&w, 70, 1);
    worker_clear(&w);
    key_make(70, key);
    t = (struct ucm_transfer){
        .keys = key, .blocks = &(uint32_t){0}, .n_keys = 1, .shard = 2, .n_shards = 1};
    cr_assert_eq(ucm_load(w.region, &t, -1, &task), 0);
    cr_assert_eq(ucm_task_wait(task, 30000, &r), 0);
    cr_assert_eq(r.bytes, w.shard_bytes);
    ucm_task_free(task);
    cr_assert_eq(worker_differs(&w, 0, 70) > 0, 1);
    for (uint32_t plane = 0; plane < 8; plane++)
        cr_assert_eq(w.memory[plane * half * w.blocks] == 0xEE, plane != 4 && plane != 5 ? 1 : 0,
                     "plane %u", plane);
    worker_close(&w);
    host_remove(&h);
}

Test(serve, reads_from_nvme_what_left_dram)
{
    struct host h = {0};
    struct worker w;
    uint8_t keys[64 * WORKER_KEY_BYTES], status[64];
    uint32_t blocks[64];
    uint64_t changed;

    setup(&h, true);
    worker_open(&w, &h, &(struct worker_options){.shard_bytes = 65536});
    worker_store(&w, 1000, 64);
    cr_assert(metric_reaches(w.client, "nvme_writes", 64, 20000));
    {
        /* {ns, tier: 1} by hand: leaving DRAM alone is an operators' call. */
        uint8_t params[] = "\x82\xa2ns\x01\xa4tier\x01", *p;
        size_t n;

        cr_assert_eq(ucm_call(w.client, "evict", params, sizeof(params) - 1, -1, &p, &n), 0, "%s",
                     ucm_errmsg());
        free(p);
        changed = metric(w.client, "arena_bytes_used");
        cr_assert_eq(changed, 0u);
    }
    keys_make(1000, 64, keys);
    cr_assert_eq(worker_hits(&w, keys, 64), 64u);
    worker_clear(&w);
    for (uint32_t i = 0; i < 64; i++)
        blocks[i] = i;
    cr_assert_eq(worker_load(&w, keys, blocks, 64, status), 0, "%s", ucm_errmsg());
    for (uint32_t i = 0; i < 64; i++) {
        cr_expect_eq(status[i], UCM_BLOCK_IS_OK);
        cr_expect_eq(worker_differs(&w, i, 1000 + i), 0u);
    }
    cr_assert_eq(metric(w.client, "load_blocks_nvme"), 64u);
    worker_close(&w);
    host_remove(&h);
}

/* Twice the arena goes in: what left DRAM must come back from NVMe, and every byte be right. */
Test(serve, keeps_more_than_the_arena_holds, .timeout = 120)
{
    struct host h = {0};
    struct worker w;
    uint8_t key[WORKER_KEY_BYTES], status;
    uint32_t found = 0;

    setup(&h, true);
    worker_open(&w, &h, &(struct worker_options){.shard_bytes = 65536});
    for (uint64_t i = 0; i < 512; i += 64) {
        worker_store(&w, i, 64);
        metric_reaches(w.client, "nvme_writes", i + 64, 10000);
    }
    for (uint64_t i = 0; i < 512; i++) {
        key_make(i, key);
        worker_clear(&w);
        cr_assert_eq(worker_load(&w, key, &(uint32_t){1}, 1, &status), 0);
        if (status != UCM_BLOCK_IS_OK)
            continue;
        found++;
        cr_assert_eq(worker_differs(&w, 1, i), 0u, "block %llu", (unsigned long long)i);
    }
    cr_assert_gt(found, 400u, "only %u of 512 blocks were kept", found);
    cr_assert_gt(metric(w.client, "load_blocks_nvme"), 100u);
    worker_close(&w);
    host_remove(&h);
}

Test(serve, a_restart_of_the_daemon_is_lived_through)
{
    struct host h = {0};
    struct worker w;
    uint8_t key[WORKER_KEY_BYTES], status;

    setup(&h, false);
    worker_open(&w, &h, &(struct worker_options){0});
    worker_store(&w, 1, 1);
    host_kill(&h);
    host_restart(&h);
    key_make(1, key);
    /* The first call may find the broken connection; the next one has a new one. */
    if (worker_load(&w, key, &(uint32_t){0}, 1, &status) != 0)
        cr_assert_eq(worker_load(&w, key, &(uint32_t){0}, 1, &status), 0, "%s", ucm_errmsg());
    cr_assert_eq(status, UCM_BLOCK_IS_MISS);
    cr_assert_eq(ucm_generation(w.client), 2u);
    worker_store(&w, 1, 1);
    worker_clear(&w);
    cr_assert_eq(worker_load(&w, key, &(uint32_t){2}, 1, &status), 0);
    cr_assert_eq(worker_differs(&w, 2, 1), 0u);
    worker_close(&w);
    host_remove(&h);
}

/* With MLA one part holds a block, and every rank loads it: at once, while it is only on NVMe. */
Test(serve, reads_once_what_every_rank_loads)
{
    struct host h = {0};
    struct worker rank[4];
    uint8_t keys[64 * WORKER_KEY_BYTES], params[] = "\x82\xa2ns\x01\xa4tier\x01", *p;
    uint32_t blocks[64];
    struct ucm_transfer t = {.keys = keys, .blocks = blocks, .n_keys = 64};
    struct ucm_task *task[4];
    struct ucm_result r;
    size_t n;

    setup(&h, true);
    for (uint32_t i = 0; i < 4; i++)
        worker_open(&rank[i], &h, &(struct worker_options){.shard_bytes = 65536, .blocks = 64});
    worker_store(&rank[0], 500, 64);
    cr_assert(metric_reaches(rank[0].client, "nvme_writes", 64, 20000));
    arena_wait(rank[0].client);
    cr_assert_eq(ucm_call(rank[0].client, "evict", params, sizeof(params) - 1, -1, &p, &n), 0);
    free(p);
    keys_make(500, 64, keys);
    for (uint32_t i = 0; i < 64; i++)
        blocks[i] = i;
    for (uint32_t i = 0; i < 4; i++) {
        worker_clear(&rank[i]);
        cr_assert_eq(ucm_load(rank[i].region, &t, -1, &task[i]), 0, "%s", ucm_errmsg());
    }
    for (uint32_t i = 0; i < 4; i++) {
        cr_assert_eq(ucm_task_wait(task[i], 30000, &r), 0, "%s", ucm_errmsg());
        cr_assert_eq(r.n_ok, 64);
        ucm_task_free(task[i]);
        for (uint32_t b = 0; b < 64; b++)
            cr_assert_eq(worker_differs(&rank[i], b, 500 + b), 0u, "rank %u, block %u", i, b);
    }
    cr_assert_eq(metric(rank[0].client, "nvme_reads"), 64u, "each block once");
    for (uint32_t i = 0; i < 4; i++)
        worker_close(&rank[i]);
    host_remove(&h);
}
