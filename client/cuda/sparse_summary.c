#include "client/cuda/error.h"
#include "client/cuda/sparse.h"
#include "kernels/sparse/summary_cuda.h"

#include <stdio.h>
#include <stdlib.h>

#define THREAD_BLOCKS 32

extern const unsigned char ucm_summary_fatbin[];

struct ucm_cuda_summary {
    struct sparse_kernel kernel;
    struct ucm_summary_cuda args; /* what follows from the plan */
    uint32_t shared_bytes;
};

static uint32_t largest(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

/* Bytes that the arrays take of a summary; padding follows. */
static uint32_t used_bytes(const struct ucm_summary_plan *p)
{
    uint32_t heads = p->spec.shape.kv_heads, vectors = heads * p->vectors;

    switch (p->spec.method) {
    case UCM_SUMMARY_HASH:
        return p->array[1] + 4 * heads;
    case UCM_SUMMARY_STATS:
        return p->scale[2] + 2 * heads;
    default:
        return p->scale[0] + 2 * vectors;
    }
}

static void args_from_plan(struct ucm_cuda_summary *d)
{
    const struct ucm_summary_plan *p = &d->kernel.plan;
    const struct ucm_kv_shape *s = &p->spec.shape;
    struct ucm_summary_cuda *a = &d->args;

    *a = (struct ucm_summary_cuda){
        .kind = p->spec.kind,
        .run = p->spec.run,
        .tokens = s->tokens,
        .kv_heads = s->kv_heads,
        .head_dim = s->head_dim,
        .v_head_dim = s->v_head_dim,
        .vectors = p->vectors,
        .channels = p->channels,
        .vector_bytes = p->vector_bytes,
        .chosen = p->spec.chosen,
        .rest = p->spec.rest,
        .bytes = p->bytes,
        .used = used_bytes(p),
        .n_segments = p->n_segments,
        .k_token_stride = s->k_token_stride,
        .k_head_stride = s->k_head_stride,
        .v_token_stride = s->v_token_stride,
        .v_head_stride = s->v_head_stride,
        .channel = d->kernel.channel,
        .flips = d->kernel.flips,
    };
    for (int i = 0; i < UCM_SUMMARY_ARRAYS; i++) {
        a->array[i] = p->array[i];
        a->scale[i] = p->scale[i];
    }
    sparse_segments(p, a->segment);
}

/* The kernel's name, for so many values a lane as the longest row needs. */
static void kernel_name(const struct ucm_summary_plan *p, char *name, size_t bytes)
{
    const struct ucm_kv_shape *s = &p->spec.shape;
    uint32_t v = p->spec.method == UCM_SUMMARY_STATS ? s->v_head_dim : 0;
    uint32_t values = (largest(s->head_dim, v) + WARP_LANES - 1) / WARP_LANES;

    for (uint32_t i = 0; i < p->n_segments; i++)
        values = largest(values, p->segment[i].size / WARP_LANES);
    snprintf(name, bytes, "ucm_summary_%u_%u_%u", p->spec.method, s->dtype,
             s->dtype == UCM_KV_F32 || values > 8 ? 32u
             : values > 4                         ? 8u
                                                  : 4u);
}

int ucm_cuda_summary_open(const uint8_t *gpu, const struct ucm_sparse_summary *summary,
                          struct ucm_cuda_summary **out)
{
    struct ucm_cuda_summary *d;
    int r;

    if (!gpu || !summary || !out)
        return cuda_fail(UCM_EINVALID, "gpu, summary or out is NULL");
    d = calloc(1, sizeof *d);
    if (!d)
        return cuda_fail(UCM_ENOMEMORY, "no memory for a summary's plan");
    r = sparse_plan(&d->kernel.plan, summary);
    if (r == 0) {
        char name[48];

        kernel_name(&d->kernel.plan, name, sizeof name);
        r = sparse_kernel_open(&d->kernel, gpu, ucm_summary_fatbin, name, 0);
    }
    if (r != 0) {
        free(d);
        return r;
    }
    args_from_plan(d);
    if (d->kernel.plan.spec.method == UCM_SUMMARY_TOKENS)
        d->shared_bytes = UCM_SUMMARY_CUDA_WARPS * d->args.tokens * (uint32_t)sizeof(float);
    ucm_context_leave();
    *out = d;
    return 0;
}

void ucm_cuda_summary_close(struct ucm_cuda_summary *d)
{
    if (!d)
        return;
    if (cuda_enter(d->kernel.context) == 0)
        sparse_kernel_close(&d->kernel);
    free(d);
}

static int layers_check(const struct ucm_cuda_summary *d, const struct ucm_cuda_summary_build *b)
{
    uint32_t dtype = d->kernel.plan.spec.shape.dtype;
    uint32_t element = dtype == UCM_KV_F32 ? 4 : dtype == UCM_KV_FP8_E4M3 ? 1 : 2;

    if (b->n_layers < 1 || b->n_layers > UCM_CUDA_SUMMARY_LAYERS || !b->layers)
        return cuda_fail(UCM_EINVALID, "n_layers is %u; 1 to %d are right", b->n_layers,
                         UCM_CUDA_SUMMARY_LAYERS);
    if (b->stride % element != 0)
        return cuda_fail(UCM_EINVALID, "stride is no multiple of an element's %u bytes", element);
    for (uint32_t i = 0; i < b->n_layers; i++) {
        const struct ucm_cuda_summary_layer *l = &b->layers[i];

        if (l->k == 0 || l->out == 0 || (l->k | l->v) % element != 0 || l->out % 4 != 0)
            return cuda_fail(UCM_EINVALID,
                             "layer %u: k or out is 0, k or v is not aligned to an element's %u "
                             "bytes, or out not to 4",
                             i, element);
    }
    return 0;
}

static int build_check(const struct ucm_cuda_summary *d, const struct ucm_cuda_summary_build *b)
{
    if (b->out_stride % 4 != 0 || b->out_stride < d->args.bytes)
        return cuda_fail(UCM_EINVALID, "out_stride is %llu; multiples of 4 from %u on are right",
                         (unsigned long long)b->out_stride, d->args.bytes);
    if (b->n_blocks > 0 && b->numbers == 0)
        return cuda_fail(UCM_EINVALID, "numbers is 0");
    return layers_check(d, b);
}

static CUresult launch(struct ucm_cuda_summary *d, const struct ucm_cuda_summary_build *b,
                       CUstream stream)
{
    const struct ucm_kv_shape *s = &d->kernel.plan.spec.shape;
    struct ucm_summary_cuda args = d->args;
    void *arguments[] = {&args};
    uint64_t heads = (uint64_t)b->n_layers * b->n_blocks * args.kv_heads;
    uint64_t grid = (heads + UCM_SUMMARY_CUDA_WARPS - 1) / UCM_SUMMARY_CUDA_WARPS;
    uint32_t most = b->thread_blocks ? b->thread_blocks : THREAD_BLOCKS;

    args.n_layers = b->n_layers;
    args.n_blocks = b->n_blocks;
    args.block = b->numbers;
    args.out_block = b->out_numbers ? b->out_numbers : b->numbers;
    args.blocks = b->bound;
    args.out_blocks = b->out_bound;
    args.block_stride = b->stride;
    args.out_stride = b->out_stride;
    for (uint32_t i = 0; i < b->n_layers; i++)
        args.layer[i] = (struct ucm_summary_cuda_layer){
            b->layers[i].k + s->k_offset, b->layers[i].v + s->v_offset, b->layers[i].out};
    return cuLaunchKernel(d->kernel.function, (unsigned)(grid < most ? grid : most), 1, 1,
                          UCM_SUMMARY_CUDA_THREADS, 1, 1, d->shared_bytes, stream, arguments, NULL);
}

int ucm_cuda_summary(struct ucm_cuda_summary *summary, const struct ucm_cuda_summary_build *build,
                     void *stream)
{
    CUresult rc;
    int r;

    if (!summary || !build)
        return cuda_fail(UCM_EINVALID, "summary or build is NULL");
    r = build_check(summary, build);
    if (r != 0 || build->n_blocks == 0)
        return r;
    r = cuda_enter(summary->kernel.context);
    if (r != 0)
        return r;
    rc = launch(summary, build, stream);
    return cuda_leave(rc, "summaries can't be built");
}
