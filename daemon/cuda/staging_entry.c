#include "daemon/cuda/staging_entry.h"

#include <errno.h>
#include <string.h>

#define STAGING_FIXED_NS 30000.0 /* an entry's way besides the bus: posts, kernel, polls */
#define STAGING_PROBE_WORTH_NS 250000.0
#define STAGING_FIRST_BYTES (1ull << 20) /* a dump's first entry, while the bus is idle */
#define STAGING_LAST_PART 4              /* a load's last entry holds 1/4, unless loads follow */
#define STAGING_CLAIM_MS 20  /* a copy agent that claims later than that gets no processor */
#define STAGING_SLOW_MS 100  /* its kernels don't run: new copies go straight meanwhile */
#define STAGING_DONE_MS 5000 /* it will not finish at all */
#define STAGING_LOOKS 64     /* at jobs that may share an entry */

/* ---- entries ---- */

static uint32_t entries_under_way(const struct gpu_staging *s)
{
    return s->under_way[0] + s->under_way[1];
}

/* One direction gets all entries but one, or half of them while the other is under way, too. */
static uint32_t entries_most(const struct gpu_staging *s, enum ucm_copy_direction direction)
{
    return s->under_way[!direction] > 0 ? s->n_entries / 2 : s->n_entries - 1;
}

/* NULL: none is free for this direction. */
static struct gpu_staging_entry *entry_begin(struct gpu *g, struct gpu_staging *s,
                                             enum ucm_copy_direction direction)
{
    struct gpu_staging_entry *entry = s->entries;

    if (s->under_way[direction] >= entries_most(s, direction) ||
        entries_under_way(s) == s->n_entries)
        return NULL;
    while (entry->state != ENTRY_FREE)
        entry++;
    entry->direction = direction;
    entry->n_parts = 0;
    entry->all = (struct job_piece){0};
    entry->tag = ucm_staging_tag(s->generation, s->next_number++);
    if (entries_under_way(s) == 0) {
        atomic_store(&s->shared->words.soon, 1);
        ucm_staging_wake(s->shared); /* it is awake when the order is posted */
    }
    s->under_way[direction]++;
    g->entries++;
    return entry;
}

static void entry_free(struct gpu *g, struct gpu_staging_entry *entry)
{
    struct gpu_staging *s = entry->staging;

    entry->state = ENTRY_FREE;
    s->under_way[entry->direction]--;
    g->entries--;
    if (entries_under_way(s) == 0)
        atomic_store(&s->shared->words.soon, 0);
}

static void entry_end(struct gpu *g, struct gpu_staging_entry *entry)
{
    atomic_fetch_add(&g->strategy_bytes[COPY_STAGED], entry->all.bytes);
    atomic_fetch_add(&g->strategy_launches[COPY_STAGED], 1);
    entry_free(g, entry);
    for (uint32_t i = 0; i < entry->n_parts; i++) {
        struct entry_part *part = &entry->parts[i];

        if (part->job->converts && entry->direction == UCM_COPY_DUMP)
            job_mark_unfit(part->job, &part->piece);
        gpu_piece_end(g, part->job);
    }
}

/* status: why, which the first part's job has been told. */
static void entry_fail(struct gpu *g, struct gpu_staging_entry *entry, int status)
{
    struct ucm_error why = entry->parts[0].job->error; /* that job may end here */

    entry_free(g, entry);
    for (uint32_t i = 0; i < entry->n_parts; i++) {
        entry->parts[i].job->error = why;
        gpu_piece_fail(g, entry->parts[i].job, status);
    }
}

static void order_write(struct gpu_staging_entry *entry)
{
    struct ucm_staging_order *order = &entry->staging->shared->orders[entry->index];
    const struct entry_part *first = entry->parts;
    uint32_t n = 0;

    order->direction = entry->direction;
    order->region = first->job->region->ring_region;
    order->first_plane = entry->all.first_plane;
    order->n_planes = entry->all.n_planes;
    order->n_items = entry->all.n_items;
    order->converts = first->job->converts;
    gpu_rope_order(first->job, &first->piece, order); /* such an entry has one part */
    for (uint32_t i = 0; i < entry->n_parts; i++) {
        const struct entry_part *part = &entry->parts[i];

        for (uint32_t k = 0; k < part->piece.n_items; k++)
            order->blocks[n++] = part->job->items[part->piece.first_item + k].block;
    }
}

