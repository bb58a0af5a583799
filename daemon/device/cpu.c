#include "daemon/device/cpu.h"

#include "daemon/device/work.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define CPU_THREADS_MAX 64
#define CPU_PIECE_BYTES                                                                            \
    (1u << 20) /* what one thread takes at a time: lets others help and overtake */

struct cpu {
    struct device device;
    struct job_outbox outbox;
    uv_mutex_t mutex;
    uv_cond_t cond;
    /* Under the mutex. */
    struct job_queue queue;
    bool quit;

    unsigned n_threads;
    uv_thread_t threads[CPU_THREADS_MAX];
};

/* A region's mapping; made by OPEN, gone with CLOSE. */
struct cpu_region {
    uint32_t jobs;           /* under the mutex: copies submitted and not done */
    struct device_job *last; /* under the mutex: the CLOSE that waits for them */
    uint32_t n;              /* mapped so far */
    struct cpu_map {
        void *base;
        size_t bytes;
    } maps[];
};

/* ---- regions ---- */

/* A peer may do with its memfd what it likes, at any time. What must not happen is that a page of
 * the mapping has nothing behind it, for then touching it kills the daemon. */
static int check_memfd(struct device_job *job, uint32_t i, int fd)
{
    const struct msg_handle *h = &job->region->handles[i];
    char what[32];

    snprintf(what, sizeof(what), "handle %u", i);
    return job_check_memfd(job, what, fd, h->offset + h->bytes);
}

static int map_handle(struct device_job *job, uint32_t i, struct cpu_map *map)
{
    const struct msg_handle *h = &job->region->handles[i];
    int fd = job->region->fds[i];
    int rc = check_memfd(job, i, fd);
    void *base;

    if (rc < 0)
        return rc;
    base = mmap(NULL, h->offset + h->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED)
        return job_refuse(job, -EINVAL, UCM_WIRE_DEVICE,
                          "handle %u can't be mapped: %s; it must be writable", i, strerror(errno));
    *map = (struct cpu_map){base, h->offset + h->bytes};
    return 0;
}

static void region_unmap(struct cpu_region *mapping)
{
    for (uint32_t i = 0; i < mapping->n; i++)
        munmap(mapping->maps[i].base, mapping->maps[i].bytes);
    free(mapping);
}

static int region_open(struct device_job *job)
{
    struct device_region *r = job->region;
    struct cpu_region *mapping =
        calloc(1, sizeof(*mapping) + r->n_handles * sizeof(*mapping->maps));
    int rc = 0;

    if (!mapping)
        return job_refuse(job, -EIO, UCM_WIRE_NO_MEMORY, "no memory for the region");
    while (rc == 0 && mapping->n < r->n_handles) {
        rc = map_handle(job, mapping->n, &mapping->maps[mapping->n]);
        if (rc == 0)
            mapping->n++;
    }
    if (rc < 0) {
        region_unmap(mapping);
        return rc;
    }
    for (uint32_t p = 0; p < r->n_planes; p++) {
        const struct msg_plane *spec = &r->spec[p];

        r->planes[p].base = (uint64_t)(uintptr_t)mapping->maps[spec->handle].base +
                            r->handles[spec->handle].offset + spec->offset;
    }
    for (uint32_t i = 0; i < r->n_handles; i++) {
        close(r->fds[i]);
        r->fds[i] = -1;
    }
    r->mapping = mapping;
    return 0;
}

static void run_control(struct cpu *c, struct device_job *job)
{
    struct device_region *r = job->region;
    int rc = 0;

    if (job->op == DEVICE_OPEN) {
        rc = region_open(job);
    } else {
        region_unmap(r->mapping);
        r->mapping = NULL;
    }
    job_outbox_put(&c->outbox, job, rc);
}

/* ---- copies; called with the mutex held ---- */

static void finish(struct cpu *c, struct device_job *job, int status)
{
    struct cpu_region *mapping = job->region->mapping;

    if (--mapping->jobs == 0 && mapping->last) {
        job_queue_push(&c->queue, mapping->last);
        uv_cond_signal(&c->cond);
    }
    job_outbox_put(&c->outbox, job, status);
}

/* Outside the queue, so that no other thread takes a piece before all was checked. */
static void begin(struct cpu *c, struct device_job *job)
{
    int rc;

    list_remove(&job->link);
    uv_mutex_unlock(&c->mutex);
    rc = job_check(job, job_clock_ms());
    if (rc == 0 && job->event)
        rc = job_refuse(job, -EINVAL, UCM_WIRE_INVALID,
                        "a cpu region has no events; dump when the memory is written");
    uv_mutex_lock(&c->mutex);
    if (rc < 0) {
        finish(c, job, rc);
        return;
    }
    job->begun = true;
    job_queue_push_front(&c->queue, job);
    if (job->n_items * job_item_bytes(job) > CPU_PIECE_BYTES)
        uv_cond_broadcast(&c->cond);
}

