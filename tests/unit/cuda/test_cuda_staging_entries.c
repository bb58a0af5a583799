/* A ring has few entries. While several tenants use the bus, one tenant's small requests that wait
 * for the last free entry share it. The test is the copy agent, so it decides when an entry is free
 * again. */
#include "tests/unit/cuda/cuda_rig.h"

#define ENTRIES 4u
#define HELD (ENTRIES - 1) /* that one direction may have */
#define FRAGMENT (64u << 10)
#define ENTRY (16u * FRAGMENT) /* eight requests of two blocks */
#define JOBS 23u

static struct worker_side a;
static struct test_job jobs[JOBS];
static uint32_t tags[ENTRIES]; /* of the orders that the test has seen */

static void straight(uint32_t tenant)
{
    static struct test_job j;

    for (unsigned op = 0; op < 2; op++) {
        copy_init(&j, &a, op ? DEVICE_DUMP : DEVICE_LOAD);
        copy_add(&j, &a, 0, 0);
        j.job.who = (struct fair_who){.tenant = tenant, .weight = 100};
        j.job.straight = true;
        job_run(&j);
    }
}

/* Tenants 1 to n have used both directions. */
static void begin(uint32_t n_planes, unsigned tenants)
{
    daemon_begin(COPY_STAGED, 10 * MIB);
    worker_begin(&a, getpid(), n_planes, FRAGMENT / n_planes, 0);
    worker_ring(&a, getpid(), ENTRY, ENTRIES);
    memset(tags, 0, sizeof(tags));
    for (uint32_t tenant = 1; tenant <= tenants; tenant++)
        straight(tenant);
    bytes_random(slots, BLOCKS * a.slot_bytes, 3);
    bytes_random((void *)(uintptr_t)a.memory, a.bytes, 4);
}

static void end(void)
{
    worker_end(&a);
    daemon_end();
}

TestSuite(cuda_staging_entries, .fini = end, .timeout = 60);

/* Request i has blocks 2 i and 2 i + 1 and their slots. */
static void request(enum device_op op, unsigned i, uint32_t tenant)
{
    copy_init(&jobs[i], &a, op);
    copy_add(&jobs[i], &a, 2 * i, 2 * i);
    copy_add(&jobs[i], &a, 2 * i + 1, 2 * i + 1);
    jobs[i].job.who = (struct fair_who){.tenant = tenant, .weight = 100};
}

static void submit(enum device_op op, unsigned first, unsigned n)
{
    for (unsigned i = first; i < first + n; i++) {
        request(op, i, 1);
        job_submit(&jobs[i], gpu);
    }
}

/* ---- the copy agent ---- */

static uint64_t state_of(uint32_t entry)
{
    return atomic_load(&a.shared->words.entries[entry].state);
}

/* Runs the event loop until an entry has an order that was not seen before. */
static uint32_t order_wait(void)
{
    for (;;) {
        for (uint32_t i = 0; i < ENTRIES; i++)
            if (ucm_staging_phase_of(state_of(i)) == STAGING_POSTED &&
                ucm_staging_tag_of(state_of(i)) != tags[i]) {
                tags[i] = ucm_staging_tag_of(state_of(i));
                fake_cuda_fence();
                return i;
            }
        uv_run(&loop, UV_RUN_NOWAIT);
    }
}

static void order_move(uint32_t entry, enum ucm_staging_phase from, enum ucm_staging_phase to)
{
    fake_cuda_fence();
    cr_assert(ucm_staging_move(a.shared, entry, tags[entry], from, to));
}

