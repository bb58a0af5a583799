#include "daemon/device/work.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#define OUTBOX_AWAKE_NS 250000u /* for what is done soon */
#define OUTBOX_LINGER_NS 50000u /* and then: who waited for it may send the next */

/* ---- queue ---- */

void job_queue_init(struct job_queue *q)
{
    list_init(&q->control);
    for (unsigned i = 0; i < JOB_CLASSES; i++)
        list_init(&q->copies[i]);
}

static unsigned job_class(const struct device_job *job)
{
    unsigned priority = job->priority < 8 ? job->priority : 7;

    return (7 - priority) * 2 + (job->op == DEVICE_DUMP);
}

static struct list *job_list(struct job_queue *q, const struct device_job *job)
{
    return job_is_copy(job) ? &q->copies[job_class(job)] : &q->control;
}

void job_queue_push(struct job_queue *q, struct device_job *job)
{
    list_push_back(job_list(q, job), &job->link);
}

void job_queue_push_front(struct job_queue *q, struct device_job *job)
{
    list_push_front(job_list(q, job), &job->link);
}

struct device_job *job_queue_pop_control(struct job_queue *q)
{
    struct list *node = list_pop_front(&q->control);

    return node ? LIST_ENTRY(node, struct device_job, link) : NULL;
}

static struct device_job *first_from(const struct job_queue *q, unsigned begin, unsigned step)
{
    for (unsigned i = begin; i < JOB_CLASSES; i += step)
        if (!list_empty(&q->copies[i]))
            return LIST_ENTRY(q->copies[i].next, struct device_job, link);
    return NULL;
}

bool job_queue_empty(const struct job_queue *q)
{
    return list_empty(&q->control) && !job_queue_first(q);
}

struct device_job *job_queue_next_of(const struct job_queue *q, const struct device_job *job)
{
    unsigned class = job_class(job);

    if (job->link.next != &q->copies[class])
        return LIST_ENTRY(job->link.next, struct device_job, link);
    return first_from(q, class + 2, 2);
}

struct device_job *job_queue_first(const struct job_queue *q)
{
    return first_from(q, 0, 1);
}

struct device_job *job_queue_first_of(const struct job_queue *q, enum device_op op)
{
    return first_from(q, op == DEVICE_DUMP, 2);
}

/* Some piece of it was taken. */
static bool job_moves(const struct device_job *job)
{
    return job->pieces > 0 || job->next_item > 0 || job->next_plane > 0;
}

static void expire_list(struct list *head, uint64_t now_ms, struct list *expired)
{
    struct list *next;

    for (struct list *node = head->next; node != head; node = next) {
        struct device_job *job = LIST_ENTRY(node, struct device_job, link);

        next = node->next;
        if (job_moves(job) || !job_late(job, now_ms))
            continue;
        list_remove(node);
        list_push_back(expired, node);
    }
}

void job_queue_expire(struct job_queue *q, uint64_t now_ms, struct list *expired)
{
    for (unsigned i = 0; i < JOB_CLASSES; i++)
        expire_list(&q->copies[i], now_ms, expired);
}

static void list_move(struct list *to, struct list *from)
{
    struct list *node;

    while ((node = list_pop_front(from)) != NULL)
        list_push_back(to, node);
}

void job_queue_move(struct job_queue *to, struct job_queue *from)
{
    list_move(&to->control, &from->control);
    for (unsigned i = 0; i < JOB_CLASSES; i++)
        list_move(&to->copies[i], &from->copies[i]);
}

/* ---- jobs ---- */

uint64_t job_clock_ms(void)
{
    return uv_hrtime() / 1000000;
}

int job_refuse(struct device_job *job, int status, int code, const char *format, ...)
{
    char text[sizeof(job->error.text)];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    ucm_error_set(&job->error, code, "%s", text);
    return status;
}

