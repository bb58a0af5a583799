#include "daemon/device/gpu.h"

#include "proto/backoff.h"
#include "proto/staging.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#define STAGING_FIRST_BYTES (1ull << 20) /* a dump's first slice, while the bus is idle */
#define STAGING_LAST_PART 4              /* a load's last slice holds 1/4, unless loads follow */
#define STAGING_FIXED_NS 30000.0         /* a slice's way besides the bus: posts, kernel, polls */
#define STAGING_PROBE_WORTH_NS 250000.0
#define STAGING_CLAIM_MS 20   /* a companion that claims later than that gets no processor */
#define STAGING_SLOW_MS 100   /* its kernels don't run: new copies go straight meanwhile */
#define STAGING_DONE_MS 5000  /* it will not finish at all */
#define STAGING_PAUSE_MS 1000 /* after it was too slow */
/* The way of a slice:
 * - load: FREE, FILLING, POSTED, FREE
 * - dump: FREE, POSTED, GATHERED, EMPTYING, FREE
 * STRAIGHT: the companion did nothing, the piece goes straight. */
enum slice_state {
    SLICE_FREE,
    SLICE_FILLING,  /* the engines write a load's bytes into it */
    SLICE_POSTED,   /* the companion moves it */
    SLICE_GATHERED, /* a dump's bytes are in it */
    SLICE_EMPTYING, /* the engines read them */
    SLICE_STRAIGHT,
};

struct gpu_slice {
    struct gpu_staging *staging;
    uint32_t index, tag;
    enum slice_state state;
    enum ucm_copy_direction direction;
    struct device_job *job;
    struct job_piece piece;
    uint64_t posted_ms;
};

struct gpu_staging {
    struct list link;
    uint64_t connection;
    struct worker worker;
    struct gpu_ipc *ipc;
    CUdeviceptr base; /* of the first slice */
    struct ucm_staging *shared;
    uint64_t slice_bytes;
    uint32_t n_slices, generation, next_number;
    uint32_t under_way[2];  /* slices, by direction */
    struct backoff backoff; /* after the companion was too slow, or refused */
    bool retired;           /* takes no copy any more */
    struct gpu_slice slices[UCM_MAX_SLICES];
};

/* ---- open and close ---- */

static int shared_map(struct device_job *job, struct gpu_staging *s)
{
    int fd = job->staging->fd;
    int rc = job_check_memfd(job, "the ring's descriptor", fd, sizeof(*s->shared));
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
    close(job->staging->fd);
    job->staging->fd = -1;
    job->staging->mapping = s;
    list_push_back(&g->stagings, &s->link);
    return 0;
}

static void mark_dead(struct gpu_staging *s)
{
    atomic_store(&s->shared->words.dead, 1);
    s->retired = true;
}

void gpu_staging_close(struct device_staging *staging)
{
    struct gpu_staging *s = staging->mapping;

    mark_dead(s);
    ucm_staging_wake(s->shared);
    list_remove(&s->link);
    staging_delete(s);
    staging->mapping = NULL;
}

static bool paused(const struct gpu_staging *s)
{
    return s->retired || !backoff_ready(&s->backoff, job_clock_ms());
}

/* ---- slices ---- */

static uint32_t slices_under_way(const struct gpu_staging *s)
{
    return s->under_way[0] + s->under_way[1];
}

/* One direction gets all slices but one, or half of them while the other is under way, too. NULL:
 * none is free for this one. */
static struct gpu_slice *slice_begin(struct gpu *g, struct gpu_staging *s,
                                     enum ucm_copy_direction direction)
{
    uint32_t limit = s->under_way[!direction] > 0 ? s->n_slices / 2 : s->n_slices - 1;
    struct gpu_slice *slice = s->slices;

    if (s->under_way[direction] >= limit || slices_under_way(s) == s->n_slices)
        return NULL;
    while (slice->state != SLICE_FREE)
        slice++;
    slice->direction = direction;
    slice->tag = ucm_staging_tag(s->generation, s->next_number++);
    if (slices_under_way(s) == 0) {
        atomic_store(&s->shared->words.soon, 1);
        ucm_staging_wake(s->shared); /* it is awake when the order is posted */
    }
    s->under_way[direction]++;
    g->slices++;
    return slice;
}

static void slice_free(struct gpu *g, struct gpu_slice *slice)
{
    struct gpu_staging *s = slice->staging;

    slice->state = SLICE_FREE;
    s->under_way[slice->direction]--;
    g->slices--;
    if (slices_under_way(s) == 0)
        atomic_store(&s->shared->words.soon, 0);
}

