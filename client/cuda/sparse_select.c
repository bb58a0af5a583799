#include "client/cuda/sparse_select.h"
#include "client/cuda/error.h"
#include "client/lib/sparse/spec.h"
#include "kernels/sparse/arith.h"

#include <stdio.h>
#include <stdlib.h>

#define WORKSPACE_ALIGN 4096

extern const unsigned char ucm_select_fatbin[], ucm_select_rare_fatbin[];

/* ---- options ---- */

static int specs(struct ucm_cuda_select *s, const struct ucm_cuda_select_options *o,
                 struct ucm_score_spec *score, struct ucm_choose_spec *choose)
{
    char why[UCM_SPARSE_WHY];

    *score = sparse_score_spec(&o->score);
    *choose = sparse_choose_spec(&o->choose);
    if (ucm_score_check(&s->kernel.plan, score, why) ||
        ucm_choose_for(&s->kernel.plan.spec, choose, why))
        return cuda_fail(UCM_EINVALID, "%s", why);
    return 0;
}

static int sizes_check(const struct ucm_cuda_select_options *o, const struct ucm_score_spec *score)
{
    if (o->q_dtype > UCM_SPARSE_BF16)
        return cuda_fail(UCM_EINVALID, "q_dtype %u is none of f32, f16 and bf16", o->q_dtype);
    if (o->sequences < 1 || o->sequences > UCM_CUDA_SELECT_SEQUENCES)
        return cuda_fail(UCM_EINVALID, "sequences is %u; 1 to %d are right", o->sequences,
                         UCM_CUDA_SELECT_SEQUENCES);
    if (o->max_blocks < 1 || o->max_blocks > UCM_CUDA_SELECT_BLOCKS)
        return cuda_fail(UCM_EINVALID, "max_blocks is %u; 1 to %d are right", o->max_blocks,
                         UCM_CUDA_SELECT_BLOCKS);
    if ((uint64_t)score->rows * score->q_heads > UCM_CUDA_SELECT_QUERIES)
        return cuda_fail(UCM_EINVALID, "%u rows of %u query heads are more than %d", score->rows,
                         score->q_heads, UCM_CUDA_SELECT_QUERIES);
    return 0;
}

/* ---- what the kernel takes ---- */

static enum ucm_select_cuda_family family_of(const struct ucm_summary_plan *p, uint32_t metric)
{
    switch (p->spec.method) {
    case UCM_SUMMARY_BOX:
        return UCM_SELECT_BOX;
    case UCM_SUMMARY_HASH:
        return UCM_SELECT_HASH;
    case UCM_SUMMARY_STATS:
        return UCM_SELECT_STATS;
    case UCM_SUMMARY_TOKENS:
        if (p->spec.rest != UCM_REST_NONE)
            return UCM_SELECT_REST;
        /* fall through */
    default:
        return metric == UCM_METRIC_L2 ? UCM_SELECT_L2 : UCM_SELECT_DOT;
    }
}

static uint32_t round_up(uint32_t n, uint32_t to)
{
    return (n + to - 1) / to * to;
}

static void args_from_plan(struct ucm_cuda_select *s, enum ucm_select_cuda_family family)
{
    const struct ucm_summary_plan *p = &s->kernel.plan;
    const struct ucm_kv_shape *shape = &p->spec.shape;
    struct ucm_select_cuda *a = &s->args;

    a->kv_heads = shape->kv_heads;
    a->head_dim = shape->head_dim;
    a->tokens = shape->tokens;
    a->vectors = p->vectors;
    a->channels = p->channels;
    a->vector_bytes = p->vector_bytes;
    a->chosen = p->spec.chosen;
    a->padded = family == UCM_SELECT_HASH ? p->channels / 4 : round_up(p->channels, WARP_LANES);
    a->aligned = p->channels % 4 == 0;
    a->n_segments = p->n_segments;
    a->stats_beta = p->spec.beta;
    a->ln_count = p->ln_count;
    for (int i = 0; i < UCM_SUMMARY_ARRAYS; i++) {
        a->array[i] = p->array[i];
        a->scale[i] = p->scale[i];
    }
    sparse_segments(p, a->segment);
    a->query_floats =
        family == UCM_SELECT_BOX ? a->padded + a->padded / 4 + 4 : round_up(a->padded, 4);
}

