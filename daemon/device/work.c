#include "daemon/device/work.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#define AWAKE_NS 250000u         /* the loop stays awake for a job that ends soon */
#define CONTROL_COST (16u << 20) /* counted as if it copied so many bytes */
#define LINGER_NS 50000u /* and after it: the client that waited may send its next request */

/* ---- queue ---- */

void job_queue_init(struct job_queue *q, bool joint, uint64_t burst)
{
    fair_queue_init(&q->control, 1, CONTROL_COST);
    q->joint = joint;
    for (unsigned i = 0; i < 2; i++)
        fair_queue_init(&q->copies[i], joint ? 2 * JOB_PRIORITIES : JOB_PRIORITIES, burst);
}

static unsigned job_class(const struct job_queue *q, const struct device_job *job)
{
    unsigned class = JOB_PRIORITIES - 1;

    class -= job->priority < JOB_PRIORITIES ? job->priority : class;
    return q->joint ? 2 * class + (job->op == DEVICE_DUMP) : class;
}

static struct fair_queue *queue_of(struct job_queue *q, enum device_op op)
{
    return &q->copies[!q->joint && op == DEVICE_DUMP];
}

static struct device_job *job_at(struct list *node)
{
    return node ? LIST_ENTRY(node, struct device_job, link) : NULL;
}

