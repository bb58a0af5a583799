#include "daemon/device/work.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

#define AWAKE_NS 250000u         /* the event loop stays awake for a job that ends soon */
#define CONTROL_COST (16u << 20) /* counted as if it copied so many bytes */
#define LINGER_NS 50000u /* and after it: the client that waited may send its next request */

/* ---- queue ---- */

void job_queue_init(struct job_queue *q, bool joint, uint64_t burst)
{
    fair_queue_init(&q->control, CONTROL_COST);
    q->joint = joint;
    for (unsigned i = 0; i < 2; i++)
        fair_queue_init(&q->copies[i], burst);
}

static struct device_job *job_at(struct list *node)
{
    return node ? LIST_ENTRY(node, struct device_job, link) : NULL;
}

void job_queue_push(struct job_queue *q, struct device_job *job)
{
    bool dump = job->op == DEVICE_DUMP;

    job->queue = &q->control;
    job->rank = 0;
    if (job->op >= DEVICE_COPIES) {
        job->queue = &q->copies[dump && !q->joint];
        if (job->priority < JOB_PRIORITIES)
            job->rank = JOB_PRIORITIES - 1 - job->priority;
        if (q->joint)
            job->rank = 2 * job->rank + dump;
    }
    fair_queue_push(job->queue, &job->who, job->rank, &job->link, false);
}

struct device_job *job_queue_pop_control(struct job_queue *q,
                                         bool (*skip_cb)(void *ctx, struct list *link), void *ctx)
{
    struct list *node = skip_cb ? fair_queue_first_unless(&q->control, skip_cb, ctx)
                                : fair_queue_first(&q->control);
    struct device_job *job = job_at(node);

    if (!job)
        return NULL;
    list_remove(node);
    fair_queue_charge(&q->control, &job->who, CONTROL_COST, NULL);
    return job;
}

struct device_job *job_queue_next(struct device_job *job)
{
    return job_at(fair_queue_next(job->queue, &job->who, job->rank, &job->link));
}

struct device_job *job_queue_first(struct job_queue *q, enum device_op op)
{
    struct list *node = fair_queue_first(&q->copies[!q->joint && op == DEVICE_DUMP]);

    return node ? LIST_ENTRY(node, struct device_job, link) : NULL;
}

struct device_job *job_queue_first_unless(struct job_queue *q,
                                          bool (*skip_cb)(void *ctx, struct list *link), void *ctx)
{
    return job_at(fair_queue_first_unless(&q->copies[0], skip_cb, ctx));
}

bool job_queue_waits(struct job_queue *q)
{
    return fair_queue_first(&q->control) || job_queue_first(q, DEVICE_LOAD) ||
           job_queue_first(q, DEVICE_DUMP);
}

struct expiry {
    uint64_t now_ms;
    struct list *expired;
};

static void expire_cb(void *ctx, struct list *node)
{
    const struct device_job *job = LIST_ENTRY(node, struct device_job, link);
    const struct expiry *e = ctx;
    bool moves = job->pieces > 0 || job->next_item > 0 || job->next_plane > 0;

    if (moves || !job_late(job, e->now_ms))
        return;
    list_remove(node);
    list_push_back(e->expired, node);
}

void job_queue_expire(struct job_queue *q, uint64_t now_ms, struct list *expired)
{
    struct expiry e = {now_ms, expired};

    for (unsigned i = 0; i < 2; i++)
        fair_queue_each(&q->copies[i], expire_cb, &e);
}

/* ---- work ---- */

uint64_t job_clock_ms(void)
{
    return uv_hrtime() / 1000000;
}

#define WORK_OF(handle, member) LIST_ENTRY(handle, struct work, member)

static void awake_cb(uv_idle_t *awake)
{
    if (uv_hrtime() >= WORK_OF(awake, awake)->awake_until_ns)
        uv_idle_stop(awake);
}

static void stay_awake(struct work *w, uint64_t ns)
{
    w->awake_until_ns = uv_hrtime() + ns;
    (void)uv_idle_start(&w->awake, awake_cb); /* fails without a callback only */
}

static void deliver_cb(uv_async_t *async)
{
    struct work *w = WORK_OF(async, async);
    bool soon = atomic_exchange(&w->soon, false);
    struct list done, *node;

    list_init(&done);
    uv_mutex_lock(&w->mutex);
    list_splice_front(&done, &w->done);
    uv_mutex_unlock(&w->mutex);
    if (list_empty(&done) ? soon : uv_is_active((uv_handle_t *)&w->awake))
        stay_awake(w, list_empty(&done) ? AWAKE_NS : LINGER_NS);
    while ((node = list_pop_front(&done)) != NULL) {
        struct device_job *job = LIST_ENTRY(node, struct device_job, link);
        uint64_t *open = job->staging ? &w->stats.staging_rings : &w->stats.regions;
        uint64_t *bytes = job->op == DEVICE_LOAD ? &w->stats.load_bytes : &w->stats.dump_bytes;

        if (job->op >= DEVICE_COPIES) {
            w->accepted--;
            w->stats.jobs++;
            *bytes += job->status == 0 ? job->n_items * job_item_bytes(job, NULL) : 0;
        } else if (job->status == 0 && job->op != DEVICE_UNPIN) {
            *open += job->op == DEVICE_OPEN ? 1 : -UINT64_C(1);
        }
        if (job->status == 0 && job->op == DEVICE_OPEN && job->staging)
            list_push_back(&w->staging_open, &job->staging->link);
        job->done_cb(job, job->status);
    }
    if (w->delivered_cb)
        w->delivered_cb(w);
}