static void entry_post(struct gpu_staging_entry *entry)
{
    entry->state = ENTRY_POSTED;
    entry->posted_ms = job_clock_ms();
    ucm_staging_post(entry->staging->shared, entry->index, entry->tag);
}

/* Launches the copy between slots and entry; the stream has a place for it. */
static CUresult entry_launch(struct gpu *g, struct gpu_staging_entry *entry)
{
    enum ucm_copy_direction direction = entry->direction;
    struct gpu_launch *l = gpu_launch_next(g, direction);
    uint64_t base = entry->staging->base + entry->index * entry->staging->entry_bytes;
    struct ucm_copy_item *items = l->items;
    CUresult r;
    uint32_t n;

    for (uint32_t i = 0; i < entry->n_parts; i++) {
        const struct entry_part *part = &entry->parts[i];

        memcpy(items, &part->job->items[part->piece.first_item],
               part->piece.n_items * sizeof(*items));
        items += part->piece.n_items;
    }
    n = gpu_dma_plan_entry(g, entry->parts[0].job, &entry->all, l->items, base);
    if (n == 0) {
        entry->state = ENTRY_STRAIGHT;
        return CUDA_SUCCESS;
    }
    l->strategy = COPY_STAGED;
    l->cost_ns = (uint64_t)costs_dma_ns(&g->costs.of[direction], g->dma.extents, n);
    l->begun_ns = uv_hrtime();
    r = gpu_dma_launch(g, direction, n);
    if (r != CUDA_SUCCESS)
        return r;
    entry->state = direction == UCM_COPY_LOAD ? ENTRY_FILLING : ENTRY_EMPTYING;
    return gpu_launch_follow(g, direction, l, entry->parts[0].job, entry->all.cost, entry);
}

static void entry_move(struct gpu *g, struct gpu_staging_entry *entry)
{
    CUresult r = entry_launch(g, entry);

    if (r != CUDA_SUCCESS)
        entry_fail(g, entry,
                   gpu_refuse(g, entry->parts[0].job, -EIO, r, "an entry can't be copied"));
}

/* ---- pieces ---- */

/* How much of an entry is used, so that a worker with larger entries does not get more of the bus
 * at once. */
static uint64_t entry_use(const struct gpu *g, const struct gpu_staging *s,
                          enum ucm_copy_direction direction)
{
    uint64_t most = gpu_launch_bytes(g, direction);

    return s->entry_bytes < most ? s->entry_bytes : most;
}

/* How many of the job's items fit alongside so many others like them. */
static uint32_t items_left(const struct device_job *job, const struct gpu_staging *s, uint32_t had)
{
    uint64_t fit = s->entry_bytes / ucm_staging_pitch(job_item_bytes(job, NULL));
    uint32_t most = fit < UCM_STAGING_ITEMS ? (uint32_t)fit : UCM_STAGING_ITEMS;

    return most > had ? most - had : 0;
}

/* The job's next piece, of about `bytes` and as many items as an entry holds besides `had` others
 * like these: at least one more. As job_next_piece. */
