#include "daemon/cuda/slice.h"

#include <errno.h>
#include <string.h>

#define STAGING_FIXED_NS 30000.0 /* a slice's way besides the bus: posts, kernel, polls */
#define STAGING_PROBE_WORTH_NS 250000.0
#define STAGING_FIRST_BYTES (1ull << 20) /* a dump's first slice, while the bus is idle */
#define STAGING_LAST_PART 4              /* a load's last slice holds 1/4, unless loads follow */
#define STAGING_CLAIM_MS 20  /* a companion that claims later than that gets no processor */
#define STAGING_SLOW_MS 100  /* its kernels don't run: new copies go straight meanwhile */
#define STAGING_DONE_MS 5000 /* it will not finish at all */
#define STAGING_LOOKS 64     /* at jobs that may share a slice */

/* ---- slices ---- */

static uint32_t slices_under_way(const struct gpu_staging *s)
{
    return s->under_way[0] + s->under_way[1];
}

/* One direction gets all slices but one, or half of them while the other is under way, too. */
static uint32_t slices_most(const struct gpu_staging *s, enum ucm_copy_direction direction)
{
    return s->under_way[!direction] > 0 ? s->n_slices / 2 : s->n_slices - 1;
}

/* NULL: none is free for this direction. */
static struct gpu_slice *slice_begin(struct gpu *g, struct gpu_staging *s,
                                     enum ucm_copy_direction direction)
{
    struct gpu_slice *slice = s->slices;

    if (s->under_way[direction] >= slices_most(s, direction) || slices_under_way(s) == s->n_slices)
        return NULL;
    while (slice->state != SLICE_FREE)
        slice++;
    slice->direction = direction;
    slice->n_parts = 0;
    slice->all = (struct job_piece){0};
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
    atomic_fetch_add(&g->strategy_bytes[COPY_STAGED], slice->all.bytes);
    atomic_fetch_add(&g->strategy_launches[COPY_STAGED], 1);
    slice_free(g, slice);
    for (uint32_t i = 0; i < slice->n_parts; i++) {
        struct slice_part *part = &slice->parts[i];

        if (part->job->converts && slice->direction == UCM_COPY_DUMP)
            job_mark_unfit(part->job, &part->piece);
        gpu_piece_end(g, part->job);
    }
}

/* status: why, which the first part's job has been told. */
static void slice_fail(struct gpu *g, struct gpu_slice *slice, int status)
{
    struct ucm_error why = slice->parts[0].job->error; /* that job may end here */

    slice_free(g, slice);
    for (uint32_t i = 0; i < slice->n_parts; i++) {
        slice->parts[i].job->error = why;
        gpu_piece_fail(g, slice->parts[i].job, status);
    }
}

static void order_write(struct gpu_slice *slice)
{
    struct ucm_staging_order *order = &slice->staging->shared->orders[slice->index];
    const struct slice_part *first = slice->parts;
    uint32_t n = 0;

    order->direction = slice->direction;
    order->region = first->job->region->ring_region;
    order->first_plane = slice->all.first_plane;
    order->n_planes = slice->all.n_planes;
    order->n_items = slice->all.n_items;
    order->converts = first->job->converts;
    gpu_rope_order(first->job, &first->piece, order); /* such a slice has one part */
    for (uint32_t i = 0; i < slice->n_parts; i++) {
        const struct slice_part *part = &slice->parts[i];

        for (uint32_t k = 0; k < part->piece.n_items; k++)
            order->blocks[n++] = part->job->items[part->piece.first_item + k].block;
    }
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
    struct ucm_copy_item *items = l->items;
    CUresult r;
    uint32_t n;

    for (uint32_t i = 0; i < slice->n_parts; i++) {
        const struct slice_part *part = &slice->parts[i];

        memcpy(items, &part->job->items[part->piece.first_item],
               part->piece.n_items * sizeof(*items));
        items += part->piece.n_items;
    }
    n = gpu_dma_plan_slice(g, slice->parts[0].job, &slice->all, l->items, base);
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
    return gpu_launch_follow(g, direction, l, slice->parts[0].job, slice->all.cost, slice);
}

static void slice_move(struct gpu *g, struct gpu_slice *slice)
{
    CUresult r = slice_launch(g, slice);

    if (r != CUDA_SUCCESS)
        slice_fail(g, slice,
                   gpu_refuse(g, slice->parts[0].job, -EIO, r, "a slice can't be copied"));
}

/* ---- pieces ---- */

/* How much of a slice is used: a worker with larger slices gets no more of the bus in one go. */
static uint64_t slice_use(const struct gpu *g, const struct gpu_staging *s,
                          enum ucm_copy_direction direction)
{
    uint64_t most = gpu_launch_bytes(g, direction);

    return s->slice_bytes < most ? s->slice_bytes : most;
}

