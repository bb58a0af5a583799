/* NVMe below DRAM: a block that left DRAM is read only once for all workers that load it at the
 * same time. */
/* Sanitizers: address, thread */
#include "tests/integration/harness.h"

#include <criterion/criterion.h>
#include <stdlib.h>

/* With MLA one part holds a block, and every rank loads it. They do so at once, while it is only on
 * NVMe. */
Test(serve, reads_once_what_every_rank_loads)
{
    struct host h = {.nvme = true};
    struct worker rank[4];
    uint8_t keys[64 * WORKER_KEY_BYTES];
    uint32_t blocks[64];
    struct ucm_transfer t = {.keys = keys, .blocks = blocks, .n_keys = 64};
    struct ucm_task *task[4];
    struct ucm_result r;

    host_start(&h);
    for (uint32_t i = 0; i < 4; i++)
        worker_open(&rank[i], &h, &(struct worker_options){.layer_bytes = 16384});
    worker_store(&rank[0], 500, 64);
    cr_assert(metric_reaches(rank[0].client, "nvme_writes", 64, 20000));
    arena_wait(rank[0].client);
    cr_assert_eq(evict_dram(rank[0].client, 1, -1), 0, "%s", ucm_errmsg());
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
