/* fetch: single layers of blocks into slots of a pool, against a load of as many bytes in whole blocks and against
 * memcpy of the same pieces. Every fetched byte is checked, outside the measured time. */
#include "client/bench/baseline.h"
#include "client/bench/bench.h"
#include "client/bench/pattern.h"
#include "client/bench/workload.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define BLOCKS_MAX 4096 /* their keys and 65,536 items are one frame */

struct fetch {
    const struct args *args;
    struct rig rig;
    struct ucm_region *pool;
    uint8_t *slots; /* of the pool, or their mirror */
    struct gpu gpu; /* where they lie with rig.on_gpu */
    struct ucm_fetch_item *items;
    uint32_t n;
    struct copy copy; /* of the same pieces, out of memory of this process */
    uint8_t *keys;
    uint64_t run, random, differing;
    struct samples own, load, base, us, to_load, to_base; /* GB/s, microseconds, ratios */
    struct progress progress;
};

static size_t pool_bytes(const struct fetch *f)
{
    return (size_t)f->n * f->rig.chunk;
}

/* ---- the pool ---- */

static int pool_register(struct fetch *f, const struct ucm_memory *memory)
{
    struct ucm_plane plane = {.stride = f->rig.chunk, .chunk_bytes = f->rig.chunk};
    struct ucm_region_spec spec = {.blocks = f->n,
                                   .device = f->rig.on_gpu ? "cuda" : "cpu",
                                   .gpu = f->rig.on_gpu ? f->gpu.uuid : NULL,
                                   .memory = memory,
                                   .n_memory = 1,
                                   .planes = &plane,
                                   .n_planes = 1,
                                   .pool = 1};
    int rc = ucm_region_register(f->rig.ns, &spec, f->rig.timeout_ms, &f->pool);

    return rc < 0 ? bench_fail(BENCH_FAILED, "registering the pool: %s", ucm_errmsg()) : 0;
}

static int pool_open(struct fetch *f)
{
    struct ucm_memory memory = {.kind = UCM_MEMORY_CUDA_IPC, .bytes = pool_bytes(f), .fd = -1};
    void *p;
    int rc;

    if (f->rig.on_gpu) {
        p = mmap(NULL, pool_bytes(f), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED)
            return bench_fail(BENCH_FAILED, "memory ran out");
        f->slots = p;
        if (gpu_open(&f->gpu, pool_bytes(f)) < 0)
            return bench_fail(BENCH_FAILED, "%s", f->gpu.why);
        memcpy(memory.ipc, f->gpu.ipc, sizeof memory.ipc);
        memory.prove_cb = gpu_prove_cb;
        memory.prove_ctx = &f->gpu;
        return pool_register(f, &memory);
    }
    memory.kind = UCM_MEMORY_MEMFD;
    if (ucm_shared_memory(pool_bytes(f), &memory.fd, &p) < 0)
        return bench_fail(BENCH_FAILED, "the pool's memory: %s", ucm_errmsg());
    f->slots = p;
    rc = pool_register(f, &memory);
    close(memory.fd);
    return rc;
}

static void pool_close(struct fetch *f)
{
    if (f->pool)
        (void)ucm_region_unregister(f->pool, f->rig.timeout_ms);
    gpu_close(&f->gpu);
    if (f->slots)
        munmap(f->slots, pool_bytes(f));
}

/* ---- a round ---- */

/* Other pieces each time: any layer of any block, into slots in random order. */
static void items_choose(struct fetch *f)
{
    for (uint32_t i = 0; i < f->n; i++) {
        uint32_t at = (uint32_t)(workload_random(&f->random) % (i + 1));

        f->items[i].slot = f->items[at].slot;
        f->items[at].slot = i;
        f->items[i].block = (uint32_t)(workload_random(&f->random) % f->rig.blocks);
        f->items[i].shard = (uint32_t)(workload_random(&f->random) % f->rig.planes);
    }
}

static int items_check(struct fetch *f, const struct ucm_result *r)
{
    if (r->n_ok != f->n)
        return bench_fail(BENCH_FAILED, "%u of %u items were not fetched: is the arena too small?",
                          f->n - r->n_ok, f->n);
    if (f->rig.on_gpu && gpu_read(&f->gpu, f->slots, pool_bytes(f)) < 0)
        return bench_fail(BENCH_FAILED, "%s", f->gpu.why);
    for (uint32_t i = 0; i < f->n; i++) {
        const struct ucm_fetch_item *p = &f->items[i];
        uint64_t seed = pattern_seed(f->keys + (size_t)p->block * RIG_KEY_BYTES, 0);

        f->differing += pattern_differ(f->slots + (size_t)p->slot * f->rig.chunk, f->rig.chunk,
                                       seed, (uint64_t)p->shard * f->rig.chunk) > 0;
    }
    return 0;
}

