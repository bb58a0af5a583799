#include "client/cuda/decode.h"

#include "client/cuda/error.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern const unsigned char ucm_entries_fatbin[];
extern const unsigned char ucm_attend_fatbin[], ucm_mla_fatbin[];

_Static_assert(sizeof(struct ucm_entries_word) == sizeof(struct ucm_cuda_decode_result) &&
                   offsetof(struct ucm_entries_word, share) ==
                       offsetof(struct ucm_cuda_decode_result, share),
               "the word is the result");
_Static_assert(UCM_CUDA_DECODE_UNSERVED == UCM_ENTRIES_UNSERVED &&
                   UCM_CUDA_DECODE_FULL == UCM_ENTRIES_FULL &&
                   UCM_CUDA_DECODE_LIST_FULL == UCM_ENTRIES_LIST_FULL &&
                   UCM_CUDA_DECODE_STRAY == UCM_ENTRIES_STRAY &&
                   UCM_CUDA_DECODE_NO_ENTRY == UCM_ATTEND_NO_ENTRY << UCM_ENTRIES_ATTENDED &&
                   UCM_CUDA_DECODE_NO_PAGE == UCM_ATTEND_NO_PAGE << UCM_ENTRIES_ATTENDED,
               "flags are the kernels'");
_Static_assert(UCM_CUDA_DECODE_GROUP == UCM_ATTEND_CUDA_ROWS &&
                   UCM_CUDA_DECODE_TOKENS == UCM_ATTEND_CUDA_TOKENS,
               "limits are the kernels'");

/* ---- a step, with the context entered ---- */

static CUresult launch_next(struct ucm_cuda_decode *d, CUstream stream)
{
    CUdeviceptr flags = d->plan.attend.flags;

    return decode_launch(d, DECODE_NEXT, 1, 1, (void *[]){&d->entries, &flags}, stream);
}

static CUresult launch_end(struct ucm_cuda_decode *d, CUstream stream)
{
    CUdeviceptr flags = d->plan.attend.flags, word = (CUdeviceptr)(uintptr_t)d->word;

    return decode_launch(d, DECODE_END, 1, 1, (void *[]){&d->entries, &flags, &word}, stream);
}

static CUresult launch_layer(struct ucm_cuda_decode *d, const struct ucm_cuda_decode_layer *l,
                             CUstream stream)
{
    const struct ucm_cuda_decode_options *o = &d->plan.options;
    uint32_t layer_head = l->layer * (d->plan.attend.apart ? o->kv_heads : 1);

    return o->rule == UCM_CUDA_DECODE_ALL ? decode_launch_lists(d, l, layer_head, NULL, stream)
                                          : decode_rounds_launch(d, l, layer_head, stream);
}

int ucm_cuda_decode_begin(struct ucm_cuda_decode *d, void *stream)
{
    int r;

    if (!d)
        return cuda_fail(UCM_EINVALID, "decode is NULL");
    r = cuda_enter(d->context);
    return r ? r : cuda_leave(launch_next(d, stream), "a step can't begin");
}

int ucm_cuda_decode_end(struct ucm_cuda_decode *d, void *stream)
{
    int r;

    if (!d)
        return cuda_fail(UCM_EINVALID, "decode is NULL");
    r = cuda_enter(d->context);
    return r ? r : cuda_leave(launch_end(d, stream), "a step can't end");
}

static int window_check(const struct ucm_cuda_decode_options *o,
                        const struct ucm_cuda_decode_layer *l)
{
    if (l->page_of != 0 && (l->pages == 0 || l->pages % 16 != 0 || l->page_stride % 16 != 0 ||
                            memcmp(&o->page, &o->stored, sizeof o->page) != 0))
        return cuda_fail(UCM_EINVALID, "page_of is not 0; pages of multiples of 16, laid out as "
                                       "the daemon's blocks, are right");
    if (o->window == 0 || l->length == 0)
        return 0;
    if (l->first == 0 || l->page_table == 0 || l->pages == 0)
        return cuda_fail(UCM_EINVALID, "length is not 0, but first, page_table or pages is");
    if (l->pages % 16 != 0 || l->page_stride % 16 != 0)
        return cuda_fail(UCM_EINVALID, "pages or page_stride is no multiple of 16");
    return 0;
}

