/* test_attend [--few]: compares; a part of the cases only. */
#include "tests/gpu/attend.h"

#include "kernels/arith.h"
#include "kernels/encoding/arith.h"

#include <math.h>
#include <string.h>

extern const unsigned char ucm_attend_fatbin[], ucm_mla_fatbin[], ucm_entries_fatbin[];

static CUmodule module, latents;
static bool overlaps;       /* launches can */
static uint32_t most_bytes; /* of shared memory that a thread block can have */

static void attend_open(void)
{
    int major, most;

    must(cuDeviceGetAttribute(&most, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 0),
         "the GPU");
    most_bytes = (uint32_t)most;
    must(cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0), "the GPU");
    overlaps = major >= 9;
    must(cuModuleLoadData(&module, ucm_attend_fatbin), "the kernels of attend.cu");
    must(cuModuleLoadData(&latents, ucm_mla_fatbin), "the kernels of mla.cu");
    gpu_load(ucm_entries_fatbin);
}

static CUfunction kernel(CUmodule from, const char *name)
{
    CUfunction f;

    must(cuModuleGetFunction(&f, from, name), name);
    return f;
}

/* `beside`: it may begin before the launch before it has ended. */
static void launch(CUfunction f, const uint32_t blocks[3], uint32_t threads, uint32_t shared,
                   const struct ucm_attend_cuda *args, bool beside, const char *name)
{
    struct ucm_attend_cuda copy = *args;
    void *parameters[] = {&copy};
    CUlaunchAttribute overlap = {
        .id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        .value.programmaticStreamSerializationAllowed = 1,
    };
    CUlaunchConfig config = {.gridDimX = blocks[0],
                             .gridDimY = blocks[1],
                             .gridDimZ = blocks[2],
                             .blockDimX = threads,
                             .blockDimY = 1,
                             .blockDimZ = 1,
                             .sharedMemBytes = shared,
                             .hStream = gpu_stream,
                             .attrs = &overlap,
                             .numAttrs = beside && overlaps};

    must(cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, (int)shared), name);
    must(cuLaunchKernelEx(&config, f, parameters, NULL), name);
}

/* The grid follows from args. narrow: K and V are FP8 E4M3. */
static void attend_launch(const struct ucm_attend_cuda *args, uint32_t dtype, uint32_t head_dim,
                          uint32_t narrow)
{
    char name[64];

    ucm_attend_cuda_kernel(name, dtype == UCM_KV_F16 ? "f16" : "bf16", narrow, head_dim,
                           args->group);
    launch(kernel(module, name), (uint32_t[]){args->splits, args->kv_heads, args->sequences},
           UCM_ATTEND_CUDA_THREADS,
           ucm_attend_cuda_shared(head_dim, narrow ? 1 : 2, args->group, args->splits), args,
           args->wait, name);
}

/* The same of latents, and of the launch that merges. */
static void mla_launch(const struct ucm_attend_cuda *args, uint32_t dtype, uint32_t narrow)
{
    uint32_t element = narrow ? 1 : 2, grid[] = {args->splits, args->kv_heads, args->sequences};
    const char *type = dtype == UCM_KV_F16 ? "f16" : "bf16";
    struct ucm_attend_cuda a = *args;
    char name[64];

    a.ring = a.ring ? a.ring : ucm_attend_mla_ring(element, a.group, most_bytes);
    ucm_attend_mla_kernel(name, type, narrow, a.group);
    launch(kernel(latents, name), grid, UCM_ATTEND_MLA_THREADS,
           ucm_attend_mla_shared(element, a.group, a.ring), &a, a.wait, name);
    if (a.splits == 1)
        return;
    ucm_attend_mla_merge(name, type);
    grid[0] = a.group * UCM_ATTEND_MLA_MERGE_BLOCKS;
    launch(kernel(latents, name), grid, UCM_ATTEND_MLA_MERGE_THREADS, 0, &a, true, name);
}

void order_launch(const struct ucm_attend_cuda_order *args)
{
    struct ucm_attend_cuda_order copy = *args;
    void *parameters[] = {&copy};

    must(cuLaunchKernel(kernel(module, "ucm_attend_order"), args->rows,
                        args->sequences * args->lists, 1, UCM_ATTEND_CUDA_ORDER_THREADS, 1, 1, 0,
                        gpu_stream, parameters, NULL),
         "ucm_attend_order");
}