/* N of the kernel: see enum ucm_select_cuda_family. */
static uint32_t words_of(const struct ucm_cuda_select *s, enum ucm_select_cuda_family family)
{
    const struct ucm_select_cuda *a = &s->args;

    if (family == UCM_SELECT_HASH || family == UCM_SELECT_L2 ||
        a->rows * a->q_heads > UCM_SELECT_CUDA_SHORT)
        return 0;
    return a->channels == 64 || a->channels == 128 ? a->channels / WARP_LANES : 0;
}

/* By chunks, for vectors of any length where warps have several jobs: their summaries are staged in shared memory if
 * that many fit. */
static void chunks_plan(struct ucm_cuda_select *s, uint32_t queries)
{
    struct ucm_select_cuda *a = &s->args;
    uint32_t pitch =
        round_up(a->copy_bytes, 128) + 32; /* teams read four blocks at once: no bank twice */
    uint32_t chunk = 64;

    a->prepares = 1;
    while (chunk > 8 && (chunk * pitch > UCM_SELECT_CUDA_STAGE ||
                         2 * queries * (chunk + 4) > UCM_SELECT_CUDA_RAW))
        chunk /= 2;
    if (chunk * pitch <= UCM_SELECT_CUDA_STAGE &&
        2 * queries * (chunk + 4) <= UCM_SELECT_CUDA_RAW) {
        a->staged = pitch;
        a->raw_pitch = chunk + 4;
    } else {
        for (chunk = 256; 2 * queries * chunk > UCM_SELECT_CUDA_RAW;)
            chunk /= 2;
        a->raw_pitch = chunk;
    }
    a->chunk = chunk;
    a->stage_at = round_up(2 * queries * a->raw_pitch * (uint32_t)sizeof(float), 128);
    a->summary_at = a->stage_at + UCM_SELECT_CUDA_STAGES * chunk * a->staged;
}

/* UCM_METRIC_ROUNDED: how many times four queries the matrix units take at once; 0: they don't. */
static uint32_t panels_of(const struct ucm_cuda_select *s, uint32_t n)
{
    if (n == 0 || s->args.rounds == 0)
        return 0;
    return s->args.queries_a_head > 4 ? 2 : 1;
}

/* A tile as one chunk, scored by the matrix units. */
static void matrix_plan(struct ucm_cuda_select *s, uint32_t panels, uint32_t queries)
{
    struct ucm_select_cuda *a = &s->args;
    uint32_t jobs = a->kv_heads * ((a->queries_a_head + 4 * panels - 1) / (4 * panels));
    uint32_t warps = UCM_SELECT_CUDA_THREADS / WARP_LANES;

    while (a->tile * queries > UCM_SELECT_CUDA_RAW)
        a->tile /= 2;
    a->grain = UCM_SELECT_CUDA_MATRIX_BLOCKS * (jobs < warps ? warps / jobs : 1);
    a->chunk = a->tile;
    a->raw_pitch = a->tile + 8; /* what a warp stores at once lies in 32 banks */
    a->summary_at = UCM_SELECT_CUDA_RINGS_AT + UCM_SELECT_CUDA_RINGS;
}

