/* Loads that turn K on a GPU: straight by the daemon's own kernel, or through slices that a companion empties. The
 * reference's bits, and nothing but K; what a companion can't or won't do goes straight, and is never wrong. */
#include "tests/unit/cuda/cuda_rig.h"

#include "kernels/rope/rope_cuda.h"

#define LAYERS 2u
#define PLANES (2 * LAYERS)
#define TABLES 3u
#define SECTION 32768u

static struct worker_side w;
static struct ucm_encoding_spec encoding;
static struct companion_rope rope;
static uint32_t rope_at[PLANES];
static struct ucm_rope_angle tables[BLOCKS][UCM_ROPE_PAIRS_MAX];
static const struct ucm_rope_angle *turns[BLOCKS];
static uint8_t *want_memory;

/* 32 KiB of K, or of V, a plane: at `dim` 128 those of 16 tokens and 8 heads. */
static void begin(enum copy_strategy strategy, uint32_t dim, bool encoded)
{
    daemon_begin(strategy, 9 * MIB);
    encoding = (struct ucm_encoding_spec){
        .encoding = UCM_ENCODING_FP8, .version = 1, .dtype = UCM_ENCODING_BF16, .n_sections = 2};
    for (uint32_t s = 0; s < 2; s++)
        encoding.section[s] = (struct ucm_encoding_section){s, 16, 8, dim, UCM_ENCODING_NHD};
    rope.spec = (struct ucm_rope_spec){.dtype = UCM_ROPE_BF16,
                                       .rows = SECTION / (2 * dim),
                                       .dim = dim,
                                       .rotary = dim,
                                       .base = 10000};
    /* Pairs of planes are one shard where the namespace is encoded, else each plane is one. */
    for (uint32_t p = 0; p < PLANES; p++)
        rope_at[p] = encoded && p % 2 ? UCM_ROPE_NO_K : 0;
    rope.at = rope_at;
    w.encoding = encoded ? &encoding : NULL;
    w.rope = &rope;
    worker_begin(&w, getpid(), PLANES, SECTION, 64);
    want_memory = malloc(w.bytes);
    cr_assert(want_memory);
}

static void end(void)
{
    worker_end(&w);
    w.encoding = NULL;
    w.rope = NULL;
    free(want_memory);
    daemon_end();
    cr_assert_eq(fake_cuda_left(), 0);
    cr_assert_eq(failures, 0);
}

static void *of(uint64_t address)
{
    return (void *)(uintptr_t)address;
}

static uint8_t *wanted(uint64_t page)
{
    return want_memory + (page - w.memory);
}

/* By the C reference alone. */
static void expect_block(const struct test_job *j, uint32_t i, uint32_t p)
{
    const struct ucm_copy_plane *plane = &w.region->planes[p];
    uint8_t *to = wanted(plane->base + j->items[i].block * plane->stride);

    if (j->job.coded)
        ucm_decode(&encoding, w.region->coded[p].section,
                   of(j->items[i].slot + w.region->coded[p].slot_offset), to);
    else
        memcpy(to, of(j->items[i].slot + plane->slot_offset), plane->chunk);
    if (turns[i] && rope_at[p] != UCM_ROPE_NO_K)
        ucm_rope_apply(&rope.spec, turns[i], to, to);
}

/* Every second block; of `kinds` tables in runs, and blocks between that stay. */
static void job_begin(struct test_job *j, uint32_t first, uint32_t n, uint32_t kinds, bool coded)
{
    bytes_random(of(w.memory), w.bytes, 3);
    bytes_random(slots, slots_bytes, 5);
    memcpy(want_memory, of(w.memory), w.bytes);
    copy_half(j, &w, DEVICE_LOAD);
    for (uint32_t i = 0; i < kinds; i++)
        ucm_rope_table(&rope.spec, &(struct ucm_rope_turn){i * 1000, 70000, 0, 0}, tables[i]);
    for (uint32_t i = 0; i < j->job.n_items; i++)
        turns[i] = i % 7 == 6 ? NULL : tables[i * kinds / j->job.n_items];
    j->job.coded = coded;
    j->job.turns = turns;
    j->job.first_plane = first;
    j->job.n_planes = n;
    for (uint32_t i = 0; i < j->job.n_items; i++)
        for (uint32_t p = first; p < first + n; p++)
            expect_block(j, i, p);
    job_submit(j, gpu);
}

static void right(struct test_job *j, int status)
{
    cr_assert_eq(status, 0, "%s", j->job.error.text);
    cr_assert_eq(memcmp(of(w.memory), want_memory, w.bytes), 0);
}

static void run(uint32_t first, uint32_t n, uint32_t kinds)
{
    static struct test_job j;

    job_begin(&j, first, n, kinds, w.encoding != NULL);
    right(&j, job_wait(&j));
}

/* Whole blocks; one layer, as loads in steps have it. */
static void run_all(void)
{
    run(0, PLANES, TABLES);
    run(2, 2, TABLES);
}

static uint64_t moved(enum copy_strategy strategy)
{
    struct device_stats stats;

    gpu->ops->stats(gpu, &stats);
    return stats.bytes[strategy];
}

static void straight(enum copy_strategy strategy, bool encoded, enum copy_strategy by)
{
    begin(strategy, 128, encoded);
    run_all();
    cr_assert_gt(moved(by), 0);
    cr_assert_eq(moved(COPY_DMA) + moved(COPY_SM), moved(by));
    end();
}

Test(cuda_turned, behind_the_engines, .timeout = 60)
{
    straight(COPY_AUTO, false, COPY_DMA);
    straight(COPY_DMA, false, COPY_DMA);
}