/* n zero bytes, now. */
static void gpu_clear(CUdeviceptr at, size_t n)
{
    must(cuMemsetD8Async(at, 0, n, gpu_stream), "clearing memory of the GPU");
    gpu_sync();
}

/* ---- problems ---- */

/* Bytes, of K and V. */
static uint32_t problem_element(const struct problem *p)
{
    return p->shape.narrow == 1 ? 1 : 2;
}

/* E4M3 is float16 without its low 7 bits, times 2^8. */
void problem_draw_bytes(const struct problem *p, uint8_t *to, uint64_t n)
{
    uint16_t bits;

    for (uint64_t i = 0; i < n; i += problem_element(p)) {
        if (p->shape.narrow == 1) {
            rnd_element(false, 0x1p-8f, &bits);
            to[i] = (uint8_t)((bits >> 8 & 0x80) | (bits >> 7 & 0x7f));
        } else {
            rnd_element(p->shape.dtype == UCM_KV_BF16, 1, &bits);
            memcpy(to + i, &bits, 2);
        }
    }
}

void problem_launch(const struct problem *p, const struct ucm_attend_cuda *args)
{
    if (p->shape.latent)
        mla_launch(args, p->shape.dtype, p->shape.narrow);
    else
        attend_launch(args, p->shape.dtype, p->shape.d, p->shape.narrow);
}

/* bfloat16's range is more than that of float16, by which E4M3 is multiplied. */
static float query_size(const struct problem *p)
{
    return p->shape.narrow == 1 && p->shape.dtype == UCM_KV_BF16 ? 0x1p30f : 1;
}

/* Entries: contiguous. Pages: rows set apart. */
static void latent_plans(struct problem *p, struct ucm_attend_spec *spec)
{
    struct ucm_kv_shape *k = &spec->shape;
    uint64_t row = problem_element(p) * (uint64_t)p->shape.d;
    char why[UCM_SPARSE_WHY] = "";

    *k = (struct ucm_kv_shape){.dtype = p->shape.narrow == 1 ? UCM_KV_FP8_E4M3 : p->shape.dtype,
                               .tokens = p->shape.tokens,
                               .kv_heads = 1,
                               .head_dim = p->shape.d,
                               .v_head_dim = p->v,
                               .rope_dim = p->shape.d - p->v,
                               .k_token_stride = row + 48,
                               .k_head_stride = row,
                               .v_token_stride = row + 48,
                               .v_head_stride = row};
    p->page = p->shape.tokens * k->k_token_stride;
    check(ucm_attend_plan_init(&p->plan, spec, why) == 0, "a plan: %s", why);
    k->k_token_stride = k->v_token_stride = row;
    p->entry = p->shape.tokens * row;
    check(ucm_attend_plan_init(&p->pool_plan, spec, why) == 0, "a plan: %s", why);
}

/* ---- encoded entries ---- */

/* The largest scale bytes that are drawn. If there is no window, V is small: float16 must hold its
 * weights all the same. */
#define K_SCALE 127u
static uint32_t v_scale(const struct problem *p)
{
    return p->shape.window > 0 ? 127 : 116;
}

float problem_v(const struct problem *p)
{
    float v = 6 * p->plan.spec.v_scale;

    return p->shape.narrow == ENCODED ? v * ucm_fp8_power(v_scale(p)) : v;
}

static uint64_t encoded_bytes(const struct problem *p)
{
    return 2ull * p->shape.tokens * (p->shape.d + 1);
}

void problem_decode(struct problem *p, uint32_t entry)
{
    const struct attend_shape *s = &p->shape;
    const uint8_t *codes = p->encoded + entry * encoded_bytes(p),
                  *scales = codes + 2 * s->tokens * s->d;
    uint16_t *to = (uint16_t *)(void *)(p->pool + entry * p->entry);

    for (uint32_t i = 0; i < 2 * s->tokens * s->d; i++)
        to[i] = (uint16_t)ucm_fp8_decode(s->dtype, codes[i], ucm_fp8_power(scales[i / s->d]));
    gpu_put(p->args.pool.base + entry * encoded_bytes(p), codes, encoded_bytes(p));
}

