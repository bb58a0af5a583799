/* Copies on a GPU that do more than move: they encode or decode, or re-rotate K in loads. They go
 * through entries that a copy agent fills or empties, or straight by the daemon's kernels. Each
 * leaves the reference's bits and changes nothing else. An order that a copy agent can't or won't
 * do goes straight or fails, and is never wrong. */
#include "tests/unit/cuda/cuda_rig.h"

#include "kernels/rope/rope_cuda.h"

#define LAYERS 2u
#define PLANES (2 * LAYERS)
#define TABLES 3u
#define TENSOR 32768u /* of 16 tokens and 8 heads of 128 */

static struct worker_side w;
static struct ucm_encoding_spec spec;
static struct copy_agent_rope rope;
static uint32_t rope_at[PLANES];
static struct ucm_rope_angle tables[BLOCKS][UCM_ROPE_PAIRS_MAX];
static const struct ucm_rope_angle *shifts[BLOCKS];
static uint8_t *want_slots, *want_memory;

/* Properties of the region; both may apply. */
enum { ENCODED = 1, SHIFTED = 2 };

/* heads 8: a layer is wide enough to pass through entries; 1: it is not, in loads. */
static void begin_with(enum copy_strategy strategy, unsigned does, uint32_t heads, uint32_t dim)
{
    daemon_begin(strategy, 9 * MIB);
    spec = (struct ucm_encoding_spec){
        .encoding = UCM_ENCODING_FP8, .version = 1, .dtype = UCM_ENCODING_BF16, .n_tensors = 2};
    for (uint32_t s = 0; s < 2; s++)
        spec.tensor[s] = (struct ucm_encoding_tensor){s, 16, heads, 128, UCM_ENCODING_NHD};
    rope.spec = (struct ucm_rope_spec){.dtype = UCM_ROPE_BF16,
                                       .rows = TENSOR / (2 * dim),
                                       .dim = dim,
                                       .rotary = dim,
                                       .base = 10000};
    /* In an encoded namespace two planes are one layer; otherwise each plane is one. */
    for (uint32_t p = 0; p < PLANES; p++)
        rope_at[p] = does & ENCODED && p % 2 ? UCM_ROPE_NO_K : 0;
    rope.at = rope_at;
    w.encoding = does & ENCODED ? &spec : NULL;
    w.rope = does & SHIFTED ? &rope : NULL;
    worker_begin(&w, getpid(), PLANES, TENSOR / 8 * heads, 64);
    want_slots = bytes_pages(slots_bytes);
    want_memory = bytes_pages(w.bytes);
}

static void begin(enum copy_strategy strategy, unsigned does)
{
    begin_with(strategy, does, 8, 128);
}

static void end(void)
{
    worker_end(&w);
    w.encoding = NULL;
    w.rope = NULL;
    free(want_slots);
    free(want_memory);
    daemon_end();
    cr_assert_eq(failures, 0);
}

static void *of(uint64_t address)
{
    return (void *)(uintptr_t)address;
}

/* The bytes that the job should leave, by the C reference alone. */
static void expect_fragment(const struct test_job *j, uint32_t i, uint32_t p)
{
    const struct ucm_copy_plane *plane = &w.region->planes[p];
    uint64_t slot = j->items[i].slot - (uint64_t)(uintptr_t)slots + (uint64_t)(uintptr_t)want_slots;
    uint8_t *page = want_memory + (plane->base + j->items[i].block * plane->stride - w.memory);
    bool loads = j->job.op == DEVICE_LOAD;

    if (j->job.converts) {
        const struct ucm_encoding_plane *c = &w.region->tensors[p];

        if (loads)
            ucm_decode(&spec, c->tensor, of(slot + c->slot_offset), page);
        else
            ucm_encode(&spec, c->tensor, page, of(slot + c->slot_offset));
    } else {
        slot += plane->slot_offset;
        memcpy(loads ? page : of(slot), loads ? of(slot) : page, plane->block_bytes);
    }
    if (j->job.shifts && shifts[i] && rope_at[p] != UCM_ROPE_NO_K)
        ucm_rope_apply(&rope.spec, shifts[i], page, page);
}

static void expect(const struct test_job *j)
{
    for (uint32_t i = 0; i < j->job.n_items; i++)
        for (uint32_t p = j->job.first_plane; p < j->job.first_plane + j->job.n_planes; p++)
            expect_fragment(j, i, p);
}

