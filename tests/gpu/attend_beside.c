/* Attention alongside the gather, in one stream: resolve, gather, and attention that waits for
 * blocks on their way. Its bits are those of attention after the gather, whatever was resident. */
#include "tests/gpu/attend.h"

#include "kernels/entries/entries_cuda.h"

#include <string.h>

#define GATHER_BLOCKS 32u

struct beside {
    struct problem p;
    struct ucm_entries pool; /* the GPU's */
    struct ucm_entries_lists lists;
    struct ucm_entries_gather gather;
    struct ucm_entries_place *place;
    uint8_t *mapping; /* of the host: [numbers][kv_heads] of what an entry holds */
    CUdeviceptr memory, requests, places, forgotten;
    uint32_t misses; /* numbers that a replay forgets first */
};

/* ---- a pool, and a mapping that has all blocks ---- */

static void pool_open(struct beside *b)
{
    const struct attend_shape *s = &b->p.shape;
    struct ucm_entries_shape shape = {.layer_heads = s->kv_heads,
                                      .numbers = b->p.n_numbers,
                                      .entries = s->entries,
                                      .requests = 1,
                                      .misses = s->sequences * s->lists * s->room};
    char why[UCM_ENTRIES_WHY] = "";
    size_t bytes;
    struct ucm_entries host;
    void *memory;

    check(ucm_entries_check(&shape, why) == 0, "a pool: %s", why);
    bytes = ucm_entries_bytes(&shape);
    memory = fresh(bytes);
    ucm_entries_layout(&host, &shape, memory);
    ucm_entries_init(&host);
    host.step->now = 1;
    b->memory = gpu_put(0, memory, bytes);
    ucm_entries_layout(&b->pool, &shape, (void *)b->memory);
}

static void mapping_open(struct beside *b)
{
    struct problem *p = &b->p;
    uint64_t block = p->shape.kv_heads * p->entry, size = p->n_numbers * block, piece = 2000006;
    uint8_t *from = fresh(piece);
    uint64_t *seqs; /* each its own: reads of one word of the host wait for each other */
    CUdeviceptr at;

    problem_draw_bytes(p, from, piece);
    must(cuMemHostAlloc((void **)&b->mapping, size + 8 * p->n_numbers, CU_MEMHOSTALLOC_DEVICEMAP),
         "a mapping");
    must(cuMemHostGetDevicePointer(&at, b->mapping, 0), "its address");
    for (uint64_t i = 0; i < size; i += piece)
        memcpy(b->mapping + i, from, size - i < piece ? size - i : piece);
    seqs = (uint64_t *)(void *)(b->mapping + size);
    b->place = fresh(p->n_numbers * sizeof(*b->place));
    for (uint32_t i = 0; i < p->n_numbers; i++) {
        seqs[i] = 2;
        b->place[i] = (struct ucm_entries_place){at + i * block, at + size + 8 * i, 2};
    }
    b->places = gpu_put(0, b->place, p->n_numbers * sizeof(*b->place));
    b->gather = (struct ucm_entries_gather){.places = b->places,
                                            .heads = p->shape.kv_heads,
                                            .planes = 1,
                                            .plane[0] = {.entries = p->args.pool.base,
                                                         .entry_stride = p->entry,
                                                         .head_stride = p->entry,
                                                         .rows = 1,
                                                         .row_bytes = (uint32_t)p->entry}};
}

static void beside_open(struct beside *b, const struct attend_shape *shape)
{
    struct ucm_attend_cuda *a = &b->p.args;
    uint32_t *requests = fresh(shape->sequences * 4);

    memset(b, 0, sizeof(*b));
    problem_open(&b->p, shape);
    problem_draw(&b->p);
    pool_open(b);
    mapping_open(b);
    a->entry_of = (CUdeviceptr)b->pool.entry_of;
    b->requests = gpu_put(0, requests, shape->sequences * 4);
    b->forgotten = gpu_new(b->p.n_numbers * 4);
    b->lists = (struct ucm_entries_lists){.sequences = shape->sequences,
                                          .lists = shape->lists,
                                          .room = shape->room,
                                          .apart = 1,
                                          .index = (const void *)a->list,
                                          .count = (const void *)a->count,
                                          .table = (const void *)a->numbers,
                                          .table_stride = shape->entries,
                                          .request = (const void *)b->requests};
}

static void beside_close(struct beside *b)
{
    must(cuMemFreeHost(b->mapping), "the mapping");
    memory_end();
}

/* ---- a layer's launches ---- */