static int layer_check(const struct ucm_cuda_decode *d, const struct ucm_cuda_decode_layer *l)
{
    const struct ucm_cuda_decode_options *o = &d->plan.options;

    if (l->layer >= o->layers)
        return cuda_fail(UCM_EINVALID, "layer is %u of %u", l->layer, o->layers);
    if (l->sequences > o->sequences)
        return cuda_fail(UCM_EINVALID, "sequences is %u; the handle is for %u", l->sequences,
                         o->sequences);
    if (l->index == 0 || l->count == 0 || l->table == 0 || l->request == 0)
        return cuda_fail(UCM_EINVALID, "index, count, table or request is 0");
    if (l->table_stride == 0 || l->table_stride > UINT32_MAX)
        return cuda_fail(UCM_EINVALID, "table_stride is %llu; 1 to 2^32 - 1 are right",
                         (unsigned long long)l->table_stride);
    if (l->q == 0 || l->q % 4 != 0 || l->out == 0 || l->out % 16 != 0)
        return cuda_fail(UCM_EINVALID, "q or out is 0, or q no multiple of 4, or out none of 16");
    if (l->q_stride % 2 != 0)
        return cuda_fail(UCM_EINVALID, "q_stride is %llu elements, which is odd",
                         (unsigned long long)l->q_stride);
    return window_check(o, l) != 0 ? -UCM_EINVALID : decode_rounds_layer_check(o, l);
}

int ucm_cuda_decode_layer(struct ucm_cuda_decode *d, const struct ucm_cuda_decode_layer *l,
                          void *stream)
{
    int r;

    if (!d || !l)
        return cuda_fail(UCM_EINVALID, "decode or layer is NULL");
    r = layer_check(d, l);
    if (r != 0 || l->sequences == 0)
        return r;
    r = cuda_enter(d->context);
    return r ? r : cuda_leave(launch_layer(d, l, stream), "a layer can't be launched");
}

int ucm_cuda_decode_result(struct ucm_cuda_decode *d, struct ucm_cuda_decode_result *out)
{
    volatile struct ucm_entries_word *w;

    if (!d || !out)
        return cuda_fail(UCM_EINVALID, "decode or out is NULL");
    w = d->word;
    *out = (struct ucm_cuda_decode_result){.step = __atomic_load_n(&w->step, __ATOMIC_ACQUIRE)};
    out->flags = w->flags;
    out->unserved = w->unserved;
    out->missed = w->missed;
    out->taken = w->taken;
    out->floors_broken = w->floors_broken;
    out->attended = w->blocks;
    out->rounds = w->rounds;
    out->share = w->share;
    return 0;
}

int ucm_cuda_decode_info(const struct ucm_cuda_decode *d, struct ucm_cuda_decode_info *out)
{
    if (!d || !out)
        return cuda_fail(UCM_EINVALID, "decode or out is NULL");
    *out = d->plan.info;
    return 0;
}

/* ---- open and close ---- */

static CUresult attend_load(struct ucm_cuda_decode *d)
{
    const struct ucm_cuda_decode_options *o = &d->plan.options;
    const char *type = o->dtype == UCM_SPARSE_F16 ? "f16" : "bf16";
    CUresult r = CUDA_SUCCESS;
    char name[48];

    if (d->plan.latent) {
        ucm_attend_mla_merge(name, type);
        r = cuModuleGetFunction(&d->kernel[DECODE_MERGE], d->attend_module, name);
        ucm_attend_mla_kernel(name, type, d->plan.narrow, d->plan.attend.group);
    } else {
        r = cuModuleGetFunction(&d->kernel[DECODE_ORDER], d->attend_module, "ucm_attend_order");
        ucm_attend_cuda_kernel(name, type, d->plan.narrow, o->head_dim, d->plan.attend.group);
    }
    if (r == CUDA_SUCCESS)
        r = cuModuleGetFunction(&d->kernel[DECODE_ATTEND], d->attend_module, name);
    if (r == CUDA_SUCCESS)
        r = cuFuncSetAttribute(d->kernel[DECODE_ATTEND],
                               CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                               (int)d->plan.shared_bytes);
    return r;
}

static CUresult kernels_load(struct ucm_cuda_decode *d)
{
    static const char *const names[] = {"ucm_entries_next",
                                        "ucm_entries_resolve",
                                        NULL,
                                        "ucm_entries_end",
                                        "ucm_entries_want_keys",
                                        "ucm_entries_put",
                                        "ucm_entries_forget_numbers",
                                        "ucm_entries_leave_request"};
    const struct ucm_cuda_decode_options *o = &d->plan.options;
    CUresult r = cuModuleLoadData(&d->entries_module, ucm_entries_fatbin);

    if (r == CUDA_SUCCESS)
        r = cuModuleLoadData(&d->attend_module,
                             d->plan.latent ? ucm_mla_fatbin : ucm_attend_fatbin);
    for (int i = 0; r == CUDA_SUCCESS && i < DECODE_ATTEND; i++)
        if (names[i])
            r = cuModuleGetFunction(&d->kernel[i], d->entries_module, names[i]);
    if (r == CUDA_SUCCESS)
        r = cuModuleGetFunction(&d->kernel[DECODE_GATHER], d->entries_module,
                                o->entry == UCM_CUDA_DECODE_HEAD ? "ucm_entries_gather_warp"
                                                                 : "ucm_entries_gather_block");
    return r == CUDA_SUCCESS ? attend_load(d) : r;
}