/* Shifts by `kinds` tables in runs, with blocks between them that stay as they are. */
static void shifts_make(const struct test_job *j, uint32_t kinds)
{
    for (uint32_t i = 0; i < kinds; i++)
        ucm_rope_table(&rope.spec, &(struct ucm_rope_shift){i * 1000, 70000, 0, 0}, tables[i]);
    for (uint32_t i = 0; i < j->job.n_items; i++)
        shifts[i] = i % 7 == 6 ? NULL : tables[i * kinds / j->job.n_items];
}

/* Every second block. */
static void job_begin(struct test_job *j, enum device_op op, uint32_t first, uint32_t n,
                      uint32_t kinds, bool converts)
{
    bytes_random(of(w.memory), w.bytes, 3 + op);
    bytes_random(slots, slots_bytes, 5 + op);
    memcpy(want_slots, slots, slots_bytes);
    memcpy(want_memory, of(w.memory), w.bytes);
    copy_half(j, &w, op);
    shifts_make(j, kinds);
    j->job.shifts = kinds > 0 && op == DEVICE_LOAD ? shifts : NULL;
    j->job.converts = converts;
    j->job.first_plane = first;
    j->job.n_planes = n;
    expect(j);
    job_submit(j, gpu);
}

static void right(struct test_job *j, int status)
{
    cr_assert_eq(status, 0, "%s", j->job.error.text);
    cr_assert_eq(memcmp(slots, want_slots, slots_bytes), 0);
    cr_assert_eq(memcmp(of(w.memory), want_memory, w.bytes), 0);
}

/* passing: the daemon's clock passes meanwhile. */
static void run_passing(enum device_op op, uint32_t first, uint32_t n, unsigned does, bool passing)
{
    static struct test_job j;

    job_begin(&j, op, first, n, does & SHIFTED ? TABLES : 0, does & ENCODED);
    right(&j, passing ? job_wait_passing(&j) : job_wait(&j));
}

static void run(enum device_op op, uint32_t first, uint32_t n, unsigned does)
{
    run_passing(op, first, n, does, false);
}

/* Whole blocks, and one layer, as in layer-wise loads. */
static void run_all(unsigned does)
{
    for (unsigned i = 0; i < 2; i++) {
        run(i ? DEVICE_DUMP : DEVICE_LOAD, 0, PLANES, does);
        run(i ? DEVICE_DUMP : DEVICE_LOAD, 2, 2, does);
    }
}

static uint64_t moved(enum copy_strategy strategy)
{
    struct device_stats stats;

    gpu->ops->stats(gpu, &stats);
    return stats.bytes[strategy];
}

/* Copy engines can't encode or decode, so a kernel or a copy agent does. Engines and kernels have
 * streams of their own. On a slow GPU, K must be re-rotated after it has come, and not before. */
static const struct {
    enum copy_strategy strategy;
    unsigned does;
    enum copy_strategy by; /* STAGED: with a copy agent */
    uint32_t delay_us;
    unsigned rounds;
} ways[] = {
    {COPY_AUTO, ENCODED, COPY_SM, 0, 1},
    {COPY_DMA, ENCODED, COPY_SM, 0, 1},
    {COPY_AUTO, ENCODED, COPY_STAGED, 0, 1},
    {COPY_STAGED, ENCODED, COPY_STAGED, 300, 1},
    {COPY_AUTO, SHIFTED, COPY_DMA, 0, 1},
    {COPY_DMA, SHIFTED, COPY_DMA, 0, 1},
    {COPY_DMA, SHIFTED, COPY_DMA, 300, 10},
    {COPY_SM, SHIFTED, COPY_SM, 0, 1},
    {COPY_AUTO, ENCODED | SHIFTED, COPY_SM, 0, 1},
    {COPY_AUTO, ENCODED | SHIFTED, COPY_SM, 300, 1},
    {COPY_STAGED, SHIFTED, COPY_STAGED, 0, 1},
    {COPY_STAGED, SHIFTED, COPY_STAGED, 300, 1},
    {COPY_STAGED, ENCODED | SHIFTED, COPY_STAGED, 0, 1},
};

Test(cuda_forms, every_way, .timeout = 120)
{
    for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++)
        for (unsigned round = 0; round < ways[i].rounds; round++) {
            fake_cuda.delay_us = ways[i].delay_us;
            begin(ways[i].strategy, ways[i].does);
            if (ways[i].by == COPY_STAGED)
                worker_copy_agent(&w, 256 << 10, 4);
            run_all(ways[i].does);
            cr_assert_gt(moved(ways[i].by), 0, "way %zu", i);
            cr_assert_eq(moved(COPY_DMA) + moved(COPY_SM) + moved(COPY_STAGED), moved(ways[i].by),
                         "way %zu", i);
            end();
        }
}

