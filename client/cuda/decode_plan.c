/* What a handle for decode steps needs, by its options. No GPU is touched here. */
#include "client/cuda/decode.h"

#include "client/cuda/error.h"
#include "kernels/sparse/arith.h"

#define BATCH 16384u
#define CUT_SEQUENCES 8u
#define MISSES (1u << 20)

/* Bytes, of K and V. */
static uint32_t element_bytes(const struct ucm_cuda_decode_options *o)
{
    return o->kv_dtype == UCM_SPARSE_FP8_E4M3 ? 1 : 2;
}

/* Bytes of a token's row of one KV head. */
static uint32_t row_bytes(const struct ucm_cuda_decode_options *o)
{
    return o->head_dim * element_bytes(o);
}

static bool is_encoded(const struct ucm_cuda_decode_options *o)
{
    return o->encoding == UCM_CUDA_DECODE_FP8;
}

/* Bytes of an element of K and V in entries; and of a row there. */
static uint32_t entry_element_bytes(const struct ucm_cuda_decode_options *o)
{
    return is_encoded(o) ? 1 : element_bytes(o);
}

static uint32_t entry_row_bytes(const struct ucm_cuda_decode_options *o)
{
    return o->head_dim * entry_element_bytes(o);
}

/* Channels of V, and of results. */
static uint32_t value_channels(const struct ucm_cuda_decode_options *o)
{
    return o->v_head_dim > 0 ? o->v_head_dim : o->head_dim;
}

static bool is_latent(const struct ucm_cuda_decode_options *o)
{
    return o->head_dim == UCM_ATTEND_MLA_CHANNELS && o->v_head_dim == UCM_ATTEND_MLA_VALUES;
}

/* Whether a KV head's query heads are attended in two halves. */
static bool is_halved(const struct ucm_cuda_decode_options *o)
{
    return o->head_dim > 128 && !is_latent(o) && o->q_heads / o->kv_heads > 8;
}

/* ---- checks ---- */

static int scale_check(float scale, const char *what)
{
    if (!(scale >= 0) || scale == ucm_inf())
        return cuda_fail(UCM_EINVALID, "%s is %g; a number above 0 is right, or 0", what,
                         (double)scale);
    return 0;
}

/* Query heads and channels. */
static int latent_check(const struct ucm_cuda_decode_options *o)
{
    if (o->kv_heads != 1)
        return cuda_fail(UCM_EINVALID, "kv_heads is %u; MLA has 1, the latent", o->kv_heads);
    if (o->q_heads < 1 || o->q_heads > UCM_CUDA_DECODE_LATENT)
        return cuda_fail(UCM_EINVALID, "q_heads is %u; 1 to %d are right for MLA", o->q_heads,
                         UCM_CUDA_DECODE_LATENT);
    if (o->scale == 0)
        return cuda_fail(UCM_EINVALID, "scale is 0; MLA's must be given, since 1 / sqrt(head_dim) "
                                       "is not the model's");
    if (o->v_scale > 0 && (o->v_scale < o->k_scale || o->v_scale > o->k_scale))
        return cuda_fail(UCM_EINVALID, "v_scale is %g and k_scale %g; MLA has one scale, k_scale",
                         (double)o->v_scale, (double)o->k_scale);
    if (o->encoding != UCM_CUDA_DECODE_AS_STORED)
        return cuda_fail(UCM_EINVALID, "encoding is %u; entries of MLA are as stored", o->encoding);
    if (o->rule != UCM_CUDA_DECODE_ALL)
        return cuda_fail(UCM_EINVALID, "rule is %u; lists of MLA don't stop", o->rule);
    return 0;
}

static int heads_check(const struct ucm_cuda_decode_options *o)
{
    if (is_latent(o))
        return latent_check(o);
    if (o->q_heads < 1 || o->q_heads % o->kv_heads != 0 ||
        o->q_heads / o->kv_heads > UCM_CUDA_DECODE_GROUP)
        return cuda_fail(UCM_EINVALID, "q_heads is %u; 1 to %d times kv_heads, %u, are right",
                         o->q_heads, UCM_CUDA_DECODE_GROUP, o->kv_heads);
    if (o->head_dim != 64 && o->head_dim != 128 && o->head_dim != 256)
        return cuda_fail(UCM_EINVALID,
                         "head_dim is %u; 64, 128 and 256 are right, and 576 with v_head_dim 512",
                         o->head_dim);
    if (is_halved(o) && o->q_heads / o->kv_heads % 2 != 0)
        return cuda_fail(UCM_EINVALID,
                         "q_heads is %u times kv_heads; with head_dim 256, at most 8 or an even "
                         "number of times are right",
                         o->q_heads / o->kv_heads);
    if (o->v_head_dim != 0 && o->v_head_dim != o->head_dim)
        return cuda_fail(UCM_EINVALID, "v_head_dim is %u; head_dim, %u, is right, or 512 of 576",
                         o->v_head_dim, o->head_dim);
    return 0;
}

