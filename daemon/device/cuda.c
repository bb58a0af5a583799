#include "daemon/device/cuda.h"

#include "daemon/base/log.h"
#include "daemon/device/gpu.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

/* CUDA tells of finished work only when asked. The thread asks without pause for a moment after
 * anything moved, and around the time when the bus should run dry; else with short sleeps, and with
 * nothing under way it sleeps until it is woken. */
#define GPU_SPIN_NS 40000
#define GPU_LINGER_NS 100000 /* the same with nothing under way: who waited sends the next soon */
#define GPU_NAP_NS 25000
#define GPU_NEAR_NS 60000      /* "around" */
#define GPU_TELL_NS 100000     /* how long before a job's end the loop is told, to be awake then */
#define GPU_LONG_NAP_NS 500000 /* only events are waited for, and that for long */
#define GPU_LONG_WAIT_NS 20000000 /* "long" */

/* ---- jobs that come in ---- */

static void take_copy(struct gpu *g, struct device_job *job)
{
    int rc = 0;

    list_remove(&job->link);
    if (job->op == DEVICE_DUMP && job->event) {
        rc = gpu_event_open(g, job);
        if (rc == 0) {
            list_push_back(&g->waiting, &job->link);
            return;
        }
    }
    if (rc < 0)
        gpu_finish(g, job, rc);
    else
        job_queue_push(&g->ready, job);
}

