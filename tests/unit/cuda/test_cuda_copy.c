/* The device module and the copy agent over a slow driver that keeps the order of streams. Every
 * strategy makes the reference's copies, with jobs of both directions, many sizes and priorities
 * interleaved. Nothing that a GPU reads is overwritten before it was read. */
/* Sanitizers: thread */
#include "tests/unit/cuda/cuda_rig.h"
#include "tests/unit/random.h"

static struct worker_side a, b;

static void end(void)
{
    if (!set)
        return; /* the test did it */
    worker_end(&a);
    worker_end(&b);
    daemon_end();
}

TestSuite(cuda_copy, .fini = end, .timeout = 60);

/* ---- random copies ---- */

static void shuffle(uint32_t *v, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        v[i] = i;
    for (uint32_t i = n - 1; i > 0; i--) {
        uint32_t k = below(i + 1), was = v[i];

        v[i] = v[k];
        v[k] = was;
    }
}

/* Half of the blocks are dumped and half are loaded, by jobs of one to sixteen blocks under way at
 * once. The jobs are of two tenants, and some have only some of the planes. */
static unsigned jobs_make(struct test_job *jobs, struct worker_side *w)
{
    uint32_t blocks[BLOCKS], at[BLOCKS], i = 0;
    unsigned n = 0;

    shuffle(blocks, BLOCKS);
    shuffle(at, BLOCKS);
    while (i < BLOCKS) {
        struct test_job *j = &jobs[n++];
        uint32_t size = 1 + below(16);

        copy_init(j, w, i < BLOCKS / 2 ? DEVICE_DUMP : DEVICE_LOAD);
        j->job.priority = (uint8_t)below(8);
        j->job.who = (struct fair_who){.tenant = 1 + below(2), .weight = 100};
        j->job.beside = (enum device_beside)below(3);
        if (n % 3 == 0) {
            j->job.first_plane = below(w->n_planes);
            j->job.n_planes = 1 + below(w->n_planes - j->job.first_plane);
        }
        do {
            copy_add(j, w, at[i], blocks[i]);
            i++;
        } while (--size > 0 && i < BLOCKS && i != BLOCKS / 2);
    }
    return n;
}

static void round_of(struct worker_side *w, uint64_t seed)
{
    static struct test_job jobs[JOBS_MAX];
    unsigned n = jobs_make(jobs, w);
    uint8_t *want_slots = bytes_pages(BLOCKS * w->slot_bytes), *want_memory = bytes_pages(w->bytes);

    bytes_random(slots, BLOCKS * w->slot_bytes, seed);
    bytes_random((void *)(uintptr_t)w->memory, w->bytes, seed + 1);
    memcpy(want_slots, slots, BLOCKS * w->slot_bytes);
    memcpy(want_memory, (void *)(uintptr_t)w->memory, w->bytes);
    for (unsigned i = 0; i < n; i++)
        copy_expect(&jobs[i], w, want_slots, want_memory);
    for (unsigned i = 0; i < n; i++)
        job_submit(&jobs[i], gpu);
    for (unsigned i = 0; i < n; i++)
        cr_assert_eq(job_wait(&jobs[i]), 0, "%s", jobs[i].job.error.text);
    cr_assert_eq(memcmp(slots, want_slots, BLOCKS * w->slot_bytes), 0, "slots");
    cr_assert_eq(memcmp((void *)(uintptr_t)w->memory, want_memory, w->bytes), 0, "memory");
    free(want_slots);
    free(want_memory);
}

static uint64_t staged_bytes(void)
{
    struct device_stats stats;

    gpu->ops->stats(gpu, &stats);
    return stats.bytes[COPY_STAGED];
}