static int counts_check(const struct ucm_cuda_decode_options *o)
{
    if (o->layers < 1 || o->layers > 65536)
        return cuda_fail(UCM_EINVALID, "layers is %u; 1 to 65536 are right", o->layers);
    if (o->kv_heads < 1 || o->kv_heads > 1024)
        return cuda_fail(UCM_EINVALID, "kv_heads is %u; 1 to 1024 are right", o->kv_heads);
    if (o->dtype != UCM_SPARSE_F16 && o->dtype != UCM_SPARSE_BF16)
        return cuda_fail(UCM_EINVALID, "dtype %u is neither f16 nor bf16", o->dtype);
    if (o->kv_dtype != 0 && o->kv_dtype != o->dtype && o->kv_dtype != UCM_SPARSE_FP8_E4M3)
        return cuda_fail(UCM_EINVALID, "kv_dtype %u is neither dtype nor fp8_e4m3", o->kv_dtype);
    if (o->tokens < 16 || o->tokens % 16 != 0 || o->tokens > UCM_CUDA_DECODE_TOKENS)
        return cuda_fail(UCM_EINVALID, "tokens is %u; multiples of 16 up to %d are right",
                         o->tokens, UCM_CUDA_DECODE_TOKENS);
    if (scale_check(o->scale, "scale") != 0 || scale_check(o->k_scale, "k_scale") != 0 ||
        scale_check(o->v_scale, "v_scale") != 0)
        return -UCM_EINVALID;
    return heads_check(o);
}

static int encoding_check(const struct ucm_cuda_decode_options *o)
{
    if (o->encoding == UCM_CUDA_DECODE_AS_STORED)
        return 0;
    if (!is_encoded(o))
        return cuda_fail(UCM_EINVALID, "encoding is %u, which is no enum ucm_cuda_decode_encoding",
                         o->encoding);
    if (o->kv_dtype == UCM_SPARSE_FP8_E4M3)
        return cuda_fail(UCM_EINVALID, "encoding fp8 makes 8 bits of 16; kv_dtype is fp8_e4m3");
    if (o->entry != UCM_CUDA_DECODE_HEAD)
        return cuda_fail(UCM_EINVALID, "encoding fp8 wants entries of a KV head, not of a layer");
    if ((o->k_scale > 0 || o->v_scale > 0) && (o->k_scale != 1 || o->v_scale != 1))
        return cuda_fail(UCM_EINVALID,
                         "k_scale is %g and v_scale %g; with encoding fp8, which has scales of its "
                         "own, 0 is right",
                         (double)o->k_scale, (double)o->v_scale);
    return 0;
}

static int lists_check(const struct ucm_cuda_decode_options *o)
{
    if (o->entry > UCM_CUDA_DECODE_LAYER)
        return cuda_fail(UCM_EINVALID, "entry is %u, which is no enum ucm_cuda_decode_entry",
                         o->entry);
    if (o->sequences < 1 || o->sequences > UCM_CUDA_DECODE_SEQUENCES)
        return cuda_fail(UCM_EINVALID, "sequences is %u; 1 to %d are right", o->sequences,
                         UCM_CUDA_DECODE_SEQUENCES);
    if (o->lists != o->kv_heads && o->lists != 1)
        return cuda_fail(UCM_EINVALID, "lists is %u; one a KV head (%u) is right, or 1", o->lists,
                         o->kv_heads);
    if (o->lists != o->kv_heads && o->entry == UCM_CUDA_DECODE_HEAD)
        return cuda_fail(UCM_EINVALID,
                         "one list for all KV heads wants entries of a layer, not of a KV head");
    if (o->room < 1 || o->room > UCM_CUDA_SELECT_BLOCKS)
        return cuda_fail(UCM_EINVALID, "room is %u; 1 to %d are right", o->room,
                         UCM_CUDA_SELECT_BLOCKS);
    if (o->window > UCM_CUDA_SELECT_BLOCKS)
        return cuda_fail(UCM_EINVALID, "window is %u blocks; at most %d are right", o->window,
                         UCM_CUDA_SELECT_BLOCKS);
    return 0;
}

