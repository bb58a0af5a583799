#include "daemon/base/log.h"
#include "daemon/base/text_file.h"
#include "daemon/device/guard.h"
#include "daemon/device/work.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define CPU_THREADS_MAX 64
#define CPU_PIECE_BYTES (1u << 20) /* of one thread at a time, so that others help and overtake */
#define CPU_BURST_BYTES (16ull << 20)
/* Pages are unmapped in slices: the first 16 MiB take about 2 ms if all are there. While a slice has
 * taken less processor time than CPU_SLICE_NS, it goes on with twice as many bytes. */
#define CPU_SLICE_BYTES (16ull << 20)
#define CPU_SLICE_BYTES_MAX (1ull << 30)
#define CPU_SLICE_NS 1000000u
/* A piece takes 1 ms. A copier is held up when its worker's memory has kept it for CPU_HELD_MS, or
 * the host's other work for CPU_BUSY_MS. */
#define CPU_HELD_MS 5u
#define CPU_BUSY_MS 50u
#define CPU_STAND_INS 16u

struct copier {
    struct cpu *cpu;
    uv_thread_t thread;
    /* Under the mutex. */
    pid_t tid;
    uint64_t since_ms; /* when what it does now began; 0: it does nothing */
    uint64_t had_ns;   /* of a processor, then */
    uint32_t tenant;   /* of the job */
    bool controls;     /* it opens or closes a region, or did so last */
};

/* `at_once` threads work at a time, and one more watches. For each that is held up another one
 * stands in, which works for tenants that have none. So a tenant holds up at_once threads, or one,
 * and others wait CPU_HELD_MS for each. */
struct cpu {
    struct work work;
    struct job_queue queue; /* under its mutex */
    int guard;              /* see guard_open */
    uv_cond_t watch_cond;   /* never signalled: see thread_cb */
    unsigned at_once;
    unsigned n_copiers, working; /* under the mutex; working: of them */
    struct copier copiers[CPU_THREADS_MAX + CPU_STAND_INS];
};

/* ---- threads that are held up; called with the mutex held ---- */

static void thread_cb(void *arg);

static int copier_start(struct cpu *c)
{
    struct copier *k = &c->copiers[c->n_copiers];
    int rc;

    *k = (struct copier){.cpu = c};
    rc = uv_thread_create(&k->thread, thread_cb, k);
    c->n_copiers += rc == 0;
    return rc;
}