Test(cuda_copy, by_every_strategy)
{
    static const struct {
        enum copy_strategy strategy;
        bool copy_agent;
    } ways[] = {{COPY_DMA, false}, {COPY_SM, false}, {COPY_STAGED, true}, {COPY_AUTO, true}};
    static const struct {
        uint32_t planes, fragment, gap;
    } shapes[] = {{8, 4096, 0}, {5, 777, 13}, {3, 20000, 480}, {1, 65536, 0}};

    for (unsigned i = 0; i < sizeof(ways) / sizeof(ways[0]); i++) {
        daemon_begin(ways[i].strategy, 6 * MIB);
        fake_cuda.delay_us = ways[i].copy_agent ? 200 : 50;
        for (unsigned s = 0; s < sizeof(shapes) / sizeof(shapes[0]); s++) {
            worker_begin(&a, getpid(), shapes[s].planes, shapes[s].fragment, shapes[s].gap);
            if (ways[i].copy_agent)
                worker_copy_agent(&a, 131072, 4);
            for (unsigned round = 0; round < 3; round++)
                round_of(&a, 1 + 10 * s + round);
            worker_end(&a);
        }
        if (ways[i].strategy == COPY_STAGED)
            cr_assert_gt(staged_bytes(), 0);
        end();
    }
}

static void expect_staged(struct test_job *j, bool staged)
{
    uint64_t before = staged_bytes();

    job_run(j);
    cr_expect_eq(staged_bytes() > before, staged);
}

/* The device finds the staging ring by the region's connection. */
Test(cuda_copy, only_the_owners_ring_is_used)
{
    static struct test_job j;

    daemon_begin(COPY_STAGED, 6 * MIB);
    worker_begin(&a, getpid(), 4, 4096, 0);
    worker_begin(&b, getpid(), 4, 4096, 0);
    worker_copy_agent(&a, 65536, 4);
    b.region->ring_region = a.region->ring_region;
    copy_half(&j, &a, DEVICE_LOAD);
    expect_staged(&j, true);
    copy_half(&j, &a, DEVICE_LOAD);
    j.job.straight = true;
    expect_staged(&j, false);
    copy_half(&j, &b, DEVICE_LOAD);
    expect_staged(&j, false);
    ring_close(&a);
    copy_half(&j, &a, DEVICE_LOAD);
    expect_staged(&j, false);
}

/* ---- two regions on two rings of one GPU ---- */

Test(cuda_copy, two_workers_share_the_streams)
{
    static struct test_job jobs[2][4];

    daemon_begin(COPY_STAGED, 6 * MIB);
    fake_cuda.delay_us = 100;
    worker_begin(&a, getpid(), 4, 4096, 0);
    worker_begin(&b, getpid(), 2, 8192, 64);
    worker_copy_agent(&a, 65536, 3);
    worker_copy_agent(&b, 131072, 2);
    bytes_random(slots, BLOCKS * b.slot_bytes, 77);
    for (unsigned i = 0; i < 4; i++)
        for (unsigned k = 0; k < 2; k++) {
            struct worker_side *w = k ? &b : &a;

            copy_all(&jobs[k][i], w, DEVICE_LOAD);
            job_submit(&jobs[k][i], gpu);
        }
    for (unsigned i = 0; i < 4; i++)
        for (unsigned k = 0; k < 2; k++)
            cr_assert_eq(job_wait(&jobs[k][i]), 0, "%s", jobs[k][i].job.error.text);
    for (uint32_t n = 0; n < BLOCKS; n++)
        for (uint32_t p = 0; p < 2; p++)
            cr_assert_eq(memcmp((uint8_t *)(uintptr_t)b.memory + (p * BLOCKS + n) * 8256,
                                slots + n * b.slot_bytes + p * 8192, 8192),
                         0);
}

/* ---- bounds ---- */

#define ENTRIES 4u

static uint64_t most_of_an_order(void)
{
    uint64_t most = 0;

    for (unsigned s = 0; s < ENTRIES; s++) {
        uint64_t bytes = a.shared->orders[s].n_items * (uint64_t)a.fragment;

        most = bytes > most ? bytes : most;
    }
    return most;
}

/* A worker with larger entries does not get more of the bus at once. A load of 37 MiB takes four
 * orders, of which the last two are small. */