void job_queue_push(struct job_queue *q, struct device_job *job)
{
    if (job_is_copy(job))
        fair_queue_push(queue_of(q, job->op), &job->who, job_class(q, job), &job->link, false);
    else
        fair_queue_push(&q->control, &job->who, 0, &job->link, false);
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

struct device_job *job_queue_next_of(struct job_queue *q, struct device_job *job)
{
    return job_at(fair_queue_next(queue_of(q, job->op), &job->who, job_class(q, job), &job->link));
}

struct device_job *job_queue_first_of(struct job_queue *q, enum device_op op)
{
    return job_at(fair_queue_first(queue_of(q, op)));
}

struct device_job *job_queue_first(struct job_queue *q)
{
    struct list *node = fair_queue_first(&q->copies[0]);

    return job_at(node || q->joint ? node : fair_queue_first(&q->copies[1]));
}

struct device_job *job_queue_first_unless(struct job_queue *q,
                                          bool (*skip_cb)(void *ctx, struct list *link), void *ctx)
{
    return job_at(fair_queue_first_unless(queue_of(q, DEVICE_LOAD), skip_cb, ctx));
}

bool job_queue_waits(struct job_queue *q)
{
    return fair_queue_first(&q->control) || job_queue_first(q);
}

bool job_queue_bursts(struct job_queue *q, const struct device_job *job)
{
    return fair_queue_bursts(queue_of(q, job->op), &job->who);
}

void job_queue_charge(struct job_queue *q, struct device_job *job, uint64_t cost)
{
    fair_queue_charge(queue_of(q, job->op), &job->who, cost, &job->got);
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

void job_queue_take(struct job_queue *q, struct list *jobs)
{
    struct list *node;

    while ((node = list_pop_front(jobs)) != NULL)
        job_queue_push(q, job_at(node));
}

/* ---- jobs ---- */

uint64_t job_clock_ms(void)
{
    return uv_hrtime() / 1000000;
}

int job_refuse_late(struct device_job *job)
{
    return job_refuse(job, -ETIMEDOUT, UCM_WIRE_DEADLINE,
                      "the deadline passed before the copy could begin");
}

int job_refuse_deserted(struct device_job *job)
{
    return job_refuse(job, -ECANCELED, UCM_WIRE_CANCELLED,
                      "the worker hung up: its memory may be in use for something else");
}

int job_check(struct device_job *job, uint64_t now_ms)
{
    const struct device_region *r = job->region;

    if (job_late(job, now_ms))
        return job_refuse_late(job);
    if (job->n_items == 0 || job->n_planes == 0 || job->first_plane >= r->n_planes ||
        job->n_planes > r->n_planes - job->first_plane)
        return job_refuse(job, -EINVAL, UCM_WIRE_INVALID,
                          "the copy names planes %u to %u; the region has %u", job->first_plane,
                          job->first_plane + job->n_planes, r->n_planes);
    if (job->coded && !r->codec)
        return job_refuse(job, -EINVAL, UCM_WIRE_INVALID, "the region's blocks are not encoded");
    for (uint32_t i = 0; i < job->n_items; i++)
        if (job->items[i].block >= r->blocks)
            return job_refuse(job, -EINVAL, UCM_WIRE_INVALID,
                              "block id %u is out of range; the region has %u blocks",
                              job->items[i].block, r->blocks);
    return 0;
}

uint64_t job_plane_at(const struct device_job *job, uint32_t plane)
{
    return job->coded ? job->region->coded[plane].slot_offset
                      : job->region->planes[plane].slot_offset;
}

uint32_t job_plane_bytes(const struct device_job *job, uint32_t plane)
{
    return job->coded ? job->region->coded[plane].bytes : job->region->planes[plane].chunk;
}

uint64_t job_item_bytes(const struct device_job *job)
{
    uint32_t first = job->first_plane, last = first + job->n_planes - 1;

    return job_plane_at(job, last) + job_plane_bytes(job, last) - job_plane_at(job, first);
}

uint64_t job_item_cost(const struct device_job *job)
{
    uint64_t bytes = job_item_bytes(job), least = (uint64_t)job->n_planes * JOB_CHUNK_COST;

    return bytes > least ? bytes : least;
}

static uint64_t plane_cost(const struct device_job *job, uint32_t p)
{
    uint32_t bytes = job_plane_bytes(job, job->first_plane + p);

    return bytes > JOB_CHUNK_COST ? bytes : JOB_CHUNK_COST;
}

/* One item is larger than a piece: takes as many of its planes as fit. */
static void cut_planes(struct device_job *job, uint64_t max_cost, struct job_piece *out)
{
    uint32_t p = job->next_plane;

    out->first_plane = job->first_plane + p;
    out->n_items = 1;
    out->bytes = out->cost = 0;
    do {
        out->cost += plane_cost(job, p);
        out->bytes += job_plane_bytes(job, job->first_plane + p++);
    } while (p < job->n_planes && out->cost + plane_cost(job, p) <= max_cost);
    out->n_planes = p - job->next_plane;
    job->next_plane = p % job->n_planes;
    job->next_item += p == job->n_planes;
}

bool job_next_piece(struct device_job *job, uint64_t max_cost, uint32_t max_items,
                    struct job_piece *out)
{
    uint64_t item_cost = job_item_cost(job), n = max_cost / item_cost;

    assert(job->next_item < job->n_items);
    out->first_item = job->next_item;
    if (n == 0 || job->next_plane != 0) { /* or a smaller piece has begun this item */
        cut_planes(job, max_cost, out);
        return job->next_item == job->n_items;
    }
    if (n > max_items)
        n = max_items;
    if (n > job->n_items - job->next_item)
        n = job->n_items - job->next_item;
    out->n_items = (uint32_t)n;
    out->first_plane = job->first_plane;
    out->n_planes = job->n_planes;
    out->bytes = n * job_item_bytes(job);
    out->cost = n * item_cost;
    job->next_item += out->n_items;
    return job->next_item == job->n_items;
}

static bool item_fits(const struct device_job *job, const struct job_piece *piece, uint32_t item)
{
    const struct device_region *r = job->region;

    for (uint32_t p = piece->first_plane; p < piece->first_plane + piece->n_planes; p++) {
        const struct ucm_encoding_plane *c = &r->coded[p];
        const void *coded = (const void *)(uintptr_t)(job->items[item].slot + c->slot_offset);

        if (!ucm_encoding_fits(&r->codec->spec, c->section, coded))
            return false;
    }
    return true;
}

void job_mark_unfit(struct device_job *job, const struct job_piece *piece)
{
    if (!job->unfit)
        return;
    for (uint32_t i = piece->first_item; i < piece->first_item + piece->n_items; i++)
        if (!item_fits(job, piece, i))
            atomic_store_explicit(&job->unfit[i], 1, memory_order_relaxed);
}

/* Asks nothing that needs the lock of the file (SEEK_HOLE does): the peer may hold it. */
int job_check_memfd(struct device_job *job, const char *what, int fd, uint64_t offset,
                    uint64_t bytes)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), end = offset + bytes, there;
    struct statfs fs;
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);

    if (seals < 0 || !(seals & F_SEAL_SHRINK))
        return job_refuse(job, -EINVAL, UCM_WIRE_INVALID,
                          "%s is not a memfd sealed with F_SEAL_SHRINK", what);
    if (fstatfs(fd, &fs) < 0 || fs.f_type != TMPFS_MAGIC)
        return job_refuse(job, -EINVAL, UCM_WIRE_INVALID,
                          "%s is not on tmpfs; a memfd without MFD_HUGETLB is right", what);
    if (fstat(fd, &st) < 0)
        return job_refuse(job, -EINVAL, UCM_WIRE_INVALID, "%s: %s", what, strerror(errno));
    if (st.st_size < 0 || (uint64_t)st.st_size < end)
        return job_refuse(job, -EINVAL, UCM_WIRE_INVALID,
                          "%s: %" PRIu64 " bytes pass the memfd's %" PRIu64 " bytes", what, end,
                          (uint64_t)st.st_size);
    there = (uint64_t)st.st_blocks * 512 / page;
    if (there < (end - 1) / page - offset / page + 1)
        return job_refuse(job, -EINVAL, UCM_WIRE_INVALID,
                          "%s: pages are missing: the memfd has %" PRIu64 " for %" PRIu64
                          " bytes; write to all of its pages before it is registered, or make "
                          "them by MADV_POPULATE_WRITE",
                          what, there, bytes);
    return 0;
}