/* Codes of normal numbers, with scales from the largest to 2^-6 of it. */
static void encoded_draw(struct problem *p)
{
    const struct attend_shape *s = &p->shape;
    uint32_t codes = 2 * s->tokens * s->d;

    p->encoded = fresh(s->entries * encoded_bytes(p));
    p->args.pool.base = gpu_new(s->entries * encoded_bytes(p));
    for (uint32_t entry = 0; entry < s->entries; entry++) {
        uint8_t *to = p->encoded + entry * encoded_bytes(p);

        for (uint32_t i = 0; i < codes; i++) {
            float x = rnd_normal();

            to[i] = (uint8_t)ucm_fp8_encode(x, 1.0f);
        }
        for (uint32_t i = 0; i < 2 * s->tokens; i++)
            to[codes + i] = (uint8_t)((i < s->tokens ? K_SCALE : v_scale(p)) - rnd_below(7));
        problem_decode(p, entry);
    }
}

/* ---- plans ---- */

/* Entries: head by head. Pages: token by token, as engines have them. */
static void plan_of(struct problem *p)
{
    const struct attend_shape *s = &p->shape;
    uint64_t row = problem_element(p) * (uint64_t)s->d, entry_heads = s->apart ? 1 : s->kv_heads;
    struct ucm_attend_spec spec = {.group = s->group,
                                   .scale = 1 / (query_size(p) * sqrtf((float)s->d)),
                                   .k_scale = s->narrow == 1 ? 0.75f : 0,
                                   .v_scale = s->narrow == 1 ? 1.5f : 0};
    struct ucm_kv_shape *k = &spec.shape;
    char why[UCM_SPARSE_WHY] = "";

    if (s->latent) {
        latent_plans(p, &spec);
        return;
    }
    *k = (struct ucm_kv_shape){.dtype = s->narrow == 1 ? UCM_KV_FP8_E4M3 : s->dtype,
                               .tokens = s->tokens,
                               .kv_heads = s->kv_heads,
                               .head_dim = s->d,
                               .v_head_dim = s->d,
                               .k_token_stride = row * s->kv_heads,
                               .k_head_stride = row,
                               .v_offset = row * s->kv_heads * s->tokens,
                               .v_token_stride = row * s->kv_heads,
                               .v_head_stride = row};
    p->page = 2 * k->v_offset;
    check(ucm_attend_plan_init(&p->plan, &spec, why) == 0, "a plan: %s", why);
    k->kv_heads = entry_heads;
    k->k_token_stride = k->v_token_stride = row;
    k->k_head_stride = k->v_head_stride = row * s->tokens;
    k->v_offset = k->k_head_stride * entry_heads;
    p->entry = 2 * k->v_offset;
    check(ucm_attend_plan_init(&p->pool_plan, &spec, why) == 0, "a plan: %s", why);
}

static struct ucm_attend_cuda_memory memory_of(const struct ucm_attend_plan *plan, CUdeviceptr base,
                                               uint64_t stride, uint32_t blocks)
{
    const struct ucm_kv_shape *s = &plan->spec.shape;
    uint64_t heads = s->kv_heads > 1;

    return (struct ucm_attend_cuda_memory){
        .base = base,
        .stride = stride,
        .blocks = blocks,
        .k = {s->k_offset, s->k_token_stride, heads * s->k_head_stride},
        .v = {s->v_offset, s->v_token_stride, heads * s->v_head_stride}};
}

/* Entries of a KV head, rows in 8 bits. */
static void pool_encoded(struct problem *p)
{
    struct ucm_attend_cuda_memory *m = &p->args.pool;
    uint64_t codes = (uint64_t)p->shape.tokens * p->shape.d;

    *m = (struct ucm_attend_cuda_memory){.base = m->base,
                                         .stride = encoded_bytes(p),
                                         .blocks = p->shape.entries,
                                         .scales = (uint32_t)(2 * codes),
                                         .k = {0, p->shape.d, 0},
                                         .v = {codes, p->shape.d, 0}};
    p->args.plain_pages = 1;
}

static uint64_t n_lists(const struct problem *p)
{
    return (uint64_t)p->shape.sequences * p->shape.lists;
}

static bool is_halved(const struct attend_shape *s)
{
    return !s->latent && s->d == 256 && s->group > 8;
}

