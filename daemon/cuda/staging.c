#include "daemon/cuda/slice.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#define STAGING_FIXED_NS 30000.0 /* a slice's way besides the bus: posts, kernel, polls */
#define STAGING_PROBE_WORTH_NS 250000.0
#define STAGING_PAUSE_MS 1000         /* after it was too slow */
#define STAGING_MEMFD_MOST (4u << 20) /* the last page may be a huge one */

/* ---- open and close ---- */

/* The GPU's thread touches the ring, and gives it back: a worker that punches holes in a large file, or lets the last
 * mapping of it go, would hold up all copies of that GPU. */
static int shared_check(struct device_job *job, int fd, uint64_t bytes)
{
    int rc = job_check_memfd(job, "the ring's descriptor", fd, 0, bytes);
    struct stat st;

    if (rc < 0)
        return rc;
    if (!(fcntl(fd, F_GET_SEALS) & F_SEAL_GROW))
        return job_refuse(job, -EINVAL, UCM_WIRE_INVALID,
                          "the ring's descriptor is not a memfd sealed with F_SEAL_GROW");
    if (fstat(fd, &st) < 0 || (uint64_t)st.st_size != bytes ||
        (uint64_t)st.st_blocks * 512 > STAGING_MEMFD_MOST)
        return job_refuse(
            job, -EINVAL, UCM_WIRE_INVALID,
            "the ring's memfd must have %" PRIu64 " bytes, and no pages behind its end", bytes);
    return 0;
}

