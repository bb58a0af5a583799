/* select on this host's first GPU, by libucmclient_cuda. A layer's launch is timed as one of those of all
 * layers, which follow each other in a stream without a pause. */
#include "client/bench/companion.h"
#include "client/bench/cuda.h"
#include "client/bench/gpu_work.h"
#include "client/bench/select.h"
#include "client/include/ucmclient_cuda_sparse.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PLACE_ALIGN 4096u
#define READ_CTAS 1056u
#define READ_THREADS 512u
#define READS 8 /* of all layers, launched at once: their ends then don't count */

/* Of libucmclient_cuda. */
struct calls {
    int (*open)(const uint8_t *gpu, const struct ucm_sparse_digest *digest,
                const struct ucm_cuda_select_options *options, struct ucm_cuda_select **out);
    void (*close)(struct ucm_cuda_select *select);
    int (*info)(const struct ucm_cuda_select *select, struct ucm_cuda_select_info *out);
    int (*select)(struct ucm_cuda_select *select, const struct ucm_cuda_select_layer *layer,
                  void *stream);
    const char *(*errmsg)(void);
};

struct gpu_rig {
    const struct select_case *c;
    struct calls calls;
    struct gpu gpu;
    struct gpu_work work;
    struct ucm_cuda_select *handle;
    struct ucm_cuda_select_layer layer; /* the first's */
    void *stream;
    uint64_t layer_bytes, bytes, odd; /* odd: where a read writes */
    char *why;
};

/* ---- the library ---- */

static int calls_find(struct gpu_rig *r)
{
    const struct {
        const char *name;
        void *to;
    } symbols[] = {
        {"ucm_cuda_select_open", &r->calls.open}, {"ucm_cuda_select_close", &r->calls.close},
        {"ucm_cuda_select_info", &r->calls.info}, {"ucm_cuda_select", &r->calls.select},
        {"ucm_cuda_errmsg", &r->calls.errmsg},
    };
    void *library = bench_companion_library();

    for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        void *found = library != NULL ? dlsym(library, symbols[i].name) : NULL;

        if (found == NULL) {
            snprintf(r->why, SELECT_WHY, "no libucmclient_cuda with %s: %s", symbols[i].name,
                     dlerror());
            return -ENOTSUP;
        }
        memcpy(symbols[i].to, &found, sizeof(found));
    }
    return 0;
}

static int gpu_failed(struct gpu_rig *r)
{
    snprintf(r->why, SELECT_WHY, "%s", r->gpu.why);
    return -EIO;
}

static int library_failed(struct gpu_rig *r)
{
    snprintf(r->why, SELECT_WHY, "%s", r->calls.errmsg());
    return -EIO;
}

/* ---- memory ---- */

static struct ucm_sparse_digest digest_of(const struct ucm_digest_spec *s)
{
    const struct ucm_kv_shape *k = &s->shape;

    return (struct ucm_sparse_digest){
        .method = s->method,
        .run = s->run,
        .bits = s->bits,
        .seed = s->seed,
        .chosen = s->chosen,
        .rest = s->rest,
        .shape = {.dtype = k->dtype,
                  .tokens = k->tokens,
                  .kv_heads = k->kv_heads,
                  .head_dim = k->head_dim,
                  .v_head_dim = k->v_head_dim,
                  .k_token_stride = k->k_token_stride,
                  .k_head_stride = k->k_head_stride,
                  .v_offset = k->v_offset,
                  .v_token_stride = k->v_token_stride,
                  .v_head_stride = k->v_head_stride},
    };
}

static int handle_open(struct gpu_rig *r, struct ucm_cuda_select_info *info)
{
    const struct select_case *c = r->c;
    const struct ucm_choose_spec *o = &c->choose;
    struct ucm_sparse_digest digest = digest_of(&c->plan.spec);
    struct ucm_cuda_select_options options = {
        .score = {.metric = c->score.metric,
                  .reduce = c->score.reduce,
                  .heads = c->score.heads,
                  .rows = c->score.rows,
                  .q_heads = c->score.q_heads,
                  .beta = c->score.beta},
        .choose = {.policy = o->policy,
                   .topk_tokens = o->topk_tokens,
                   .min_blocks = o->min_blocks,
                   .init_window_sz = o->init_window_sz,
                   .local_window_sz = o->local_window_sz,
                   .limit = o->limit,
                   .sparse_ratio = o->sparse_ratio,
                   .eps = o->eps,
                   .beta_m = o->beta},
        .q_dtype = UCM_SPARSE_F32,
        .chains = 1,
        .max_blocks = c->blocks,
    };

    if (r->calls.open(r->gpu.uuid, &digest, &options, &r->handle) < 0 ||
        r->calls.info(r->handle, info) < 0)
        return library_failed(r);
    return 0;
}