static int fetch_once(struct fetch *f, double *seconds)
{
    struct ucm_fetch_spec spec = {.keys = f->keys,
                                  .n_keys = f->rig.blocks,
                                  .items = f->items,
                                  .n_items = f->n,
                                  .priority = 7};
    struct ucm_task *task;
    struct ucm_result r;
    uint64_t t = clock_ns();
    int rc = ucm_fetch(f->pool, &spec, f->rig.timeout_ms, &task);

    if (rc < 0)
        return bench_fail(BENCH_FAILED, "fetch: %s", ucm_errmsg());
    rc = ucm_task_wait(task, f->rig.timeout_ms, &r);
    *seconds = (double)(clock_ns() - t) / 1e9;
    rc = rc < 0 ? bench_fail(BENCH_FAILED, "fetch: %s", ucm_errmsg()) : items_check(f, &r);
    ucm_task_free(task);
    return rc;
}

/* As many bytes in whole blocks, in one request. */
static int load_once(struct fetch *f, double *rate)
{
    uint32_t blocks = (uint32_t)(pool_bytes(f) / f->rig.block_bytes);
    struct rig_move plan = {.keys = f->keys, .n = blocks, .batch = blocks, .in_flight = 1};
    struct rig_moved moved;
    uint64_t t = clock_ns();
    int rc = rig_move(&f->rig, RIG_LOAD, &plan, NULL, &moved);

    *rate = (double)blocks * (double)f->rig.block_bytes / (double)(clock_ns() - t);
    return rc < 0 ? bench_rig_fail(&f->rig, rc) : 0;
}

/* The same pieces by a plain loop; to a GPU as many bytes at once. */
static int base_once(struct fetch *f, double *rate)
{
    uint64_t t = clock_ns();

    if (f->rig.on_gpu && gpu_write(&f->gpu, f->slots, pool_bytes(f)) < 0)
        return bench_fail(BENCH_FAILED, "%s", f->gpu.why);
    for (uint32_t i = 0; !f->rig.on_gpu && i < f->n; i++) {
        const struct ucm_fetch_item *p = &f->items[i];

        memcpy(f->slots + (size_t)p->slot * f->rig.chunk,
               f->copy.slots + ((size_t)p->block * f->rig.planes + p->shard) * f->rig.chunk,
               f->rig.chunk);
    }
    *rate = (double)pool_bytes(f) / (double)(clock_ns() - t);
    return 0;
}

static int round_run(struct fetch *f)
{
    double seconds = 0, load = 0, base = 0, own;
    int rc;

    items_choose(f);
    rc = base_once(f, &base);
    if (rc == 0)
        rc = load_once(f, &load);
    if (rc == 0)
        rc = fetch_once(f, &seconds);
    if (rc != 0)
        return rc;
    own = (double)pool_bytes(f) / seconds / 1e9;
    if (samples_add(&f->own, own) < 0 || samples_add(&f->load, load) < 0 ||
        samples_add(&f->base, base) < 0 || samples_add(&f->us, seconds * 1e6) < 0 ||
        samples_add(&f->to_load, own / load) < 0 || samples_add(&f->to_base, own / base) < 0)
        return bench_fail(BENCH_FAILED, "memory ran out");
    return 0;
}

/* ---- the command ---- */

static void report(struct fetch *f)
{
    struct figure to_base = {.name = "fetch from DRAM",
                             .unit = "GB/s",
                             .value = samples_at(&f->own, 0.5),
                             .baseline_name =
                                 f->rig.on_gpu ? "one large copy" : "memcpy, one thread",
                             .baseline = samples_at(&f->base, 0.5),
                             .ratio = samples_at(&f->to_base, 0.5),
                             .more_is_better = true};
    struct figure to_load = to_base;
    struct report r;

    to_load.name = "fetch beside load";
    to_load.baseline_name = "load of whole blocks";
    to_load.baseline = samples_at(&f->load, 0.5);
    to_load.ratio = samples_at(&f->to_load, 0.5);
    report_begin(&r, f->args->command, args_given(f->args, "json"));
    report_number(&r, "items", f->n);
    report_number(&r, "chunk_bytes", f->rig.chunk);
    report_number(&r, "block_bytes", (double)f->rig.block_bytes);
    report_number(&r, "microseconds", samples_at(&f->us, 0.5));
    report_number(&r, "microseconds_p99", samples_at(&f->us, 0.99));
    report_number(&r, "items_per_second", f->n / samples_at(&f->us, 0.5) * 1e6);
    report_number(&r, "differing", (double)f->differing);
    report_figure(&r, &to_base);
    report_figure(&r, &to_load);
    (void)report_end(&r);
}

