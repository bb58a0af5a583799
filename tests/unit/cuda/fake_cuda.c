#include "tests/unit/cuda/fake_cuda.h"

#include "tests/unit/cuda/fake_cuda_inside.h"
#include "tests/unit/random.h"

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

struct CUstream_st {
    pthread_t thread;
    struct op *first, **last;
    bool busy, quit;
    unsigned events; /* that wait */
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static unsigned enqueued; /* on all streams, and not done */
static unsigned most_events;
static atomic_ullong stopped_ms; /* 0: the clock runs */

struct fake_cuda fake_cuda;
atomic_uint fake_cuda_objects;

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

void fake_cuda_fence(void)
{
    pthread_mutex_lock(&mutex);
    pthread_mutex_unlock(&mutex);
}

/* ---- streams ---- */

static void wait_a_little(void)
{
    unsigned max = fake_cuda.delay_us;
    struct timespec t = {0};

    if (max == 0)
        return;
    pthread_mutex_lock(&mutex);
    t.tv_nsec = (long)below(max) * 1000;
    pthread_mutex_unlock(&mutex);
    nanosleep(&t, NULL);
}

static void event_free(CUevent e)
{
    if (--e->refs == 0) {
        free(e);
        fake_cuda_objects--;
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
            while (o->copy_agent && fake_cuda.hold) {
                fake_cuda.holds = true;
                usleep(50);
            }
            fake_op_run(o);
        }
        pthread_mutex_lock(&mutex);
        while (o->waits && o->event->done < o->value)
            pthread_cond_wait(&changed, &mutex);
        if (o->event && !o->waits) {
            s->events--;
            o->event->done = o->value;
        }
        if (o->event)
            event_free(o->event);
        s->busy = false;
        enqueued--;
        free(o);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&mutex);
    return NULL;
}

struct op *fake_op_new(size_t n)
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

CUresult fake_op_send(CUstream s, struct op *o)
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
    fake_cuda_objects++;
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

    if (flags != CU_STREAM_WAIT_VALUE_GEQ || fake_cuda.refuse_waits)
        return CUDA_ERROR_NOT_SUPPORTED;
    o = fake_op_new(0);
    o->word = (const _Atomic uint32_t *)(uintptr_t)word;
    o->value = value;
    return fake_op_send(s, o);
}

CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *out)
{
    (void)s;
    *out = fake_cuda.capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

CUresult cuStreamDestroy(CUstream s)
{
    pthread_mutex_lock(&mutex);
    s->quit = true;
    fake_cuda_objects--;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
    pthread_join(s->thread, NULL);
    free(s);
    return CUDA_SUCCESS;
}

/* ---- events ---- */

CUresult cuEventCreate(CUevent *out, unsigned flags)
{
    CUevent e = calloc(1, sizeof(*e));

    (void)flags;
    if (!e)
        return CUDA_ERROR_OUT_OF_MEMORY;
    e->refs = 1;
    fake_cuda_objects++;
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
    struct op *o = fake_op_new(0);

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

/* Waits for what was recorded last, whatever is recorded later. */
CUresult cuStreamWaitEvent(CUstream s, CUevent e, unsigned flags)
{
    struct op *o = fake_op_new(0);

    (void)flags;
    pthread_mutex_lock(&mutex);
    e->refs++;
    o->event = e;
    o->waits = true;
    o->value = e->wanted;
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

/* The copy agent's. */
CUresult cuEventRecord(CUevent e, CUstream s)
{
    unsigned left = fake_cuda.bad_records;

    while (left > 0 && !atomic_compare_exchange_weak(&fake_cuda.bad_records, &left, left - 1))
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
    CUresult r = (CUresult)fake_cuda.lost;

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