static uint64_t place(uint64_t *end, uint64_t bytes)
{
    uint64_t at = *end;

    *end = (at + bytes + PLACE_ALIGN - 1) / PLACE_ALIGN * PLACE_ALIGN;
    return at;
}

/* Offsets in the one allocation. No list is longer than its chain. */
static void lay(struct gpu_rig *r)
{
    const struct select_case *c = r->c;
    uint64_t lists = ucm_score_lists(&c->plan, &c->score);
    uint64_t queries = (uint64_t)c->score.rows * c->score.q_heads * c->plan.spec.shape.head_dim;
    struct ucm_cuda_select_layer *l = &r->layer;

    r->layer_bytes = (uint64_t)c->blocks * c->plan.bytes;
    l->digests = place(&r->bytes, r->layer_bytes * c->layers);
    l->table = place(&r->bytes, c->blocks * sizeof(int32_t));
    l->n_blocks = place(&r->bytes, sizeof(int32_t));
    l->q = place(&r->bytes, queries * sizeof(float));
    l->count = place(&r->bytes, lists * sizeof(uint32_t));
    l->index = place(&r->bytes, lists * (c->blocks + 1) * sizeof(uint32_t));
    r->odd = place(&r->bytes, sizeof(uint32_t));
}

static void lay_at(struct gpu_rig *r, uint64_t base)
{
    struct ucm_cuda_select_layer *l = &r->layer;

    l->digests += base;
    l->table += base;
    l->n_blocks += base;
    l->q += base;
    l->count += base;
    l->index += base;
    r->odd += base;
    l->stride = r->c->plan.bytes;
    l->bound = l->table_stride = r->c->blocks;
    l->chains = 1;
}

static int put(struct gpu_rig *r, uint64_t to, const void *from, size_t bytes)
{
    if (gpu_check(&r->gpu, "cuMemcpyHtoD", bench_cuda.to_device(to, from, bytes)) < 0)
        return gpu_failed(r);
    return 0;
}

/* Blocks' numbers in any order. */
static void numbers_fill(int32_t *table, uint32_t n)
{
    for (uint32_t b = 0; b < n; b++) {
        uint32_t other = (uint32_t)(((uint64_t)b * 2654435761u >> 7) % (b + 1));

        table[b] = table[other];
        table[other] = (int32_t)b;
    }
}

/* All layers have the same digests, in memory of their own. */
static int fill(struct gpu_rig *r)
{
    const struct select_case *c = r->c;
    const struct ucm_cuda_select_layer *l = &r->layer;
    size_t queries = (size_t)c->score.rows * c->score.q_heads * c->plan.spec.shape.head_dim;
    uint8_t *digests = malloc(r->layer_bytes);
    int32_t *table = malloc(c->blocks * sizeof(*table)), n = (int32_t)c->blocks;
    float *q = malloc(queries * sizeof(*q));
    int rc = digests == NULL || table == NULL || q == NULL ? -ENOMEM : 0;

    if (rc == 0) {
        for (uint32_t b = 0; b < c->blocks; b++)
            select_fill_digest(&c->plan, (uint64_t)b << 32, digests + (size_t)b * c->plan.bytes);
        numbers_fill(table, c->blocks);
        select_fill_queries(c, q);
        rc = put(r, l->table, table, c->blocks * sizeof(*table));
    }
    if (rc == 0)
        rc = put(r, l->n_blocks, &n, sizeof(n));
    if (rc == 0)
        rc = put(r, l->q, q, queries * sizeof(*q));
    for (uint32_t i = 0; rc == 0 && i < c->layers; i++)
        rc = put(r, l->digests + i * r->layer_bytes, digests, r->layer_bytes);
    if (rc == 0 && gpu_check(&r->gpu, "cuCtxSynchronize", bench_cuda.context_synchronize()) < 0)
        rc = gpu_failed(r);
    free(digests);
    free(table);
    free(q);
    return rc;
}