static int store(struct fetch *f)
{
    struct rig_move plan = {.keys = f->keys, .n = f->rig.blocks, .batch = 32, .in_flight = 4};
    struct rig_moved moved;
    int rc;

    bench_keys(f->run, 0, f->rig.blocks, f->keys);
    for (uint32_t b = 0; b < f->rig.blocks; b++)
        rig_fill(&f->rig, b, f->keys + (size_t)b * RIG_KEY_BYTES);
    rc = rig_push(&f->rig);
    if (rc == 0)
        rc = rig_move(&f->rig, RIG_DUMP, &plan, NULL, &moved);
    if (rc < 0)
        return bench_rig_fail(&f->rig, rc);
    if (moved.ok != f->rig.blocks)
        return bench_fail(BENCH_FAILED,
                          "%u of %u blocks were not stored: use a smaller --total or a larger "
                          "arena.size",
                          f->rig.blocks - moved.ok, f->rig.blocks);
    return 0;
}

static int measure(struct fetch *f)
{
    uint32_t rounds = (uint32_t)args_number(f->args, "rounds");
    int rc = store(f);

    for (uint32_t i = 0; rc == 0 && i < rounds; i++) {
        rc = round_run(f);
        if (progress_due(&f->progress))
            progress_show(&f->progress, "round %u of %u", i + 1, rounds);
    }
    progress_end(&f->progress);
    if (rc == 0)
        report(f);
    if (rig_evict(&f->rig, 0) < 0 && rc == 0)
        rc = bench_rig_fail(&f->rig, -UCM_EBUSY);
    if (rc == 0 && f->differing > 0)
        rc = bench_fail(BENCH_DIFFERING, "%llu fetched pieces differ from what was stored",
                        (unsigned long long)f->differing);
    return rc;
}

static int run(struct fetch *f)
{
    int rc;

    f->keys = malloc((size_t)f->rig.blocks * RIG_KEY_BYTES);
    f->items = calloc(f->n, sizeof *f->items);
    if (f->keys == NULL || f->items == NULL ||
        copy_init(&f->copy, f->rig.memory, f->rig.blocks, f->rig.planes, f->rig.chunk, 1) < 0) {
        rc = bench_fail(BENCH_FAILED, "memory ran out");
        goto out;
    }
    rc = pool_open(f);
    if (rc == 0)
        rc = measure(f);
    pool_close(f);
    copy_close(&f->copy);
out:
    free(f->keys);
    free(f->items);
    return rc;
}

int bench_fetch(const struct args *a)
{
    struct fetch f = {.args = a, .run = bench_run_id(), .random = bench_run_id()};
    struct samples *all[] = {&f.own, &f.load, &f.base, &f.us, &f.to_load, &f.to_base};
    struct rig_options o;
    uint64_t blocks;
    int rc;

    bench_rig_options(a, &o);
    f.n = (uint32_t)args_number(a, "items");
    blocks = args_number(a, "total") / o.block_bytes;
    if (blocks == 0 || blocks > BLOCKS_MAX)
        return program_usage_error(a, "--total must hold 1 to %d blocks", BLOCKS_MAX);
    if (f.n * o.chunk < o.block_bytes || f.n * o.chunk > blocks * o.block_bytes)
        return program_usage_error(a,
                                   "--items must be a block's bytes at least and --total at most");
    o.model = "ucm-bench fetch";
    o.blocks = (uint32_t)blocks;
    o.gpu = strcmp(args_text(a, "device"), "gpu") == 0;
    progress_begin(&f.progress, args_given(a, "quiet"));
    rc = rig_open(&f.rig, &o);
    if (rc < 0)
        return bench_rig_fail(&f.rig, rc);
    rc = rig_wait_arena(&f.rig);
    rc = rc < 0 ? bench_rig_fail(&f.rig, rc) : run(&f);
    rig_close(&f.rig);
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        samples_free(all[i]);
    return rc;
}