static uint64_t clock_ns(clockid_t clock)
{
    struct timespec t = {0};

    (void)clock_gettime(clock, &t); /* fails for no clock of a thread that is there */
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* The letter of proc_pid_stat(5): 'R' runs or waits for a processor, 'S' and 'D' wait for something
 * else. '?': it is not known. */
static char thread_state(pid_t tid)
{
    const char *name_end;
    char path[64], text[1024], state;

    snprintf(path, sizeof(path), "/proc/self/task/%ld/stat", (long)tid);
    if (text_file_read(AT_FDCWD, path, 0, text, sizeof(text)) < 0)
        return '?';
    name_end = strrchr(text, ')'); /* of the thread's name, which may hold anything */
    return name_end && sscanf(name_end, ") %c", &state) == 1 ? state : '?';
}

/* Only a busy host keeps it waiting. A stand-in would then take turns with it as the kernel likes,
 * and not by tenants' weights. A thread that works in the kernel for long is held up: it frees a
 * file's pages, say. */
static bool lacks_processor(const struct copier *k)
{
    clockid_t clock;

    return thread_state(k->tid) == 'R' && pthread_getcpuclockid(k->thread, &clock) == 0 &&
           clock_ns(clock) - k->had_ns < CPU_HELD_MS * 1000000ull;
}

static bool held(const struct copier *k, uint64_t now_ms)
{
    if (k->since_ms == 0 || now_ms < k->since_ms + CPU_HELD_MS)
        return false;
    return now_ms >= k->since_ms + CPU_BUSY_MS || !lacks_processor(k);
}

/* May one more work, though at_once do? Where so many are held up. */
static bool has_room(const struct cpu *c)
{
    uint64_t now_ms = job_clock_ms();
    unsigned working = c->working;

    for (unsigned i = 0; i < c->n_copiers; i++)
        working -= held(&c->copiers[i], now_ms);
    return working < c->at_once;
}

static bool works_for(const struct copier *k, struct list *link)
{
    return k->since_ms != 0 && k->tenant == LIST_ENTRY(link, struct device_job, link)->who.tenant;
}

static bool has_copier_cb(void *ctx, struct list *link)
{
    const struct cpu *c = ctx;

    for (unsigned i = 0; i < c->n_copiers; i++)
        if (works_for(&c->copiers[i], link))
            return true;
    return false;
}

static bool is_controlled_cb(void *ctx, struct list *link)
{
    const struct cpu *c = ctx;

    for (unsigned i = 0; i < c->n_copiers; i++)
        if (works_for(&c->copiers[i], link) && c->copiers[i].controls)
            return true;
    return false;
}

/* ---- regions ---- */

static size_t map_bytes(const struct device_handle *h)
{
    return h->offset + h->bytes;
}

/* job_check_memfd keeps a peer from making the mapping shorter: touching a page past its end
 * would kill the daemon. A mapping that can't be guarded would let its client fill the daemon's
 * memory. */
static int map_handle(struct cpu *c, struct device_job *job, uint32_t i)
{
    struct device_handle *h = &job->region->handles[i];
    char what[32];
    void *base;
    int rc;

    snprintf(what, sizeof(what), "handle %u", i);
    rc = job_check_memfd(job, what, h->fd, h->offset, h->bytes);
    if (rc < 0)
        return rc;
    base = mmap(NULL, map_bytes(h), PROT_READ | PROT_WRITE, MAP_SHARED, h->fd, 0);
    if (base == MAP_FAILED)
        return job_refuse(job, -EINVAL, UCM_WIRE_DEVICE,
                          "handle %u can't be mapped: %s; it must be writable", i, strerror(errno));
    (void)madvise(base, map_bytes(h), MADV_DONTDUMP);
    h->address = (uint64_t)(uintptr_t)base;
    rc = guard_add(c->guard, base, map_bytes(h));
    if (rc < 0)
        return job_refuse(job, -EINVAL, UCM_WIRE_DEVICE, "handle %u can't be watched: %s", i,
                          strerror(-rc));
    return 0;
}

static void handle_unmap(struct device_handle *h)
{
    if (h->address != 0)
        munmap((void *)(uintptr_t)h->address, map_bytes(h));
    h->address = 0;
}

/* No page was touched yet: to undo it takes no time. */
static int region_open(struct cpu *c, struct device_job *job)
{
    struct device_region *r = job->region;
    int rc = 0;

    for (uint32_t i = 0; rc == 0 && i < r->n_handles; i++)
        rc = map_handle(c, job, i);
    if (rc == 0)
        region_mapped(r);
    for (uint32_t i = 0; rc < 0 && i < r->n_handles; i++)
        handle_unmap(&r->handles[i]);
    return rc;
}

/* A slice of it: 4 GiB in one go held the thread for 0.6 s. Most of a mapping may be holes: 32 TiB
 * of them in slices of the smallest size would be two million. Is the region closed then? */
static bool close_slice(struct device_job *job)
{
    struct device_handle *h = &job->region->handles[job->next_item];
    uint64_t bytes = CPU_SLICE_BYTES, end_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID) + CPU_SLICE_NS;

    while (h->address != 0 && map_bytes(h) - job->next_byte > bytes) {
        /* What it fails for is left to munmap. */
        (void)madvise((void *)(uintptr_t)(h->address + job->next_byte), bytes, MADV_DONTNEED);
        job->next_byte += bytes;
        if (clock_ns(CLOCK_THREAD_CPUTIME_ID) >= end_ns)
            return false;
        bytes = bytes < CPU_SLICE_BYTES_MAX ? 2 * bytes : bytes;
        if (map_bytes(h) - job->next_byte <= bytes)
            bytes = CPU_SLICE_BYTES;
    }
    handle_unmap(h);
    job->next_byte = 0;
    return ++job->next_item == job->region->n_handles;
}

static void run_control(struct cpu *c, struct device_job *job)
{
    bool done = true;
    int rc = 0;

    uv_mutex_unlock(&c->work.mutex);
    if (job->op == DEVICE_OPEN)
        rc = region_open(c, job);
    else
        done = close_slice(job);
    uv_mutex_lock(&c->work.mutex);
    if (done)
        work_finish_locked(&c->work, job, rc);
    else
        job_queue_push(&c->queue, job);
}

