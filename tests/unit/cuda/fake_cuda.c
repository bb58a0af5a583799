#include "tests/unit/cuda/fake_cuda.h"

#include "tests/unit/cuda/fake_cuda_inside.h"

#include "kernels/copy.h"
#include "kernels/encoding/encoding.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* ---- state, under the mutex ---- */

struct CUevent_st {
    unsigned refs;
    uint64_t wanted, done;
};

struct rows {
    uint64_t to, from, to_pitch, from_pitch, width, height;
};

struct op {
    struct op *next;
    CUevent event; /* done is set to `value`, and nothing else */
    uint64_t value;
    const _Atomic uint32_t *word; /* or is waited for until it reaches `value` */
    uint64_t planes, items;       /* a kernel, when n_items is not 0 */
    uint32_t n_planes, n_items, direction, slow_us;
    bool companion; /* a kernel of the companion's */
    bool coded;     /* it encodes or decodes */
    struct ucm_encoding_spec spec;
    size_t n; /* or copies */
    struct rows rows[];
};

struct CUstream_st {
    pthread_t thread;
    struct op *first, **last;
    bool busy, quit;
    unsigned events; /* that wait */
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static unsigned objects;  /* streams and events */
static unsigned enqueued; /* on all streams, and not done */
static unsigned most_events;
static uint64_t seed = 88172645463325252u;
static atomic_uint delay_us, slow_us, lost, bad_records;
static atomic_bool no_waits, capturing, held, holds;
static atomic_ullong stopped_ms; /* 0: the clock runs */

/* ---- the clock: the linker puts this in place of job_clock_ms ---- */

uint64_t __real_job_clock_ms(void);
uint64_t __wrap_job_clock_ms(void);
uint64_t __wrap_job_clock_ms(void)
{
    uint64_t ms = atomic_load(&stopped_ms);

    return ms != 0 ? ms : __real_job_clock_ms();
}

void fake_clock_stop(void)
{
    atomic_store(&stopped_ms, __real_job_clock_ms());
}

void fake_clock_pass(unsigned ms)
{
    atomic_fetch_add(&stopped_ms, ms);
}

uint64_t fake_clock_ms(void)
{
    return __wrap_job_clock_ms();
}

void fake_cuda_hold(bool hold)
{
    atomic_store(&holds, false);
    atomic_store(&held, hold);
}

bool fake_cuda_holds(void)
{
    return atomic_load(&holds);
}

void fake_cuda_delay(unsigned max_us)
{
    atomic_store(&delay_us, max_us);
}

void fake_cuda_slow(unsigned us)
{
    atomic_store(&slow_us, us);
}

void fake_cuda_fail_records(unsigned n)
{
    atomic_store(&bad_records, n);
}

void fake_cuda_refuse_waits(bool refuse)
{
    atomic_store(&no_waits, refuse);
}

void fake_cuda_capture(bool begin)
{
    atomic_store(&capturing, begin);
}

void fake_cuda_lose(CUresult r)
{
    atomic_store(&lost, r);
}

void fake_cuda_fence(void)
{
    pthread_mutex_lock(&mutex);
    pthread_mutex_unlock(&mutex);
}

unsigned fake_cuda_objects(void)
{
    unsigned n;

    pthread_mutex_lock(&mutex);
    n = objects;
    pthread_mutex_unlock(&mutex);
    return n;
}

/* ---- streams ---- */

static void code(const struct op *o)
{
    const struct ucm_encoding_plane *planes =
        (const struct ucm_encoding_plane *)(uintptr_t)o->planes;
    const struct ucm_copy_item *items = (const struct ucm_copy_item *)(uintptr_t)o->items;

    for (uint32_t i = 0; i < o->n_items; i++)
        for (uint32_t p = 0; p < o->n_planes; p++) {
            void *coded = (void *)(uintptr_t)(items[i].slot + planes[p].slot_offset);
            void *page = (void *)(uintptr_t)(planes[p].base + items[i].block * planes[p].stride);

            if (o->direction == UCM_COPY_LOAD)
                ucm_decode(&o->spec, planes[p].section, coded, page);
            else
                ucm_encode(&o->spec, planes[p].section, page, coded);
        }
}

static void op_run(const struct op *o)
{
    if (o->coded)
        code(o);
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

static void wait_a_little(void)
{
    unsigned max = atomic_load(&delay_us);
    struct timespec t = {0};

    if (max == 0)
        return;
    pthread_mutex_lock(&mutex);
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    t.tv_nsec = (long)(seed % max) * 1000;
    pthread_mutex_unlock(&mutex);
    nanosleep(&t, NULL);
}

static void event_free(CUevent e)
{
    if (--e->refs == 0) {
        free(e);
        objects--;
    }
}

static void word_wait(const struct op *o)
{
    const struct timespec nap = {.tv_nsec = 20000};

    while ((int32_t)(atomic_load_explicit(o->word, memory_order_acquire) - (uint32_t)o->value) < 0)
        nanosleep(&nap, NULL);
}

static void *stream_run(void *arg)
{
    CUstream s = arg;

    pthread_mutex_lock(&mutex);
    while (!s->quit || s->first) {
        struct op *o = s->first;

        if (!o) {
            pthread_cond_wait(&changed, &mutex);
            continue;
        }
        s->first = o->next;
        if (!s->first)
            s->last = &s->first;
        s->busy = true;
        pthread_mutex_unlock(&mutex);
        if (o->word) {
            word_wait(o);
        } else if (!o->event) {
            wait_a_little();
            usleep(o->slow_us);
            while (o->companion && atomic_load(&held)) {
                atomic_store(&holds, true);
                usleep(50);
            }
            op_run(o);
        }
        pthread_mutex_lock(&mutex);
        if (o->event) {
            s->events--;
            o->event->done = o->value;
            event_free(o->event);
        }
        s->busy = false;
        enqueued--;
        free(o);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&mutex);
    return NULL;
}

static struct op *op_new(size_t n)
{
    struct op *o = calloc(1, sizeof(*o) + n * sizeof(o->rows[0]));

    if (!o)
        abort();
    o->n = n;
    return o;
}

static void op_put(CUstream s, struct op *o)
{
    *s->last = o;
    s->last = &o->next;
    enqueued++;
    pthread_cond_broadcast(&changed);
}

static CUresult op_send(CUstream s, struct op *o)
{
    pthread_mutex_lock(&mutex);
    op_put(s, o);
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

CUresult cuStreamCreateWithPriority(CUstream *out, unsigned flags, int priority)
{
    CUstream s = calloc(1, sizeof(*s));

    (void)flags, (void)priority;
    if (!s)
        return CUDA_ERROR_OUT_OF_MEMORY;
    s->last = &s->first;
    if (pthread_create(&s->thread, NULL, stream_run, s) != 0)
        abort();
    pthread_mutex_lock(&mutex);
    objects++;
    pthread_mutex_unlock(&mutex);
    *out = s;
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream s)
{
    pthread_mutex_lock(&mutex);
    while (s->first || s->busy)
        pthread_cond_wait(&changed, &mutex);
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void)
{
    pthread_mutex_lock(&mutex);
    while (enqueued > 0)
        pthread_cond_wait(&changed, &mutex);
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream s)
{
    bool done;

    pthread_mutex_lock(&mutex);
    done = !s->first && !s->busy;
    pthread_mutex_unlock(&mutex);
    return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamWaitValue32(CUstream s, CUdeviceptr word, cuuint32_t value, unsigned flags)
{
    struct op *o;

    if (flags != CU_STREAM_WAIT_VALUE_GEQ || atomic_load(&no_waits))
        return CUDA_ERROR_NOT_SUPPORTED;
    o = op_new(0);
    o->word = (const _Atomic uint32_t *)(uintptr_t)word;
    o->value = value;
    return op_send(s, o);
}

CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *out)
{
    (void)s;
    *out =
        atomic_load(&capturing) ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

CUresult cuStreamDestroy(CUstream s)
{
    pthread_mutex_lock(&mutex);
    s->quit = true;
    objects--;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
    pthread_join(s->thread, NULL);
    free(s);
    return CUDA_SUCCESS;
}

/* By enum ucm_copy_direction. */
static const char coders[2];

CUfunction fake_cuda_coder(const char *name)
{
    const char *end = strrchr(name, '_');

    return (CUfunction)(uintptr_t)&coders[end && strcmp(end, "_dump") == 0];
}

static CUresult launch(CUfunction f, CUstream s, void **arguments, bool companion)
{
    bool coded = f == (CUfunction)(uintptr_t)&coders[0] || f == (CUfunction)(uintptr_t)&coders[1];
    struct op *o = op_new(0);

    o->planes = *(uint64_t *)arguments[0];
    o->n_planes = *(uint32_t *)arguments[1];
    o->items = *(uint64_t *)arguments[2];
    o->n_items = *(uint32_t *)arguments[3];
    o->coded = coded && o->n_items > 0;
    if (coded)
        memcpy(&o->spec, arguments[4], sizeof(o->spec));
    o->direction = coded ? f == (CUfunction)(uintptr_t)&coders[1] : *(uint32_t *)arguments[5];
    o->companion = companion;
    o->slow_us = companion ? atomic_load(&slow_us) : 0;
    return op_send(s, o);
}

/* The companion's. */
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                        unsigned by, unsigned bz, unsigned shared, CUstream s, void **arguments,
                        void **extra)
{
    (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)extra;
    return f ? launch(f, s, arguments, true) : CUDA_SUCCESS;
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
    struct op *o = op_new(1);

    o->rows[0] = rows_of(c);
    return op_send(s, o);
}

/* Whole pages, then what is left. */
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream s)
{
    static uint8_t pages[256][4096];
    uint8_t *page = pages[value];
    size_t whole = bytes / sizeof(*pages), rest = bytes % sizeof(*pages);
    struct op *o = op_new(2);

    memset(page, value, sizeof(*pages));
    o->rows[0] = (struct rows){.to = to,
                               .from = (uint64_t)(uintptr_t)page,
                               .to_pitch = sizeof(*pages),
                               .width = sizeof(*pages),
                               .height = whole};
    o->rows[1] = (struct rows){.to = to + whole * sizeof(*pages),
                               .from = (uint64_t)(uintptr_t)page,
                               .width = rest,
                               .height = rest > 0};
    return op_send(s, o);
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, CUstream s)
{
    struct op *o = op_new(1);

    o->rows[0] = (struct rows){.to = to,
                               .from = (uint64_t)(uintptr_t)from,
                               .to_pitch = bytes,
                               .width = bytes,
                               .height = 1};
    return op_send(s, o);
}

CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream s)
{
    return cuMemcpyHtoDAsync((CUdeviceptr)(uintptr_t)to, (const void *)(uintptr_t)from, bytes, s);
}

CUresult cuMemcpyBatchAsync(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t n,
                            CUmemcpyAttributes *attributes, size_t *at, size_t n_attributes,
                            CUstream s)
{
    struct op *o = op_new(n);

    (void)at;
    if (n_attributes != 1 || attributes->srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM) {
        free(o);
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (size_t i = 0; i < n; i++)
        o->rows[i] = (struct rows){.to = to[i], .from = from[i], .width = sizes[i], .height = 1};
    return op_send(s, o);
}

CUresult cuMemcpy3DBatchAsync(size_t n, CUDA_MEMCPY3D_BATCH_OP *ops, unsigned long long flags,
                              CUstream s)
{
    struct op *o = op_new(n);

    (void)flags;
    for (size_t i = 0; i < n; i++)
        o->rows[i] = (struct rows){.to = ops[i].dst.op.ptr.ptr,
                                   .from = ops[i].src.op.ptr.ptr,
                                   .to_pitch = ops[i].dst.op.ptr.rowLength,
                                   .from_pitch = ops[i].src.op.ptr.rowLength,
                                   .width = ops[i].extent.width,
                                   .height = ops[i].extent.height};
    return op_send(s, o);
}

/* ---- events ---- */

CUresult cuEventCreate(CUevent *out, unsigned flags)
{
    CUevent e = calloc(1, sizeof(*e));

    (void)flags;
    if (!e)
        return CUDA_ERROR_OUT_OF_MEMORY;
    e->refs = 1;
    pthread_mutex_lock(&mutex);
    objects++;
    pthread_mutex_unlock(&mutex);
    *out = e;
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent e)
{
    pthread_mutex_lock(&mutex);
    event_free(e);
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

CUresult fake_cuda_daemon_record(CUevent e, CUstream s)
{
    struct op *o = op_new(0);

    pthread_mutex_lock(&mutex);
    e->refs++;
    o->event = e;
    o->value = ++e->wanted;
    s->events++;
    most_events = s->events > most_events ? s->events : most_events;
    op_put(s, o);
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

unsigned fake_cuda_most_events(void)
{
    unsigned most;

    pthread_mutex_lock(&mutex);
    most = most_events;
    most_events = 0;
    pthread_mutex_unlock(&mutex);
    return most;
}

/* The companion's. */
CUresult cuEventRecord(CUevent e, CUstream s)
{
    unsigned left = atomic_load(&bad_records);

    while (left > 0 && !atomic_compare_exchange_weak(&bad_records, &left, left - 1))
        ;
    return left > 0 ? CUDA_ERROR_UNKNOWN : fake_cuda_daemon_record(e, s);
}

CUresult cuEventQuery(CUevent e)
{
    bool done;

    pthread_mutex_lock(&mutex);
    done = e->done == e->wanted;
    pthread_mutex_unlock(&mutex);
    return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult fake_cuda_daemon_query(CUevent e)
{
    CUresult r = (CUresult)atomic_load(&lost);

    return r != CUDA_SUCCESS ? r : cuEventQuery(e);
}

void fake_cuda_event_signal(CUevent e, bool signalled)
{
    pthread_mutex_lock(&mutex);
    e->wanted = 1;
    e->done = signalled;
    pthread_mutex_unlock(&mutex);
}

void fake_cuda_handle_fill(uint8_t handle[64], uint32_t kind, void *what)
{
    memset(handle, 0, 64);
    memcpy(handle, &kind, sizeof(kind));
    memcpy(handle + 8, &what, sizeof(what));
}

void *fake_cuda_handle_of(const void *handle, uint32_t kind)
{
    uint32_t found;
    void *what;

    memcpy(&found, handle, sizeof(found));
    memcpy(&what, (const uint8_t *)handle + 8, sizeof(what));
    return found == kind ? what : NULL;
}

void fake_cuda_event_handle(CUevent e, uint8_t handle[64])
{
    fake_cuda_handle_fill(handle, FAKE_HANDLE_EVENT, e);
}

CUresult cuIpcOpenEventHandle(CUevent *out, CUipcEventHandle handle)
{
    CUevent e = fake_cuda_handle_of(&handle, FAKE_HANDLE_EVENT);

    if (!e)
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&mutex);
    e->refs++;
    pthread_mutex_unlock(&mutex);
    *out = e;
    return CUDA_SUCCESS;
}