/* How many of the job's items fit beside so many others like them. */
static uint32_t items_left(const struct device_job *job, const struct gpu_staging *s, uint32_t had)
{
    uint64_t fit = s->slice_bytes / ucm_staging_pitch(job_item_bytes(job, NULL));
    uint32_t most = fit < UCM_STAGING_ITEMS ? (uint32_t)fit : UCM_STAGING_ITEMS;

    return most > had ? most - had : 0;
}

/* The job's next piece, of about `bytes` and as many items as a slice holds besides `had` others
 * like these: at least one more. As job_next_piece. */
static bool slice_next_piece(struct device_job *job, const struct gpu_staging *s, uint32_t had,
                             uint64_t bytes, struct job_piece *out)
{
    uint32_t most = items_left(job, s, had);

    return job_next_piece(job, bytes, gpu_rope_items(job, most, UCM_STAGING_SHIFT_WORDS), out);
}

/* ---- whether it pays ---- */

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
    times = (double)job_item_bytes(job, NULL) * job->n_items / (double)piece.bytes;
    memcpy(items, job->items, piece.n_items * sizeof(*items));
    n = gpu_dma_plan(g, job, &piece, items);
    idle_ns = times * costs_direct_ns(costs, extents, n, piece.bytes, g->slices > 0);
    /* K is re-rotated by a kernel, which would take turns with others'. */
    busy_ns = times * costs_direct_ns(costs, extents, job->shifts ? 0 : n, piece.bytes, true);
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
                    (job->shifts ? UCM_STAGING_KNOWS_SHIFTED : 0);

    return (atomic_load(&s->shared->words.knows) & asks) == asks;
}

/* The other way of an encoded job is the daemon's own kernel, over the bus: hardly faster than the
 * engines on an idle GPU, and hopeless beside others. Only narrow items of loads go there, which
 * kernels of the driver would move to a slice. */