/* How blocks are scored, by a kernel of that N, and where in shared memory. */
static void tile_plan(struct ucm_cuda_select *s, uint32_t n, uint32_t queries)
{
    struct ucm_select_cuda *a = &s->args;
    uint32_t each = a->queries_a_head > 1 ? 4 : 1, end;
    uint32_t jobs = a->kv_heads * ((a->queries_a_head + each - 1) / each);
    bool many = jobs > UCM_SELECT_CUDA_THREADS / WARP_LANES;

    a->copy_bytes = s->kernel.plan.bytes;
    a->tile = UCM_SELECT_CUDA_TILE;
    a->grain = 8;
    if (panels_of(s, n) > 0) {
        matrix_plan(s, panels_of(s, n), queries);
    } else if (n == 0 && many) {
        chunks_plan(s, queries);
    } else {
        while (a->tile * queries > UCM_SELECT_CUDA_RAW)
            a->tile /= 2;
        a->chunk = a->raw_pitch = a->tile;
        a->query_at = n == 0 ? UCM_SELECT_CUDA_RINGS_AT : 0;
        a->summary_at = UCM_SELECT_CUDA_RINGS_AT + UCM_SELECT_CUDA_RINGS;
        a->prepares = many || (n == 0 && queries * a->query_floats * (uint32_t)sizeof(float) >
                                             UCM_SELECT_CUDA_RINGS);
    }
    end = a->summary_at + (UCM_SELECT_CUDA_TILE + UCM_SELECT_CUDA_PAD) * (uint32_t)sizeof(uint64_t);
    s->shared_bytes = end > UCM_SELECT_CUDA_SHARED ? end : UCM_SELECT_CUDA_SHARED;
}

static void args_from_specs(struct ucm_cuda_select *s, enum ucm_select_cuda_family family,
                            const struct ucm_cuda_select_options *o,
                            const struct ucm_score_spec *score,
                            const struct ucm_choose_spec *choose)
{
    struct ucm_select_cuda *a = &s->args;

    a->reduce = score->reduce;
    a->heads = score->heads;
    a->rows = score->rows;
    a->q_heads = score->q_heads;
    a->queries_a_head = score->rows * score->q_heads / a->kv_heads;
    if (score->metric == UCM_METRIC_ROUNDED)
        a->rounds = family == UCM_SELECT_REST ? 3 : 7;
    a->beta = ucm_score_beta(&s->kernel.plan.spec, score->beta);
    a->policy = choose->policy;
    a->block_tokens = choose->block_tokens;
    a->topk_tokens = choose->topk_tokens;
    a->min_blocks = choose->min_blocks;
    a->sink_blocks = choose->sink_blocks;
    a->recent_blocks = choose->recent_blocks;
    a->k_max = choose->limit;
    a->mass_beta = choose->beta;
    a->sparse_ratio = choose->sparse_ratio;
    a->eps = choose->eps;
    a->q_dtype = o->q_dtype;
    a->max_blocks = o->max_blocks;
    a->pitch = round_up(o->max_blocks, 4);
    a->lists = ucm_score_lists(&s->kernel.plan, score);
    a->slices = a->policy == UCM_CHOOSE_TOPK && o->max_blocks > UCM_SELECT_CUDA_LONG
                    ? (o->max_blocks + UCM_SELECT_CUDA_SLICE - 1) / UCM_SELECT_CUDA_SLICE
                    : 0;
    a->room =
        o->room > 0 ? ucm_choose_limit(choose, o->room) : ucm_choose_room(choose, o->max_blocks);
    if (a->room == 0) /* a choice of no block */
        a->room = 1;
}

/* ---- the workspace ---- */

static uint64_t place(uint64_t *end, uint64_t bytes)
{
    uint64_t at = *end;

    *end = (at + bytes + WORKSPACE_ALIGN - 1) / WORKSPACE_ALIGN * WORKSPACE_ALIGN;
    return at;
}

