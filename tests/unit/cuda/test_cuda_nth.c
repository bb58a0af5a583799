/* Each driver call with which the daemon opens a region and copies fails once: the n-th of a run,
 * for each n. The caller learns why, nothing moves after the end of a job, and nothing is left
 * over. */
#include "daemon/cuda/gpu.h"
#include "tests/unit/cuda/cuda_rig.h"

#define PLANES 2u
#define FRAGMENT 32768u /* of K: 16 tokens of 8 heads of 128 channels, BF16 */

static struct worker_side w;
static struct copy_agent_rope rope;
static uint32_t rope_at[PLANES];
static struct ucm_rope_angle table[UCM_ROPE_PAIRS_MAX];
static const struct ucm_rope_angle *shifts[BLOCKS];
static uint8_t *want, *seen;

static struct cuda_api real;
static atomic_uint calls, fail_at;

static bool fails(void)
{
    return atomic_fetch_add(&calls, 1) + 1 == atomic_load(&fail_at);
}

/* The calls that fail, with errors after which a context goes on: name, parameters, arguments. */
#define EACH_CALL(CALL)                                                                            \
    CALL(cuEventRecord, (CUevent e, CUstream s), (e, s))                                           \
    CALL(cuStreamWaitEvent, (CUstream s, CUevent e, unsigned flags), (s, e, flags))                \
    CALL(cuLaunchKernel,                                                                           \
         (CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,           \
          unsigned bz, unsigned shared, CUstream s, void **arguments, void **extra),               \
         (f, gx, gy, gz, bx, by, bz, shared, s, arguments, extra))                                 \
    CALL(cuMemcpyBatchAsync,                                                                       \
         (CUdeviceptr * to, CUdeviceptr * from, size_t * sizes, size_t n,                          \
          CUmemcpyAttributes * attributes, size_t * first, size_t n_attributes, CUstream s),       \
         (to, from, sizes, n, attributes, first, n_attributes, s))                                 \
    CALL(cuMemcpy3DBatchAsync,                                                                     \
         (size_t n, CUDA_MEMCPY3D_BATCH_OP * ops, unsigned long long flags, CUstream s),           \
         (n, ops, flags, s))                                                                       \
    CALL(cuStreamCreateWithPriority, (CUstream * out, unsigned flags, int priority),               \
         (out, flags, priority))                                                                   \
    CALL(cuEventCreate, (CUevent * out, unsigned flags), (out, flags))                             \
    CALL(cuMemHostAlloc, (void **out, size_t bytes, unsigned flags), (out, bytes, flags))          \
    CALL(cuMemHostRegister, (void *memory, size_t bytes, unsigned flags), (memory, bytes, flags))  \
    CALL(cuMemHostGetDevicePointer, (CUdeviceptr * out, void *memory, unsigned flags),             \
         (out, memory, flags))                                                                     \
    CALL(cuMemAlloc, (CUdeviceptr * out, size_t bytes), (out, bytes))                              \
    CALL(cuMemcpyHtoDAsync, (CUdeviceptr to, const void *from, size_t bytes, CUstream s),          \
         (to, from, bytes, s))                                                                     \
    CALL(cuModuleLoadData, (CUmodule * out, const void *image), (out, image))                      \
    CALL(cuModuleGetFunction, (CUfunction * out, CUmodule module, const char *name),               \
         (out, module, name))                                                                      \
    CALL(cuIpcOpenMemHandle, (CUdeviceptr * out, CUipcMemHandle handle, unsigned flags),           \
         (out, handle, flags))

#define NTH(name, parameters, arguments)                                                           \
    static CUresult nth_##name parameters                                                          \
    {                                                                                              \
        return fails() ? CUDA_ERROR_OUT_OF_MEMORY : real.name arguments;                           \
    }
EACH_CALL(NTH)

/* Counts from now on. */
static void nth(unsigned n)
{
    atomic_store(&calls, 0);
    atomic_store(&fail_at, n);
}

/* To be called before the GPU's thread makes its first call. */
static void calls_wrap(void)
{
    nth(0);
    real = cuda;
#define USE(name, parameters, arguments) cuda.name = nth_##name;
    EACH_CALL(USE)
#undef USE
}

static void begin(enum copy_strategy strategy)
{
    daemon_begin(strategy, 6 * MIB);
    calls_wrap();
    rope = (struct copy_agent_rope){.at = rope_at,
                                    .spec = {.dtype = UCM_ROPE_BF16,
                                             .rows = FRAGMENT / 256,
                                             .dim = 128,
                                             .rotary = 128,
                                             .base = 10000}};
    w = (struct worker_side){.rope = &rope};
    worker_memory(&w, 0, PLANES, FRAGMENT, 64);
    w.region = region_of(&w, gpu, getpid(), 64);
}