static uint64_t aligned(uint64_t n)
{
    return (n + 255) / 256 * 256;
}

/* The tables: entries, then places, then the batch. */
static CUresult memory_make(struct ucm_cuda_decode *d)
{
    struct decode_plan *p = &d->plan;
    struct decode_scratch *s = &d->scratch;
    uint64_t batch = p->batch, places = p->options.numbers * sizeof(*d->place);
    CUresult r = cuMemAlloc(&d->tables, p->info.table_bytes);
    uint8_t *pinned = NULL;

    if (r == CUDA_SUCCESS)
        r = cuMemAlloc(&d->workspace, p->info.workspace_bytes);
    if (r == CUDA_SUCCESS)
        r = cuMemHostAlloc((void **)&pinned, p->info.host_bytes, 0);
    if (r != CUDA_SUCCESS)
        return r;
    memset(pinned, 0, p->info.host_bytes);
    d->word = (struct ucm_entries_word *)(void *)pinned;
    d->place = (struct ucm_entries_place *)(void *)(d->word + 1);
    s->from = (uint64_t *)(d->place + p->options.numbers);
    s->key = (uint32_t *)(s->from + batch);
    s->request = s->key + batch;
    ucm_entries_layout(&d->entries, &p->shape, (void *)(uintptr_t)d->tables);
    p->gather.places = d->tables + aligned(ucm_entries_bytes(&p->shape));
    s->from_gpu = p->gather.places + aligned(places);
    s->key_gpu = s->from_gpu + batch * sizeof(*s->from);
    s->request_gpu = s->key_gpu + batch * sizeof(*s->key);
    p->attend.flags = d->workspace + p->flags;
    p->attend.done = d->workspace + p->done;
    p->attend.partial = d->workspace + p->partial;
    p->attend.partial_sum = d->workspace + p->partial_sum;
    decode_rounds_place(p, d->workspace);
    return r;
}

static CUresult fill(void *at, uint8_t byte, uint64_t bytes, CUstream stream)
{
    return cuMemsetD8Async((CUdeviceptr)(uintptr_t)at, byte, bytes, stream);
}

/* As ucm_entries_init: nobody is resident, no block is in the mapping. */
static CUresult tables_init(struct ucm_cuda_decode *d, CUstream stream)
{
    const struct ucm_entries_shape *n = &d->entries.shape;
    struct ucm_entries *s = &d->entries;
    CUresult r = cuMemsetD8Async(d->tables, 0, d->plan.info.table_bytes, stream);

    if (r == CUDA_SUCCESS)
        r = fill(s->entry_of, 0xff, (uint64_t)n->layer_heads * n->numbers * sizeof(*s->entry_of),
                 stream);
    if (r == CUDA_SUCCESS)
        r = fill(s->key, 0xff, (uint64_t)n->entries * sizeof(*s->key), stream);
    if (r == CUDA_SUCCESS)
        r = fill(s->request, 0xff, (uint64_t)n->entries * sizeof(*s->request), stream);
    return r;
}

/* A first launch of each kernel, over empty lists, so that a captured one finds it loaded. Partial results are memory
 * enough for its inputs and outputs; what it leaves in the tables, tables_init undoes. */
static CUresult warm(struct ucm_cuda_decode *d, CUstream stream)
{
    uint64_t at = d->plan.attend.partial;
    struct ucm_cuda_decode_layer layer = {.sequences = 1,
                                          .index = at,
                                          .count = at,
                                          .table = at,
                                          .table_stride = 1,
                                          .request = at,
                                          .q = at,
                                          .out = at,
                                          .candidates = at,
                                          .score = at,
                                          .head_scores = at,
                                          .head_pitch = 1};
    uint32_t none = 0, request = 0;
    CUresult r = launch_next(d, stream);

    if (r == CUDA_SUCCESS)
        r = launch_layer(d, &layer, stream);
    if (r == CUDA_SUCCESS)
        r = launch_end(d, stream);
    if (r == CUDA_SUCCESS)
        r = decode_launch(d, DECODE_WANT, 1, 32, (void *[]){&d->entries, &at, &at, &none}, stream);
    if (r == CUDA_SUCCESS)
        r = decode_launch(d, DECODE_PUT, 1, UCM_ENTRIES_CUDA_GATHER,
                          (void *[]){&d->entries, &d->plan.gather, &at, &at, &none}, stream);
    if (r == CUDA_SUCCESS)
        r = decode_launch(d, DECODE_FORGET, 1, 32, (void *[]){&d->entries, &at, &none}, stream);
    if (r == CUDA_SUCCESS)
        r = decode_launch(d, DECODE_LEAVE, 1, 32, (void *[]){&d->entries, &request}, stream);
    return r;
}