/* The memory on the host, and the random bytes of pool and pages. */
static void memory_new(struct problem *p)
{
    const struct attend_shape *s = &p->shape;
    uint64_t lists = n_lists(p);

    p->pool = fresh(s->entries * p->entry);
    p->pages = fresh(s->pages * p->page + 16);
    if (s->narrow != ENCODED)
        problem_draw_bytes(p, p->pool, s->entries * p->entry);
    problem_draw_bytes(p, p->pages, s->pages * p->page);
    p->q16 = fresh(p->rows * s->d * 2);
    p->q = fresh(p->rows * s->d * 4);
    p->list = fresh(lists * s->room * 4);
    p->numbers = fresh((uint64_t)s->sequences * s->entries * 4);
    p->entry_of = fresh((uint64_t)p->tables * p->n_numbers * 4);
    p->count = fresh(lists * 4);
    p->first = fresh(s->sequences * 4);
    p->length = fresh(s->sequences * 4);
    p->table = fresh((uint64_t)s->sequences * s->window * 4 + 4);
}

/* The memory on the GPU, except the pool. */
static void args_new(struct problem *p)
{
    const struct attend_shape *s = &p->shape;
    uint32_t groups = s->latent ? ucm_attend_mla_groups(s->group) : s->kv_heads << is_halved(s);
    uint64_t lists = n_lists(p);

    p->args = (struct ucm_attend_cuda){
        .kv_heads = groups,
        .group = s->kv_heads * s->group / groups,
        .halved = is_halved(s),
        .tokens = s->tokens,
        .sequences = s->sequences,
        .lists = s->lists,
        .room = s->room,
        .scale_log2 = p->plan.logit_scale * 1.44269504f,
        .v_scale = s->narrow == 1 ? p->plan.spec.v_scale : 0,
        .q = gpu_new(p->rows * s->d * 2),
        .q_stride = (uint64_t)s->kv_heads * s->group * s->d,
        .list = gpu_new(lists * s->room * 4),
        .count = gpu_new(lists * 4),
        .numbers = gpu_new((uint64_t)s->sequences * s->entries * 4),
        .numbers_stride = s->entries,
        .rows = p->n_numbers,
        .apart = s->latent ? 0 : s->apart,
        .entry_of = gpu_new((uint64_t)p->tables * p->n_numbers * 4),
        .pages =
            memory_of(&p->plan, gpu_put(0, p->pages, s->pages * p->page + 16), p->page, s->pages),
        .table = gpu_new((uint64_t)s->sequences * s->window * 4 + 4),
        .table_stride = s->window,
        .first = gpu_new(s->sequences * 4),
        .length = s->window > 0 ? gpu_new(s->sequences * 4) : 0,
        .out = gpu_new(p->rows * p->v * 2),
        .lse = gpu_new(p->rows * 4),
        .flags = gpu_new(4),
        .done = gpu_new((uint64_t)s->sequences * groups * 4),
    };
    gpu_clear(p->args.flags, 4);
    gpu_clear(p->args.done, (uint64_t)s->sequences * groups * 4);
}

void problem_open(struct problem *p, const struct attend_shape *s)
{
    *p = (struct problem){.shape = *s,
                          .v = s->latent ? UCM_ATTEND_MLA_VALUES : s->d,
                          .n_numbers = s->entries + s->entries / 2,
                          .tables = s->apart ? s->lists : 1};
    plan_of(p);
    p->rows = (uint64_t)s->sequences * s->kv_heads * s->group;
    memory_new(p);
    args_new(p);
    if (s->narrow == ENCODED) {
        encoded_draw(p);
        pool_encoded(p);
    } else {
        p->args.pool = memory_of(&p->pool_plan, gpu_put(0, p->pool, s->entries * p->entry),
                                 p->entry, s->entries);
    }
}

static void shuffle(int32_t *x, uint32_t n)
{
    for (uint32_t i = n; i > 1; i--) {
        uint32_t j = rnd_below(i);
        int32_t t = x[i - 1];

        x[i - 1] = x[j];
        x[j] = t;
    }
}

