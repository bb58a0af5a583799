#include "client/cuda/sparse.h"

#include "client/cuda/error.h"
#include "client/lib/sparse/spec.h"

#include <stdio.h>
#include <string.h>

/* ---- plans ---- */

int sparse_plan(struct ucm_summary_plan *plan, const struct ucm_sparse_summary *d)
{
    struct ucm_summary_spec spec;
    char why[UCM_SPARSE_WHY];

    return sparse_spec(d, &spec, why) && ucm_summary_plan_init(plan, &spec, why) == 0
               ? 0
               : cuda_fail(UCM_EINVALID, "%s", why);
}

void sparse_segments(const struct ucm_summary_plan *plan, struct ucm_cuda_segment out[2])
{
    for (uint32_t i = 0; i < plan->n_segments; i++) {
        const struct ucm_hash_segment *s = &plan->segment[i];

        out[i] =
            (struct ucm_cuda_segment){s->first, s->channels, s->size, s->bits, s->chunks, s->flips};
    }
}

/* ---- memory ---- */

/* Copies, or if `from` is NULL fills. Not on the legacy stream, which would wait for all others. */
static CUresult stream_run(CUdeviceptr to, const void *from, uint8_t byte, size_t bytes)
{
    CUstream stream;
    CUresult r = cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0);

    if (r != CUDA_SUCCESS)
        return r;
    r = from ? cuMemcpyHtoDAsync(to, from, bytes, stream)
             : cuMemsetD8Async(to, byte, bytes, stream);
    if (r == CUDA_SUCCESS)
        r = cuStreamSynchronize(stream);
    (void)cuStreamDestroy(stream);
    return r;
}

CUresult sparse_fill(CUdeviceptr at, uint8_t byte, size_t bytes)
{
    return stream_run(at, NULL, byte, bytes);
}

/* Allocates, copies and waits for it. Context entered. */
static CUresult sparse_upload(CUdeviceptr *to, const void *from, size_t bytes)
{
    CUdeviceptr at;
    CUresult r = cuMemAlloc(&at, bytes);

    if (r == CUDA_SUCCESS) {
        r = stream_run(at, from, 0, bytes);
        if (r == CUDA_SUCCESS)
            *to = at;
        else
            (void)cuMemFree(at);
    }
    return r;
}

/* ---- the kernel ---- */

/* Tables that kernels read: submean's channels, unless it keeps all; hash's signs. */
static CUresult tables_upload(struct sparse_kernel *k)
{
    const struct ucm_summary_plan *p = &k->plan;
    size_t flips = 0;
    CUresult r = CUDA_SUCCESS;

    if (p->spec.method == UCM_SUMMARY_SUBMEAN && p->channels < p->spec.shape.head_dim)
        r = sparse_upload(&k->channel, p->channel, p->channels * sizeof(*p->channel));
    for (uint32_t i = 0; i < p->n_segments; i++)
        flips += 2 * (size_t)p->segment[i].chunks * p->segment[i].size;
    if (r == CUDA_SUCCESS && flips > 0)
        r = sparse_upload(&k->flips, p->flip, flips * sizeof(*p->flip));
    return r;
}

static CUresult kernel_load(struct sparse_kernel *k, const void *fatbin, const char *name,
                            uint32_t shared_bytes)
{
    CUresult r = cuModuleLoadData(&k->module, fatbin);

    if (r == CUDA_SUCCESS)
        r = cuModuleGetFunction(&k->function, k->module, name);
    if (r == CUDA_SUCCESS && shared_bytes > 0)
        r = cuFuncSetAttribute(k->function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                               (int)shared_bytes);
    return r == CUDA_SUCCESS ? tables_upload(k) : r;
}

void sparse_kernel_close(struct sparse_kernel *k)
{
    if (k->channel)
        (void)cuMemFree(k->channel);
    if (k->flips)
        (void)cuMemFree(k->flips);
    if (k->module)
        (void)cuModuleUnload(k->module);
    ucm_context_leave();
    (void)cuDevicePrimaryCtxRelease(k->dev);
}

int sparse_kernel_open(struct sparse_kernel *k, const uint8_t *gpu, const void *fatbin,
                       const char *name, uint32_t shared_bytes)
{
    CUresult rc = ucm_device_find(gpu, &k->dev);
    int r;

    if (rc == CUDA_SUCCESS)
        rc = cuDevicePrimaryCtxRetain(&k->context, k->dev);
    if (rc != CUDA_SUCCESS)
        return cuda_fail_driver(rc, "the GPU can't be used");
    r = cuda_enter(k->context);
    if (r != 0) {
        (void)cuDevicePrimaryCtxRelease(k->dev);
        return r;
    }
    rc = kernel_load(k, fatbin, name, shared_bytes);
    if (rc == CUDA_SUCCESS)
        return 0;
    r = cuda_fail_driver(rc, name);
    sparse_kernel_close(k);
    return r;
}