/* Engines and kernel have streams of their own: K turns when it is there, and not before. */
Test(cuda_turned, behind_the_engines_of_a_delayed_gpu, .timeout = 60)
{
    fake_cuda_delay(300);
    for (unsigned i = 0; i < 10; i++)
        straight(COPY_DMA, false, COPY_DMA);
}

Test(cuda_turned, by_a_kernel_that_copies_too, .timeout = 60)
{
    straight(COPY_SM, false, COPY_SM);
}

Test(cuda_turned, behind_the_decoding, .timeout = 60)
{
    straight(COPY_AUTO, true, COPY_SM);
    fake_cuda_delay(300);
    straight(COPY_AUTO, true, COPY_SM);
}

static void staged(bool encoded)
{
    begin(COPY_STAGED, 128, encoded);
    worker_companion(&w, 256 << 10, 4);
    run_all();
    cr_assert_gt(moved(COPY_STAGED), 0);
    cr_assert_eq(moved(COPY_DMA) + moved(COPY_SM), 0);
    end();
}

Test(cuda_turned, through_slices, .timeout = 60)
{
    staged(false);
}

Test(cuda_turned, through_slices_of_a_delayed_gpu, .timeout = 60)
{
    fake_cuda_delay(300);
    staged(false);
}

Test(cuda_turned, through_slices_behind_the_decoding, .timeout = 60)
{
    staged(true);
}

/* A table of 512 channels takes 2 KiB, so a launch has eight, an order seven. Each block has one of its own. */
Test(cuda_turned, more_tables_than_a_launch_has, .timeout = 60)
{
    for (unsigned ring = 0; ring < 2; ring++) {
        begin(ring ? COPY_STAGED : COPY_SM, 512, false);
        cr_assert_eq(ucm_rope_tables_most(&rope.spec), 8);
        if (ring)
            worker_companion(&w, 1 << 20, 4);
        run(1, 1, BLOCKS / 2);
        cr_assert_gt(moved(ring ? COPY_STAGED : COPY_SM), 0);
        end();
    }
}

/* Nothing of it turns: no kernel runs. */
Test(cuda_turned, what_stays_is_a_plain_copy, .timeout = 60)
{
    static struct test_job j;

    begin(COPY_DMA, 128, false);
    job_begin(&j, 0, PLANES, TABLES, false);
    right(&j, job_wait(&j));
    memset(turns, 0, sizeof(turns));
    for (uint32_t i = 0; i < j.job.n_items; i++)
        for (uint32_t p = 0; p < PLANES; p++)
            expect_block(&j, i, p);
    j.done = false;
    job_submit(&j, gpu);
    right(&j, job_wait(&j));
    cr_assert_gt(moved(COPY_DMA), 0);
    end();
}

/* It does not say that it knows such orders, so it gets none, which it would take for plain ones. */
Test(cuda_turned, an_old_companion_gets_no_orders_that_turn, .timeout = 60)
{
    begin(COPY_STAGED, 128, false);
    worker_companion(&w, 256 << 10, 4);
    atomic_store(&w.shared->words.knows, UCM_STAGING_KNOWS_CODED);
    run_all();
    cr_assert_eq(moved(COPY_STAGED), 0);
    cr_assert_gt(moved(COPY_DMA), 0);
    end();
}

/* The worker registered the region here without its rope: its companion refuses. */
Test(cuda_turned, refused_where_the_companion_knows_no_rope, .timeout = 60)
{
    static struct test_job j;

    begin(COPY_STAGED, 128, false);
    w.rope = NULL;
    worker_companion(&w, 256 << 10, 4);
    job_begin(&j, 0, PLANES, TABLES, false);
    right(&j, job_wait_passing(&j));
    cr_assert_eq(moved(COPY_STAGED), 0);
    cr_assert_gt(moved(COPY_DMA), 0);
    end();
}

static enum ucm_staging_phase answer(uint32_t number)
{
    uint32_t tag = ucm_staging_tag(atomic_load(&w.shared->words.generation), number);
    enum ucm_staging_phase phase = STAGING_POSTED;

    ucm_staging_post(w.shared, 0, tag);
    while (phase == STAGING_POSTED || phase == STAGING_CLAIMED)
        phase = ucm_staging_phase_of(atomic_load(&w.shared->words.slices[0].state));
    return phase;
}

/* Whoever wrote them. */
Test(cuda_turned, orders_whose_tables_do_not_fit_are_refused, .timeout = 60)
{
    struct ucm_staging_order *o;

    begin(COPY_AUTO, 128, false);
    worker_companion(&w, 64 << 10, 2);
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

Test(cuda_turned, k_outside_of_planes_gets_no_companion, .timeout = 60)
{
    uint8_t uuid[UCM_UUID_BYTES];
    uint32_t number;

    begin(COPY_AUTO, 128, false);
    fake_cuda_uuid(0, uuid);
    cr_assert_eq(companion_init(&w.companion, uuid, 65536, 2), CUDA_SUCCESS);
    rope_at[PLANES - 1] = 2;
    cr_assert_eq(companion_region_add(&w.companion, w.region->planes, PLANES, BLOCKS,
                                      (struct companion_skills){.rope = &rope}, &number),
                 CUDA_ERROR_INVALID_VALUE);
    rope_at[PLANES - 1] = 0;
    rope.spec.rotary = 129;
    cr_assert_eq(companion_region_add(&w.companion, w.region->planes, PLANES, BLOCKS,
                                      (struct companion_skills){.rope = &rope}, &number),
                 CUDA_ERROR_INVALID_VALUE);
    companion_close(&w.companion);
    end();
}
