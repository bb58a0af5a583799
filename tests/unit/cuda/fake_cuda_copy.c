/* What streams of the fake driver carry out: kernels, copies, memory that is set. */
#include "tests/unit/cuda/fake_cuda.h"
#include "tests/unit/cuda/fake_cuda_inside.h"

#include "kernels/copy.h"
#include "kernels/rope/rope_cuda.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void code(const struct op *o)
{
    const struct ucm_encoding_plane *planes =
        (const struct ucm_encoding_plane *)(uintptr_t)o->planes;
    const struct ucm_copy_item *items = (const struct ucm_copy_item *)(uintptr_t)o->items;

    for (uint32_t i = 0; i < o->n_items; i++)
        for (uint32_t p = 0; p < o->n_planes; p++) {
            void *encoded = (void *)(uintptr_t)(items[i].slot + planes[p].slot_offset);
            void *page = (void *)(uintptr_t)(planes[p].base + items[i].block * planes[p].stride);

            if (o->direction == UCM_COPY_LOAD)
                ucm_decode(&o->spec, planes[p].tensor, encoded, page);
            else
                ucm_encode(&o->spec, planes[p].tensor, page, encoded);
        }
}

/* Tables are read now, as late as a kernel would. */
static void shift(const struct op *o)
{
    const struct ucm_copy_plane *planes = (const struct ucm_copy_plane *)(uintptr_t)o->planes;
    const struct ucm_copy_item *items = (const struct ucm_copy_item *)(uintptr_t)o->items;
    const struct ucm_rope_angle *tables = (const struct ucm_rope_angle *)(uintptr_t)o->tables;
    const uint32_t *at = (const uint32_t *)(uintptr_t)o->at;

    if (!o->in_place)
        ucm_copy_ref(planes, o->n_planes, items, o->n_items, UCM_COPY_LOAD);
    for (uint32_t i = 0; i < o->n_items; i++)
        for (uint32_t p = 0; p < o->n_planes; p++) {
            void *k =
                (void *)(uintptr_t)(planes[p].base + items[i].block * planes[p].stride + at[p]);

            if (at[p] != UCM_ROPE_NO_K && items[i].memory != UCM_ROPE_STAYS)
                ucm_rope_apply(&o->rope, tables + items[i].memory * (o->rope.rotary / 2), k, k);
        }
}

void fake_op_run(const struct op *o)
{
    if (o->encoded)
        code(o);
    else if (o->shifted)
        shift(o);
    else if (o->n_items > 0)
        ucm_copy_ref((const struct ucm_copy_plane *)(uintptr_t)o->planes, o->n_planes,
                     (const struct ucm_copy_item *)(uintptr_t)o->items, o->n_items,
                     (enum ucm_copy_direction)o->direction);
    for (size_t i = 0; i < o->n; i++)
        for (uint64_t row = 0; row < o->rows[i].height; row++)
            memcpy((void *)(uintptr_t)(o->rows[i].to + row * o->rows[i].to_pitch),
                   (const void *)(uintptr_t)(o->rows[i].from + row * o->rows[i].from_pitch),
                   o->rows[i].width);
}

/* Indexed by enum ucm_copy_direction. */
static const char coders[2];

CUfunction fake_cuda_coder(const char *name)
{
    const char *end = strrchr(name, '_');

    return (CUfunction)(uintptr_t)&coders[end && strcmp(end, "_dump") == 0];
}

static const char rerotator;

CUfunction fake_cuda_rerotator(void)
{
    return (CUfunction)(uintptr_t)&rerotator;
}

/* ---- kernels that do nothing ---- */

static struct idle {
    char name[64];
    bool launched;
} idles[128];
static pthread_mutex_t idles_lock = PTHREAD_MUTEX_INITIALIZER;

/* With the lock: the one of that name, or the first without one. */
static struct idle *idle_named(const char *name)
{
    struct idle *i = idles;

    while (i < idles + sizeof idles / sizeof *idles - 1 && i->name[0] != 0 &&
           strcmp(i->name, name) != 0)
        i++;
    return i;
}

CUfunction fake_cuda_idle(const char *name)
{
    struct idle *i;

    pthread_mutex_lock(&idles_lock);
    i = idle_named(name);
    snprintf(i->name, sizeof i->name, "%s", name);
    pthread_mutex_unlock(&idles_lock);
    return (CUfunction)(uintptr_t)i;
}

bool fake_cuda_launched(const char *name)
{
    bool launched;

    pthread_mutex_lock(&idles_lock);
    launched = idle_named(name)->launched;
    idle_named(name)->launched = false;
    pthread_mutex_unlock(&idles_lock);
    return launched;
}

/* False: it is none of them. */
static bool idle_launch(CUfunction f)
{
    uintptr_t at = (uintptr_t)f - (uintptr_t)idles;

    if (at >= sizeof idles)
        return false;
    pthread_mutex_lock(&idles_lock);
    idles[at / sizeof *idles].launched = true;
    pthread_mutex_unlock(&idles_lock);
    return true;
}

/* ---- kernels that copy ---- */

