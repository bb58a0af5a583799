#include "daemon/cuda/cuda.h"

#include "daemon/base/log.h"
#include "daemon/cuda/gpu.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

/* CUDA reports finished work only when asked. The thread polls without pause shortly after any
 * progress and around the time when the bus should run dry, else with short naps. With nothing
 * under way it sleeps until it is woken. */
#define GPU_SPIN_NS 40000
#define GPU_LINGER_NS 100000 /* with nothing under way: clients that waited soon send the next */
#define GPU_NAP_NS 25000
#define GPU_NEAR_NS 60000 /* before and after the time when the bus should run dry */
/* before a job's end: wakes the event loop, so that it is awake then */
#define GPU_SOON_NS 100000
#define GPU_LONG_NAP_NS 500000 /* when nothing but events was awaited for GPU_LONG_WAIT_NS */
#define GPU_LONG_WAIT_NS 20000000

/* memory_add on its way to the thread. */
struct gpu_added {
    struct list link;
    uint64_t base, bytes;
};

/* ---- jobs that come in ---- */

static void take_copy(struct gpu *g, struct device_job *job)
{
    int rc;

    gpu_beside_told(g, job);
    if (job->op == DEVICE_LOAD || !job->event) {
        job_queue_push(&g->queued, job);
        return;
    }
    rc = gpu_event_open(g, job);
    if (rc < 0)
        gpu_finish(g, job, rc);
    else
        list_push_back(&g->waiting, &job->link);
}

static void take_memory(struct gpu *g, struct list *added)
{
    struct list *node;

    while ((node = list_pop_front(added)) != NULL) {
        struct gpu_added *a = LIST_ENTRY(node, struct gpu_added, link);

        gpu_memory_add(&g->memory, a->base, a->bytes);
        free(a);
    }
}

/* Takes over what the event loop has submitted. */
static bool take(struct gpu *g)
{
    struct list jobs, added, *node;
    bool moved = false;

    list_init(&jobs);
    list_init(&added);
    uv_mutex_lock(&g->work.mutex);
    list_splice_front(&jobs, &g->work.inbox);
    while ((node = list_pop_front(&g->added)) != NULL)
        list_push_back(&added, node);
    uv_mutex_unlock(&g->work.mutex);

    take_memory(g, &added);
    while ((node = list_pop_front(&jobs)) != NULL) {
        struct device_job *job = LIST_ENTRY(node, struct device_job, link);

        if (job->op >= DEVICE_COPIES)
            take_copy(g, job);
        else
            job_queue_push(&g->queued, job);
        moved = true;
    }
    return moved;
}

static void close_region(struct gpu *g, struct device_region *region)
{
    gpu_beside_forget(g, region);
    gpu_region_close(region);
}

/* With the first OPEN. */
static int begin(struct gpu *g, struct device_job *job)
{
    int rc = gpu_context_open(g, job);

    if (rc < 0)
        return rc;
    gpu_ipc_learn(g);
    if (g->config.strategy != COPY_SM)
        gpu_calibrate(g);
    return 0;
}

static bool run_control(struct gpu *g)
{
    struct device_job *job = job_queue_pop_control(&g->queued, NULL, NULL);
    int rc = 0;

    if (!job)
        return false;
    if (job->op == DEVICE_CLOSE && job->staging)
        gpu_staging_close(job->staging);
    else if (job->op == DEVICE_CLOSE)
        close_region(g, job->region);
    else if (job->op == DEVICE_UNPIN)
        gpu_memory_remove(&g->memory, (uint64_t)(uintptr_t)job->memory, job->memory_bytes);
    else if (atomic_load(&g->failed))
        rc = gpu_refuse_failed(g, job);
    else if (!g->context)
        rc = begin(g, job);
    if (rc == 0 && job->op == DEVICE_OPEN)
        rc = job->staging ? gpu_staging_open(g, job) : gpu_region_open(g, job);
    work_finish(&g->work, job, rc);
    return true;
}

/* ---- the thread ---- */

/* Is a launch with nothing after it due about now? The sooner its end is seen, the sooner the bus
 * has work again. Where it ends a job, this wakes the event loop before: waking it afterwards would
 * cost more than anything else on the job's way. */
static bool ends_soon(struct gpu *g, uint64_t now_ns)
{
    bool soon = false;

    for (unsigned i = 0; i < GPU_STREAMS; i++) {
        struct gpu_stream *s = &g->streams[i];
        struct gpu_launch *l = &s->launches[s->oldest];

        if (s->n != 1)
            continue;
        if (!l->announced && now_ns + GPU_SOON_NS >= l->due_ns && l->job->pieces == 1 &&
            l->job->next_item == l->job->n_items) {
            l->announced = true;
            work_soon(&g->work);
        }
        soon |= now_ns + GPU_NEAR_NS >= l->due_ns && now_ns < l->due_ns + GPU_NEAR_NS;
    }
    return soon;
}

/* Is there memory to pin, and nothing else to do? */
static bool may_pin(const struct gpu *g, bool copying)
{
    return !copying && list_empty(&g->waiting) && g->context && g->memory.fresh > 0 &&
           !atomic_load(&g->failed);
}