static void slice_end(struct gpu *g, struct gpu_slice *slice)
{
    atomic_fetch_add(&g->strategy_bytes[COPY_STAGED], slice->piece.bytes);
    atomic_fetch_add(&g->strategy_launches[COPY_STAGED], 1);
    if (slice->job->coded && slice->direction == UCM_COPY_DUMP)
        job_mark_unfit(slice->job, &slice->piece);
    slice_free(g, slice);
    gpu_piece_end(g, slice->job);
}

static void slice_fail(struct gpu *g, struct gpu_slice *slice, int status)
{
    slice_free(g, slice);
    gpu_piece_fail(g, slice->job, status);
}

static void order_write(struct gpu_slice *slice)
{
    struct ucm_staging_order *order = &slice->staging->shared->orders[slice->index];
    const struct device_job *job = slice->job;

    order->direction = slice->direction;
    order->region = job->region->ring_region;
    order->first_plane = slice->piece.first_plane;
    order->n_planes = slice->piece.n_planes;
    order->n_items = slice->piece.n_items;
    order->coded = job->coded;
    gpu_rope_order(job, &slice->piece, order);
    for (uint32_t i = 0; i < slice->piece.n_items; i++)
        order->blocks[i] = job->items[slice->piece.first_item + i].block;
}

static void slice_post(struct gpu_slice *slice)
{
    slice->state = SLICE_POSTED;
    slice->posted_ms = job_clock_ms();
    ucm_staging_post(slice->staging->shared, slice->index, slice->tag);
}

/* Launches the copy between slots and slice; the stream has a place for it. */
static CUresult slice_launch(struct gpu *g, struct gpu_slice *slice)
{
    enum ucm_copy_direction direction = slice->direction;
    struct gpu_launch *l = gpu_launch_next(g, direction);
    uint64_t base = slice->staging->base + slice->index * slice->staging->slice_bytes;
    uint32_t n = gpu_dma_plan_slice(g, slice->job, &slice->piece, l->items, base);
    CUresult r;

    if (n == 0) {
        slice->state = SLICE_STRAIGHT;
        return CUDA_SUCCESS;
    }
    l->strategy = COPY_STAGED;
    l->cost_ns = (uint64_t)costs_dma_ns(&g->costs.of[direction], g->dma.extents, n);
    l->begun_ns = uv_hrtime();
    r = gpu_dma_launch(g, direction, n);
    if (r != CUDA_SUCCESS)
        return r;
    slice->state = direction == UCM_COPY_LOAD ? SLICE_FILLING : SLICE_EMPTYING;
    return gpu_launch_follow(g, direction, l, slice->job, slice->piece.bytes, slice);
}

static void slice_move(struct gpu *g, struct gpu_slice *slice)
{
    CUresult r = slice_launch(g, slice);

    if (r != CUDA_SUCCESS)
        slice_fail(g, slice, gpu_refuse(g, slice->job, -EIO, r, "a slice can't be copied"));
}

/* ---- the planner ---- */

/* How much of a slice is used: a worker with larger slices gets no more of the bus in one go. */
static uint64_t slice_use(const struct gpu *g, const struct gpu_staging *s,
                          enum ucm_copy_direction direction)
{
    uint64_t most = gpu_launch_bytes(g, direction);

    return s->slice_bytes < most ? s->slice_bytes : most;
}

static bool next_piece(struct device_job *job, const struct gpu_staging *s, uint64_t bytes,
                       struct job_piece *out)
{
    uint64_t fit = s->slice_bytes / ucm_staging_pitch(job_item_bytes(job));
    uint32_t most = fit < UCM_STAGING_ITEMS ? (uint32_t)fit : UCM_STAGING_ITEMS;

    return job_next_piece(job, bytes, gpu_rope_items(job, most, UCM_STAGING_TURN_WORDS), out);
}

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

    (void)next_piece(&first, s, slice_use(g, s, direction), &piece);
    times = (double)job_item_bytes(job) * job->n_items / (double)piece.bytes;
    memcpy(items, job->items, piece.n_items * sizeof(*items));
    n = job->turns ? 0 : gpu_dma_plan(g, job, &piece, items);
    idle_ns = times * costs_direct_ns(costs, extents, n, piece.bytes, g->slices > 0);
    busy_ns = times * costs_direct_ns(costs, extents, n, piece.bytes, true);
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
    uint32_t asks =
        (job->coded ? UCM_STAGING_KNOWS_CODED : 0) | (job->turns ? UCM_STAGING_KNOWS_TURNED : 0);

    return (atomic_load(&s->shared->words.knows) & asks) == asks;
}

