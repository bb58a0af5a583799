/* A full arena, pins, leases, and evicting what is in use. */
#include "tests/integration/harness.h"

#include <criterion/criterion.h>
#include <string.h>

static struct host host;
static struct worker w;

/* 64 MiB of arena, blocks of 256 KiB: 256 slots. */
static void open_host(bool nvme)
{
    host = (struct host){.nvme = nvme, .sets = {"arena.size=64MiB"}};
    host_start(&host);
    worker_open(&w, &host, &(struct worker_options){.shard_bytes = 65536});
    arena_wait(w.client);
}

static void close_host(void)
{
    worker_close(&w);
    host_remove(&host);
}

TestSuite(room, .fini = close_host, .timeout = 90);

static uint32_t lease_take(uint64_t first, uint32_t n, uint32_t lease_ms)
{
    uint8_t keys[512 * WORKER_KEY_BYTES];
    struct ucm_lookup l = {.keys = keys, .n_keys = n, .lease_ms = lease_ms};
    uint32_t hits, lease = 0;

    keys_make(first, n, keys);
    cr_assert_eq(ucm_lookup_prefix(w.ns, &l, -1, &hits, NULL, &lease), 0, "%s", ucm_errmsg());
    cr_assert_eq(hits, n);
    return lease;
}

static void store(uint64_t first, uint32_t n)
{
    for (uint64_t i = first; i < first + n; i += 64)
        worker_store(&w, i, 64);
}

Test(room, a_full_arena_evicts_the_oldest)
{
    uint8_t key[WORKER_KEY_BYTES];

    open_host(false);
    store(0, 320);
    cr_expect_geq(metric(w.client, "arena_evicted_blocks"), 64u);
    key_make(319, key);
    cr_expect_eq(worker_hits(&w, key, 1), 1u);
    cr_expect_leq(metric(w.client, "arena_bytes_used"), 64u << 20);
}

Test(room, everything_leased_skips_the_store_at_once)
{
    uint8_t key[WORKER_KEY_BYTES], status;
    uint32_t lease;
    uint64_t start;

    open_host(false);
    store(0, 256);
    lease = lease_take(0, 256, 60000);
    cr_assert_neq(lease, 0u);
    key_make(9999, key);
    start = now_ms();
    cr_assert_eq(worker_dump(&w, key, &(uint32_t){0}, 1, &status), 0);
    cr_expect_eq(status, UCM_BLOCK_IS_NO_ROOM);
    cr_expect_lt(now_ms() - start, 5000u);
    cr_expect_geq(metric(w.client, "dump_blocks_skipped"), 1u);
    cr_assert_eq(ucm_release(w.client, lease, -1), 0);
    cr_assert_eq(worker_dump(&w, key, &(uint32_t){0}, 1, &status), 0);
    cr_expect_eq(status, UCM_BLOCK_IS_OK);
}

Test(room, a_lease_ends_by_itself)
{
    uint8_t key[WORKER_KEY_BYTES], status;

    open_host(false);
    store(0, 256);
    cr_assert_neq(lease_take(0, 256, 300), 0u);
    cr_assert(metric_reaches(w.client, "leases_expired", 1, 5000));
    key_make(9999, key);
    cr_assert_eq(worker_dump(&w, key, &(uint32_t){0}, 1, &status), 0);
    cr_expect_eq(status, UCM_BLOCK_IS_OK);
}

Test(room, pinned_blocks_stay)
{
    uint8_t keys[64 * WORKER_KEY_BYTES];
    uint64_t changed;

    open_host(false);
    store(0, 64);
    keys_make(0, 64, keys);
    cr_assert_eq(ucm_pin(w.ns, keys, 64, -1, &changed), 0);
    cr_expect_eq(changed, 64u);
    store(1000, 512);
    cr_expect_eq(worker_hits(&w, keys, 64), 64u);
    cr_assert_eq(ucm_unpin(w.ns, keys, 64, -1, &changed), 0);
    cr_expect_eq(changed, 64u);
    store(2000, 512);
    cr_expect_lt(worker_hits(&w, keys, 64), 64u);
}

/* Half of the arena is pinned, and coldest: the other half serves all that come. */
Test(room, pinned_blocks_do_not_hide_those_that_may_go)
{
    struct worker small;
    uint8_t keys[64 * WORKER_KEY_BYTES];
    uint64_t changed;

    open_host(false);
    worker_open(&small, &host, &(struct worker_options){.model = "small", .shard_bytes = 4096});
    for (uint64_t i = 0; i < 2048; i += 64) {
        worker_store(&small, i, 64);
        keys_make(i, 64, keys);
        cr_assert_eq(ucm_pin(small.ns, keys, 64, -1, &changed), 0);
        cr_assert_eq(changed, 64u);
    }
    for (uint64_t i = 100000; i < 110000; i += 64)
        worker_store(&small, i, 64); /* asserts that none is skipped */
    worker_close(&small);
}