Test(cuda_forms, narrow_loads_go_straight, .timeout = 60)
{
    begin_with(COPY_AUTO, ENCODED, 1, 128);
    worker_copy_agent(&w, 256 << 10, 4);
    run(DEVICE_LOAD, 0, 2, ENCODED);
    cr_assert_eq(moved(COPY_STAGED), 0);
    run(DEVICE_DUMP, 0, 2, ENCODED);
    cr_assert_gt(moved(COPY_STAGED), 0);
    end();
}

/* Blocks of the base: a region of an encoded namespace takes them as they are. */
Test(cuda_forms, raw_jobs_of_the_same_region, .timeout = 60)
{
    begin(COPY_STAGED, ENCODED);
    worker_copy_agent(&w, 256 << 10, 4);
    for (unsigned i = 0; i < 2; i++) {
        run(i ? DEVICE_DUMP : DEVICE_LOAD, 0, PLANES, 0);
        run(i ? DEVICE_LOAD : DEVICE_DUMP, 0, PLANES, ENCODED);
    }
    end();
}

/* A table of 512 channels takes 2 KiB, so a launch has eight tables and an order seven. Each block
 * has a table of its own. */
Test(cuda_forms, more_tables_than_a_launch_has, .timeout = 60)
{
    static struct test_job j;

    for (unsigned ring = 0; ring < 2; ring++) {
        begin_with(ring ? COPY_STAGED : COPY_SM, SHIFTED, 8, 512);
        cr_assert_eq(ucm_rope_tables_most(&rope.spec), 8);
        if (ring)
            worker_copy_agent(&w, 1 << 20, 4);
        job_begin(&j, DEVICE_LOAD, 1, 1, BLOCKS / 2, false);
        right(&j, job_wait(&j));
        cr_assert_gt(moved(ring ? COPY_STAGED : COPY_SM), 0);
        end();
    }
}

/* No block of the job is re-rotated, so no kernel runs. */
Test(cuda_forms, what_stays_is_a_raw_copy, .timeout = 60)
{
    static struct test_job j;

    begin(COPY_DMA, SHIFTED);
    job_begin(&j, DEVICE_LOAD, 0, PLANES, TABLES, false);
    right(&j, job_wait(&j));
    memset(shifts, 0, sizeof(shifts));
    expect(&j);
    j.done = false;
    job_submit(&j, gpu);
    right(&j, job_wait(&j));
    cr_assert_gt(moved(COPY_DMA), 0);
    end();
}

/* ---- copy agents that can't ---- */

/* An old copy agent does not say that it knows such orders. So it gets none: it would take them for
 * others. Or the worker registered the region at its copy agent without the encoding, or without
 * the rope: the copy agent refuses. */
Test(cuda_forms, a_copy_agent_that_knows_nothing_of_it_does_nothing, .timeout = 60)
{
    for (unsigned way = 0; way < 4; way++) {
        unsigned does = way % 2 ? ENCODED : SHIFTED;
        bool old = way < 2;

        begin(COPY_STAGED, does);
        if (!old) {
            w.encoding = NULL;
            w.rope = NULL;
        }
        worker_copy_agent(&w, 256 << 10, 4);
        if (old)
            atomic_store(&w.shared->words.knows,
                         does == ENCODED ? 0 : UCM_STAGING_KNOWS_CONVERSION);
        run_passing(DEVICE_LOAD, 0, PLANES, does, !old);
        if (old)
            run(DEVICE_LOAD, 2, 2, does);
        if (does == ENCODED)
            run_passing(DEVICE_DUMP, 0, PLANES, does, !old);
        cr_assert_eq(moved(COPY_STAGED), 0, "way %u", way);
        cr_assert_gt(moved(does == ENCODED ? COPY_SM : COPY_DMA), 0, "way %u", way);
        end();
    }
}

/* Orders that nobody claims are revoked, and go straight. One that is claimed and not done fails.
 */