/* ---- copies; called with the mutex held ---- */

/* Re-rotates K where it lies, in pages that the copy has just written. */
static void rerotate_piece(struct device_job *job, const struct job_piece *piece)
{
    const struct device_rope *rope = job->region->rope;

    for (uint32_t i = piece->first_item; i < piece->first_item + piece->n_items; i++)
        for (uint32_t p = piece->first_plane; p < piece->first_plane + piece->n_planes; p++) {
            const struct ucm_copy_plane *plane = &job->region->planes[p];
            void *k = (void *)(uintptr_t)(plane->base + job->items[i].block * plane->stride +
                                          rope->at[p]);

            if (job->shifts[i] && rope->at[p] != DEVICE_NO_K)
                ucm_rope_apply(&rope->spec, job->shifts[i], k, k);
        }
}

struct copy {
    struct device_job *job;
    struct job_piece piece;
};

/* Holds nothing: a guard may leave it in the middle. */
static void copy_cb(void *ctx)
{
    struct device_job *job = ((struct copy *)ctx)->job;
    const struct job_piece *piece = &((struct copy *)ctx)->piece;

    if (job->converts)
        job_convert(job, piece);
    else
        ucm_copy_ref(&job->region->planes[piece->first_plane], piece->n_planes,
                     &job->items[piece->first_item], piece->n_items,
                     job->op == DEVICE_DUMP ? UCM_COPY_DUMP : UCM_COPY_LOAD);
    if (job->shifts)
        rerotate_piece(job, piece);
}

static int refuse_hole(struct device_job *job)
{
    return job_refuse(
        job, -EFAULT, UCM_WIRE_INVALID,
        "a page of the region's memory is not there: it was never written to, or was taken "
        "away; keep all of them from before the registration until it is unregistered");
}

static void copy_next(struct cpu *c, struct device_job *job)
{
    int rc = job->begun ? 0 : job_check(job, job_clock_ms());
    struct copy copy = {.job = job};
    bool deserted, whole = true;

    if (rc == 0 && job->event)
        rc = job_refuse(job, -EINVAL, UCM_WIRE_INVALID,
                        "a cpu region has no events; dump when the memory is written");
    if (rc < 0) {
        list_remove(&job->link);
        work_finish_locked(&c->work, job, rc);
        return;
    }
    if (job_next_piece(job, CPU_PIECE_BYTES, UINT32_MAX, &copy.piece))
        list_remove(&job->link);
    else if (!job->begun)
        uv_cond_broadcast(&c->work.cond); /* others help */
    job->begun = true;
    fair_queue_charge(job->queue, &job->who, copy.piece.cost, &job->got);
    job->pieces++;
    uv_mutex_unlock(&c->work.mutex);
    deserted = job->op == DEVICE_LOAD && peer_hung_up(job->region->peer_fd);
    if (!deserted)
        whole = guard_run(job->region, copy_cb, &copy);
    if (job->op == DEVICE_DUMP)
        deserted = peer_hung_up(job->region->peer_fd);
    uv_mutex_lock(&c->work.mutex);
    if (deserted || !whole) {
        list_remove(&job->link);
        job->next_item = job->n_items;
        job->status = deserted ? job_refuse_deserted(job) : refuse_hole(job);
    }
    if (--job->pieces == 0 && job->next_item == job->n_items)
        work_finish_locked(&c->work, job, job->status);
}

/* One thread at a time, those that are held up not counted: the others copy. */
static struct device_job *next_control(struct cpu *c)
{
    uint64_t now_ms = 0;

    for (unsigned i = 0; i < c->n_copiers; i++) {
        const struct copier *k = &c->copiers[i];

        if (k->since_ms == 0 || !k->controls)
            continue;
        now_ms = now_ms ? now_ms : job_clock_ms();
        if (!held(k, now_ms))
            return NULL;
    }
    return job_queue_pop_control(&c->queue,
                                 c->working < c->at_once ? is_controlled_cb : has_copier_cb, c);
}

/* Copies come between what one thread does for regions. controlled: the thread's last job was such
 * a one. */
static struct device_job *next_job(struct cpu *c, bool controlled)
{
    bool controls = c->queue.control.fair.n > 0, stands_in = c->working >= c->at_once;
    struct device_job *job = NULL;

