/* Coded jobs on a GPU: through slices that a companion encodes and decodes, or straight by the daemon's
 * own kernel. What a companion can't or won't do goes straight or fails, and is never wrong. */
#include "tests/unit/cuda/cuda_rig.h"

#define LAYERS 2u
#define PLANES (2 * LAYERS)

static struct worker_side w;
static struct ucm_encoding_spec spec;
static uint8_t *want_slots, *want_memory;

static void spec_of(uint32_t heads)
{
    spec = (struct ucm_encoding_spec){
        .encoding = UCM_ENCODING_FP8, .version = 1, .dtype = UCM_ENCODING_BF16, .n_sections = 2};
    for (uint32_t s = 0; s < 2; s++)
        spec.section[s] = (struct ucm_encoding_section){s, 16, heads, 128, UCM_ENCODING_NHD};
}

/* heads 8: a layer is wide enough to pass through slices; 1: it is not, in loads. */
static void begin(enum copy_strategy strategy, uint32_t heads)
{
    daemon_begin(strategy, 9 * MIB);
    spec_of(heads);
    w.encoding = &spec;
    worker_begin(&w, getpid(), PLANES, (uint32_t)ucm_encoding_plain_bytes(&spec, 0), 64);
    want_slots = malloc(slots_bytes);
    want_memory = malloc(w.bytes);
    cr_assert(want_slots && want_memory);
}

static void end(void)
{
    worker_end(&w);
    w.encoding = NULL;
    free(want_slots);
    free(want_memory);
    daemon_end();
    cr_assert_eq(fake_cuda_left(), 0);
    cr_assert_eq(failures, 0);
}

static void *of(uint64_t address)
{
    return (void *)(uintptr_t)address;
}

/* What the job should leave, by the C reference alone. */
static void expect(const struct test_job *j)
{
    const struct device_region *r = w.region;

    for (uint32_t i = 0; i < j->job.n_items; i++)
        for (uint32_t p = j->job.first_plane; p < j->job.first_plane + j->job.n_planes; p++) {
            const struct ucm_encoding_plane *c = &r->coded[p];
            uint64_t slot = j->items[i].slot - (uint64_t)(uintptr_t)slots +
                            (uint64_t)(uintptr_t)want_slots + c->slot_offset;
            uint64_t page = c->base + j->items[i].block * c->stride - w.memory +
                            (uint64_t)(uintptr_t)want_memory;

            if (j->job.op == DEVICE_LOAD)
                ucm_decode(&spec, c->section, of(slot), of(page));
            else
                ucm_encode(&spec, c->section, of(page), of(slot));
        }
}