/* Offsets; counters, which must be 0 at first, come first. */
static void workspace_plan(struct ucm_cuda_select *s)
{
    struct ucm_select_cuda *a = &s->args;
    uint64_t end = 0, sequences = s->sequences, heads = sequences * a->rows * a->q_heads;
    uint64_t raw = a->reduce == UCM_REDUCE_SOFTMAX ? heads : 0;
    uint64_t lists = a->slices > 0 ? sequences * a->lists : 0; /* that may be long */

    a->ticket = place(&end, UCM_SELECT_STREAM_TICKETS * sizeof(uint32_t));
    a->progress = place(&end, sequences * sizeof(struct ucm_select_cuda_progress));
    a->top = place(&end, raw * sizeof(uint32_t));
    a->sum = place(&end, raw * sizeof(uint64_t));
    a->digits = place(&end, a->policy == UCM_CHOOSE_TOPK
                                ? sequences * a->lists * UCM_SELECT_CUDA_DIGITS * sizeof(uint32_t)
                                : 0);
    a->found = place(&end, lists * sizeof(uint32_t));
    s->counters_bytes = end;
    a->found_at = place(&end, lists * 2 * UCM_SELECT_CUDA_FOUND * sizeof(uint32_t));
    a->marks = place(&end, lists * ((a->max_blocks + 31) / 32) * sizeof(uint32_t));
    a->poison = place(&end, s->kernel.plan.bytes);
    a->queries = place(&end, heads * a->query_floats * sizeof(float));
    a->scores = place(&end, sequences * a->lists * a->pitch * sizeof(float));
    a->raw = place(&end, raw * a->pitch * sizeof(float));
    s->workspace_bytes = end;
}

static void workspace_place(struct ucm_select_cuda *a, CUdeviceptr base)
{
    a->ticket += base;
    a->progress += base;
    a->top += base;
    a->sum += base;
    a->digits += base;
    a->found += base;
    a->found_at += base;
    a->marks += base;
    a->poison += base;
    a->queries += base;
    a->scores += base;
    a->raw += base;
}

/* ---- open and close ---- */

static CUresult launch(struct ucm_cuda_select *s, const struct ucm_select_cuda *args,
                       uint32_t thread_blocks, CUstream stream)
{
    void *arguments[] = {(void *)args};

    if (s->cluster > 0)
        return sparse_cluster_launch(s, args, stream);
    return cuLaunchKernel(s->kernel.function, thread_blocks, 1, 1, s->threads, 1, 1,
                          s->shared_bytes, stream, arguments, NULL);
}

/* A first launch, of no sequence, so that a captured one finds the kernel loaded. */
static CUresult warm(struct ucm_cuda_select *s)
{
    CUstream stream;
    CUresult r = cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0);

    if (r != CUDA_SUCCESS)
        return r;
    r = launch(s, &s->args, 1, stream);
    if (r == CUDA_SUCCESS && s->few)
        r = launch(s->few, &s->few->args, 1, stream);
    if (r == CUDA_SUCCESS)
        r = cuStreamSynchronize(stream);
    (void)cuStreamDestroy(stream);
    return r;
}

static int workspace_make(struct ucm_cuda_select *s)
{
    int sms;
    CUresult r =
        cuDeviceGetAttribute(&sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, s->kernel.dev);

    if (r == CUDA_SUCCESS)
        r = cuMemAlloc(&s->workspace, s->workspace_bytes);
    if (r != CUDA_SUCCESS)
        return cuda_fail_driver(r, "no workspace for selections");
    workspace_place(&s->args, s->workspace);
    if (s->few)
        workspace_place(&s->few->args, s->workspace);
    s->thread_blocks = (uint32_t)sms;
    r = sparse_fill(s->workspace, 0, s->counters_bytes);
    if (r == CUDA_SUCCESS) /* scales are NaN then, and words that say "poisoned" are not 0 */
        r = sparse_fill(s->args.poison, 0xff, s->kernel.plan.bytes);
    if (r == CUDA_SUCCESS)
        r = warm(s);
    if (r == CUDA_SUCCESS)
        return 0;
    (void)cuMemFree(s->workspace);
    return cuda_fail_driver(r, "the selection can't be launched");
}

