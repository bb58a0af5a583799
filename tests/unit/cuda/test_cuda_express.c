/* A small load goes past another tenant's large one, by a kernel in a stream of its own. A large
 * load waits for its turn. It goes by the copy engines, so only small loads count as kernels. */
#include "daemon/cuda/gpu.h"
#include "tests/unit/cuda/cuda_rig.h"

#define FRAGMENT (1u << 20)
#define ROUNDS 1000u

static struct worker_side a;
static struct test_job large, small;

static void begin(bool others)
{
    struct gpu *g;

    daemon_begin(COPY_AUTO, BLOCKS * MIB);
    worker_begin(&a, getpid(), 1, FRAGMENT, 0);
    bytes_random(slots, BLOCKS * a.slot_bytes, 3);
    g = (struct gpu *)gpu;
    g->busy = (struct busy){.others = others,
                            .until_ns = UINT64_MAX}; /* no probe: the thread waits for jobs */
    fake_cuda.delay_us = 20000;
}

static void end(void)
{
    worker_end(&a);
    daemon_end();
}

static uint64_t kernels(void)
{
    struct device_stats stats;

    gpu->ops->stats(gpu, &stats);
    return stats.launches[COPY_SM];
}

/* One tenant loads all blocks but the last n. Then another tenant loads those. */
static void load_both(uint32_t n)
{
    memset((void *)(uintptr_t)a.memory, 0, a.bytes);
    copy_init(&large, &a, DEVICE_LOAD);
    copy_init(&small, &a, DEVICE_LOAD);
    for (uint32_t i = 0; i < BLOCKS; i++)
        copy_add(i < BLOCKS - n ? &large : &small, &a, i, i);
    large.job.who = (struct fair_who){.tenant = 1, .weight = 100};
    small.job.who = (struct fair_who){.tenant = 2, .weight = 100};
    job_submit(&large, gpu);
    job_submit(&small, gpu);
    cr_assert_eq(job_wait(&small), 0, "%s", small.job.error.text);
    cr_assert_eq(job_wait(&large), 0, "%s", large.job.error.text);
    cr_assert_eq(memcmp((void *)(uintptr_t)a.memory, slots, BLOCKS * a.slot_bytes), 0);
}

/* The large one may have ended before the small one comes: then there is nothing to overtake. */
Test(cuda_express, a_small_load_overtakes, .timeout = 120)
{
    begin(false);
    for (unsigned i = 0; i < ROUNDS && kernels() == 0; i++)
        load_both(1);
    cr_expect_gt(kernels(), 0);
    end();
}

static void none_overtakes(bool others, uint32_t n)
{
    begin(others);
    for (unsigned i = 0; i < 3; i++)
        load_both(n);
    cr_expect_eq(kernels(), 0);
    end();
}

Test(cuda_express, a_larger_one_waits_for_its_turn, .timeout = 120)
{
    none_overtakes(false, 2);
}

/* Kernels of several processes take turns of milliseconds. */
Test(cuda_express, beside_others_kernels_none_overtakes, .timeout = 120)
{
    none_overtakes(true, 1);
}