int work_init(struct work *w, uv_loop_t *loop, const struct device_ops *ops)
{
    int rc = uv_mutex_init(&w->mutex);

    if (rc < 0)
        return rc;
    rc = uv_cond_init(&w->cond);
    if (rc < 0)
        goto err_after_mutex;
    rc = uv_async_init(loop, &w->async, deliver_cb);
    if (rc < 0)
        goto err_after_cond;
    (void)uv_idle_init(loop, &w->awake); /* can't fail */
    atomic_init(&w->soon, false);
    list_init(&w->inbox);
    list_init(&w->done);
    list_init(&w->staging_open);
    w->device = (struct device){.ops = ops, .node = NUMA_NONE};
    return 0;

err_after_cond:
    uv_cond_destroy(&w->cond);
err_after_mutex:
    uv_mutex_destroy(&w->mutex);
    return rc;
}

/* The open staging ring of that connection, or NULL. */
static struct device_staging *staging_of(struct work *w, uint64_t connection)
{
    for (struct list *node = w->staging_open.next; node != &w->staging_open; node = node->next) {
        struct device_staging *s = LIST_ENTRY(node, struct device_staging, link);

        if (s->connection == connection)
            return s;
    }
    return NULL;
}

int work_submit(struct device *d, struct device_job *job)
{
    struct work *w = (struct work *)d;
    struct device_users *users = NULL;
    bool copies = job->op >= DEVICE_COPIES, closes = job->op == DEVICE_CLOSE;

    if (copies && w->accepted == DEVICE_QUEUE_MAX)
        return -EAGAIN;
    if (copies) {
        w->accepted++;
        job->staging = job->straight || job->region->ring_region == 0
                           ? NULL
                           : staging_of(w, job->region->connection);
    } else if (closes && job->staging) {
        list_remove(&job->staging->link);
    }
    list_init(&job->link);
    job->status = 0;
    job->begun = job->staged = false;
    job->next_item = job->next_plane = job->pieces = 0;
    job->next_byte = 0;
    job->scratch = NULL;
    job->got = (struct fair_got){0};
    job->error.code = 0;
    job->error.text[0] = '\0';
    uv_mutex_lock(&w->mutex);
    if (copies)
        job->region->users.jobs++;
    if (copies && job->staging)
        job->staging->users.jobs++;
    if (closes) /* comes after the copies that use what it closes */
        users = job->staging ? &job->staging->users : &job->region->users;
    if (users && users->jobs > 0) {
        users->close = job;
    } else {
        list_push_back(&w->inbox, &job->link);
        uv_cond_signal(&w->cond);
    }
    uv_mutex_unlock(&w->mutex);
    return 0;
}

void work_finish_locked(struct work *w, struct device_job *job, int status)
{
    struct device_users *users[2] = {NULL, NULL};

    job->status = status;
    if (job->op >= DEVICE_COPIES) {
        users[0] = &job->region->users;
        users[1] = job->staging ? &job->staging->users : NULL;
    }
    list_push_back(&w->done, &job->link);
    for (unsigned i = 0; i < 2; i++) {
        if (!users[i] || --users[i]->jobs > 0 || !users[i]->close)
            continue;
        list_push_back(&w->inbox, &users[i]->close->link);
        users[i]->close = NULL;
        uv_cond_signal(&w->cond);
    }
}

/* Wakes the event loop after the mutex is free, which the event loop takes next. */
void work_finish(struct work *w, struct device_job *job, int status)
{
    uv_mutex_lock(&w->mutex);
    work_finish_locked(w, job, status);
    uv_mutex_unlock(&w->mutex);
    uv_async_send(&w->async);
}

void work_wake(struct work *w)
{
    uv_async_send(&w->async);
}

void work_soon(struct work *w)
{
    atomic_store(&w->soon, true);
    uv_async_send(&w->async);
}

void work_quit(struct work *w)
{
    uv_mutex_lock(&w->mutex);
    w->quit = true;
    uv_cond_broadcast(&w->cond);
    uv_mutex_unlock(&w->mutex);
}

static void awake_closed_cb(uv_handle_t *handle)
{
    free(WORK_OF(handle, awake));
}

static void async_closed_cb(uv_handle_t *handle)
{
    uv_close((uv_handle_t *)&WORK_OF(handle, async)->awake, awake_closed_cb);
}

void work_close(struct work *w)
{
    assert(w->accepted == 0);
    uv_cond_destroy(&w->cond);
    uv_mutex_destroy(&w->mutex);
    uv_close((uv_handle_t *)&w->async, async_closed_cb);
}