/* ---- work ---- */

#define WORK_OF(handle, member) LIST_ENTRY(handle, struct work, member)

static void users_drop(struct work *w, struct device_users *u)
{
    if (--u->jobs > 0 || !u->close)
        return;
    list_push_back(&w->inbox, &u->close->link);
    u->close = NULL;
    uv_cond_signal(&w->cond);
}

static void count_done(struct work *w, const struct device_job *job, int status)
{
    uint64_t *open = job->staging ? &w->stats.staging_rings : &w->stats.regions;

    if (job_is_copy(job)) {
        w->accepted--;
        w->stats.jobs++;
    }
    if (status != 0 || job->op == DEVICE_UNPIN)
        return;
    if (job->op == DEVICE_LOAD)
        w->stats.load_bytes += job->n_items * job_item_bytes(job);
    else if (job->op == DEVICE_DUMP)
        w->stats.dump_bytes += job->n_items * job_item_bytes(job);
    else
        *open += job->op == DEVICE_OPEN ? 1 : -UINT64_C(1);
    if (job->op == DEVICE_OPEN && job->staging)
        list_push_back(&w->staging_open, &job->staging->link);
}

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
        int status = job->status;

        count_done(w, job, status);
        job->done_cb(job, status);
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

/* The open staging ring that the copy may pass through, or NULL. */
static struct device_staging *staging_for(struct work *w, const struct device_job *job)
{
    if (job->straight || job->region->ring_region == 0)
        return NULL;
    for (struct list *node = w->staging_open.next; node != &w->staging_open; node = node->next) {
        struct device_staging *s = LIST_ENTRY(node, struct device_staging, link);

        if (s->connection == job->region->connection)
            return s;
    }
    return NULL;
}

/* Under the mutex. A CLOSE stays out of the inbox while copies use what it closes. */
static void submit_locked(struct work *w, struct device_job *job)
{
    if (job_is_copy(job)) {
        job->region->users.jobs++;
        if (job->staging)
            job->staging->users.jobs++;
    } else if (job->op == DEVICE_CLOSE) {
        struct device_users *u = job->staging ? &job->staging->users : &job->region->users;

        if (u->jobs > 0) {
            u->close = job;
            return;
        }
    }
    list_push_back(&w->inbox, &job->link);
    uv_cond_signal(&w->cond);
}

int work_submit(struct device *d, struct device_job *job)
{
    struct work *w = (struct work *)d;

    if (job_is_copy(job)) {
        if (w->accepted == DEVICE_QUEUE_MAX)
            return -EAGAIN;
        w->accepted++;
        job->staging = staging_for(w, job);
    } else if (job->op == DEVICE_CLOSE && job->staging) {
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
    submit_locked(w, job);
    uv_mutex_unlock(&w->mutex);
    return 0;
}

static void finish(struct work *w, struct device_job *job, int status)
{
    job->status = status;
    if (job_is_copy(job)) {
        users_drop(w, &job->region->users);
        if (job->staging)
            users_drop(w, &job->staging->users);
    }
    list_push_back(&w->done, &job->link);
}

void work_finish_locked(struct work *w, struct device_job *job, int status)
{
    finish(w, job, status);
    uv_async_send(&w->async);
}

/* Wakes the loop after the mutex is free, which the loop takes next. */
void work_finish(struct work *w, struct device_job *job, int status)
{
    uv_mutex_lock(&w->mutex);
    finish(w, job, status);
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
