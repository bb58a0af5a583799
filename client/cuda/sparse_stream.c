#include "client/cuda/copy_agent.h"
#include "client/cuda/sparse_select.h"

#define SHARED_MOST (220u << 10) /* dynamic, of a thread block: some is static */

extern const unsigned char ucm_select_stream_fatbin[];

static uint32_t round_up(uint32_t n, uint32_t to)
{
    return (n + to - 1) / to * to;
}

static uint32_t panels_of(const struct ucm_cuda_select *s)
{
    return s->args.queries_a_head > 4 ? 2 : 1;
}

/* Dynamic shared memory of a thread block: a list's scores, the queries of each scoring warp, tiles. */
static uint32_t shared_plan(struct ucm_cuda_select *s)
{
    struct ucm_select_cuda *a = &s->args;
    uint32_t halves = panels_of(s) * a->channels / 16 * WARP_LANES * (uint32_t)sizeof(uint32_t);
    uint32_t tile = UCM_SELECT_STREAM_SCORERS / a->kv_heads * UCM_SELECT_CUDA_MATRIX_BLOCKS;

    a->copy_bytes = s->kernel.plan.bytes;
    a->staged = round_up(a->copy_bytes, 16);
    a->staged += a->staged / 16 % 2 == 0 ? 16 : 0;
    a->query_at = round_up(a->pitch * (uint32_t)sizeof(float), 128);
    a->stage_at = a->query_at + UCM_SELECT_STREAM_SCORERS * halves;
    return a->stage_at + UCM_SELECT_STREAM_STAGES * tile * a->staged;
}

bool sparse_stream_serves(struct ucm_cuda_select *s, const uint8_t *gpu,
                          enum ucm_select_cuda_family family)
{
    const struct ucm_select_cuda *a = &s->args;

    if (family != UCM_SELECT_REST || a->channels != 128 || a->rounds == 0 ||
        a->reduce != UCM_REDUCE_SOFTMAX || a->heads != UCM_HEADS_EACH ||
        a->policy != UCM_CHOOSE_TOPK || a->queries_a_head > UCM_SELECT_STREAM_QUERIES ||
        UCM_SELECT_STREAM_SCORERS % a->kv_heads != 0 || !sparse_has_clusters(gpu))
        return false;
    s->shared_bytes = shared_plan(s);
    return s->shared_bytes <= SHARED_MOST;
}

int sparse_stream_open(struct ucm_cuda_select *s, const uint8_t *gpu)
{
    const char *name =
        panels_of(s) == 2 ? "ucm_select_stream_rest_4_2" : "ucm_select_stream_rest_4_1";
    int r = sparse_kernel_open(&s->kernel, gpu, ucm_select_stream_fatbin, name, s->shared_bytes);

    s->threads = r == 0 ? UCM_SELECT_STREAM_THREADS : 0;
    return r;
}