static void rerotate_take(struct op *o, void **arguments)
{
    o->at = *(uint64_t *)arguments[4];
    o->tables = *(uint64_t *)arguments[5];
    memcpy(&o->rope, arguments[7], sizeof(o->rope));
    o->in_place = *(uint32_t *)arguments[9] != 0;
}

static CUresult launch(CUfunction f, CUstream s, void **arguments, bool copy_agent)
{
    bool encoded = f == (CUfunction)(uintptr_t)&coders[0] || f == (CUfunction)(uintptr_t)&coders[1];
    bool shifted = f == fake_cuda_rerotator();
    struct op *o = fake_op_new(0);

    o->planes = *(uint64_t *)arguments[0];
    o->n_planes = *(uint32_t *)arguments[1];
    o->items = *(uint64_t *)arguments[2];
    o->n_items = *(uint32_t *)arguments[3];
    o->encoded = encoded && o->n_items > 0;
    if (encoded)
        memcpy(&o->spec, arguments[4], sizeof(o->spec));
    o->shifted = shifted && o->n_items > 0;
    if (shifted)
        rerotate_take(o, arguments);
    o->direction = shifted   ? UCM_COPY_LOAD
                   : encoded ? f == (CUfunction)(uintptr_t)&coders[1]
                             : *(uint32_t *)arguments[5];
    o->copy_agent = copy_agent;
    o->slow_us = copy_agent ? fake_cuda.slow_us : 0;
    return fake_op_send(s, o);
}

/* The copy agent's. */
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                        unsigned by, unsigned bz, unsigned shared, CUstream s, void **arguments,
                        void **extra)
{
    (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)extra;
    if (f == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    return idle_launch(f) ? CUDA_SUCCESS : launch(f, s, arguments, true);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **arguments, void **extra)
{
    return cuLaunchKernel(f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY,
                          c->blockDimZ, c->sharedMemBytes, c->hStream, arguments, extra);
}

CUresult fake_cuda_daemon_launch(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                 unsigned by, unsigned bz, unsigned shared, CUstream s,
                                 void **arguments, void **extra)
{
    (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)extra;
    return launch(f, s, arguments, false);
}

static struct rows rows_of(const CUDA_MEMCPY2D *c)
{
    return (struct rows){.to = c->dstDevice,
                         .from = c->srcDevice,
                         .to_pitch = c->dstPitch,
                         .from_pitch = c->srcPitch,
                         .width = c->WidthInBytes,
                         .height = c->Height};
}

CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D *c, CUstream s)
{
    struct op *o = fake_op_new(1);

    o->rows[0] = rows_of(c);
    return fake_op_send(s, o);
}

static uint8_t pages[256][4096]; /* of each value; streams read them */

static void pages_fill(void)
{
    for (unsigned value = 0; value < 256; value++)
        memset(pages[value], (int)value, sizeof(*pages));
}

/* Whole pages, then what is left. */
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream s)
{
    static pthread_once_t filled = PTHREAD_ONCE_INIT;
    uint8_t *page = pages[value];
    size_t whole = bytes / sizeof(*pages), rest = bytes % sizeof(*pages);
    struct op *o = fake_op_new(2);

    (void)pthread_once(&filled, pages_fill);
    o->rows[0] = (struct rows){.to = to,
                               .from = (uint64_t)(uintptr_t)page,
                               .to_pitch = sizeof(*pages),
                               .width = sizeof(*pages),
                               .height = whole};
    o->rows[1] = (struct rows){.to = to + whole * sizeof(*pages),
                               .from = (uint64_t)(uintptr_t)page,
                               .width = rest,
                               .height = rest > 0};
    return fake_op_send(s, o);
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, CUstream s)
{
    struct op *o = fake_op_new(1);

    o->rows[0] = (struct rows){.to = to,
                               .from = (uint64_t)(uintptr_t)from,
                               .to_pitch = bytes,
                               .width = bytes,
                               .height = 1};
    return fake_op_send(s, o);
}

CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream s)
{
    return cuMemcpyHtoDAsync((CUdeviceptr)(uintptr_t)to, (const void *)(uintptr_t)from, bytes, s);
}

CUresult cuMemcpyBatchAsync(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t n,
                            CUmemcpyAttributes *attributes, size_t *at, size_t n_attributes,
                            CUstream s)
{
    struct op *o = fake_op_new(n);

    (void)at;
    if (n_attributes != 1 || attributes->srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM) {
        free(o);
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (size_t i = 0; i < n; i++)
        o->rows[i] = (struct rows){.to = to[i], .from = from[i], .width = sizes[i], .height = 1};
    return fake_op_send(s, o);
}

CUresult cuMemcpy3DBatchAsync(size_t n, CUDA_MEMCPY3D_BATCH_OP *ops, unsigned long long flags,
                              CUstream s)
{
    struct op *o = fake_op_new(n);

    (void)flags;
    for (size_t i = 0; i < n; i++)
        o->rows[i] = (struct rows){.to = ops[i].dst.op.ptr.ptr,
                                   .from = ops[i].src.op.ptr.ptr,
                                   .to_pitch = ops[i].dst.op.ptr.rowLength,
                                   .from_pitch = ops[i].src.op.ptr.rowLength,
                                   .width = ops[i].extent.width,
                                   .height = ops[i].extent.height};
    return fake_op_send(s, o);
}