/* Numbers that have entries, in any order, for each sequence; entries in any order, too. */
static void draw_tables(struct problem *p)
{
    const struct attend_shape *s = &p->shape;
    uint64_t rows = (uint64_t)p->tables * p->n_numbers;
    int32_t *order = fresh(p->n_numbers * 4), *entries = fresh(s->entries * 4);

    for (uint32_t i = 0; i < p->n_numbers; i++)
        order[i] = (int32_t)i;
    for (uint32_t i = 0; i < s->entries; i++)
        entries[i] = (int32_t)i;
    for (uint64_t i = 0; i < rows; i++)
        p->entry_of[i] = -1 - (int32_t)rnd_below(2);
    shuffle(order, p->n_numbers);
    for (uint32_t t = 0; t < p->tables; t++) {
        shuffle(entries, s->entries);
        for (uint32_t i = 0; i < s->entries; i++)
            p->entry_of[(uint64_t)t * p->n_numbers + (uint32_t)order[i]] = entries[i];
    }
    for (uint32_t c = 0; c < s->sequences; c++) {
        memcpy(p->numbers + (uint64_t)c * s->entries, order, s->entries * 4);
        shuffle(p->numbers + (uint64_t)c * s->entries, s->entries);
    }
    gpu_put(p->args.numbers, p->numbers, (uint64_t)s->sequences * s->entries * 4);
    gpu_put(p->args.entry_of, p->entry_of, rows * 4);
}

int32_t problem_entry(const struct problem *p, uint64_t l, int32_t item)
{
    uint64_t sequence = l / p->shape.lists, table = p->shape.apart * (l % p->shape.lists);

    return p->entry_of[table * p->n_numbers +
                       (uint32_t)p->numbers[sequence * p->shape.entries + (uint32_t)item]];
}

uint32_t problem_head(const struct problem *p, uint32_t g)
{
    return p->shape.apart ? 0 : g;
}

void problem_draw(struct problem *p)
{
    const struct attend_shape *s = &p->shape;
    uint64_t lists = n_lists(p);

    draw_tables(p);
    for (uint64_t i = 0; i < p->rows * s->d; i++)
        p->q[i] = rnd_element(s->dtype == UCM_KV_BF16, 1.5f * query_size(p), &p->q16[i]);
    for (uint64_t l = 0; l < lists; l++) {
        p->count[l] = l % 5 == 4 ? 0 : rnd_below(s->room + 1);
        for (uint32_t i = 0; i < s->room; i++)
            p->list[l * s->room + i] = (int32_t)rnd_below(s->entries);
    }
    p->count[0] = s->room;
    for (uint32_t c = 0; c < s->sequences && s->window > 0; c++) {
        for (uint32_t i = 0; i < s->window; i++)
            p->table[(uint64_t)c * s->window + i] = (int32_t)rnd_below(s->pages);
        p->first[c] = rnd_below(s->window);
        p->length[c] =
            p->first[c] * s->tokens + rnd_below((s->window - p->first[c]) * s->tokens + 1);
    }
    gpu_put(p->args.q, p->q16, p->rows * s->d * 2);
    gpu_put(p->args.list, p->list, lists * s->room * 4);
    gpu_put(p->args.count, p->count, lists * 4);
    if (s->window == 0)
        return;
    gpu_put(p->args.table, p->table, (uint64_t)s->sequences * s->window * 4);
    gpu_put(p->args.first, p->first, s->sequences * 4);
    gpu_put(p->args.length, p->length, s->sequences * 4);
}

void problem_cut(struct problem *p, uint32_t tiles)
{
    const struct attend_shape *s = &p->shape;
    uint32_t in_block = s->tokens / UCM_ATTEND_CUDA_TILE, room = s->room * in_block;
    uint64_t rows;

    if (s->narrow == ENCODED) /* the window begins with a split */
        room = (room + tiles - 1) / tiles * tiles;
    p->args.split_tiles = tiles;
    p->args.splits = (room + s->window * in_block + tiles - 1) / tiles;
    rows = p->rows * p->args.splits;
    p->args.partial = gpu_new(rows * p->v * 4);
    p->args.partial_sum = gpu_new(rows * sizeof(struct ucm_attend_cuda_sum));
}

uint32_t problem_flags(const struct problem *p)
{
    uint32_t flags;

    gpu_get(&flags, p->args.flags, 4);
    gpu_clear(p->args.flags, 4);
    return flags;
}

int main(int argc, char **argv)
{
    gpu_begin(argc, argv);
    attend_open();
    test_steps();
    test_beside();
    test_rounds();
    test_latents();
    return gpu_end();
}