static void copy_next(struct cpu *c, struct device_job *job)
{
    struct job_piece piece;
    bool deserted;

    if (job_next_piece(job, CPU_PIECE_BYTES, UINT32_MAX, &piece))
        list_remove(&job->link);
    job->pieces++;
    uv_mutex_unlock(&c->mutex);
    deserted = job->op == DEVICE_LOAD && job_deserted(job);
    if (!deserted)
        ucm_copy_ref(&job->region->planes[piece.first_plane], piece.n_planes,
                     &job->items[piece.first_item], piece.n_items,
                     job->op == DEVICE_LOAD ? UCM_COPY_LOAD : UCM_COPY_DUMP);
    if (job->op == DEVICE_DUMP)
        deserted = job_deserted(job);
    uv_mutex_lock(&c->mutex);
    if (deserted) {
        list_remove(&job->link);
        job->next_item = job->n_items;
        job->status = job_refuse_deserted(job);
    }
    job->pieces--;
    if (job->pieces == 0 && job->next_item == job->n_items)
        finish(c, job, job->status);
}

static void thread_cb(void *arg)
{
    struct cpu *c = arg;
    struct device_job *job;

    uv_mutex_lock(&c->mutex);
    for (;;) {
        if ((job = job_queue_pop_control(&c->queue)) != NULL) {
            uv_mutex_unlock(&c->mutex);
            run_control(c, job);
            uv_mutex_lock(&c->mutex);
        } else if ((job = job_queue_first(&c->queue)) != NULL) {
            if (job->begun)
                copy_next(c, job);
            else
                begin(c, job);
        } else if (c->quit) {
            break;
        } else {
            uv_cond_wait(&c->cond, &c->mutex);
        }
    }
    uv_mutex_unlock(&c->mutex);
}

/* ---- the device ---- */

static int cpu_submit(struct device *d, struct device_job *job)
{
    struct cpu *c = (struct cpu *)d;
    int rc = job_outbox_accept(&c->outbox, job);

    if (rc < 0)
        return rc;
    uv_mutex_lock(&c->mutex);
    if (job_is_copy(job)) {
        struct cpu_region *mapping = job->region->mapping;

        assert(mapping && !mapping->last);
        mapping->jobs++;
        job_queue_push(&c->queue, job);
    } else if (job->op == DEVICE_CLOSE && ((struct cpu_region *)job->region->mapping)->jobs > 0) {
        ((struct cpu_region *)job->region->mapping)->last = job;
    } else {
        job_queue_push(&c->queue, job);
    }
    uv_cond_signal(&c->cond);
    uv_mutex_unlock(&c->mutex);
    return 0;
}

static void cpu_memory_add(struct device *d, void *base, uint64_t bytes)
{
    (void)d; /* a CPU reaches all memory */
    (void)base;
    (void)bytes;
}

static void cpu_stats(struct device *d, struct device_stats *out)
{
    *out = ((struct cpu *)d)->outbox.stats;
}

static void closed_cb(uv_handle_t *handle)
{
    free(handle->data);
}

/* Ends the threads that were started and frees the rest; the outbox is the caller's. */
static void stop_threads(struct cpu *c)
{
    uv_mutex_lock(&c->mutex);
    c->quit = true;
    uv_cond_broadcast(&c->cond);
    uv_mutex_unlock(&c->mutex);
    for (unsigned i = 0; i < c->n_threads; i++)
        uv_thread_join(&c->threads[i]);
    uv_cond_destroy(&c->cond);
    uv_mutex_destroy(&c->mutex);
}

static void cpu_close(struct device *d)
{
    struct cpu *c = (struct cpu *)d;

    stop_threads(c);
    job_outbox_close(&c->outbox, closed_cb);
}

static const struct device_ops cpu_ops = {
    .name = "cpu",
    .submit = cpu_submit,
    .memory_add = cpu_memory_add,
    .stats = cpu_stats,
    .close = cpu_close,
};

int cpu_new(struct uv_loop_s *loop, unsigned threads, struct device **out)
{
    struct cpu *c = calloc(1, sizeof(*c));
    int rc;

    if (!c)
        return -ENOMEM;
    c->device.ops = &cpu_ops;
    c->device.node = NUMA_NONE;
    strcpy(c->outbox.stats.name, "cpu");
    job_queue_init(&c->queue);
    rc = uv_mutex_init(&c->mutex);
    if (rc < 0)
        goto err_after_alloc;
    rc = uv_cond_init(&c->cond);
    if (rc < 0)
        goto err_after_mutex;
    rc = job_outbox_init(&c->outbox, loop);
    if (rc < 0)
        goto err_after_cond;
    c->outbox.async.data = c;
    threads = threads < 1 ? 1 : threads > CPU_THREADS_MAX ? CPU_THREADS_MAX : threads;
    while (rc == 0 && c->n_threads < threads) {
        rc = uv_thread_create(&c->threads[c->n_threads], thread_cb, c);
        c->n_threads += rc == 0;
    }
    if (rc < 0) {
        cpu_close(&c->device);
        return rc;
    }
    *out = &c->device;
    return 0;

err_after_cond:
    uv_cond_destroy(&c->cond);
err_after_mutex:
    uv_mutex_destroy(&c->mutex);
err_after_alloc:
    free(c);
    return rc;
}