static int layout_check(const struct ucm_cuda_decode_layout *l, const char *what)
{
    if ((l->k_offset | l->k_token_stride | l->k_head_stride | l->v_offset | l->v_token_stride |
         l->v_head_stride) %
            16 !=
        0)
        return cuda_fail(UCM_EINVALID, "an offset or stride of %s is no multiple of 16", what);
    return 0;
}

static uint64_t end_of(const struct ucm_cuda_decode_options *o, uint64_t offset, uint64_t token,
                       uint64_t head)
{
    return offset + (o->tokens - 1) * token + (o->kv_heads - 1) * head + row_bytes(o);
}

static int stored_check(const struct ucm_cuda_decode_options *o)
{
    const struct ucm_cuda_decode_layout *l = &o->stored;
    uint64_t k, v;
    int r = layout_check(l, "stored");

    if (r == 0)
        r = layout_check(&o->page, "page");
    if (r != 0)
        return r;
    if (o->layer_bytes == 0 || o->layer_bytes % 16 != 0 || o->layer_bytes > UINT32_MAX)
        return cuda_fail(UCM_EINVALID, "layer_bytes is %llu; multiples of 16 below 4 GiB are right",
                         (unsigned long long)o->layer_bytes);
    if (l->k_offset > o->layer_bytes || l->k_token_stride > o->layer_bytes ||
        l->k_head_stride > o->layer_bytes || l->v_offset > o->layer_bytes ||
        l->v_token_stride > o->layer_bytes || l->v_head_stride > o->layer_bytes)
        return cuda_fail(UCM_EINVALID,
                         "an offset or stride of stored is beyond the %llu of a layer",
                         (unsigned long long)o->layer_bytes);
    k = end_of(o, l->k_offset, l->k_token_stride, l->k_head_stride);
    v = is_latent(o) ? k : end_of(o, l->v_offset, l->v_token_stride, l->v_head_stride);
    if (k > o->layer_bytes || v > o->layer_bytes)
        return cuda_fail(UCM_EINVALID, "stored reaches byte %llu of %llu of a layer",
                         (unsigned long long)(k > v ? k : v), (unsigned long long)o->layer_bytes);
    return 0;
}

/* All that a step can miss, as far as that is MISSES, and all that a layer can. */
static uint32_t misses_default(const struct ucm_cuda_decode_options *o)
{
    uint64_t layer = (uint64_t)o->sequences * o->lists * o->room, step = layer * o->layers;
    uint64_t most = layer > MISSES ? layer : MISSES;

    most = step < most ? step : most;
    return most < UCM_ENTRIES_MISSES_MAX ? (uint32_t)most : UCM_ENTRIES_MISSES_MAX;
}

static int shape_check(struct decode_plan *p)
{
    struct ucm_cuda_decode_options *o = &p->options;
    char why[UCM_ENTRIES_WHY];

    if (o->misses == 0)
        o->misses = misses_default(o);
    p->batch = o->misses < BATCH ? o->misses : BATCH;
    p->shape = (struct ucm_entries_shape){
        .layer_heads = o->layers * (o->entry == UCM_CUDA_DECODE_HEAD ? o->kv_heads : 1),
        .numbers = o->numbers,
        .entries = o->entries,
        .requests = o->requests,
        .misses = o->misses,
    };
    return ucm_entries_check(&p->shape, why) == 0 ? 0 : cuda_fail(UCM_EINVALID, "%s", why);
}

/* ---- the gather: from a layer to an entry ---- */

static struct ucm_entries_plane head_plane(const struct ucm_cuda_decode_options *o, uint64_t offset,
                                           uint64_t token, uint64_t head)
{
    uint32_t row = row_bytes(o);
    bool contiguous = token == row;

    return (struct ucm_entries_plane){.first = offset,
                                      .layer_stride = o->layer_bytes,
                                      .head_stride = head,
                                      .pitch = token,
                                      .rows = contiguous ? 1 : o->tokens,
                                      .row_bytes = contiguous ? o->tokens * row : row};
}

/* Codes of K, codes of V, scales of K, scales of V. */
static void gather_code(struct ucm_entries_gather *g, const struct ucm_cuda_decode_options *o,
                        uint64_t half)
{
    uint64_t pitch[] = {o->stored.k_token_stride, o->stored.v_token_stride};

    for (uint32_t i = 0; i < g->planes; i++) {
        g->plane[i].pitch = pitch[i];
        g->plane[i].rows = o->tokens;
        g->plane[i].row_bytes = row_bytes(o);
        g->plane[i].scales = o->block_pool + 2 * half + (uint64_t)i * o->tokens;
        g->plane[i].dtype = o->dtype;
    }
}