static CUresult prepare(struct ucm_cuda_decode *d)
{
    CUstream stream;
    CUresult r = cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0);

    if (r != CUDA_SUCCESS)
        return r;
    r = cuMemsetD8Async(d->workspace, 0, d->plan.info.workspace_bytes, stream);
    if (r == CUDA_SUCCESS)
        r = tables_init(d, stream);
    if (r == CUDA_SUCCESS)
        r = warm(d, stream);
    if (r == CUDA_SUCCESS)
        r = tables_init(d, stream);
    if (r == CUDA_SUCCESS)
        r = cuStreamSynchronize(stream);
    (void)cuStreamDestroy(stream);
    memset(d->word, 0, sizeof *d->word);
    return r;
}

/* With the context entered; leaves it. */
static void release(struct ucm_cuda_decode *d)
{
    decode_mapping_end(d);
    if (d->word)
        (void)cuMemFreeHost(d->word);
    if (d->workspace)
        (void)cuMemFree(d->workspace);
    if (d->tables)
        (void)cuMemFree(d->tables);
    if (d->attend_module)
        (void)cuModuleUnload(d->attend_module);
    if (d->entries_module)
        (void)cuModuleUnload(d->entries_module);
    ucm_context_leave();
}

/* What of the plan follows from the GPU. */
static int plan_gpu(struct ucm_cuda_decode *d)
{
    int multiprocessors, bytes, major;
    CUresult r =
        cuDeviceGetAttribute(&multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, d->dev);

    if (r == CUDA_SUCCESS)
        r = cuDeviceGetAttribute(&bytes, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
                                 d->dev);
    if (r == CUDA_SUCCESS)
        r = cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, d->dev);
    if (r != CUDA_SUCCESS)
        return cuda_fail_driver(r, "the GPU can't be asked");
    d->beside = major >= 9;
    return decode_plan_memory(&d->plan, (uint32_t)multiprocessors, (uint32_t)bytes);
}

static int decode_make(struct ucm_cuda_decode *d, const uint8_t *gpu)
{
    CUresult rc = ucm_device_find(gpu, &d->dev);
    int r;

    if (rc == CUDA_SUCCESS)
        rc = cuDevicePrimaryCtxRetain(&d->context, d->dev);
    if (rc != CUDA_SUCCESS)
        return cuda_fail_driver(rc, "the GPU can't be used");
    r = cuda_enter(d->context);
    if (r == 0) {
        r = plan_gpu(d);
        if (r == 0)
            rc = kernels_load(d);
        if (r == 0 && rc == CUDA_SUCCESS)
            rc = memory_make(d);
        if (r == 0 && rc == CUDA_SUCCESS)
            rc = prepare(d);
        if (r == 0 && rc == CUDA_SUCCESS) {
            ucm_context_leave();
            return 0;
        }
        if (r == 0)
            r = cuda_fail_driver(rc, "decode steps can't be prepared");
        release(d);
    }
    (void)cuDevicePrimaryCtxRelease(d->dev);
    return r;
}

int ucm_cuda_decode_open(const uint8_t *gpu, const struct ucm_cuda_decode_options *options,
                         struct ucm_cuda_decode **out)
{
    struct ucm_cuda_decode *d;
    int r;

    if (!gpu || !options || !out)
        return cuda_fail(UCM_EINVALID, "gpu, options or out is NULL");
    d = calloc(1, sizeof *d);
    if (!d || pthread_mutex_init(&d->mapping_lock, NULL) != 0) {
        free(d);
        return cuda_fail(UCM_ENOMEMORY, "no memory for decode steps");
    }
    r = decode_plan(&d->plan, options);
    if (r == 0 && (options->block_pool == 0 || options->block_pool % 16 != 0))
        r = cuda_fail(UCM_EINVALID, "block_pool is 0, or no multiple of 16");
    if (r == 0) {
        d->floors = calloc(d->plan.shape.requests, sizeof *d->floors);
        r = d->floors ? decode_make(d, gpu)
                      : cuda_fail(UCM_ENOMEMORY, "no memory for the floors of requests");
    }
    if (r != 0) {
        pthread_mutex_destroy(&d->mapping_lock);
        free(d->floors);
        free(d);
        return r;
    }
    *out = d;
    return 0;
}

void ucm_cuda_decode_close(struct ucm_cuda_decode *d)
{
    if (!d)
        return;
    if (cuda_enter(d->context) == 0)
        release(d);
    (void)cuDevicePrimaryCtxRelease(d->dev);
    pthread_mutex_destroy(&d->mapping_lock);
    free(d->range);
    free(d->floors);
    free(d);
}