int job_check(struct device_job *job, uint64_t now_ms)
{
    const struct device_region *r = job->region;

    if (job_late(job, now_ms))
        return job_refuse(job, -ETIMEDOUT, UCM_WIRE_DEADLINE,
                          "the deadline passed before the copy could begin");
    if (job->n_items == 0 || job->n_planes == 0 || job->first_plane >= r->n_planes ||
        job->n_planes > r->n_planes - job->first_plane)
        return job_refuse(job, -EINVAL, UCM_WIRE_INVALID,
                          "planes %u to %u are asked for; the region has %u", job->first_plane,
                          job->first_plane + job->n_planes, r->n_planes);
    for (uint32_t i = 0; i < job->n_items; i++)
        if (job->items[i].block >= r->blocks)
            return job_refuse(job, -EINVAL, UCM_WIRE_INVALID,
                              "block id %u is out of range; the region has %u blocks",
                              job->items[i].block, r->blocks);
    return 0;
}

bool job_deserted(const struct device_job *job)
{
    struct pollfd p = {.events = POLLRDHUP};

    if (!job->region->peer_fd)
        return false;
    p.fd = *job->region->peer_fd;
    return poll(&p, 1, 0) > 0;
}

int job_refuse_deserted(struct device_job *job)
{
    return job_refuse(job, -ECANCELED, UCM_WIRE_CANCELLED,
                      "the worker hung up: its memory may be in use for something else");
}

uint64_t job_item_bytes(const struct device_job *job)
{
    const struct ucm_copy_plane *first = &job->region->planes[job->first_plane];
    const struct ucm_copy_plane *last = first + job->n_planes - 1;

    return last->slot_offset + last->chunk - first->slot_offset;
}

/* A part of one item that is larger than a piece: as many planes as fit. */
static void cut_planes(struct device_job *job, uint64_t max_bytes, struct job_piece *out)
{
    const struct ucm_copy_plane *planes = &job->region->planes[job->first_plane];
    uint32_t p = job->next_plane;

    out->first_plane = job->first_plane + p;
    out->n_items = 1;
    out->bytes = 0;
    do {
        out->bytes += planes[p++].chunk;
    } while (p < job->n_planes && out->bytes + planes[p].chunk <= max_bytes);
    out->n_planes = p - job->next_plane;
    job->next_plane = p % job->n_planes;
    job->next_item += p == job->n_planes;
}

bool job_next_piece(struct device_job *job, uint64_t max_bytes, uint32_t max_items,
                    struct job_piece *out)
{
    uint64_t item_bytes = job_item_bytes(job), n = max_bytes / item_bytes;

    assert(job->next_item < job->n_items);
    out->first_item = job->next_item;
    if (n == 0 || job->next_plane != 0) { /* or an item that a smaller piece has begun */
        cut_planes(job, max_bytes, out);
        return job->next_item == job->n_items;
    }
    if (n > max_items)
        n = max_items;
    if (n > job->n_items - job->next_item)
        n = job->n_items - job->next_item;
    out->n_items = (uint32_t)n;
    out->first_plane = job->first_plane;
    out->n_planes = job->n_planes;
    out->bytes = n * item_bytes;
    job->next_item += out->n_items;
    return job->next_item == job->n_items;
}

int job_check_memfd(struct device_job *job, const char *what, int fd, uint64_t bytes)
{
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
    if (st.st_size < 0 || (uint64_t)st.st_size < bytes)
        return job_refuse(job, -EINVAL, UCM_WIRE_INVALID,
                          "%s: %" PRIu64 " bytes pass the memfd's %" PRIu64 " bytes", what, bytes,
                          (uint64_t)st.st_size);
    return 0;
}

/* ---- outbox ---- */

static void outbox_count(struct job_outbox *b, const struct device_job *job, int status)
{
    if (job_is_copy(job)) {
        b->accepted--;
        b->stats.jobs++;
    }
    if (status != 0)
        return;
    switch (job->op) {
    case DEVICE_OPEN:
        b->stats.regions++;
        break;
    case DEVICE_CLOSE:
        b->stats.regions--;
        break;
    case DEVICE_STAGING_OPEN:
        b->stats.rings++;
        break;
    case DEVICE_STAGING_CLOSE:
        b->stats.rings--;
        break;
    case DEVICE_LOAD:
        b->stats.load_bytes += job->n_items * job_item_bytes(job);
        break;
    case DEVICE_DUMP:
        b->stats.dump_bytes += job->n_items * job_item_bytes(job);
        break;
    }
}