/* Whether select.cu has the kernel, and not select_rare.cu. */
static bool is_usual(enum ucm_select_cuda_family family, uint32_t queries, uint32_t n,
                     uint32_t panels)
{
    if (panels > 0)
        return n == 4;
    return queries == 4 && (family == UCM_SELECT_HASH || (family != UCM_SELECT_L2 && n == 4) ||
                            (family == UCM_SELECT_DOT && n == 0));
}

static int kernel_open(struct ucm_cuda_select *s, const uint8_t *gpu,
                       enum ucm_select_cuda_family family, uint32_t n)
{
    static const char *const names[] = {"dot", "l2", "box", "stats", "hash", "rest"};
    const struct ucm_select_cuda *a = &s->args;
    uint32_t queries = a->queries_a_head > 1 ? 4 : 1, panels = panels_of(s, n);
    const unsigned char *fatbin =
        is_usual(family, queries, n, panels) ? ucm_select_fatbin : ucm_select_rare_fatbin;
    char name[48];

    if (panels > 0)
        snprintf(name, sizeof name, "ucm_select_matrix_%s_%u_%u", names[family], n, panels);
    else
        snprintf(name, sizeof name, "ucm_select_%s_%u_%u", names[family], queries, n);
    s->threads = UCM_SELECT_CUDA_THREADS;
    return sparse_kernel_open(&s->kernel, gpu, fatbin, name, s->shared_bytes);
}

/* A form by clusters alongside the handle's own. Its error is no error of the handle's. */
static void few_open(struct ucm_cuda_select *s, const uint8_t *gpu)
{
    struct ucm_cuda_select *few = malloc(sizeof *few);

    if (!few)
        return;
    *few = *s;
    if (sparse_cluster_open(few, gpu) != 0) {
        free(few);
        return;
    }
    few->args.channel = few->kernel.channel;
    few->args.flips = few->kernel.flips;
    ucm_context_leave();
    s->few = few;
}

static void few_close(struct ucm_cuda_select *s)
{
    if (s->few && cuda_enter(s->few->kernel.context) == 0)
        sparse_kernel_close(&s->few->kernel);
    free(s->few);
    s->few = NULL;
}

/* Launches of so few sequences that all lists have a cluster at once by clusters; the others by a stream of tiles, or by items. */
static int any_kernel_open(struct ucm_cuda_select *s, const uint8_t *gpu,
                           enum ucm_select_cuda_family family)
{
    const struct ucm_select_cuda *a = &s->args;
    uint32_t n = words_of(s, family);

    if (sparse_cluster_serves(s, gpu, family))
        few_open(s, gpu);
    if (sparse_stream_serves(s, gpu, family))
        return sparse_stream_open(s, gpu);
    tile_plan(s, n, a->rows * a->q_heads);
    return kernel_open(s, gpu, family, n);
}

static int select_make(struct ucm_cuda_select *s, const uint8_t *gpu,
                       const struct ucm_sparse_summary *summary,
                       const struct ucm_cuda_select_options *o)
{
    enum ucm_select_cuda_family family;
    struct ucm_choose_spec choose;
    struct ucm_score_spec score;
    int r = sparse_plan(&s->kernel.plan, summary);

    if (r == 0)
        r = specs(s, o, &score, &choose);
    if (r == 0)
        r = sizes_check(o, &score);
    if (r != 0)
        return r;
    family = family_of(&s->kernel.plan, score.metric);
    s->sequences = o->sequences;
    args_from_plan(s, family);
    args_from_specs(s, family, o, &score, &choose);
    workspace_plan(s);
    r = any_kernel_open(s, gpu, family);
    if (r != 0) {
        few_close(s);
        return r;
    }
    s->args.channel = s->kernel.channel;
    s->args.flips = s->kernel.flips;
    r = workspace_make(s);
    if (r == 0) {
        ucm_context_leave();
    } else {
        sparse_kernel_close(&s->kernel);
        few_close(s);
    }
    return r;
}

int ucm_cuda_select_open(const uint8_t *gpu, const struct ucm_sparse_summary *summary,
                         const struct ucm_cuda_select_options *options,
                         struct ucm_cuda_select **out)
{
    struct ucm_cuda_select *s;
    int r;