static void end(bool opened)
{
    struct ucm_error e = {0};

    if (opened)
        cr_assert_eq(control(DEVICE_CLOSE, w.region, NULL, &e), 0, "%s", e.text);
    region_free(w.region);
    cr_assert_eq(cuMemFree(w.memory), CUDA_SUCCESS);
    daemon_end();
    cuda = real;
}

static uint8_t *page(uint8_t *of, const struct test_job *j, uint32_t i, uint32_t p)
{
    const struct ucm_copy_plane *plane = &w.region->planes[p];

    return of + (plane->base - w.memory) + j->items[i].block * plane->stride;
}

/* Compares the pages of a load that succeeded; those of others are undefined. */
static void loaded(struct test_job *j)
{
    for (uint32_t i = 0; i < j->job.n_items; i++)
        for (uint32_t p = 0; p < PLANES; p++) {
            uint8_t *to = page(want, j, i, p);

            memcpy(to, (void *)(uintptr_t)(j->items[i].slot + w.region->planes[p].slot_offset),
                   FRAGMENT);
            if (j->job.shifts && shifts[i])
                ucm_rope_apply(&rope.spec, shifts[i], to, to);
            cr_assert_eq(memcmp(to, page((uint8_t *)(uintptr_t)w.memory, j, i, p), FRAGMENT), 0);
        }
}

/* Loads of two tenants; every second one re-rotates. A small one that does not may overtake. */
static void copies(void)
{
    static struct test_job j[4];

    for (unsigned k = 0; k < 4; k++) {
        copy_init(&j[k], &w, DEVICE_LOAD);
        for (uint32_t i = k; i < BLOCKS; i += 4)
            copy_add(&j[k], &w, i, i);
        j[k].job.shifts = k % 2 ? shifts : NULL;
        j[k].job.who = (struct fair_who){.tenant = 1 + k / 2, .weight = 100};
        job_submit(&j[k], gpu);
    }
    for (unsigned k = 0; k < 4; k++) {
        int status = job_wait(&j[k]);

        cr_assert(status == 0 || (status == -EIO && strlen(j[k].job.error.text) > 10), "%d %s",
                  status, j[k].job.error.text);
        if (status == 0)
            loaded(&j[k]);
    }
    memcpy(seen, (void *)(uintptr_t)w.memory, w.bytes);
    cr_assert_eq(cuCtxSynchronize(), CUDA_SUCCESS);
    cr_assert_eq(memcmp(seen, (void *)(uintptr_t)w.memory, w.bytes), 0, "moved past the end");
}

/* Returns whether as many calls were made. */
static bool run(enum copy_strategy strategy, unsigned n, bool open)
{
    struct ucm_error e = {0};
    bool opened;

    begin(strategy);
    if (open)
        nth(n);
    opened = control(DEVICE_OPEN, w.region, NULL, &e) == 0;
    cr_assert(opened || strlen(e.text) > 10);
    if (!open)
        nth(n);
    /* No probe: its calls may fail, and that means nothing. */
    ((struct gpu *)gpu)->busy = (struct busy){.until_ns = UINT64_MAX};
    want = calloc(1, w.bytes);
    seen = malloc(w.bytes);
    cr_assert(want && seen);
    bytes_random(slots, slots_bytes, 5);
    if (opened)
        copies();
    end(opened);
    free(want);
    free(seen);
    return atomic_load(&calls) >= n;
}

static void each(enum copy_strategy strategy, bool open)
{
    ucm_rope_table(
        &(struct ucm_rope_spec){
            .dtype = UCM_ROPE_BF16, .rows = 1, .dim = 128, .rotary = 128, .base = 10000},
        &(struct ucm_rope_shift){16, 70000, 0, 0}, table);
    for (uint32_t i = 0; i < BLOCKS; i++)
        shifts[i] = i % 3 == 2 ? NULL : table;
    fake_cuda.delay_us = 1000;
    for (unsigned n = 1; run(strategy, n, open); n++)
        cr_assert_lt(n, 1000);
}

Test(cuda_nth, copies_by_the_engines, .timeout = 120)
{
    each(COPY_DMA, false);
}

Test(cuda_nth, copies_by_kernels, .timeout = 120)
{
    each(COPY_SM, false);
}

Test(cuda_nth, copies_by_what_is_faster, .timeout = 120)
{
    each(COPY_AUTO, false);
}

Test(cuda_nth, opening_and_copies, .timeout = 120)
{
    each(COPY_DMA, true);
}
