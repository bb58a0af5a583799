/* Launches: of a kernel, and of those that a layer's lists take. */
#include "client/cuda/decode.h"

#define GATHER_BLOCKS                                                                              \
    32u /* the bus is full with fewer, and attention alongside it has the rest of the GPU */

/* beside: it begins when the launch before it lets it, and waits by itself. */
static CUresult launch(CUfunction kernel, const uint32_t grid[3], uint32_t threads,
                       uint32_t shared_bytes, void **arguments, CUstream stream, bool beside)
{
    CUlaunchAttribute overlap = {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                                 .value.programmaticStreamSerializationAllowed = 1};
    CUlaunchConfig config = {.gridDimX = grid[0],
                             .gridDimY = grid[1],
                             .gridDimZ = grid[2],
                             .blockDimX = threads,
                             .blockDimY = 1,
                             .blockDimZ = 1,
                             .sharedMemBytes = shared_bytes,
                             .hStream = stream,
                             .attrs = &overlap,
                             .numAttrs = beside};

    return cuLaunchKernelEx(&config, kernel, arguments, NULL);
}

CUresult decode_launch_grid(struct ucm_cuda_decode *d, enum decode_kernel kernel,
                            const uint32_t grid[3], uint32_t threads, void **arguments,
                            CUstream stream)
{
    return launch(d->kernel[kernel], grid, threads, 0, arguments, stream, false);
}

CUresult decode_launch(struct ucm_cuda_decode *d, enum decode_kernel kernel, uint32_t blocks,
                       uint32_t threads, void **arguments, CUstream stream)
{
    return decode_launch_grid(d, kernel, (uint32_t[]){blocks, 1, 1}, threads, arguments, stream);
}

/* ---- lists of a layer ---- */

static CUresult launch_resolve(struct ucm_cuda_decode *d, const struct ucm_cuda_decode_layer *l,
                               uint32_t layer_head, const struct decode_round *round,
                               CUstream stream)
{
    const struct ucm_cuda_decode_options *o = &d->plan.options;
    struct ucm_entries_lists lists = {.sequences = l->sequences,
                                      .lists = o->lists,
                                      .room = o->room,
                                      .apart = d->plan.attend.apart,
                                      .index = (const void *)(uintptr_t)l->index,
                                      .count = (const void *)(uintptr_t)l->count,
                                      .table = (const void *)(uintptr_t)l->table,
                                      .table_stride = l->table_stride,
                                      .request = (const void *)(uintptr_t)l->request};

    if (round) {
        lists.begin = (const void *)(uintptr_t)round->begin;
        lists.end = (const void *)(uintptr_t)round->end;
    }
    return decode_launch(d, DECODE_RESOLVE, l->sequences * o->lists, UCM_ENTRIES_CUDA_RESOLVE,
                         (void *[]){&d->entries, &layer_head, &lists}, stream);
}

static CUresult launch_latents(struct ucm_cuda_decode *d, struct ucm_attend_cuda *a,
                               CUstream stream)
{
    CUresult r =
        launch(d->kernel[DECODE_ATTEND], (uint32_t[]){a->splits, a->kv_heads, a->sequences},
               UCM_ATTEND_MLA_THREADS, d->plan.shared_bytes, (void *[]){a}, stream, d->beside);

    if (r != CUDA_SUCCESS || a->splits == 1)
        return r;
    return launch(d->kernel[DECODE_MERGE],
                  (uint32_t[]){a->group * UCM_ATTEND_MLA_MERGE_BLOCKS, a->kv_heads, a->sequences},
                  UCM_ATTEND_MLA_MERGE_THREADS, 0, (void *[]){a}, stream, d->beside);
}

/* The next launch after the gather: it begins alongside it, and waits for what is on its way. */
static CUresult launch_attend(struct ucm_cuda_decode *d, const struct ucm_cuda_decode_layer *l,
                              uint32_t layer_head, const struct decode_round *round,
                              CUstream stream)
{
    const struct ucm_cuda_decode_options *o = &d->plan.options;
    struct ucm_attend_cuda a = d->plan.attend;

    a.sequences = l->sequences;
    a.list = l->index;
    a.count = l->count;
    a.numbers = l->table;
    a.numbers_stride = (uint32_t)l->table_stride;
    a.entry_of = (uint64_t)(uintptr_t)(d->entries.entry_of + (uint64_t)layer_head * o->numbers);
    a.pages.base = l->pages;
    a.pages.stride = l->page_stride;
    a.pages.blocks = l->page_bound;
    a.table = l->page_table;
    a.table_stride = l->page_table_stride;
    a.first = l->first;
    a.length = o->window > 0 ? l->length : 0;
    a.q = l->q;
    a.q_stride = l->q_stride ? l->q_stride : (uint64_t)o->q_heads * o->head_dim;
    a.out = l->out;
    a.lse = l->lse;
    a.wait = d->beside;
    if (d->plan.latent)
        return launch_latents(d, &a, stream);
    if (round) {
        a.round = round->number;
        a.stop = round->stop;
    }
    return launch(d->kernel[DECODE_ATTEND], (uint32_t[]){a.splits, a.kv_heads, a.sequences},
                  UCM_ATTEND_CUDA_THREADS, d->plan.shared_bytes, (void *[]){&a}, stream, d->beside);
}

CUresult decode_launch_lists(struct ucm_cuda_decode *d, const struct ucm_cuda_decode_layer *l,
                             uint32_t layer_head, const struct decode_round *round, CUstream stream)
{
    struct ucm_entries_gather gather = d->plan.gather;
    CUresult r = launch_resolve(d, l, layer_head, round, stream);

    gather.pages = l->pages;
    gather.page_stride = l->page_stride;
    gather.page_bound = l->page_bound;
    gather.page_of = (const void *)(uintptr_t)l->page_of;
    if (r == CUDA_SUCCESS)
        r = launch(d->kernel[DECODE_GATHER], (uint32_t[]){GATHER_BLOCKS, 1, 1},
                   UCM_ENTRIES_CUDA_GATHER, 0, (void *[]){&d->entries, &gather}, stream, d->beside);
    return r == CUDA_SUCCESS ? launch_attend(d, l, layer_head, round, stream) : r;
}
