/* The durability that a namespace is opened with holds for the dumps that name none. */
#include "tests/integration/harness.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define BLOCKS 32u

static struct host host;
static struct worker w;
static const struct worker_options durable = {.durability = UCM_DURABLE_ON_NVME};

static void open_host(bool nvme)
{
    host = (struct host){.nvme = nvme};
    host_start(&host);
    worker_open(&w, &host, &durable);
}

static void close_host(void)
{
    worker_close(&w);
    host_remove(&host);
}

TestSuite(durability, .fini = close_host, .timeout = 60);

static void dump_as(uint64_t first, uint32_t durability, uint8_t expected)
{
    worker_store_as(&w, first, BLOCKS, durability, expected);
}

Test(durability, what_the_namespace_says_holds_and_a_dump_may_say_otherwise)
{
    open_host(true);
    dump_as(0, UCM_DURABLE_DEFAULT, UCM_BLOCK_IS_OK);
    cr_expect_eq(metric(w.client, "dump_blocks_durable"), BLOCKS);
    dump_as(100, UCM_DURABLE_IN_DRAM, UCM_BLOCK_IS_OK);
    cr_expect_eq(metric(w.client, "dump_blocks_durable"), BLOCKS);
    dump_as(200, UCM_DURABLE_ON_NVME, UCM_BLOCK_IS_OK);
    cr_expect_eq(metric(w.client, "dump_blocks_durable"), 2 * BLOCKS);
}

/* The blocks are not durable while a later start would not find them. Once it can, they are, with
 * those stored meanwhile. */
Test(durability, a_directory_that_took_no_name_is_asked_again)
{
    char path[96];

    host = (struct host){.nvme = true};
    host_start(&host);
    snprintf(path, sizeof(path), "%s/ucmd.namespaces", host.dir);
    cr_assert_eq(mkdir(path, 0700), 0);
    worker_open(&w, &host, &durable);
    dump_as(0, UCM_DURABLE_ON_NVME, UCM_BLOCK_IS_NOT_DURABLE);
    cr_assert(metric_reaches(w.client, "nvme_writes", BLOCKS, 10000));
    cr_assert_eq(rmdir(path), 0);
    wait_ok(w.client); /* the directory was asked again */
    dump_as(100, UCM_DURABLE_ON_NVME, UCM_BLOCK_IS_OK);
    worker_close(&w);
    host_kill(&host);
    host_restart(&host);
    worker_open(&w, &host, &durable);
    wait_ok(w.client);
    cr_expect_eq(worker_hits(&w, 0, BLOCKS), BLOCKS);
    cr_expect_eq(worker_hits(&w, 100, BLOCKS), BLOCKS);
}

/* It is a wish of one connection, and does not make two namespaces differ. */
Test(durability, others_of_the_same_namespace_are_left_alone)
{
    uint8_t mine[32], theirs[32];
    struct worker other;

    open_host(true);
    worker_open(&other, &host, &(struct worker_options){0});
    ucm_namespace_fingerprint(w.ns, mine);
    ucm_namespace_fingerprint(other.ns, theirs);
    cr_expect_arr_eq(mine, theirs, 32);
    worker_store(&other, 0, BLOCKS);
    cr_expect_eq(metric(w.client, "dump_blocks_durable"), 0u);
    cr_expect_eq(worker_hits(&w, 0, BLOCKS), BLOCKS);
    worker_close(&other);
}

/* The client opens its namespaces again by itself, with the same durability. */
Test(durability, it_outlives_the_daemon)
{
    open_host(true);
    host_kill(&host);
    host_restart(&host);
    dump_as(0, UCM_DURABLE_DEFAULT, UCM_BLOCK_IS_OK);
    cr_expect_eq(metric(w.client, "dump_blocks_durable"), BLOCKS);
}

Test(durability, without_a_tier_the_answer_says_so)
{
    open_host(false);
    dump_as(0, UCM_DURABLE_DEFAULT, UCM_BLOCK_IS_NOT_DURABLE);
    dump_as(100, UCM_DURABLE_IN_DRAM, UCM_BLOCK_IS_OK);
}
