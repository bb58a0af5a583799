/* A full arena: which blocks go, and which stay. */
#include "tests/integration/harness.h"

#include <criterion/criterion.h>

static struct host host;
static struct worker w;

/* 16 MiB of arena, blocks of 64 KiB: 256 slots. */
static void open_host(void)
{
    host_start(&host);
    worker_open(&w, &host, &(struct worker_options){.layer_bytes = 16384});
    arena_wait(w.client);
}

static void close_host(void)
{
    worker_close(&w);
    host_remove(&host);
}

TestSuite(room, .fini = close_host, .timeout = 90);

static void store(uint64_t first, uint32_t n)
{
    for (uint64_t i = first; i < first + n; i += 64)
        worker_store(&w, i, 64);
}

/* Two slot sizes: an arena full of one makes way for the other. */
Test(room, slabs_move_between_sizes)
{
    struct worker small;

    open_host();
    store(0, 256);
    worker_open(&small, &host, &(struct worker_options){.model = "small", .layer_bytes = 1024});
    for (uint64_t i = 0; i < 640; i += 64)
        worker_store(&small, i, 64);
    cr_expect_geq(metric(w.client, "arena_slabs_moved"), 1u);
    for (uint64_t i = 0; i < 640; i += 64)
        cr_expect_eq(worker_hits(&small, i, 1), 1u);
    store(5000, 256);
    cr_expect_eq(worker_hits(&w, 5255, 1), 1u);
    worker_close(&small);
}

/* A dump larger than the arena must not push its own head out. */
Test(room, a_dump_larger_than_the_arena_keeps_its_head)
{
    static uint8_t keys[512 * WORKER_KEY_BYTES], status[512];
    static uint32_t blocks[512];
    uint32_t ok = 0;

    open_host();
    worker_close(&w);
    worker_open(&w, &host, &(struct worker_options){.layer_bytes = 16384, .blocks = 512});
    keys_make(0, 512, keys);
    for (uint32_t i = 0; i < 512; i++)
        blocks[i] = i;
    cr_assert_eq(worker_dump(&w, keys, blocks, 512, status), 0, "%s", ucm_errmsg());
    for (uint32_t i = 0; i < 512; i++)
        ok += status[i] == UCM_BLOCK_IS_OK;
    cr_expect_eq(ok, 256u);
    cr_expect_eq(worker_hits(&w, 0, 512), 256u);
}