/* What its kernel would do. */
static void order_serve(uint32_t entry)
{
    const struct ucm_staging_order *o = &a.shared->orders[entry];
    struct ucm_copy_plane planes[64];
    struct ucm_copy_item items[BLOCKS];
    uint64_t at = 0;

    order_move(entry, STAGING_POSTED, STAGING_CLAIMED);
    for (uint32_t p = 0; p < o->n_planes; p++) {
        planes[p] = a.region->planes[o->first_plane + p];
        planes[p].base += a.memory - a.region->planes[0].base;
        planes[p].slot_offset = at;
        at += planes[p].block_bytes;
    }
    for (uint32_t i = 0; i < o->n_items; i++)
        items[i] = (struct ucm_copy_item){
            .slot = a.entries + entry * ENTRY + i * ucm_staging_pitch(at), .block = o->blocks[i]};
    ucm_copy_ref(planes, o->n_planes, items, o->n_items, (enum ucm_copy_direction)o->direction);
    order_move(entry, STAGING_CLAIMED, STAGING_DONE);
}

static uint32_t order_blocks(uint32_t entry)
{
    return a.shared->orders[entry].n_items;
}

/* As many requests as one direction has entries, which the copy agent holds, and the others after them. */
static void entries_fill(enum device_op op, uint32_t held[HELD])
{
    for (unsigned i = 0; i < HELD; i++) {
        submit(op, i, 1);
        held[i] = order_wait();
        cr_assert_eq(order_blocks(held[i]), 2);
    }
}

static void entries_hold(enum device_op op, uint32_t held[HELD])
{
    entries_fill(op, held);
    submit(op, HELD, JOBS - HELD);
}

static void jobs_right(void)
{
    for (unsigned i = 0; i < JOBS; i++)
        cr_expect_eq(job_wait(&jobs[i]), 0, "%u: %s", i, jobs[i].job.error.text);
}

static void all_right(void)
{
    jobs_right();
    cr_expect_eq(memcmp((void *)(uintptr_t)a.memory, slots, 2 * JOBS * a.slot_bytes), 0);
}

/* ---- tests ---- */

static void shared_test(enum device_op op)
{
    uint32_t held[HELD], entry;

    begin(1, 2);
    entries_hold(op, held);
    for (unsigned n = 0, left = JOBS - HELD; left > 0; n++) {
        unsigned expect = left < 8 ? left : 8;

        order_serve(held[n]);
        entry = order_wait();
        cr_assert_eq(entry, held[n], "of one entry at a time the copy agent is done");
        cr_assert_eq(order_blocks(entry), 2 * expect);
        for (uint32_t i = 0; i < order_blocks(entry); i++)
            cr_expect_eq(a.shared->orders[entry].blocks[i], 2 * (JOBS - left) + i,
                         "in their order");
        left -= expect;
    }
    for (unsigned n = 0; n < HELD; n++)
        order_serve(held[n]);
    all_right();
}

Test(cuda_staging_entries, loads_share_the_last_free_one)
{
    shared_test(DEVICE_LOAD);
}

Test(cuda_staging_entries, dumps_share_the_last_free_one)
{
    shared_test(DEVICE_DUMP);
}

Test(cuda_staging_entries, alone_each_request_has_its_own)
{
    uint32_t held[HELD];

    begin(1, 1);
    entries_hold(DEVICE_LOAD, held);
    for (unsigned i = HELD; i < JOBS; i++) {
        order_serve(held[i % HELD]);
        cr_expect_eq(order_wait(), held[i % HELD]);
        cr_expect_eq(order_blocks(held[i % HELD]), 2);
    }
    for (unsigned n = 0; n < HELD; n++)
        order_serve(held[(JOBS + n) % HELD]);
    all_right();
}

/* One order of eight requests, which share the first entry that is free again. */
static uint32_t first_shared(uint32_t held[HELD])
{
    uint32_t entry;

    begin(1, 2);
    entries_hold(DEVICE_LOAD, held);
    order_serve(held[0]);
    entry = order_wait();
    cr_assert_eq(order_blocks(entry), 16);
    return entry;
}

/* The copy engines have done their part for all requests that share the entry. The copy agent does
 * nothing. */