static void job_begin(struct test_job *j, enum device_op op, uint32_t first, uint32_t n)
{
    bytes_random(of(w.memory), w.bytes, 3 + op);
    bytes_random(slots, slots_bytes, 5 + op);
    memcpy(want_slots, slots, slots_bytes);
    memcpy(want_memory, of(w.memory), w.bytes);
    copy_half(j, &w, op);
    j->job.coded = true;
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

static void run(enum device_op op, uint32_t first, uint32_t n)
{
    static struct test_job j;

    job_begin(&j, op, first, n);
    right(&j, job_wait(&j));
}

static void run_passing(enum device_op op)
{
    static struct test_job j;

    job_begin(&j, op, 0, PLANES);
    right(&j, job_wait_passing(&j));
}

/* Whole blocks; one layer, as loads in steps have it. */
static void run_all(void)
{
    for (unsigned i = 0; i < 2; i++) {
        run(i ? DEVICE_DUMP : DEVICE_LOAD, 0, PLANES);
        run(i ? DEVICE_DUMP : DEVICE_LOAD, 2, 2);
    }
}

static uint64_t moved(enum copy_strategy strategy)
{
    struct device_stats stats;

    gpu->ops->stats(gpu, &stats);
    return stats.bytes[strategy];
}

static void straight(enum copy_strategy strategy)
{
    begin(strategy, 8);
    run_all();
    cr_assert_gt(moved(COPY_SM), 0);
    cr_assert_eq(moved(COPY_DMA), 0, "engines can't decode");
    end();
}

Test(cuda_encoded, straight_by_the_daemons_kernel, .timeout = 60)
{
    straight(COPY_AUTO);
}

Test(cuda_encoded, dma_is_no_way_for_coded_jobs, .timeout = 60)
{
    straight(COPY_DMA);
}

static void staged(enum copy_strategy strategy)
{
    begin(strategy, 8);
    worker_companion(&w, 256 << 10, 4);
    run_all();
    cr_assert_gt(moved(COPY_STAGED), 0);
    cr_assert_eq(moved(COPY_DMA) + moved(COPY_SM), 0);
    end();
}

Test(cuda_encoded, a_ring_that_lives_takes_all, .timeout = 60)
{
    staged(COPY_AUTO);
}

Test(cuda_encoded, through_slices_of_a_delayed_gpu, .timeout = 60)
{
    fake_cuda_delay(300);
    staged(COPY_STAGED);
}

Test(cuda_encoded, narrow_loads_go_straight, .timeout = 60)
{
    begin(COPY_AUTO, 1);
    worker_companion(&w, 256 << 10, 4);
    run(DEVICE_LOAD, 0, 2);
    cr_assert_eq(moved(COPY_STAGED), 0);
    run(DEVICE_DUMP, 0, 2);
    cr_assert_gt(moved(COPY_STAGED), 0);
    end();
}

/* Blocks of the base: a region of an encoded namespace takes them as they are. */
Test(cuda_encoded, plain_jobs_of_the_same_region, .timeout = 60)
{
    static struct test_job j;

    begin(COPY_STAGED, 8);
    worker_companion(&w, 256 << 10, 4);
    for (unsigned i = 0; i < 2; i++) {
        bytes_random(of(w.memory), w.bytes, 3);
        bytes_random(slots, slots_bytes, 5);
        memcpy(want_slots, slots, slots_bytes);
        memcpy(want_memory, of(w.memory), w.bytes);
        copy_half(&j, &w, i ? DEVICE_DUMP : DEVICE_LOAD);
        copy_expect(&j, &w, want_slots, want_memory);
        job_submit(&j, gpu);
        right(&j, job_wait(&j));
        run(i ? DEVICE_LOAD : DEVICE_DUMP, 0, PLANES);
    }
    end();
}

/* It does not say that it knows coded orders, so it gets none, which it would take for plain ones. */
Test(cuda_encoded, an_old_companion_gets_no_coded_orders, .timeout = 60)
{
    begin(COPY_STAGED, 8);
    worker_companion(&w, 256 << 10, 4);
    atomic_store(&w.shared->words.knows, 0);
    run_all();
    cr_assert_eq(moved(COPY_STAGED), 0);
    cr_assert_gt(moved(COPY_SM), 0);
    end();
}

/* The worker registered the region here without its encoding: its companion refuses. */
Test(cuda_encoded, refused_where_the_companion_knows_no_encoding, .timeout = 60)
{
    begin(COPY_STAGED, 8);
    w.encoding = NULL;
    worker_companion(&w, 256 << 10, 4);
    for (unsigned i = 0; i < 2; i++) {
        run_passing(i ? DEVICE_DUMP : DEVICE_LOAD);
        cr_assert_gt(moved(COPY_SM), 0);
    }
    cr_assert_eq(moved(COPY_STAGED), 0);
    end();
}

static bool posted(void)
{
    for (uint32_t i = 0; i < UCM_MAX_SLICES; i++)
        if (ucm_staging_phase_of(atomic_load(&w.shared->words.slices[i].state)) == STAGING_POSTED)
            return true;
    return false;
}

static void orders_claim(void)
{
    for (uint32_t i = 0; i < UCM_MAX_SLICES; i++) {
        uint64_t state = atomic_load(&w.shared->words.slices[i].state);

        if (ucm_staging_phase_of(state) == STAGING_POSTED)
            (void)ucm_staging_move(w.shared, i, ucm_staging_tag_of(state), STAGING_POSTED,
                                   STAGING_CLAIMED);
    }
}

static void unserved(enum device_op op, bool claims)
{
    static struct test_job j;
    int status;

    begin(COPY_AUTO, 8);
    worker_ring(&w, getpid(), 256 << 10, 4);
    atomic_store(&w.shared->words.knows, UCM_STAGING_KNOWS_CODED);
    job_begin(&j, op, 0, PLANES);
    while (!posted())
        uv_run(&loop, UV_RUN_NOWAIT);
    if (claims)
        orders_claim();
    status = job_wait_passing(&j);
    if (!claims) {
        right(&j, status);
        cr_assert_gt(moved(COPY_SM), 0);
    } else {
        cr_assert_eq(status, -EIO);
        cr_assert(strstr(j.job.error.text, "claimed"), "%s", j.job.error.text);
    }
    run_passing(op); /* the ring is paused, or retired */
    end();
}

Test(cuda_encoded, revoked_orders_go_straight, .timeout = 60)
{
    unserved(DEVICE_LOAD, false);
    unserved(DEVICE_DUMP, false);
}

Test(cuda_encoded, claimed_and_not_done_fails, .timeout = 60)
{
    unserved(DEVICE_LOAD, true);
    unserved(DEVICE_DUMP, true);
}

/* The order says so, whoever wrote it. */
Test(cuda_encoded, orders_that_do_not_fit_are_refused, .timeout = 60)
{
    struct ucm_staging_order *o;
    uint32_t tag;

    begin(COPY_AUTO, 8);
    worker_companion(&w, 64 << 10, 2);
    o = &w.shared->orders[0];
    /* One item of all planes, coded, is longer than a slice; one plane of it fits. */
    for (uint32_t n = 1; n <= PLANES; n += PLANES - 1) {
        enum ucm_staging_phase phase = STAGING_POSTED;

        o->direction = 1;
        o->region = w.region->ring_region;
        o->first_plane = 0;
        o->n_planes = n;
        o->n_items = 1;
        o->coded = 1;
        o->blocks[0] = 0;
        tag = ucm_staging_tag(atomic_load(&w.shared->words.generation), 100 + n);
        ucm_staging_post(w.shared, 0, tag);
        while (phase == STAGING_POSTED || phase == STAGING_CLAIMED)
            phase = ucm_staging_phase_of(atomic_load(&w.shared->words.slices[0].state));
        cr_assert_eq(phase, n == 1 ? STAGING_DONE : STAGING_REFUSED, "%u planes", n);
    }
    end();
}

Test(cuda_encoded, planes_that_are_no_sections_get_no_companion, .timeout = 60)
{
    struct ucm_copy_plane planes[PLANES];
    uint8_t uuid[UCM_UUID_BYTES];
    uint32_t number;

    begin(COPY_AUTO, 8);
    fake_cuda_uuid(0, uuid);
    cr_assert_eq(companion_init(&w.companion, uuid, 65536, 2), CUDA_SUCCESS);
    memcpy(planes, w.region->planes, sizeof(planes));
    planes[PLANES - 1].chunk -= 16;
    cr_assert_eq(companion_region_add(&w.companion, planes, PLANES, BLOCKS,
                                      (struct companion_skills){.encoding = &spec}, &number),
                 CUDA_ERROR_INVALID_VALUE);
    spec.version = 99;
    cr_assert_eq(companion_region_add(&w.companion, w.region->planes, PLANES, BLOCKS,
                                      (struct companion_skills){.encoding = &spec}, &number),
                 CUDA_ERROR_INVALID_VALUE);
    companion_close(&w.companion);
    end();
}