    if (stands_in && !has_room(c))
        return NULL;
    if (controls && !controlled)
        job = next_control(c);
    if (!job)
        job = stands_in ? job_queue_first_unless(&c->queue, has_copier_cb, c)
                        : job_queue_first(&c->queue, DEVICE_LOAD);
    if (!job && controls && controlled)
        job = next_control(c);
    return job;
}

static void thread_cb(void *arg)
{
    struct copier *k = arg;
    struct cpu *c = k->cpu;
    struct work *w = &c->work;
    struct device_job *job;
    struct list *node;

    uv_mutex_lock(&w->mutex);
    k->tid = gettid();
    for (;;) {
        while ((node = list_pop_front(&w->inbox)) != NULL)
            job_queue_push(&c->queue, LIST_ENTRY(node, struct device_job, link));
        job = next_job(c, k->controls);
        k->controls = job && job->op < DEVICE_COPIES;
        if (!job && w->quit)
            break;
        /* While jobs wait that this thread may not do, it looks again soon: the copier in their way
         * may be held up by then. If at_once copiers work, it does not wait at work.cond: that
         * one's signals are for threads that may work. at_once of these are there, since so many
         * worked when this one came here. */
        if (!job && c->queue.control.fair.n + c->queue.copies[0].fair.n > 0)
            (void)uv_cond_timedwait(c->working >= c->at_once ? &c->watch_cond : &w->cond, &w->mutex,
                                    CPU_HELD_MS * 1000000ull);
        else if (!job)
            uv_cond_wait(&w->cond, &w->mutex);
        if (!job)
            continue;
        k->since_ms = job_clock_ms();
        k->had_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID);
        k->tenant = job->who.tenant;
        if (++c->working == c->n_copiers && c->n_copiers < c->at_once + CPU_STAND_INS)
            (void)copier_start(c); /* without it, the job waits for another thread */
        if (k->controls)
            run_control(c, job);
        else
            copy_next(c, job);
        k->since_ms = 0;
        c->working--;
        if (!list_empty(&w->done))
            uv_async_send(&w->async);
    }
    uv_mutex_unlock(&w->mutex);
}

/* ---- the device ---- */

static void cpu_stats(struct device *d, struct device_stats *out)
{
    *out = ((struct work *)d)->stats;
}

static void cpu_close(struct device *d)
{
    struct cpu *c = (struct cpu *)d;

    work_quit(&c->work);
    for (unsigned i = 0; i < c->n_copiers; i++)
        uv_thread_join(&c->copiers[i].thread);
    if (c->guard >= 0)
        close(c->guard);
    uv_cond_destroy(&c->watch_cond);
    work_close(&c->work);
}

static const struct device_ops cpu_ops = {
    .submit = work_submit,
    .stats = cpu_stats,
    .close = cpu_close,
};

int cpu_new(struct uv_loop_s *loop, unsigned threads, struct device **out)
{
    struct cpu *c = calloc(1, sizeof(*c));
    int rc;

    if (!c)
        return -ENOMEM;
    rc = uv_cond_init(&c->watch_cond);
    if (rc < 0)
        goto err_after_alloc;
    rc = work_init(&c->work, loop, &cpu_ops);
    if (rc < 0)
        goto err_after_cond;
    c->guard = guard_open();
    if (c->guard < 0)
        log_warn("device", "memory-unguarded",
                 "reason=\"no userfaultfd: %s\": a client that makes holes in memory which it has "
                 "registered has them filled with memory of the daemon's",
                 strerror(-c->guard));
    strcpy(c->work.stats.name, "cpu");
    job_queue_init(&c->queue, true, CPU_BURST_BYTES);
    c->at_once = threads < 1 ? 1 : threads > CPU_THREADS_MAX ? CPU_THREADS_MAX : threads;
    uv_mutex_lock(&c->work.mutex);
    while (rc == 0 && c->n_copiers < c->at_once + 1)
        rc = copier_start(c);
    uv_mutex_unlock(&c->work.mutex);
    if (rc < 0) {
        cpu_close(&c->work.device);
        return rc;
    }
    *out = &c->work.device;
    return 0;

err_after_cond:
    uv_cond_destroy(&c->watch_cond);
err_after_alloc:
    free(c);
    return rc;
}