/* Nothing moved: naps, sleeps or pins a piece of memory. Returns false when the thread must end. */
static bool nap(struct gpu *g)
{
    uint64_t now_ns = uv_hrtime(), still_ns = now_ns - g->moved_ns, next_ns = gpu_beside_next_ns(g);
    bool copying = gpu_streams_busy(g) || g->entries > 0 || next_ns > 0;
    struct work *w = &g->work;
    bool quit = false, pins = false;

    if (ends_soon(g, now_ns) || still_ns < (copying ? GPU_SPIN_NS : GPU_LINGER_NS) ||
        (next_ns > 0 && next_ns < now_ns + 2 * GPU_NAP_NS))
        return true;
    uv_mutex_lock(&w->mutex);
    if (list_empty(&w->inbox) && list_empty(&g->added)) {
        if (!w->quit && may_pin(g, copying))
            pins = true;
        else if (copying || (!list_empty(&g->waiting) && still_ns < GPU_LONG_WAIT_NS))
            uv_cond_timedwait(&w->cond, &w->mutex, GPU_NAP_NS);
        else if (!list_empty(&g->waiting))
            uv_cond_timedwait(&w->cond, &w->mutex, GPU_LONG_NAP_NS);
        else if (w->quit)
            quit = true;
        else if (job_queue_waits(&g->queued)) /* a gap alongside the engine's work ended just now */
            uv_cond_timedwait(&w->cond, &w->mutex, GPU_NAP_NS);
        else
            uv_cond_wait(&w->cond, &w->mutex);
    }
    uv_mutex_unlock(&w->mutex);
    if (pins)
        gpu_memory_pin_one(g);
    return !quit;
}

/* Keeps the thread near its GPU, and with it the memory that the thread touches first and the
 * driver's own threads, which it creates. */
static void stay_near(const struct gpu *g)
{
    int node = g->work.device.node;
    int rc = node == NUMA_NONE ? 0 : numa_stay(g->config.numa, node);

    if (rc < 0)
        log_info("device", "thread-anywhere", "gpu=%d node=%d error=%s", g->ordinal, node,
                 strerror(-rc));
}

static void thread_cb(void *arg)
{
    struct gpu *g = arg;
    bool moved;

    stay_near(g);
    prctl(PR_SET_TIMERSLACK, 1000); /* naps are shorter than the usual slack of 50 us */
    do {
        moved = take(g);
        gpu_beside_look(g);
        gpu_contended_look(g);
        if (atomic_load(&g->failed))
            gpu_abandon(g);
        moved |= run_control(g);
        moved |= gpu_events_poll(g);
        for (unsigned i = 0; i < GPU_STREAMS; i++)
            moved |= gpu_reap(g, i);
        moved |= gpu_stagings_step(g); /* entries go before jobs that have not begun */
        for (unsigned i = 0; i < 2; i++)
            moved |= gpu_fill(g, i);
        gpu_expire(g);
        if (moved)
            g->moved_ns = uv_hrtime();
    } while (moved || nap(g));
    gpu_memory_close(g);
    if (g->context)
        gpu_context_close(g);
}

/* ---- the device ---- */

/* Without memory the GPU never learns of the range, and refuses jobs with slots there. */
static void cuda_memory_add(struct device *d, void *base, uint64_t bytes)
{
    struct gpu *g = (struct gpu *)d;
    struct gpu_added *a = malloc(sizeof(*a));

    if (!a)
        return;
    a->base = (uint64_t)(uintptr_t)base;
    a->bytes = bytes;
    uv_mutex_lock(&g->work.mutex);
    list_push_back(&g->added, &a->link);
    uv_cond_signal(&g->work.cond);
    uv_mutex_unlock(&g->work.mutex);
}

static void cuda_stats(struct device *d, struct device_stats *out)
{
    struct gpu *g = (struct gpu *)d;

    *out = g->work.stats;
    out->failed = atomic_load(&g->failed);
    out->context_bytes = atomic_load(&g->context_bytes);
    for (unsigned i = 0; i < COPY_STRATEGIES; i++) {
        out->launches[i] = atomic_load(&g->strategy_launches[i]);
        out->bytes[i] = atomic_load(&g->strategy_bytes[i]);
    }
}

static void delivered_cb(struct work *w)
{
    struct gpu *g = (struct gpu *)w;

    if (!atomic_load(&g->failed) || g->failure_reported)
        return;
    g->failure_reported = true;
    if (g->config.failed_cb)
        g->config.failed_cb(g->config.ctx, g->why);
}

static void cuda_close(struct device *d)
{
    struct gpu *g = (struct gpu *)d;

    work_quit(&g->work);
    uv_thread_join(&g->thread);
    work_close(&g->work);
}

static const struct device_ops cuda_ops = {
    .submit = work_submit,
    .memory_add = cuda_memory_add,
    .stats = cuda_stats,
    .close = cuda_close,
};

int cuda_new(struct uv_loop_s *loop, const struct cuda_gpu_id *id,
             const struct device_config *config, struct device **out)
{
    struct gpu *g = calloc(1, sizeof(*g));
    struct device_stats *stats;
    int rc;

    if (!g)
        return -ENOMEM;
    rc = work_init(&g->work, loop, &cuda_ops);
    if (rc < 0) {
        free(g);
        return rc;
    }
    if (config->numa)
        g->work.device.node = numa_of_pci(config->numa, id->pci);
    g->work.delivered_cb = delivered_cb;
    stats = &g->work.stats;
    stats->cuda = true;
    memcpy(stats->name, id->name, sizeof(id->name));
    memcpy(stats->uuid, id->uuid, sizeof(id->uuid));
    g->config = *config;
    g->ordinal = id->ordinal;
    list_init(&g->added);
    list_init(&g->waiting);
    list_init(&g->opened);
    list_init(&g->stagings);
    job_queue_init(&g->queued, false, GPU_BURST_BYTES);
    rc = uv_thread_create(&g->thread, thread_cb, g);
    if (rc < 0) {
        work_close(&g->work);
        return rc;
    }
    *out = &g->work.device;
    return 0;
}