static bool entry_next_piece(struct device_job *job, const struct gpu_staging *s, uint32_t had,
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

/* Compares both ways of the first full entry, scaled to the whole job. While entries are under way
 * our own kernels would take turns with the copy agent's, as with any other process's. An entry's
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

    (void)entry_next_piece(&first, s, 0, entry_use(g, s, direction), &piece);
    times = (double)job_item_bytes(job, NULL) * job->n_items / (double)piece.bytes;
    memcpy(items, job->items, piece.n_items * sizeof(*items));
    n = gpu_dma_plan(g, job, &piece, items);
    idle_ns = times * costs_direct_ns(costs, extents, n, piece.bytes, g->entries > 0);
    /* K is re-rotated by a kernel, which would take turns with others'. */
    busy_ns = times * costs_direct_ns(costs, extents, job->shifts ? 0 : n, piece.bytes, true);
    n = gpu_dma_plan_entry(g, job, &piece, items, s->base);
    staged_ns = times * costs_dma_ns(costs, extents, n);
    if (g->entries == 0 && g->streams[direction].n == 0)
        staged_ns += STAGING_FIXED_NS;
    /* Narrower runs are moved by kernels, which would take turns with the copy agent's. */
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

/* Does the copy agent know what the job asks of it? */
static bool copy_agent_knows(const struct gpu_staging *s, const struct device_job *job)
{
    uint32_t asks = (job->converts ? UCM_STAGING_KNOWS_CONVERSION : 0) |
                    (job->shifts ? UCM_STAGING_KNOWS_SHIFTED : 0);

    return (atomic_load(&s->shared->words.knows) & asks) == asks;
}

/* The other way of an encoded job is the daemon's own kernel, over the bus: hardly faster than the
 * engines on an idle GPU, and hopeless alongside others. Only narrow items of loads go there, which
 * kernels of the driver would move to an entry. */
static bool conversion_pays(const struct device_job *job)
{
    return job->op == DEVICE_DUMP || job_item_bytes(job, NULL) >= COSTS_RUN_LEAST;
}

static bool pays(struct gpu *g, struct device_job *job)
{
    enum copy_strategy wanted = g->config.strategy;
    const struct gpu_staging *s = job->staging ? job->staging->mapping : NULL;

    if (!s || wanted == COPY_DMA || wanted == COPY_SM || staging_paused(s) ||
        largest_plane(job) > s->entry_bytes || !copy_agent_knows(s, job))
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

/* ---- what goes into an entry ---- */

/* Dumps begin with a small entry, so that the bus has work soon. Each further one is gathered while
 * the bus moves those before, and may be as large. */
static uint64_t dump_piece(const struct gpu *g, const struct gpu_staging *s)
{
    uint64_t bytes = STAGING_FIRST_BYTES, use = entry_use(g, s, UCM_COPY_DUMP);

    for (uint32_t i = 0; i < s->n_entries; i++)
        if (s->entries[i].state != ENTRY_FREE && s->entries[i].direction == UCM_COPY_DUMP)
            bytes += 2 * s->entries[i].all.bytes;
    return bytes < use ? bytes : use;
}

/* A load is done only when its last entry is scattered. So the last entry is small, and the bus
 * fills it while those before are scattered. Where more loads follow, they keep the bus busy
 * instead. Halving ends after three entries, as many as one direction may have. With several loads,
 * a rest slightly larger than an entry goes in two halves: an entry with a block or two takes as
 * long as a full one. */
static uint64_t load_piece(struct gpu *g, struct device_job *job, const struct gpu_staging *s)
{
    uint64_t left = (uint64_t)(job->n_items - job->next_item) * job_item_bytes(job, NULL);
    uint64_t whole = entry_use(g, s, UCM_COPY_LOAD), least = whole / STAGING_LAST_PART;
    bool more = job_queue_next(job);

    if (more && left > whole && left < 2 * whole)
        return left / 2;
    if (more || left > whole || left <= least)
        return whole;
    return left / 2 > least ? left / 2 : least;
}

/* Puts the job's next piece into the entry. Returns true for its last one. */
static bool entry_add(struct gpu_staging_entry *entry, struct device_job *job, uint64_t bytes)
{
    struct entry_part *part = &entry->parts[entry->n_parts++];
    struct job_piece *all = &entry->all;
    bool last = entry_next_piece(job, entry->staging, all->n_items, bytes, &part->piece);

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

/* May a piece of the job join those in the entry? Whoever has a region has its ring, too. Shifted
 * loads stay alone: their tables take the room that others' items would have. */
static bool entry_joins(const struct gpu_staging_entry *entry, const struct device_job *job,
                        uint64_t room)
{
    const struct device_job *first = entry->parts[0].job;

    return job->region == first->region && job->staging == first->staging &&
           job->converts == first->converts && job->first_plane == entry->all.first_plane &&
           job->n_planes == entry->all.n_planes && job->next_plane == 0 && !job->shifts &&
           !first->shifts && job_item_bytes(job, NULL) <= room &&
           items_left(job, entry->staging, entry->all.n_items) > 0;
}

/* A ring has few entries. With one small request in each, a tenant moves less than its due, however
 * much of it waits. So while several use the bus, the tenant's next requests share the ring's last
 * free entry, rather than wait for another. next: after it in the queue; bytes: of all in the
 * entry. */
static void entry_fill_up(struct gpu *g, struct gpu_staging_entry *entry, struct device_job *next,
                          uint64_t bytes)
{
    const struct gpu_staging *s = entry->staging;
    uint32_t tenant = entry->parts[0].job->who.tenant;
    bool more = s->under_way[entry->direction] >= entries_most(s, entry->direction);

    for (unsigned i = 0; more && next && i < STAGING_LOOKS && entry->all.bytes < bytes; i++) {
        uint64_t room = bytes - entry->all.bytes;
        struct device_job *job = next;

        if (job->who.tenant != tenant)
            break;
        next = job_queue_next(job);
        if (entry_joins(entry, job, room) && (job->begun || gpu_job_begin(g, job) == 0) &&
            job->staged)
            more = entry_add(entry, job, room) && entry->n_parts < ENTRY_PARTS;
    }
}

enum gpu_took gpu_staging_take(struct gpu *g, struct device_job *job)
{
    struct gpu_staging *s = job->staging->mapping;
    bool load = job->op == DEVICE_LOAD;
    enum ucm_copy_direction direction = job_direction(job);
    struct device_job *next = NULL;
    struct gpu_staging_entry *entry;
    uint64_t bytes;

    if (staging_paused(s))
        return GPU_PAUSED;
    entry = entry_begin(g, s, direction);
    if (!entry)
        return GPU_FULL;
    if (g->contended[direction])
        next = job_queue_next(job);
    bytes = load ? load_piece(g, job, s) : dump_piece(g, s);
    if (entry_add(entry, job, bytes))
        entry_fill_up(g, entry, next, bytes);
    order_write(entry);
    if (load)
        entry_move(g, entry);
    else
        entry_post(entry);
    return GPU_TOOK;
}

/* ---- what goes on ---- */

void gpu_staging_launched(struct gpu *g, struct gpu_staging_entry *entry)
{
    if (entry->state != ENTRY_FILLING)
        entry_end(g, entry);
    else if (peer_hung_up(
                 entry->parts[0].job->region->peer_fd)) /* of all parts the worker is the same */
        entry_fail(g, entry, job_refuse_deserted(entry->parts[0].job));
    else
        entry_post(entry);
}

void gpu_staging_lost(struct gpu *g, struct gpu_staging_entry *entry)
{
    entry_fail(g, entry, gpu_refuse_failed(g, entry->parts[0].job));
}

/* The order is claimed and not done. A worker that was stopped right before its launch may still
 * begin the kernel, at any time: when we give up, the ring is retired and the copy fails. */
static bool claimed_poll(struct gpu *g, struct gpu_staging_entry *entry, uint64_t now_ms)
{
    struct gpu_staging *s = entry->staging;
    bool runs = worker_seen(&s->worker, NULL, now_ms);

    if (runs && now_ms >= entry->posted_ms + STAGING_SLOW_MS)
        (void)backoff_fail(&s->backoff, now_ms);
    if (runs && now_ms < entry->posted_ms + STAGING_DONE_MS)
        return false;
    staging_mark_dead(s);
    entry_fail(g, entry,
               job_refuse(entry->parts[0].job, -EIO, UCM_WIRE_DEVICE,
                          runs ? "the worker's copy agent claimed an entry and did not move it"
                               : "the worker died while it moved an entry"));
    return true;
}

static bool unclaimed_poll(struct gpu_staging_entry *entry, uint64_t now_ms)
{
    struct gpu_staging *s = entry->staging;

    if (now_ms < entry->posted_ms + STAGING_CLAIM_MS && !s->retired &&
        worker_seen(&s->worker, NULL, now_ms))
        return false;
    if (!ucm_staging_move(s->shared, entry->index, entry->tag, STAGING_POSTED, STAGING_REVOKED))
        return false; /* claimed just now */
    (void)backoff_fail(&s->backoff, now_ms);
    entry->state = ENTRY_STRAIGHT;
    return true;
}

static bool entry_poll(struct gpu *g, struct gpu_staging_entry *entry, uint64_t now_ms)
{
    struct gpu_staging *s = entry->staging;
    uint64_t state = atomic_load(&s->shared->words.entries[entry->index].state);

    if (ucm_staging_tag_of(state) != entry->tag)
        return claimed_poll(g, entry, now_ms);
    switch (ucm_staging_phase_of(state)) {
    case STAGING_POSTED:
        return unclaimed_poll(entry, now_ms);
    case STAGING_DONE:
        if (entry->direction == UCM_COPY_DUMP)
            entry->state = ENTRY_GATHERED;
        else
            entry_end(g, entry);
        return true;
    case STAGING_REFUSED:
        (void)backoff_fail(&s->backoff, now_ms);
        entry->state = ENTRY_STRAIGHT;
        return true;
    case STAGING_REVOKED: /* by the worker, which has given up this connection */
        staging_mark_dead(s);
        entry_fail(g, entry,
                   job_refuse(entry->parts[0].job, -EIO, UCM_WIRE_DEVICE,
                              "the worker abandoned its ring"));
        return true;
    default:
        return claimed_poll(g, entry, now_ms);
    }
}

/* One part at a time, as each takes a place in the stream. */
static void part_straight(struct gpu *g, struct gpu_staging_entry *entry)
{
    struct entry_part part = entry->parts[0];

    memmove(entry->parts, entry->parts + 1, --entry->n_parts * sizeof(part));
    if (entry->n_parts == 0)
        entry_free(g, entry);
    gpu_launch_piece(g, entry->direction, part.job, &part.piece);
}

static bool entry_step(struct gpu *g, struct gpu_staging_entry *entry)
{
    bool moved = entry->state == ENTRY_POSTED && entry_poll(g, entry, job_clock_ms());

    if ((entry->state != ENTRY_GATHERED && entry->state != ENTRY_STRAIGHT) ||
        atomic_load(&g->failed) || !gpu_launch_next(g, entry->direction))
        return moved;
    if (peer_hung_up(entry->parts[0].job->region->peer_fd))
        entry_fail(g, entry, job_refuse_deserted(entry->parts[0].job));
    else if (entry->state == ENTRY_GATHERED)
        entry_move(g, entry);
    else
        part_straight(g, entry);
    return true;
}

/* Launched ones end with their launch (gpu_staging_lost). */
static bool entry_abandon(struct gpu *g, struct gpu_staging_entry *entry)
{
    if (entry->state == ENTRY_FILLING || entry->state == ENTRY_EMPTYING)
        return false;
    if (entry->state != ENTRY_POSTED)
        gpu_staging_lost(g, entry);
    for (uint32_t i = 0; entry->state == ENTRY_POSTED && i < entry->n_parts; i++)
        gpu_job_fail(g, entry->parts[i].job, gpu_refuse_failed(g, entry->parts[i].job));
    return true;
}

/* Calls f for every entry that is not free; returns whether any call returned true. */
static bool each_entry(struct gpu *g, bool (*f)(struct gpu *g, struct gpu_staging_entry *entry))
{
    bool moved = false;

    for (struct list *node = g->stagings.next; node != &g->stagings && g->entries > 0;
         node = node->next) {
        struct gpu_staging *s = LIST_ENTRY(node, struct gpu_staging, link);

        for (uint32_t i = 0; i < s->n_entries; i++)
            if (s->entries[i].state != ENTRY_FREE)
                moved |= f(g, &s->entries[i]);
    }
    return moved;
}

bool gpu_stagings_step(struct gpu *g)
{
    return each_entry(g, entry_step);
}

/* A copy agent may still write what it has claimed: such an entry ends as ever (gpu_stagings_step),
 * and its job fails with it. */
void gpu_stagings_abandon(struct gpu *g)
{
    for (struct list *node = g->stagings.next; node != &g->stagings; node = node->next)
        staging_mark_dead(LIST_ENTRY(node, struct gpu_staging, link));
    (void)each_entry(g, entry_abandon);
}