static void take_control(struct gpu *g, struct device_job *job)
{
    struct gpu_region *mapping = job->region ? job->region->mapping : NULL;

    if (job->op == DEVICE_STAGING_CLOSE && !gpu_ring_may_close(job))
        return;
    if (job->op == DEVICE_CLOSE && mapping->jobs > 0)
        mapping->last = job;
    else
        job_queue_push(&g->ready, job);
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

/* Takes over what the loop has put down. Copies first: a CLOSE must see that they are there. */
static bool take(struct gpu *g)
{
    struct job_queue jobs;
    struct device_job *job;
    struct list added, *node;
    bool moved = false;

    job_queue_init(&jobs);
    list_init(&added);
    uv_mutex_lock(&g->mutex);
    job_queue_move(&jobs, &g->inbox);
    while ((node = list_pop_front(&g->added)) != NULL)
        list_push_back(&added, node);
    uv_mutex_unlock(&g->mutex);

    take_memory(g, &added);
    for (job = job_queue_first(&jobs); job; job = job_queue_first(&jobs)) {
        ((struct gpu_region *)job->region->mapping)->jobs++;
        if (job->ring)
            gpu_ring_ref(job->ring);
        take_copy(g, job);
        moved = true;
    }
    while ((job = job_queue_pop_control(&jobs)) != NULL) {
        take_control(g, job);
        moved = true;
    }
    return moved;
}

static bool run_control(struct gpu *g)
{
    struct device_job *job = job_queue_pop_control(&g->ready);
    int rc = 0;

    if (!job)
        return false;
    if (job->op == DEVICE_CLOSE)
        gpu_region_close(job->region);
    else if (job->op == DEVICE_STAGING_CLOSE)
        gpu_ring_close(job->ring);
    else if (atomic_load(&g->failed))
        rc = gpu_refuse_failed(g, job);
    else if (!g->context)
        rc = gpu_context_open(g, job);
    if (rc == 0 && job->op == DEVICE_OPEN)
        rc = gpu_region_open(g, job);
    else if (rc == 0 && job->op == DEVICE_STAGING_OPEN)
        rc = gpu_ring_open(g, job);
    job_outbox_put(&g->outbox, job, rc);
    return true;
}

/* ---- the thread ---- */

/* A launch with nothing behind it is due about now: the sooner its end is seen, the sooner the bus
 * has work again. Where that is the end of a job, the loop hears of it before, so that it need not
 * be woken out of its sleep then; that costs more than all else on the job's way. */
static bool ends_soon(struct gpu *g, uint64_t now_ns)
{
    bool soon = false;

    for (unsigned i = 0; i < 2; i++) {
        struct gpu_stream *s = &g->streams[i];
        struct gpu_launch *l = &s->launches[s->oldest];

        if (s->n != 1)
            continue;
        if (!l->told && now_ns + GPU_TELL_NS >= l->due_ns && l->job->pieces == 1 &&
            l->job->next_item == l->job->n_items) {
            l->told = true;
            job_outbox_soon(&g->outbox);
        }
        soon |= now_ns + GPU_NEAR_NS >= l->due_ns && now_ns < l->due_ns + GPU_NEAR_NS;
    }
    return soon;
}

/* Nothing moved. Returns false when the thread shall end. */
static bool rest(struct gpu *g)
{
    bool copying = g->streams[0].n + g->streams[1].n + g->turns > 0;
    uint64_t now_ns = uv_hrtime(), still_ns = now_ns - g->moved_ns;
    bool quit = false;

    if (ends_soon(g, now_ns) || still_ns < (copying ? GPU_SPIN_NS : GPU_LINGER_NS))
        return true;
    if (!copying && list_empty(&g->waiting) && g->context && g->memory.fresh > 0 &&
        !atomic_load(&g->failed)) {
        gpu_memory_pin_one(g);
        return true;
    }
    uv_mutex_lock(&g->mutex);
    if (job_queue_empty(&g->inbox) && list_empty(&g->added)) {
        if (copying || (!list_empty(&g->waiting) && still_ns < GPU_LONG_WAIT_NS))
            uv_cond_timedwait(&g->cond, &g->mutex, GPU_NAP_NS);
        else if (!list_empty(&g->waiting))
            uv_cond_timedwait(&g->cond, &g->mutex, GPU_LONG_NAP_NS);
        else if (g->quit)
            quit = true;
        else
            uv_cond_wait(&g->cond, &g->mutex);
    }
    uv_mutex_unlock(&g->mutex);
    return !quit;
}

/* Near its GPU, and so are the memory that the thread touches first and the driver's own threads,
 * which it makes. */
static void stay_near(const struct gpu *g)
{
    int rc = g->device.node == NUMA_NONE ? 0 : numa_stay(g->config.numa, g->device.node);

    if (rc < 0)
        log_info("device", "thread-anywhere", "gpu=%d node=%d error=%s", g->ordinal, g->device.node,
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
        if (atomic_load(&g->failed))
            gpu_abandon(g);
        moved |= run_control(g);
        moved |= gpu_events_poll(g);
        moved |= gpu_rings_poll(g);
        for (unsigned i = 0; i < 2; i++) {
            moved |= gpu_reap(g, i);
            moved |= gpu_fill(g, i);
        }
        gpu_expire(g);
        if (moved)
            g->moved_ns = uv_hrtime();
    } while (moved || rest(g));
    gpu_memory_close(g);
    if (g->context)
        gpu_context_close(g);
}

/* ---- the device ---- */

static int cuda_submit(struct device *d, struct device_job *job)
{
    struct gpu *g = (struct gpu *)d;
    int rc = job_outbox_accept(&g->outbox, job);

    if (rc < 0)
        return rc;
    uv_mutex_lock(&g->mutex);
    job_queue_push(&g->inbox, job);
    uv_cond_signal(&g->cond);
    uv_mutex_unlock(&g->mutex);
    return 0;
}

/* Out of memory, the GPU does not get to know the range, and jobs with slots there are refused. */
static void cuda_memory_add(struct device *d, void *base, uint64_t bytes)
{
    struct gpu *g = (struct gpu *)d;
    struct gpu_added *a = malloc(sizeof(*a));

    if (!a)
        return;
    a->base = (uint64_t)(uintptr_t)base;
    a->bytes = bytes;
    uv_mutex_lock(&g->mutex);
    list_push_back(&g->added, &a->link);
    uv_cond_signal(&g->cond);
    uv_mutex_unlock(&g->mutex);
}

static void cuda_stats(struct device *d, struct device_stats *out)
{
    struct gpu *g = (struct gpu *)d;

    *out = g->outbox.stats;
    out->failed = atomic_load(&g->failed);
    out->context_bytes = atomic_load(&g->context_bytes);
    for (unsigned i = 0; i < COPY_STRATEGIES; i++) {
        out->launches[i] = atomic_load(&g->strategy_launches[i]);
        out->bytes[i] = atomic_load(&g->strategy_bytes[i]);
    }
}

static void woken_cb(struct job_outbox *b)
{
    struct gpu *g = LIST_ENTRY(b, struct gpu, outbox);

    if (!atomic_load(&g->failed) || g->failed_told)
        return;
    g->failed_told = true;
    if (g->config.failed)
        g->config.failed(g->config.ctx, g->why);
}

static void closed_cb(uv_handle_t *handle)
{
    free(handle->data);
}

static void cuda_close(struct device *d)
{
    struct gpu *g = (struct gpu *)d;

    uv_mutex_lock(&g->mutex);
    g->quit = true;
    uv_cond_signal(&g->cond);
    uv_mutex_unlock(&g->mutex);
    uv_thread_join(&g->thread);
    uv_cond_destroy(&g->cond);
    uv_mutex_destroy(&g->mutex);
    job_outbox_close(&g->outbox, closed_cb);
}

static const struct device_ops cuda_ops = {
    .name = "cuda",
    .submit = cuda_submit,
    .memory_add = cuda_memory_add,
    .stats = cuda_stats,
    .close = cuda_close,
};

static struct gpu *gpu_alloc(const struct cuda_gpu_id *id, const struct device_config *config)
{
    struct gpu *g = calloc(1, sizeof(*g));

    if (!g)
        return NULL;
    g->device.ops = &cuda_ops;
    g->device.node = config->numa ? numa_of_pci(config->numa, id->pci) : NUMA_NONE;
    g->config = *config;
    g->ordinal = id->ordinal;
    g->outbox.stats.cuda = true;
    memcpy(g->outbox.stats.name, id->name, sizeof(id->name));
    memcpy(g->outbox.stats.uuid, id->uuid, sizeof(id->uuid));
    g->outbox.woken_cb = woken_cb;
    job_queue_init(&g->inbox);
    job_queue_init(&g->ready);
    list_init(&g->added);
    list_init(&g->waiting);
    list_init(&g->opened);
    list_init(&g->rings);
    return g;
}

int cuda_new(struct uv_loop_s *loop, const struct cuda_gpu_id *id,
             const struct device_config *config, struct device **out)
{
    struct gpu *g = gpu_alloc(id, config);
    int rc;

    if (!g)
        return -ENOMEM;
    rc = uv_mutex_init(&g->mutex);
    if (rc < 0)
        goto err_after_alloc;
    rc = uv_cond_init(&g->cond);
    if (rc < 0)
        goto err_after_mutex;
    rc = job_outbox_init(&g->outbox, loop);
    if (rc < 0)
        goto err_after_cond;
    g->outbox.async.data = g;
    rc = uv_thread_create(&g->thread, thread_cb, g);
    if (rc < 0)
        goto err_after_outbox;
    *out = &g->device;
    return 0;

err_after_outbox:
    uv_cond_destroy(&g->cond);
    uv_mutex_destroy(&g->mutex);
    job_outbox_close(&g->outbox, closed_cb);
    return rc;
err_after_cond:
    uv_cond_destroy(&g->cond);
err_after_mutex:
    uv_mutex_destroy(&g->mutex);
err_after_alloc:
    free(g);
    return rc;
}