Test(cuda_staging_entries, a_refused_one_goes_straight_request_by_request)
{
    uint32_t held[HELD], entry = first_shared(held);

    order_move(entry, STAGING_POSTED, STAGING_CLAIMED);
    order_move(entry, STAGING_CLAIMED, STAGING_REFUSED);
    for (unsigned n = 1; n < HELD; n++)
        order_serve(held[n]);
    all_right();
}

Test(cuda_staging_entries, one_that_fails_fails_all_in_it)
{
    uint32_t held[HELD], entry = first_shared(held);

    for (unsigned n = 1; n < HELD; n++)
        order_serve(held[n]);
    while (!jobs[1].done || !jobs[2].done)
        uv_run(&loop, UV_RUN_ONCE);
    order_move(entry, STAGING_POSTED, STAGING_REVOKED); /* by the worker's library */
    for (unsigned i = 0; i < JOBS; i++) {
        int rc = job_wait_passing(&jobs[i]);

        if (i >= HELD && i < HELD + 8)
            cr_expect(rc == -EIO && strstr(jobs[i].job.error.text, "abandoned"), "%u: %d, %s", i,
                      rc, jobs[i].job.error.text);
        else
            cr_expect_eq(rc, 0, "%u: %s", i, jobs[i].job.error.text);
    }
}

Test(cuda_staging_entries, a_lost_context_ends_all_in_them)
{
    static struct test_job seen;
    uint32_t held[HELD];

    begin(1, 2);
    entries_hold(DEVICE_LOAD, held);
    order_serve(held[0]);
    (void)order_wait(); /* one is posted, */
    fake_cuda.delay_us = 20000;
    order_serve(held[1]); /* one is filled or will be */
    loop_for(2);
    fake_cuda.lost = CUDA_ERROR_LAUNCH_FAILED;
    /* its launch shows the daemon the loss, if no other call does */
    copy_init(&seen, &a, DEVICE_LOAD);
    copy_add(&seen, &a, 0, 0);
    seen.job.straight = true;
    job_submit(&seen, gpu);
    cr_expect_eq(job_wait(&seen), -EIO);
    for (unsigned i = 0; i < JOBS; i++)
        if (job_wait(&jobs[i]) != 0)
            cr_expect(strstr(jobs[i].job.error.text, "restart"), "%u: %s", i,
                      jobs[i].job.error.text);
    for (unsigned i = HELD; i < JOBS; i++)
        cr_expect_eq(jobs[i].status, -EIO, "%u", i);
    fake_cuda.lost = CUDA_SUCCESS;
}

/* Requests of other planes or another region, and those that re-rotate K, are passed over. */
Test(cuda_staging_entries, only_what_one_order_can_say_shares_one)
{
    uint32_t held[HELD], entry;

    begin(2, 2);
    entries_fill(DEVICE_LOAD, held);
    for (unsigned i = HELD; i < JOBS; i++) {
        request(DEVICE_LOAD, i, i % 2 ? 1 : 2);
        jobs[i].job.first_plane = i % 4 >= 2;
        jobs[i].job.n_planes = 1;
        job_submit(&jobs[i], gpu);
    }
    for (unsigned done = HELD, n = 0; done < JOBS; n = (n + 1) % HELD) {
        const struct ucm_staging_order *o = &a.shared->orders[held[n]];
        uint32_t first;

        order_serve(held[n]);
        entry = order_wait();
        cr_assert_eq(entry, held[n]);
        first = o->blocks[0] / 2;
        cr_expect_eq(o->first_plane, first % 4 >= 2);
        cr_expect_eq(o->n_planes, 1);
        for (uint32_t i = 0; i < o->n_items; i++)
            cr_expect_eq(o->blocks[i] / 2 % 4, first % 4, "of one tenant, of the same planes");
        done += o->n_items / 2;
    }
    for (unsigned n = 0; n < HELD; n++)
        if (ucm_staging_phase_of(state_of(held[n])) == STAGING_POSTED)
            order_serve(held[n]);
    jobs_right();
}