static void layer(struct beside *b, uint32_t wait)
{
    struct ucm_attend_cuda args = b->p.args;
    CUdeviceptr attended = 0;
    uint32_t layer_head = 0;

    args.wait = wait;
    gpu_launch("ucm_entries_next", 1, 1, 0, (void *[]){&b->pool, &attended});
    gpu_launch("ucm_entries_resolve", b->lists.sequences * b->lists.lists, UCM_ENTRIES_CUDA_RESOLVE,
               0, (void *[]){&b->pool, &layer_head, &b->lists});
    gpu_launch("ucm_entries_gather_warp", GATHER_BLOCKS, UCM_ENTRIES_CUDA_GATHER, 0,
               (void *[]){&b->pool, &b->gather});
    problem_launch(&b->p, &args);
}

static CUgraph captured(struct beside *b)
{
    CUgraph graph;

    must(cuStreamBeginCapture(gpu_stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "capture");
    layer(b, 1);
    must(cuStreamEndCapture(gpu_stream, &graph), "capture");
    return graph;
}

static void forget(struct beside *b)
{
    int32_t *numbers = fresh(b->misses * 4 + 4);

    for (uint32_t i = 0; i < b->misses; i++)
        numbers[i] = b->p.numbers[rnd_below(b->p.shape.entries)];
    gpu_put(b->forgotten, numbers, b->misses * 4);
    gpu_launch("ucm_entries_forget_numbers", 32, 128, 0,
               (void *[]){&b->pool, &b->forgotten, &b->misses});
}

/* ---- tests ---- */

/* The blocks that are resident now, for the C. */
static void read_pool(struct beside *b)
{
    struct problem *p = &b->p;

    gpu_get(p->entry_of, p->args.entry_of, (uint64_t)p->tables * p->n_numbers * 4);
    gpu_get(p->pool, p->args.pool.base, p->shape.entries * p->entry);
}

/* A block that no mapping brings ends the wait, and raises the flag. */
static void lose(struct beside *b)
{
    struct ucm_entries_place none = {0};
    uint32_t number = (uint32_t)b->p.numbers[b->p.list[0]], one = 1;
    struct ucm_entries_step step;

    gpu_put(b->places + number * sizeof(none), &none, sizeof(none));
    gpu_put(b->forgotten, &number, 4);
    gpu_launch("ucm_entries_forget_numbers", 32, 128, 0, (void *[]){&b->pool, &b->forgotten, &one});
    layer(b, 1);
    gpu_sync();
    gpu_get(&step, (CUdeviceptr)b->pool.step, sizeof(step));
    check(step.flags == UCM_ENTRIES_UNSERVED, "flags of the pool: %u", step.flags);
    check(problem_flags(&b->p) == UCM_ATTEND_NO_ENTRY, "a block that did not come");
    gpu_put(b->places + number * sizeof(none), &b->place[number], sizeof(none));
}

void test_beside_of(const struct attend_shape *shape, uint32_t tiles)
{
    struct beside b;
    struct answer want, behind, got;
    struct ucm_entries_step step;
    CUgraphExec graph;
    CUgraph made;

    beside_open(&b, shape);
    problem_cut(&b.p, tiles);
    want = answer_new(&b.p);
    behind = answer_new(&b.p);
    got = answer_new(&b.p);
    layer(&b, 0); /* nothing was resident */
    gpu_sync();
    answer_get(&b.p, &behind);
    read_pool(&b);
    answer_reference(&b.p, &want);
    answer_compare(&b.p, &want, &behind, "after the gather");
    check(problem_flags(&b.p) == 0, "flags after the gather");
    made = captured(&b);
    must(cuGraphInstantiate(&graph, made, 0), "the graph");
    must(cuGraphDestroy(made), "the graph");
    for (uint32_t i = 0; i < (few ? 2 : 30); i++) {
        b.misses = i % 3 == 0 ? 0 : i % 3 == 1 ? rnd_below(20) : rnd_below(b.p.n_numbers);
        forget(&b);
        if (i % 2)
            must(cuGraphLaunch(graph, gpu_stream), "the graph");
        else
            layer(&b, 1);
        gpu_sync();
        answer_get(&b.p, &got);
        answer_same(&b.p, &behind, &got, "alongside the gather");
        check(problem_flags(&b.p) == 0, "flags alongside the gather");
        gpu_get(&step, (CUdeviceptr)b.pool.step, sizeof(step));
        check(step.flags == 0 && step.misses == 0 && step.done == 0, "the gather has not ended");
    }
    lose(&b);
    must(cuGraphExecDestroy(graph), "the graph");
    beside_close(&b);
}

void test_beside(void)
{
    static const struct attend_shape shapes[] = {
        {UCM_KV_BF16, 16, 8, 4, 128, 2, 8, 37, 640, 20, 5, 1, 0, 0},
        {UCM_KV_F16, 32, 3, 3, 64, 4, 3, 20, 300, 11, 4, 1, 0, 0},
        {UCM_KV_BF16, 16, 2, 16, 128, 40, 2, 30, 2500, 9, 3, 1, 1, 0},
    };

    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        test_beside_of(&shapes[i], 3);
        test_beside_of(&shapes[i], 12);
    }
}