static void gather_plan(struct decode_plan *p)
{
    const struct ucm_cuda_decode_options *o = &p->options;
    const struct ucm_cuda_decode_layout *l = &o->stored;
    struct ucm_entries_gather *g = &p->gather;
    uint64_t half = (uint64_t)o->tokens * entry_row_bytes(o);

    if (o->entry == UCM_CUDA_DECODE_HEAD) {
        *g = (struct ucm_entries_gather){.heads = o->kv_heads, .planes = p->latent ? 1 : 2};
        p->info.entry_bytes = g->planes * (half + (is_encoded(o) ? o->tokens : 0));
        g->plane[0] = head_plane(o, l->k_offset, l->k_token_stride, l->k_head_stride);
        g->plane[1] = head_plane(o, l->v_offset, l->v_token_stride, l->v_head_stride);
    } else {
        p->info.entry_bytes = o->layer_bytes;
        *g = (struct ucm_entries_gather){.heads = 1, .planes = 1};
        g->plane[0] = (struct ucm_entries_plane){
            .layer_stride = o->layer_bytes, .rows = 1, .row_bytes = (uint32_t)o->layer_bytes};
    }
    for (uint32_t i = 0; i < g->planes; i++) {
        g->plane[i].entries = o->block_pool + i * half;
        g->plane[i].entry_stride = p->info.entry_bytes;
    }
    if (is_encoded(o))
        gather_code(g, o, half);
}

/* ---- attention ---- */

static void memory_layout(struct ucm_attend_cuda_memory *m, const struct ucm_cuda_decode_layout *l)
{
    m->k = (struct ucm_attend_cuda_plane){l->k_offset, l->k_token_stride, l->k_head_stride};
    m->v = (struct ucm_attend_cuda_plane){l->v_offset, l->v_token_stride, l->v_head_stride};
}

static uint64_t tiles_of(const struct ucm_cuda_decode_options *o)
{
    return ((uint64_t)o->room + o->window) * (o->tokens / UCM_ATTEND_CUDA_TILE);
}

static uint32_t splits_of(uint64_t blocks, const struct ucm_cuda_decode_options *o, uint32_t tiles)
{
    return (uint32_t)((blocks * (o->tokens / UCM_ATTEND_CUDA_TILE) + tiles - 1) / tiles);
}

static int tiles_check(const struct ucm_cuda_decode_options *o)
{
    uint64_t most = (uint64_t)UCM_ATTEND_CUDA_SPLIT * UCM_ATTEND_CUDA_SPLITS;

    if (tiles_of(o) > most)
        return cuda_fail(UCM_EINVALID, "room and window have %llu tokens; at most %llu are right",
                         (unsigned long long)tiles_of(o) * UCM_ATTEND_CUDA_TILE,
                         (unsigned long long)most * UCM_ATTEND_CUDA_TILE);
    return 0;
}

static void attend_plan(struct decode_plan *p)
{
    const struct ucm_cuda_decode_options *o = &p->options;
    bool heads = o->entry == UCM_CUDA_DECODE_HEAD;
    struct ucm_attend_cuda *a = &p->attend;
    uint32_t halved = is_halved(o);
    uint32_t groups = p->latent ? ucm_attend_mla_groups(o->q_heads) : o->kv_heads << halved;
    uint64_t row = entry_row_bytes(o);
    float k_scale = o->k_scale > 0 ? o->k_scale : 1.0f;
    float scale = o->scale > 0 ? o->scale : 1.0f / ucm_sqrt((float)o->head_dim);

    p->narrow = entry_element_bytes(o) == 1;
    p->logit_scale = scale * k_scale;
    *a = (struct ucm_attend_cuda){
        .kv_heads = groups,
        .group = o->q_heads / groups,
        .halved = halved,
        .tokens = o->tokens,
        .lists = o->lists,
        .room = o->room,
        .scale_log2 = p->logit_scale * 1.44269504f,
        .v_scale = p->latent ? o->k_scale : o->v_scale,
        .rows = o->numbers,
        .apart = heads && !p->latent,
        .pool = {.base = o->block_pool, .stride = p->info.entry_bytes, .blocks = o->entries},
    };
    if (heads) {
        a->pool.k.token_stride = a->pool.v.token_stride = row;
        a->pool.v.offset = o->tokens * row;
        a->pool.scales = is_encoded(o) ? 2 * o->tokens * o->head_dim : 0;
        a->plain_pages = is_encoded(o);
    } else {
        memory_layout(&a->pool, &o->stored);
    }
    memory_layout(&a->pages, &o->page);
    if (p->latent) /* row groups share it */
        a->pool.k.head_stride = a->pages.k.head_stride = 0;
}