/* ---- measuring ---- */

static int wait_for_stream(struct gpu_rig *r)
{
    if (gpu_check(&r->gpu, "a launch", bench_cuda.stream_synchronize(r->stream)) < 0)
        return gpu_failed(r);
    return 0;
}

static int measure_layers(struct gpu_rig *r, struct samples *out)
{
    struct ucm_cuda_select_layer l = r->layer;
    uint64_t begin = clock_ns();
    int rc;

    for (uint32_t i = 0; i < r->c->layers; i++, l.digests += r->layer_bytes)
        if (r->calls.select(r->handle, &l, r->stream) < 0)
            return library_failed(r);
    rc = wait_for_stream(r);
    return rc < 0 ? rc : samples_add(out, (double)(clock_ns() - begin) / 1e6 / r->c->layers);
}

static int measure_read(struct gpu_rig *r, struct samples *out)
{
    unsigned n = (unsigned)(r->layer_bytes * r->c->layers / 16);
    cuda_address from = r->layer.digests, odd = r->odd;
    void *arguments[] = {&from, &n, &odd};
    uint64_t begin = clock_ns();
    int rc;

    for (int i = 0; i < READS; i++)
        if (gpu_check(&r->gpu, "a read",
                      bench_cuda.launch(r->work.read, READ_CTAS, 1, 1, READ_THREADS, 1, 1, 0,
                                        r->stream, arguments, NULL)) < 0)
            return gpu_failed(r);
    rc = wait_for_stream(r);
    return rc < 0 ? rc
                  : samples_add(out, (double)(clock_ns() - begin) / 1e6 / READS / r->c->layers);
}

/* In turn with the read; the first round warms up. */
static int measure_rounds(struct gpu_rig *r, struct select_result *out)
{
    int rc = 0;

    for (unsigned round = 0; rc == 0 && round <= r->c->rounds; round++) {
        if (round == 1) {
            samples_clear(&out->select);
            samples_clear(&out->read);
        }
        rc = measure_layers(r, &out->select);
        if (rc == 0)
            rc = measure_read(r, &out->read);
    }
    return rc;
}

static int measure(struct gpu_rig *r, struct select_result *out)
{
    struct ucm_cuda_select_info info;
    int rc;

    if (gpu_work_open(&r->work, &r->gpu, r->bytes) < 0)
        return gpu_failed(r);
    if (!gpu_work_kernels(&r->work)) {
        snprintf(r->why, SELECT_WHY, "this ucm-bench was built without the CUDA toolkit");
        rc = -ENOTSUP;
    } else if (gpu_check(&r->gpu, "cuStreamCreate",
                         bench_cuda.stream_create(&r->stream, BENCH_STREAM_NON_BLOCKING)) < 0) {
        rc = gpu_failed(r);
    } else {
        rc = handle_open(r, &info);
        if (rc == 0)
            rc = fill(r);
        if (rc == 0)
            rc = measure_rounds(r, out);
        if (r->handle != NULL)
            r->calls.close(r->handle);
        bench_cuda.stream_destroy(r->stream);
    }
    gpu_work_close(&r->work);
    return rc;
}

int select_measure_gpu(const struct select_case *c, struct select_result *out, char why[SELECT_WHY])
{
    struct gpu_rig r = {.c = c, .why = why};
    int rc = calls_find(&r);

    if (rc < 0)
        return rc;
    lay(&r);
    if (r.layer_bytes * c->layers / 16 > UINT32_MAX) {
        snprintf(why, SELECT_WHY, "%llu bytes of digests a layer are too many for %u layers",
                 (unsigned long long)r.layer_bytes, c->layers);
        return -E2BIG;
    }
    if (gpu_open(&r.gpu, r.bytes) < 0)
        return gpu_failed(&r);
    lay_at(&r, r.gpu.memory);
    rc = measure(&r, out);
    gpu_close(&r.gpu);
    return rc;
}