/* The other way of a coded job is the daemon's own kernel, over the bus: hardly faster than the engines on an
 * idle GPU, and hopeless beside others. Only narrow items of loads go there, which kernels of the driver
 * would move to a slice. */
static bool coded_pays(const struct device_job *job)
{
    return job->op == DEVICE_DUMP || job_item_bytes(job) >= COSTS_RUN_LEAST;
}

bool gpu_staging_pays(struct gpu *g, struct device_job *job)
{
    enum copy_strategy wanted = g->config.strategy;
    const struct gpu_staging *s = job->staging ? job->staging->mapping : NULL;

    if (!s || wanted == COPY_DMA || wanted == COPY_SM || paused(s) ||
        largest_plane(job) > s->slice_bytes || !companion_knows(s, job))
        return false;
    if (job->coded)
        return coded_pays(job);
    return wanted == COPY_STAGED || staged_is_faster(g, job, s);
}

/* Dumps begin with a small slice, so that the bus has work soon. Each further one is gathered while
 * the bus moves those before, and may be as large. */
static uint64_t dump_piece(const struct gpu *g, const struct gpu_staging *s)
{
    uint64_t bytes = STAGING_FIRST_BYTES, use = slice_use(g, s, UCM_COPY_DUMP);

    for (uint32_t i = 0; i < s->n_slices; i++)
        if (s->slices[i].state != SLICE_FREE && s->slices[i].direction == UCM_COPY_DUMP)
            bytes += 2 * s->slices[i].piece.bytes;
    return bytes < use ? bytes : use;
}

/* A load is done only when its last slice is scattered. So the last slice is small, and the bus
 * fills it while those before are scattered. Where more loads follow, they keep the bus busy
 * instead. Halving ends after three slices, as many as one direction may have. Of several loads, what
 * is little more than a slice goes in two halves: a slice with a block or two costs a full one's
 * time. */
static uint64_t load_piece(struct gpu *g, struct device_job *job, const struct gpu_staging *s)
{
    uint64_t left = (uint64_t)(job->n_items - job->next_item) * job_item_bytes(job);
    uint64_t whole = slice_use(g, s, UCM_COPY_LOAD), least = whole / STAGING_LAST_PART;
    bool more = job_queue_next_of(&g->queued, job);

    if (more && left > whole && left < 2 * whole)
        return left / 2;
    if (more || left > whole || left <= least)
        return whole;
    return left / 2 > least ? left / 2 : least;
}

enum gpu_took gpu_staging_take(struct gpu *g, struct device_job *job)
{
    struct gpu_staging *s = job->staging->mapping;
    bool load = job->op == DEVICE_LOAD;
    struct gpu_slice *slice;

    if (paused(s))
        return GPU_PAUSED;
    slice = slice_begin(g, s, job_direction(job));
    if (!slice)
        return GPU_FULL;
    slice->job = job;
    if (next_piece(job, s, load ? load_piece(g, job, s) : dump_piece(g, s), &slice->piece))
        list_remove(&job->link);
    job_queue_charge(&g->queued, job, slice->piece.bytes);
    job->pieces++;
    order_write(slice);
    if (load)
        slice_move(g, slice);
    else
        slice_post(slice);
    return GPU_TOOK;
}

/* ---- what goes on ---- */

void gpu_staging_launched(struct gpu *g, struct gpu_slice *slice)
{
    if (slice->state != SLICE_FILLING)
        slice_end(g, slice);
    else if (job_deserted(slice->job))
        slice_fail(g, slice, job_refuse_deserted(slice->job));
    else
        slice_post(slice);
}

/* The order is claimed and not done. A worker that was stopped right before its launch may still
 * begin the kernel, at any time: when we give up, the ring is retired and the copy fails. */
static bool claimed_poll(struct gpu *g, struct gpu_slice *slice, uint64_t now_ms)
{
    struct gpu_staging *s = slice->staging;
    bool runs = worker_seen(&s->worker, NULL, now_ms);

    if (runs && now_ms >= slice->posted_ms + STAGING_SLOW_MS)
        (void)backoff_fail(&s->backoff, now_ms);
    if (runs && now_ms < slice->posted_ms + STAGING_DONE_MS)
        return false;
    mark_dead(s);
    slice_fail(g, slice,
               job_refuse(slice->job, -EIO, UCM_WIRE_DEVICE,
                          runs ? "the worker's companion claimed a slice and did not move it"
                               : "the worker died while it moved a slice"));
    return true;
}