static bool conversion_pays(const struct device_job *job)
{
    return job->op == DEVICE_DUMP || job_item_bytes(job, NULL) >= COSTS_RUN_LEAST;
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

/* ---- what goes into a slice ---- */

/* Dumps begin with a small slice, so that the bus has work soon. Each further one is gathered while
 * the bus moves those before, and may be as large. */
static uint64_t dump_piece(const struct gpu *g, const struct gpu_staging *s)
{
    uint64_t bytes = STAGING_FIRST_BYTES, use = slice_use(g, s, UCM_COPY_DUMP);

    for (uint32_t i = 0; i < s->n_slices; i++)
        if (s->slices[i].state != SLICE_FREE && s->slices[i].direction == UCM_COPY_DUMP)
            bytes += 2 * s->slices[i].all.bytes;
    return bytes < use ? bytes : use;
}

/* A load is done only when its last slice is scattered. So the last slice is small, and the bus
 * fills it while those before are scattered. Where more loads follow, they keep the bus busy
 * instead. Halving ends after three slices, as many as one direction may have. Of several loads,
 * what is little more than a slice goes in two halves: a slice with a block or two costs a full
 * one's time. */
static uint64_t load_piece(struct gpu *g, struct device_job *job, const struct gpu_staging *s)
{
    uint64_t left = (uint64_t)(job->n_items - job->next_item) * job_item_bytes(job, NULL);
    uint64_t whole = slice_use(g, s, UCM_COPY_LOAD), least = whole / STAGING_LAST_PART;
    bool more = job_queue_next(job);

    if (more && left > whole && left < 2 * whole)
        return left / 2;
    if (more || left > whole || left <= least)
        return whole;
    return left / 2 > least ? left / 2 : least;
}

/* Puts the job's next piece into the slice. Returns true for its last one. */
static bool slice_add(struct gpu_slice *slice, struct device_job *job, uint64_t bytes)
{
    struct slice_part *part = &slice->parts[slice->n_parts++];
    struct job_piece *all = &slice->all;
    bool last = slice_next_piece(job, slice->staging, all->n_items, bytes, &part->piece);

    part->job = job;
    all->first_plane = part->piece.first_plane;
    all->n_planes = part->piece.n_planes;
    all->n_items += part->piece.n_items;
    all->bytes += part->piece.bytes;
    all->cost += part->piece.cost;
    if (last)
        list_remove(&job->link);
    fair_queue_charge(job->queue, &job->who, part->piece.cost, &job->got);
    job->pieces++;
    return last;
}

/* May a piece of the job join those in the slice? Whoever has a region has its ring, too. Shifted
 * loads stay alone: their tables take the room that others' items would have. */
static bool slice_joins(const struct gpu_slice *slice, const struct device_job *job, uint64_t room)
{
    const struct device_job *first = slice->parts[0].job;

    return job->region == first->region && job->staging == first->staging &&
           job->converts == first->converts && job->first_plane == slice->all.first_plane &&
           job->n_planes == slice->all.n_planes && job->next_plane == 0 && !job->shifts &&
           !first->shifts && job_item_bytes(job, NULL) <= room &&
           items_left(job, slice->staging, slice->all.n_items) > 0;
}

/* A ring has few slices. With one small request in each, a tenant moves less than its due, however
 * much of it waits. So while several use the bus, the tenant's requests behind that in the ring's
 * last free slice share it with that one, rather than wait for another. next: behind it in the
 * queue; bytes: of all in the slice. */
static void slice_fill_up(struct gpu *g, struct gpu_slice *slice, struct device_job *next,
                          uint64_t bytes)
{
    const struct gpu_staging *s = slice->staging;
    uint32_t tenant = slice->parts[0].job->who.tenant;
    bool more = s->under_way[slice->direction] >= slices_most(s, slice->direction);

    for (unsigned i = 0; more && next && i < STAGING_LOOKS && slice->all.bytes < bytes; i++) {
        uint64_t room = bytes - slice->all.bytes;
        struct device_job *job = next;

        if (job->who.tenant != tenant)
            break;
        next = job_queue_next(job);
        if (slice_joins(slice, job, room) && (job->begun || gpu_job_begin(g, job) == 0) &&
            job->staged)
            more = slice_add(slice, job, room) && slice->n_parts < SLICE_PARTS;
    }
}

enum gpu_took gpu_staging_take(struct gpu *g, struct device_job *job)
{
    struct gpu_staging *s = job->staging->mapping;
    bool load = job->op == DEVICE_LOAD;
    enum ucm_copy_direction direction = job_direction(job);
    struct device_job *next = NULL;
    struct gpu_slice *slice;
    uint64_t bytes;

    if (staging_paused(s))
        return GPU_PAUSED;
    slice = slice_begin(g, s, direction);
    if (!slice)
        return GPU_FULL;
    if (g->contended[direction])
        next = job_queue_next(job);
    bytes = load ? load_piece(g, job, s) : dump_piece(g, s);
    if (slice_add(slice, job, bytes))
        slice_fill_up(g, slice, next, bytes);
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
    else if (peer_hung_up(
                 slice->parts[0].job->region->peer_fd)) /* of all parts the worker is the same */
        slice_fail(g, slice, job_refuse_deserted(slice->parts[0].job));
    else
        slice_post(slice);
}

void gpu_staging_lost(struct gpu *g, struct gpu_slice *slice)
{
    slice_fail(g, slice, gpu_refuse_failed(g, slice->parts[0].job));
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
    staging_mark_dead(s);
    slice_fail(g, slice,
               job_refuse(slice->parts[0].job, -EIO, UCM_WIRE_DEVICE,
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
        staging_mark_dead(s);
        slice_fail(g, slice,
                   job_refuse(slice->parts[0].job, -EIO, UCM_WIRE_DEVICE,
                              "the worker abandoned its ring"));
        return true;
    default:
        return claimed_poll(g, slice, now_ms);
    }
}

/* One part at a time, as each takes a place in the stream. */
static void part_straight(struct gpu *g, struct gpu_slice *slice)
{
    struct slice_part part = slice->parts[0];

    memmove(slice->parts, slice->parts + 1, --slice->n_parts * sizeof(part));
    if (slice->n_parts == 0)
        slice_free(g, slice);
    gpu_launch_piece(g, slice->direction, part.job, &part.piece);
}

static bool slice_step(struct gpu *g, struct gpu_slice *slice)
{
    bool moved = slice->state == SLICE_POSTED && slice_poll(g, slice, job_clock_ms());

    if ((slice->state != SLICE_GATHERED && slice->state != SLICE_STRAIGHT) ||
        atomic_load(&g->failed) || !gpu_launch_next(g, slice->direction))
        return moved;
    if (peer_hung_up(slice->parts[0].job->region->peer_fd))
        slice_fail(g, slice, job_refuse_deserted(slice->parts[0].job));
    else if (slice->state == SLICE_GATHERED)
        slice_move(g, slice);
    else
        part_straight(g, slice);
    return true;
}

/* Launched ones end with their launch (gpu_staging_lost). */
static bool slice_abandon(struct gpu *g, struct gpu_slice *slice)
{
    if (slice->state == SLICE_FILLING || slice->state == SLICE_EMPTYING)
        return false;
    if (slice->state != SLICE_POSTED)
        gpu_staging_lost(g, slice);
    for (uint32_t i = 0; slice->state == SLICE_POSTED && i < slice->n_parts; i++)
        gpu_job_fail(g, slice->parts[i].job, gpu_refuse_failed(g, slice->parts[i].job));
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
        staging_mark_dead(LIST_ENTRY(node, struct gpu_staging, link));
    (void)each_slice(g, slice_abandon);
}