static void outbox_awake_cb(uv_idle_t *awake)
{
    struct job_outbox *b =
        (struct job_outbox *)((char *)awake - offsetof(struct job_outbox, awake));

    if (uv_hrtime() >= b->awake_until_ns)
        uv_idle_stop(awake);
}

static void outbox_stay_awake(struct job_outbox *b, uint64_t ns)
{
    b->awake_until_ns = uv_hrtime() + ns;
    (void)uv_idle_start(&b->awake, outbox_awake_cb); /* fails without a callback only */
}

static void outbox_deliver_cb(uv_async_t *async)
{
    struct job_outbox *b =
        (struct job_outbox *)((char *)async - offsetof(struct job_outbox, async));
    bool soon = atomic_exchange(&b->soon, false);
    struct list done, *node;

    list_init(&done);
    uv_mutex_lock(&b->mutex);
    list_move(&done, &b->done);
    uv_mutex_unlock(&b->mutex);
    if (list_empty(&done) ? soon : uv_is_active((uv_handle_t *)&b->awake))
        outbox_stay_awake(b, list_empty(&done) ? OUTBOX_AWAKE_NS : OUTBOX_LINGER_NS);
    while ((node = list_pop_front(&done)) != NULL) {
        struct device_job *job = LIST_ENTRY(node, struct device_job, link);
        int status = job->status;

        outbox_count(b, job, status);
        job->done(job, status);
    }
    if (b->woken_cb)
        b->woken_cb(b);
}

int job_outbox_init(struct job_outbox *b, uv_loop_t *loop)
{
    int rc = uv_mutex_init(&b->mutex);

    if (rc < 0)
        return rc;
    rc = uv_async_init(loop, &b->async, outbox_deliver_cb);
    if (rc < 0) {
        uv_mutex_destroy(&b->mutex);
        return rc;
    }
    (void)uv_idle_init(loop, &b->awake); /* can't fail */
    atomic_init(&b->soon, false);
    list_init(&b->done);
    return 0;
}

int job_outbox_accept(struct job_outbox *b, struct device_job *job)
{
    if (job_is_copy(job)) {
        if (b->accepted == DEVICE_QUEUE_MAX)
            return -EAGAIN;
        b->accepted++;
    }
    list_init(&job->link);
    job->status = 0;
    job->begun = job->staged = false;
    job->next_item = job->next_plane = job->pieces = 0;
    job->scratch = NULL;
    job->error.code = 0;
    job->error.text[0] = '\0';
    return 0;
}

void job_outbox_put(struct job_outbox *b, struct device_job *job, int status)
{
    job->status = status;
    uv_mutex_lock(&b->mutex);
    list_push_back(&b->done, &job->link);
    uv_mutex_unlock(&b->mutex);
    uv_async_send(&b->async);
}

void job_outbox_wake(struct job_outbox *b)
{
    uv_async_send(&b->async);
}

void job_outbox_soon(struct job_outbox *b)
{
    atomic_store(&b->soon, true);
    uv_async_send(&b->async);
}

static void outbox_awake_closed_cb(uv_handle_t *handle)
{
    struct job_outbox *b =
        (struct job_outbox *)((char *)handle - offsetof(struct job_outbox, awake));

    b->closed_cb((uv_handle_t *)&b->async);
}

/* One after the other: the owner of both goes with the last. */
static void outbox_async_closed_cb(uv_handle_t *handle)
{
    struct job_outbox *b =
        (struct job_outbox *)((char *)handle - offsetof(struct job_outbox, async));

    uv_close((uv_handle_t *)&b->awake, outbox_awake_closed_cb);
}

void job_outbox_close(struct job_outbox *b, uv_close_cb closed_cb)
{
    assert(b->accepted == 0);
    uv_mutex_destroy(&b->mutex);
    b->closed_cb = closed_cb;
    uv_close((uv_handle_t *)&b->async, outbox_async_closed_cb);
}