Test(cuda_copy, one_order_moves_16_mib_at_most)
{
    static struct test_job j;

    daemon_begin(COPY_STAGED, 40 * MIB);
    worker_begin(&a, getpid(), 1, 600 * 1024, 0);
    worker_copy_agent(&a, 20u << 20, ENTRIES);
    copy_all(&j, &a, DEVICE_LOAD);
    job_run(&j);
    cr_assert_gt(most_of_an_order(), 8u << 20);
    cr_assert_leq(most_of_an_order(), 16u << 20);
}

/* ---- alongside a worker that computes ---- */

/* Launches of a copy of 37 MiB, and how many were under way at once. */
static void launches_of(struct test_job *j, struct worker_side *w, enum device_op op,
                        enum device_beside beside, unsigned *launches, unsigned *at_once)
{
    struct device_stats before, after;

    copy_all(j, w, op);
    j->job.beside = beside;
    gpu->ops->stats(gpu, &before);
    (void)fake_cuda_most_events();
    job_run(j);
    gpu->ops->stats(gpu, &after);
    *launches = (unsigned)(after.launches[COPY_DMA] - before.launches[COPY_DMA]);
    *at_once = fake_cuda_most_events();
}

static void expect_gaps(struct worker_side *w, enum device_op op, enum device_beside beside,
                        bool gaps)
{
    static struct test_job j;
    unsigned launches, at_once;

    launches_of(&j, w, op, beside, &launches, &at_once);
    cr_expect_eq(launches, gaps ? 7 : 3, "%u launches, operation %d, beside %d", launches, op,
                 beside);
    cr_expect_eq(at_once > 1, !gaps, "%u at once, operation %d, beside %d", at_once, op, beside);
}

/* The engine's own copies get their turn between two launches. What a worker says holds for all
 * copies, also for those that say nothing. It holds until the worker says otherwise, says nothing
 * for a while, or closes its region. */
Test(cuda_copy, beside_steps_copies_leave_gaps)
{
    daemon_begin(COPY_DMA, 40 * MIB);
    fake_cuda.delay_us = 2000;
    worker_begin(&a, getpid(), 1, 600 * 1024, 0);
    expect_gaps(&a, DEVICE_LOAD, DEVICE_BESIDE_UNKNOWN, false);
    for (unsigned op = 0; op < 2; op++) {
        expect_gaps(&a, op ? DEVICE_DUMP : DEVICE_LOAD, DEVICE_BESIDE_STEPS, true);
        expect_gaps(&a, op ? DEVICE_DUMP : DEVICE_LOAD, DEVICE_BESIDE_NOTHING, false);
    }
    expect_gaps(&a, DEVICE_DUMP, DEVICE_BESIDE_STEPS, true);
    expect_gaps(&a, DEVICE_LOAD, DEVICE_BESIDE_UNKNOWN, true);
    fake_clock_pass(300);
    expect_gaps(&a, DEVICE_LOAD, DEVICE_BESIDE_UNKNOWN, false);
    expect_gaps(&a, DEVICE_DUMP, DEVICE_BESIDE_STEPS, true);
    worker_end(&a);
    worker_begin(&a, getpid(), 1, 600 * 1024, 0);
    expect_gaps(&a, DEVICE_LOAD, DEVICE_BESIDE_UNKNOWN, false);
}

/* A worker that is idle, or leaves, takes nothing from another. */
Test(cuda_copy, beside_one_of_two_that_compute)
{
    daemon_begin(COPY_DMA, 40 * MIB);
    fake_cuda.delay_us = 2000;
    for (unsigned leaves = 0; leaves < 2; leaves++) {
        worker_begin(&a, getpid(), 1, 600 * 1024, 0);
        worker_begin(&b, getpid(), 1, 600 * 1024, 0);
        expect_gaps(&a, DEVICE_LOAD, DEVICE_BESIDE_STEPS, true);
        expect_gaps(&b, DEVICE_LOAD, DEVICE_BESIDE_STEPS, true);
        if (leaves)
            worker_end(&b);
        else
            expect_gaps(&b, DEVICE_LOAD, DEVICE_BESIDE_NOTHING, true);
        expect_gaps(&a, DEVICE_LOAD, DEVICE_BESIDE_UNKNOWN, true);
        expect_gaps(&a, DEVICE_LOAD, DEVICE_BESIDE_NOTHING, false);
        if (!leaves)
            worker_end(&b);
        worker_end(&a);
    }
}