static int shared_map(struct device_job *job, struct gpu_staging *s)
{
    int fd = job->staging->fd, rc = shared_check(job, fd, sizeof(*s->shared));
    void *p;

    if (rc < 0)
        return rc;
    p = mmap(NULL, sizeof(*s->shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED)
        return job_refuse(job, -EINVAL, UCM_WIRE_DEVICE, "the ring can't be mapped: %s",
                          strerror(errno));
    s->shared = p;
    return 0;
}

static void staging_delete(struct gpu_staging *s)
{
    if (s->shared)
        munmap(s->shared, sizeof(*s->shared));
    if (s->ipc)
        gpu_ipc_put(s->ipc);
    worker_close(&s->worker);
    free(s);
}

/* Two rings on the same bytes would write over each other's slices: a worker that reconnects must
 * wait until the copies of its old connection have ended. */
static int refuse_second(struct gpu *g, struct device_job *job, const struct gpu_staging *s)
{
    uint64_t end = s->base + s->n_slices * s->slice_bytes;

    for (struct list *node = g->stagings.next; node != &g->stagings; node = node->next) {
        const struct gpu_staging *other = LIST_ENTRY(node, struct gpu_staging, link);

        if (other->connection == s->connection)
            return job_refuse(job, -EBUSY, UCM_WIRE_BUSY,
                              "this connection has a ring on that GPU; unregister it first");
        if (s->base < other->base + other->n_slices * other->slice_bytes && other->base < end)
            return job_refuse(job, -EBUSY, UCM_WIRE_BUSY,
                              "the ring's memory is still in use by an older connection's ring");
    }
    return 0;
}

static int staging_fill(struct gpu *g, struct device_job *job, struct gpu_staging *s)
{
    const struct device_staging *wanted = job->staging;
    struct gpu_ipc_wish wish = {.ipc = wanted->ipc,
                                .offset = wanted->offset,
                                .bytes = wanted->slices * wanted->slice_bytes,
                                .proof = &wanted->proof,
                                .name = "the ring's handle"};
    uint32_t random;
    int rc = worker_open(&s->worker, wanted->pid);

    if (rc < 0)
        return job_refuse(job, -EINVAL, UCM_WIRE_DEVICE,
                          "the worker's process can't be seen from here (another pid namespace?), "
                          "so it can have no ring");
    rc = shared_map(job, s);
    if (rc == 0)
        rc = gpu_ipc_get(g, job, &wish, &s->worker, &s->ipc);
    if (rc < 0)
        return rc;
    s->connection = wanted->connection;
    s->base = s->ipc->address + wanted->offset;
    s->n_slices = wanted->slices;
    s->slice_bytes = wanted->slice_bytes;
    rc = refuse_second(g, job, s);
    if (rc < 0)
        return rc;
    if (getrandom(&random, sizeof(random), 0) != (ssize_t)sizeof(random))
        return job_refuse(job, -EIO, UCM_WIRE_INTERNAL, "no random number for the ring");
    s->generation = ucm_staging_generation_of(random);
    backoff_init(&s->backoff, STAGING_PAUSE_MS, STAGING_PAUSE_MS, 0);
    for (uint32_t i = 0; i < s->n_slices; i++)
        s->slices[i] = (struct gpu_slice){.staging = s, .index = i};
    return 0;
}

int gpu_staging_open(struct gpu *g, struct device_job *job)
{
    struct gpu_staging *s = calloc(1, sizeof(*s));
    int rc;

    if (!s)
        return job_refuse(job, -EIO, UCM_WIRE_NO_MEMORY, "no memory for the ring");
    s->worker.fd = -1;
    rc = staging_fill(g, job, s);
    if (rc < 0) {
        staging_delete(s);
        return rc;
    }
    atomic_store(&s->shared->words.generation, s->generation);
    job->staging->mapping = s;
    list_push_back(&g->stagings, &s->link);
    return 0;
}

void staging_mark_dead(struct gpu_staging *s)
{
    atomic_store(&s->shared->words.dead, 1);
    s->retired = true;
}

void gpu_staging_close(struct device_staging *staging)
{
    struct gpu_staging *s = staging->mapping;

    staging_mark_dead(s);
    ucm_staging_wake(s->shared);
    list_remove(&s->link);
    staging_delete(s);
    staging->mapping = NULL;
}

bool staging_paused(const struct gpu_staging *s)
{
    return s->retired || !backoff_ready(&s->backoff, job_clock_ms());
}

/* ---- the planner ---- */

/* Looks whether others run only where the answer matters, and at once where the job takes longer
 * than a probe. */
static bool staged_pays(struct gpu *g, double staged_ns, double idle_ns, double busy_ns)
{
    bool if_idle = costs_staged_pays(staged_ns, idle_ns, false);
    bool if_busy = costs_staged_pays(staged_ns, busy_ns, false);
    bool if_pauses = costs_staged_pays(staged_ns, busy_ns, true);

    if ((if_idle == if_busy && if_busy == if_pauses) ||
        !(idle_ns > STAGING_PROBE_WORTH_NS ? gpu_others_look(g) : gpu_others_run(g)))
        return if_idle;
    return g->busy.pauses ? if_pauses : if_busy;
}

/* Compares both ways of the first full slice, scaled to the whole job. While slices are under way
 * our own kernels would take turns with the companion's, as with any other process's. A slice's
 * fixed time counts only when the bus has nothing else to do. */
static bool staged_is_faster(struct gpu *g, const struct device_job *job,
                             const struct gpu_staging *s)
{
    enum ucm_copy_direction direction = job_direction(job);
    const struct costs *costs = &g->costs.of[direction];
    struct ucm_copy_item *items = gpu_launch_next(g, direction)->items;
    const struct plan_extent *extents = g->dma.extents;
    struct device_job first = *job;
    struct job_piece piece;
    double times, idle_ns, busy_ns, staged_ns;
    uint32_t n;

    (void)slice_next_piece(&first, s, 0, slice_use(g, s, direction), &piece);
    times = (double)job_item_bytes(job) * job->n_items / (double)piece.bytes;
    memcpy(items, job->items, piece.n_items * sizeof(*items));
    n = gpu_dma_plan(g, job, &piece, items);
    idle_ns = times * costs_direct_ns(costs, extents, n, piece.bytes, g->slices > 0);
    /* K turns by a kernel, which would take turns with others'. */
    busy_ns = times * costs_direct_ns(costs, extents, job->turns ? 0 : n, piece.bytes, true);
    n = gpu_dma_plan_slice(g, job, &piece, items, s->base);
    staged_ns = times * costs_dma_ns(costs, extents, n);
    if (g->slices == 0 && g->streams[direction].n == 0)
        staged_ns += STAGING_FIXED_NS;
    /* Narrower runs are moved by kernels, which would take turns with the companion's. */
    if (n == 0 || (direction == UCM_COPY_LOAD && piece.bytes / piece.n_items < COSTS_RUN_LEAST))
        return false;
    if (gpu_beside_suffices(g, direction, busy_ns, (uint64_t)(times * (double)piece.bytes)))
        return false;
    return staged_pays(g, staged_ns, idle_ns, busy_ns);
}

static uint32_t largest_plane(const struct device_job *job)
{
    uint32_t largest = 0;

    for (uint32_t p = job->first_plane; p < job->first_plane + job->n_planes; p++)
        if (job_plane_bytes(job, p) > largest)
            largest = job_plane_bytes(job, p);
    return largest;
}

/* Does the companion know what the job asks of it? */
static bool companion_knows(const struct gpu_staging *s, const struct device_job *job)
{
    uint32_t asks = (job->converts ? UCM_STAGING_KNOWS_CONVERSION : 0) |
                    (job->turns ? UCM_STAGING_KNOWS_TURNED : 0);

    return (atomic_load(&s->shared->words.knows) & asks) == asks;
}

/* The other way of a coded job is the daemon's own kernel, over the bus: hardly faster than the engines on an
 * idle GPU, and hopeless beside others. Only narrow items of loads go there, which kernels of the driver
 * would move to a slice. */
static bool conversion_pays(const struct device_job *job)
{
    return job->op == DEVICE_DUMP || job_item_bytes(job) >= COSTS_RUN_LEAST;
}

static bool pays(struct gpu *g, struct device_job *job)
{
    enum copy_strategy wanted = g->config.strategy;
    const struct gpu_staging *s = job->staging ? job->staging->mapping : NULL;

    if (!s || wanted == COPY_DMA || wanted == COPY_SM || staging_paused(s) ||
        largest_plane(job) > s->slice_bytes || !companion_knows(s, job))
        return false;
    if (job->converts)
        return conversion_pays(job);
    return wanted == COPY_STAGED || staged_is_faster(g, job, s);
}

int gpu_job_begin(struct gpu *g, struct device_job *job)
{
    int rc = gpu_job_check(g, job);

    job->begun = rc == 0;
    job->staged = rc == 0 && pays(g, job);
    return rc;
}