/* A block that is evicted by name while leased: no new hit, also for who names the lease, whose end frees it. */
Test(room, a_leased_block_that_is_evicted_by_name_goes_with_the_lease)
{
    struct ucm_transfer t;
    struct ucm_task *task;
    struct ucm_result r;
    uint8_t key[WORKER_KEY_BYTES];
    uint64_t changed, busy;
    uint32_t lease;

    open_host(false);
    worker_store(&w, 5, 1);
    key_make(5, key);
    lease = lease_take(5, 1, 60000);
    cr_assert_eq(ucm_evict(w.ns, key, 1, -1, &changed, &busy), 0);
    cr_expect_eq(changed, 0u);
    cr_expect_eq(busy, 1u);
    cr_expect_eq(worker_hits(&w, key, 1), 0u);
    worker_clear(&w);
    t = (struct ucm_transfer){.keys = key, .blocks = &(uint32_t){7}, .n_keys = 1, .lease = lease};
    cr_assert_eq(ucm_load(w.region, &t, -1, &task), 0);
    cr_assert_eq(ucm_task_wait(task, 20000, &r), 0);
    cr_expect_eq(r.result[0], UCM_BLOCK_IS_MISS);
    ucm_task_free(task);
    for (int i = 0; i < 2000 && metric(w.client, "arena_bytes_used") > 0; i++)
        sleep_ms(10);
    cr_expect_eq(metric(w.client, "arena_bytes_used"), 0u,
                 "gone with the lease that the load ended");
}

Test(room, evict_and_purge_by_name)
{
    uint8_t keys[64 * WORKER_KEY_BYTES];
    uint64_t changed, busy;

    open_host(true);
    store(0, 64);
    keys_make(0, 64, keys);
    cr_assert(metric_reaches(w.client, "nvme_writes", 64, 20000));
    cr_assert_eq(ucm_evict(w.ns, keys, 10, -1, &changed, &busy), 0);
    cr_expect_eq(changed + busy, 10u);
    cr_expect_eq(worker_hits(&w, keys, 64), 0u, "the head is gone");
    cr_expect_eq(worker_hits(&w, keys + 10 * WORKER_KEY_BYTES, 54), 54u);
    cr_assert_eq(ucm_evict(w.ns, NULL, 0, -1, &changed, &busy), 0);
    cr_expect_eq(changed + busy, 54u);
    cr_expect_eq(metric(w.client, "blocks"), 0u);
    cr_expect_eq(metric(w.client, "nvme_bytes_used"), 0u);
}

/* Two slot sizes: an arena full of one makes way for the other. */
Test(room, extents_move_between_sizes)
{
    struct worker small;
    uint8_t key[WORKER_KEY_BYTES];

    open_host(false);
    store(0, 256);
    worker_open(&small, &host, &(struct worker_options){.model = "small", .shard_bytes = 1024});
    for (uint64_t i = 0; i < 640; i += 64)
        worker_store(&small, i, 64);
    cr_expect_geq(metric(w.client, "arena_extents_moved"), 1u);
    for (uint64_t i = 0; i < 640; i += 64) {
        key_make(i, key);
        cr_expect_eq(worker_hits(&small, key, 1), 1u);
    }
    store(5000, 256);
    key_make(5255, key);
    cr_expect_eq(worker_hits(&w, key, 1), 1u);
    worker_close(&small);
}

/* A dump larger than the arena must not push its own head out. */
Test(room, a_dump_larger_than_the_arena_keeps_its_head)
{
    static uint8_t keys[512 * WORKER_KEY_BYTES], status[512];
    static uint32_t blocks[512];
    uint32_t ok = 0;

    open_host(false);
    worker_close(&w);
    worker_open(&w, &host, &(struct worker_options){.shard_bytes = 65536, .blocks = 512});
    keys_make(0, 512, keys);
    for (uint32_t i = 0; i < 512; i++)
        blocks[i] = i;
    cr_assert_eq(worker_dump(&w, keys, blocks, 512, status), 0, "%s", ucm_errmsg());
    for (uint32_t i = 0; i < 512; i++)
        ok += status[i] == UCM_BLOCK_IS_OK;
    cr_expect_eq(ok, 256u);
    cr_expect_eq(worker_hits(&w, keys, 512), 256u);
}