    if (!gpu || !summary || !options || !out)
        return cuda_fail(UCM_EINVALID, "gpu, summary, options or out is NULL");
    s = calloc(1, sizeof *s);
    if (!s)
        return cuda_fail(UCM_ENOMEMORY, "no memory for a selection's plan");
    r = select_make(s, gpu, summary, options);
    if (r != 0) {
        free(s);
        return r;
    }
    *out = s;
    return 0;
}

void ucm_cuda_select_close(struct ucm_cuda_select *s)
{
    if (!s)
        return;
    if (cuda_enter(s->kernel.context) == 0) {
        (void)cuMemFree(s->workspace);
        sparse_kernel_close(&s->kernel);
    }
    few_close(s);
    free(s);
}

int ucm_cuda_select_info(const struct ucm_cuda_select *s, struct ucm_cuda_select_info *out)
{
    if (!s || !out)
        return cuda_fail(UCM_EINVALID, "select or out is NULL");
    *out = (struct ucm_cuda_select_info){
        .lists = s->args.lists, .room = s->args.room, .workspace_bytes = s->workspace_bytes};
    if (s->args.reduce == UCM_REDUCE_SOFTMAX) {
        out->head_scores = s->args.raw;
        out->head_pitch = s->args.pitch;
    }
    return 0;
}

/* ---- launches ---- */

static int layer_check(const struct ucm_cuda_select *s, const struct ucm_cuda_select_layer *l)
{
    if (l->sequences > s->sequences)
        return cuda_fail(UCM_EINVALID, "sequences is %u; the handle is for %u", l->sequences,
                         s->sequences);
    if (l->bound == 0)
        return cuda_fail(UCM_EINVALID, "bound is 0");
    if (l->summaries == 0 || l->summaries % 4 != 0 || l->stride % 4 != 0)
        return cuda_fail(UCM_EINVALID, "summaries is 0, or summaries or stride no multiple of 4");
    if (l->table == 0 || l->table_stride < s->args.max_blocks)
        return cuda_fail(UCM_EINVALID, "table is 0, or table_stride %llu less than %u blocks",
                         (unsigned long long)l->table_stride, s->args.max_blocks);
    if (l->n_blocks == 0 || l->q == 0 || l->count == 0 || l->index == 0)
        return cuda_fail(UCM_EINVALID, "n_blocks, q, count or index is 0");
    return 0;
}

int ucm_cuda_select(struct ucm_cuda_select *s, const struct ucm_cuda_select_layer *l, void *stream)
{
    struct ucm_select_cuda args;
    CUresult rc;
    int r;

    if (!s || !l)
        return cuda_fail(UCM_EINVALID, "select or layer is NULL");
    r = layer_check(s, l);
    if (r != 0 || l->sequences == 0)
        return r;
    if (s->few && l->sequences <= s->few->sequences)
        s = s->few;
    args = s->args;
    args.sequences = l->sequences;
    args.blocks = l->bound;
    args.summaries = l->summaries;
    args.block_stride = l->stride;
    args.table = l->table;
    args.table_stride = l->table_stride;
    args.n_blocks = l->n_blocks;
    args.most = l->most;
    args.q = l->q;
    args.q_stride = l->q_stride ? l->q_stride : (uint64_t)args.rows * args.q_heads * args.head_dim;
    args.wide = (l->summaries | l->stride) % 16 == 0;
    args.q_aligned =
        l->q % (args.q_dtype == UCM_SPARSE_F32 ? 16 : 8) == 0 && args.q_stride % 4 == 0;
    args.index = l->index;
    args.count = l->count;
    args.score = l->score;
    r = cuda_enter(s->kernel.context);
    if (r != 0)
        return r;
    rc = launch(s, &args, s->thread_blocks, stream);
    return cuda_leave(rc, "the selection can't be launched");
}