/* By this calibration the share of each launch lasts 6 s. */
Test(cuda_copy, who_is_in_a_hurry_waits_for_no_shared_tier)
{
    static struct test_job urgent, awaited, other;

    bus_byte_ns = 10;
    busy_max_percent = 1;
    daemon_begin(COPY_DMA, 40 * MIB);
    worker_begin(&a, getpid(), 1, 600 * 1024, 0);
    copy_all(&urgent, &a, DEVICE_LOAD);
    copy_all(&awaited, &a, DEVICE_LOAD);
    copy_half(&other, &a, DEVICE_DUMP);
    other.job.beside = urgent.job.beside = DEVICE_BESIDE_STEPS;
    urgent.job.deadline_ms = fake_clock_ms() + 1000;
    awaited.job.beside = DEVICE_BESIDE_AWAITED;
    job_run(&urgent);
    job_run(&other);
    job_run(&awaited);
}

Test(cuda_copy, loads_first_if_the_site_wants_that)
{
    busy_max_percent = 100;
    daemon_begin(COPY_DMA, 40 * MIB);
    fake_cuda.delay_us = 2000;
    worker_begin(&a, getpid(), 1, 600 * 1024, 0);
    expect_gaps(&a, DEVICE_LOAD, DEVICE_BESIDE_STEPS, false);
}

/* A dump after an event, also a staged one, reads the bytes that were there when the event came. */
Test(cuda_copy, a_dump_waits_for_its_event)
{
    static struct test_job j, other;
    struct worker_event event;

    daemon_begin(COPY_STAGED, 6 * MIB);
    worker_begin(&a, getpid(), 4, 4096, 0);
    worker_copy_agent(&a, 65536, 4);
    copy_half_behind(&j, &a, DEVICE_DUMP, &event, false, 20000);
    half_submit(&other, &a, DEVICE_LOAD);
    cr_assert_eq(job_wait(&other), 0, "others go on");
    cr_assert_not(j.done);
    bytes_random((void *)(uintptr_t)a.memory, a.bytes, 5);
    fake_cuda_event_signal(event.event, true);
    cr_assert_eq(job_wait(&j), 0, "%s", j.job.error.text);
    for (uint32_t n = half_first(DEVICE_DUMP); n < BLOCKS; n += 2)
        cr_assert_eq(memcmp(slots + n * a.slot_bytes + 4096,
                            (uint8_t *)(uintptr_t)a.memory + (BLOCKS + n) * 4096, 4096),
                     0);
    cr_assert_eq(cuEventDestroy(event.event), CUDA_SUCCESS);
}

/* No GPU has memory registered that was given back. Copies there are refused until it is added
 * again. */
Test(cuda_copy, memory_comes_and_goes)
{
    static struct test_job j;
    unsigned before;

    daemon_begin(COPY_SM, 6 * MIB);
    before = fake_cuda.registered;
    worker_begin(&a, getpid(), 4, 4096, 0);
    for (unsigned round = 1; round <= 3; round++) {
        half_run(&j, &a, DEVICE_LOAD);
        cr_expect_gt(fake_cuda.registered, before);
        device_set_memory_remove(set, slots, slots_bytes);
        cr_expect_eq(removals, round - 1, "not inside the call");
        while (removals < round)
            uv_run(&loop, UV_RUN_ONCE);
        cr_expect_eq(fake_cuda.registered, before);
        half_submit(&j, &a, DEVICE_LOAD);
        cr_expect_eq(job_wait(&j), -EINVAL);
        cr_assert_eq(device_set_memory_add(set, slots, slots_bytes), 0);
    }
    end();
    cr_expect_eq(fake_cuda.registered, before);
}