/* By the sizes of the options, not by those of a launch: a sequence's results don't depend on the
 * others in its batch. For many sequences lists are cut as for CUT_SEQUENCES: small batches of such
 * a handle need the splits, and large ones lose a twentieth. */
static int splits_plan(struct decode_plan *p, uint32_t multiprocessors, uint32_t thread_block_bytes)
{
    const struct ucm_cuda_decode_options *o = &p->options;
    struct ucm_attend_cuda *a = &p->attend;
    uint32_t lists = (o->sequences < CUT_SEQUENCES ? o->sequences : CUT_SEQUENCES) * a->kv_heads;
    uint32_t tiles = (uint32_t)tiles_of(o), element = entry_element_bytes(o);
    struct ucm_attend_cuda_cut cut;

    if (p->latent) {
        cut = ucm_attend_mla_cut(lists, tiles, multiprocessors);
        a->ring = ucm_attend_mla_ring(element, a->group, thread_block_bytes);
        if (a->ring < UCM_ATTEND_MLA_STEP)
            return cuda_fail(UCM_EDEVICE,
                             "a thread block of this GPU has %u bytes of shared memory, which is "
                             "too little for MLA",
                             thread_block_bytes);
        p->shared_bytes = ucm_attend_mla_shared(element, a->group, a->ring);
    } else {
        cut = ucm_attend_cuda_cut(lists, tiles,
                                  (uint64_t)multiprocessors *
                                      ucm_attend_cuda_places(o->head_dim, element, a->group));
    }
    a->split_tiles = p->info.split_tiles = cut.split_tiles;
    if (a->plain_pages) /* a split has tiles of entries, or of pages */
        cut.splits =
            splits_of(o->room, o, cut.split_tiles) + splits_of(o->window, o, cut.split_tiles);
    a->splits = p->info.splits = cut.splits;
    if (!p->latent)
        p->shared_bytes = ucm_attend_cuda_shared(o->head_dim, element, a->group, cut.splits);
    return 0;
}

/* ---- memory ---- */

int decode_plan_memory(struct decode_plan *p, uint32_t multiprocessors, uint32_t thread_block_bytes)
{
    const struct ucm_cuda_decode_options *o = &p->options;
    int r = splits_plan(p, multiprocessors, thread_block_bytes);
    uint64_t end = 0, rows;

    if (r != 0)
        return r;
    rows = (uint64_t)o->sequences * o->q_heads * p->info.splits;
    p->flags = decode_plan_place(&end, sizeof(struct ucm_attend_cuda_told));
    p->done =
        decode_plan_place(&end, (uint64_t)o->sequences * p->attend.kv_heads * sizeof(uint32_t));
    p->counters_bytes = end;
    p->partial = decode_plan_place(&end, rows * value_channels(o) * sizeof(float));
    p->partial_sum = decode_plan_place(&end, rows * sizeof(struct ucm_attend_cuda_sum));
    decode_rounds_plan(p, &end);
    p->info.workspace_bytes = end;
    end = 0;
    (void)decode_plan_place(&end, ucm_entries_bytes(&p->shape));
    (void)decode_plan_place(&end, (uint64_t)o->numbers * sizeof(struct ucm_entries_place));
    (void)decode_plan_place(&end, p->batch * (sizeof(uint64_t) + 2 * sizeof(uint32_t)));
    p->info.table_bytes = end;
    p->info.host_bytes = sizeof(struct ucm_entries_word) +
                         (uint64_t)o->numbers * sizeof(struct ucm_entries_place) +
                         p->batch * (sizeof(uint64_t) + 2 * sizeof(uint32_t));
    return 0;
}

int decode_plan(struct decode_plan *p, const struct ucm_cuda_decode_options *options)
{
    int r;

    *p = (struct decode_plan){.options = *options, .latent = is_latent(options)};
    r = counts_check(options);
    if (r == 0)
        r = encoding_check(options);
    if (r == 0)
        r = lists_check(options);
    if (r == 0)
        r = stored_check(options);
    if (r == 0)
        r = shape_check(p);
    if (r == 0)
        r = tiles_check(options);
    if (r == 0)
        r = decode_rounds_check(&p->options);
    if (r != 0)
        return r;
    gather_plan(p);
    attend_plan(p);
    return 0;
}

int ucm_cuda_decode_entry_bytes(const struct ucm_cuda_decode_options *options, uint64_t *bytes)
{
    struct decode_plan plan;
    int r;

    if (!options || !bytes)
        return cuda_fail(UCM_EINVALID, "options or bytes is NULL");
    r = decode_plan(&plan, options);
    if (r == 0)
        *bytes = plan.info.entry_bytes;
    return r;
}