static bool unclaimed_poll(struct gpu_slice *slice, uint64_t now_ms)
{
    struct gpu_staging *s = slice->staging;

    if (now_ms < slice->posted_ms + STAGING_CLAIM_MS && !s->retired &&
        worker_seen(&s->worker, NULL, now_ms))
        return false;
    if (!ucm_staging_move(s->shared, slice->index, slice->tag, STAGING_POSTED, STAGING_REVOKED))
        return false; /* claimed just now */
    (void)backoff_fail(&s->backoff, now_ms);
    slice->state = SLICE_STRAIGHT;
    return true;
}

static bool slice_poll(struct gpu *g, struct gpu_slice *slice, uint64_t now_ms)
{
    struct gpu_staging *s = slice->staging;
    uint64_t state = atomic_load(&s->shared->words.slices[slice->index].state);

    if (ucm_staging_tag_of(state) != slice->tag)
        return claimed_poll(g, slice, now_ms);
    switch (ucm_staging_phase_of(state)) {
    case STAGING_POSTED:
        return unclaimed_poll(slice, now_ms);
    case STAGING_DONE:
        if (slice->direction == UCM_COPY_DUMP)
            slice->state = SLICE_GATHERED;
        else
            slice_end(g, slice);
        return true;
    case STAGING_REFUSED:
        (void)backoff_fail(&s->backoff, now_ms);
        slice->state = SLICE_STRAIGHT;
        return true;
    case STAGING_REVOKED: /* by the worker, which has given up this connection */
        mark_dead(s);
        slice_fail(g, slice,
                   job_refuse(slice->job, -EIO, UCM_WIRE_DEVICE, "the worker abandoned its ring"));
        return true;
    default:
        return claimed_poll(g, slice, now_ms);
    }
}

static void piece_straight(struct gpu *g, struct gpu_slice *slice)
{
    struct job_piece piece = slice->piece;

    slice_free(g, slice);
    gpu_launch_piece(g, slice->direction, slice->job, &piece);
}

static bool slice_step(struct gpu *g, struct gpu_slice *slice)
{
    bool moved = slice->state == SLICE_POSTED && slice_poll(g, slice, job_clock_ms());

    if ((slice->state != SLICE_GATHERED && slice->state != SLICE_STRAIGHT) ||
        atomic_load(&g->failed) || !gpu_launch_next(g, slice->direction))
        return moved;
    if (job_deserted(slice->job))
        slice_fail(g, slice, job_refuse_deserted(slice->job));
    else if (slice->state == SLICE_GATHERED)
        slice_move(g, slice);
    else
        piece_straight(g, slice);
    return true;
}

static bool slice_abandon(struct gpu *g, struct gpu_slice *slice)
{
    bool launched = slice->state == SLICE_FILLING || slice->state == SLICE_EMPTYING;

    if (slice->state == SLICE_POSTED) {
        gpu_job_fail(g, slice->job, gpu_refuse_failed(g, slice->job));
        return true;
    }
    slice_free(g, slice);
    if (!launched) /* the others end with their launch */
        gpu_piece_fail(g, slice->job, gpu_refuse_failed(g, slice->job));
    return true;
}

/* Calls f for every slice that is not free; returns whether any call returned true. */
static bool each_slice(struct gpu *g, bool (*f)(struct gpu *g, struct gpu_slice *slice))
{
    bool moved = false;

    for (struct list *node = g->stagings.next; node != &g->stagings && g->slices > 0;
         node = node->next) {
        struct gpu_staging *s = LIST_ENTRY(node, struct gpu_staging, link);

        for (uint32_t i = 0; i < s->n_slices; i++)
            if (s->slices[i].state != SLICE_FREE)
                moved |= f(g, &s->slices[i]);
    }
    return moved;
}

bool gpu_stagings_step(struct gpu *g)
{
    return each_slice(g, slice_step);
}

/* A companion may still write what it has claimed: such a slice ends as ever (gpu_stagings_step),
 * and its job fails with it. */
void gpu_stagings_abandon(struct gpu *g)
{
    for (struct list *node = g->stagings.next; node != &g->stagings; node = node->next)
        mark_dead(LIST_ENTRY(node, struct gpu_staging, link));
    (void)each_slice(g, slice_abandon);
}