Test(cuda_forms, unserved_orders_go_straight_or_fail, .timeout = 120)
{
    static struct test_job j;

    for (unsigned i = 0; i < 4; i++) {
        enum device_op op = i % 2 ? DEVICE_DUMP : DEVICE_LOAD;
        bool claims = i / 2;
        int status;

        begin(COPY_AUTO, ENCODED);
        worker_ring(&w, getpid(), 256 << 10, 4);
        atomic_store(&w.shared->words.knows, UCM_STAGING_KNOWS_CONVERSION);
        job_begin(&j, op, 0, PLANES, 0, true);
        orders_await(&w, STAGING_POSTED, -1);
        if (claims)
            orders_move(&w, STAGING_CLAIMED);
        status = job_wait_passing(&j);
        if (claims) {
            job_fails(&j, -EIO, "claimed");
        } else {
            right(&j, status);
            cr_assert_gt(moved(COPY_SM), 0);
        }
        run_passing(op, 0, PLANES, ENCODED, true); /* the ring is paused, or retired */
        end();
    }
}

static enum ucm_staging_phase answer(uint32_t number)
{
    uint32_t tag = ucm_staging_tag(atomic_load(&w.shared->words.generation), number);
    enum ucm_staging_phase phase = STAGING_POSTED;

    ucm_staging_post(w.shared, 0, tag);
    while (phase == STAGING_POSTED || phase == STAGING_CLAIMED)
        phase = ucm_staging_phase_of(atomic_load(&w.shared->words.entries[0].state));
    return phase;
}

/* The copy agent refuses them, no matter who wrote them. */
Test(cuda_forms, orders_that_do_not_fit_are_refused, .timeout = 60)
{
    struct ucm_staging_order *o;

    begin(COPY_AUTO, ENCODED);
    worker_copy_agent(&w, 64 << 10, 2);
    o = &w.shared->orders[0];
    /* One item of all planes, encoded, is longer than an entry; one plane of it fits. */
    *o = (struct ucm_staging_order){.direction = 1,
                                    .region = w.region->ring_region,
                                    .n_planes = 1,
                                    .n_items = 1,
                                    .converts = 1};
    cr_assert_eq(answer(101), STAGING_DONE);
    o->n_planes = PLANES;
    cr_assert_eq(answer(102), STAGING_REFUSED);
    end();
}

Test(cuda_forms, orders_whose_tables_do_not_fit_are_refused, .timeout = 60)
{
    struct ucm_staging_order *o;

    begin(COPY_AUTO, SHIFTED);
    worker_copy_agent(&w, 64 << 10, 2);
    o = &w.shared->orders[0];
    *o = (struct ucm_staging_order){
        .region = w.region->ring_region, .n_planes = 1, .n_items = 1, .tables = 1};
    cr_assert_eq(answer(100), STAGING_DONE);
    o->blocks[1] = UCM_STAGING_STAYS;
    cr_assert_eq(answer(101), STAGING_DONE);
    o->blocks[1] = 1;
    cr_assert_eq(answer(102), STAGING_REFUSED, "no such table");
    o->blocks[1] = 0;
    o->tables = 33;
    cr_assert_eq(answer(103), STAGING_REFUSED, "more than an order has");
    o->tables = UINT32_MAX;
    cr_assert_eq(answer(104), STAGING_REFUSED, "far more");
    o->tables = 1;
    o->direction = 1;
    cr_assert_eq(answer(105), STAGING_REFUSED, "a dump");
    end();
}

static void refuses(const struct ucm_copy_plane *planes, struct copy_agent_skills skills)
{
    uint32_t number;

    cr_assert_eq(copy_agent_region_add(&w.copy_agent, planes, PLANES, BLOCKS, skills, &number),
                 CUDA_ERROR_INVALID_VALUE);
}

Test(cuda_forms, planes_that_are_no_tensors_or_have_no_k_get_no_copy_agent, .timeout = 60)
{
    struct ucm_copy_plane planes[PLANES];
    uint8_t uuid[UCM_UUID_BYTES];

    begin(COPY_AUTO, ENCODED | SHIFTED);
    fake_cuda_uuid(0, uuid);
    cr_assert_eq(copy_agent_init(&w.copy_agent, uuid, 65536, 2), CUDA_SUCCESS);
    memcpy(planes, w.region->planes, sizeof(planes));
    planes[PLANES - 1].block_bytes -= 16;
    refuses(planes, (struct copy_agent_skills){.encoding = &spec});
    spec.version = 99;
    refuses(w.region->planes, (struct copy_agent_skills){.encoding = &spec});
    rope_at[PLANES - 1] = 2;
    refuses(w.region->planes, (struct copy_agent_skills){.rope = &rope});
    rope_at[PLANES - 1] = 0;
    rope.spec.rotary = 129;
    refuses(w.region->planes, (struct copy_agent_skills){.rope = &rope});
    copy_agent_close(&w.copy_agent);
    end();
}
