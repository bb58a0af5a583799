#include "daemon/device/gpu.h"

#include "proto/staging.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#define RING_FIRST_BYTES (1ull << 20) /* a dump's first slice, while the bus has nothing */
#define RING_LAST_SHARE 4             /* of a slice: a load's last one, unless more loads follow */
#define RING_FIXED_NS 30000.0         /* a slice's way besides the bus: posts, the kernel, looks */
#define RING_PROBE_WORTH_NS 250000.0
#define RING_CLAIM_MS 20  /* a companion that takes longer does not get its processor */
#define RING_SLOW_MS 100  /* its kernels don't get to run: new copies take other ways meanwhile */
#define RING_DONE_MS 5000 /* and one that takes this long does not run at all */
#define RING_REST_MS 1000 /* how long one that was too slow is left alone */
#define RING_SEEN_MS 10
#define RING_RUN_LEAST                                                                             \
    32768u /* narrower runs to the GPU are not all the engines' work: with the                     \
              companion's kernels they would run in turns */

/* FILLING, EMPTYING: the engines move the slice. POSTED: the companion does. GATHERED: a dump's
 * bytes are in the slice. AGAIN: the companion did nothing, the piece takes the straight way. */
enum turn_state {
    TURN_FREE,
    TURN_FILLING,
    TURN_POSTED,
    TURN_GATHERED,
    TURN_EMPTYING,
    TURN_AGAIN,
};

struct gpu_turn {
    struct gpu_ring *ring;
    uint32_t slice, tag;
    enum turn_state state;
    enum ucm_copy_direction direction;
    struct device_job *job;
    struct job_piece piece;
    uint64_t posted_ms;
};

struct gpu_ring {
    struct list link;
    struct worker worker;
    uint64_t seen_ms;
    bool seen_alive;
    struct gpu_ipc *ipc;
    CUdeviceptr base; /* of the first slice */
    struct ucm_staging *shared;
    uint64_t slice_bytes;
    uint32_t slices, generation, next_turn;
    uint32_t under_way[2];   /* turns, by direction */
    uint64_t rests_until_ms; /* UINT64_MAX: for good */
    uint32_t jobs;           /* copies taken and not finished that may use it */
    struct device_job *last; /* the CLOSE that waits for them */
    struct gpu_turn turns[UCM_MAX_SLICES];
};

/* ---- life ---- */

static int ring_map(struct device_job *job, struct gpu_ring *ring)
{
    int rc = job_check_memfd(job, "the ring's descriptor", job->ring->fd, sizeof(*ring->shared));
    void *p;

    if (rc < 0)
        return rc;
    p = mmap(NULL, sizeof(*ring->shared), PROT_READ | PROT_WRITE, MAP_SHARED, job->ring->fd, 0);
    if (p == MAP_FAILED)
        return job_refuse(job, -EINVAL, UCM_WIRE_DEVICE, "the ring can't be mapped: %s",
                          strerror(errno));
    ring->shared = p;
    return 0;
}

static void ring_free(struct gpu_ring *ring)
{
    if (ring->shared)
        munmap(ring->shared, sizeof(*ring->shared));
    if (ring->ipc)
        gpu_ipc_put(ring->ipc);
    worker_close(&ring->worker);
    free(ring);
}

/* Two rings on the same bytes would write over each other's slices: a worker that connects anew
 * must wait until what the old connection began has ended. */
static int ring_refuse_shared(struct gpu *g, struct device_job *job, const struct gpu_ring *ring)
{
    uint64_t end = ring->base + ring->slices * ring->slice_bytes;

    for (struct list *node = g->rings.next; node != &g->rings; node = node->next) {
        const struct gpu_ring *other = LIST_ENTRY(node, struct gpu_ring, link);

        if (ring->base < other->base + other->slices * other->slice_bytes && other->base < end)
            return job_refuse(job, -EBUSY, UCM_WIRE_BUSY,
                              "the ring's memory is still in use by an older connection's ring");
    }
    return 0;
}

static int ring_fill(struct gpu *g, struct device_job *job, struct gpu_ring *ring)
{
    const struct device_staging *wanted = job->ring;
    struct gpu_ipc_wish wish = {.ipc = wanted->ipc,
                                .offset = wanted->offset,
                                .bytes = wanted->slices * wanted->slice_bytes,
                                .name = "the ring's handle"};
    uint32_t random;
    int rc = worker_open(&ring->worker, wanted->pid);

    if (rc < 0)
        return job_refuse(job, -EINVAL, UCM_WIRE_DEVICE,
                          "the worker's process can't be seen from here (another pid namespace?), "
                          "so it can have no ring");
    rc = ring_map(job, ring);
    if (rc == 0)
        rc = gpu_ipc_get(g, job, &wish, &ring->worker, &ring->ipc);
    if (rc < 0)
        return rc;
    ring->base = ring->ipc->address + wanted->offset;
    ring->slices = wanted->slices;
    ring->slice_bytes = wanted->slice_bytes;
    rc = ring_refuse_shared(g, job, ring);
    if (rc < 0)
        return rc;
    if (getrandom(&random, sizeof(random), 0) != (ssize_t)sizeof(random))
        return job_refuse(job, -EIO, UCM_WIRE_INTERNAL, "no random number for the ring");
    ring->generation = ucm_staging_generation_of(random);
    for (uint32_t i = 0; i < ring->slices; i++)
        ring->turns[i] = (struct gpu_turn){.ring = ring, .slice = i};
    return 0;
}

int gpu_ring_open(struct gpu *g, struct device_job *job)
{
    struct gpu_ring *ring = calloc(1, sizeof(*ring));
    int rc;

    if (!ring)
        return job_refuse(job, -EIO, UCM_WIRE_NO_MEMORY, "no memory for the ring");
    ring->worker.fd = -1;
    rc = ring_fill(g, job, ring);
    if (rc < 0) {
        ring_free(ring);
        return rc;
    }
    atomic_store(&ring->shared->words.generation, ring->generation);
    close(job->ring->fd);
    job->ring->fd = -1;
    job->ring->mapping = ring;
    list_push_back(&g->rings, &ring->link);
    return 0;
}

void gpu_ring_close(struct device_staging *wanted)
{
    struct gpu_ring *ring = wanted->mapping;

    atomic_store(&ring->shared->words.dead, 1);
    ucm_staging_wake(ring->shared);
    list_remove(&ring->link);
    ring_free(ring);
    wanted->mapping = NULL;
}

void gpu_ring_ref(struct device_staging *ring)
{
    ((struct gpu_ring *)ring->mapping)->jobs++;
}

struct device_job *gpu_ring_unref(struct device_staging *wanted)
{
    struct gpu_ring *ring = wanted->mapping;

    return --ring->jobs == 0 ? ring->last : NULL;
}

bool gpu_ring_may_close(struct device_job *close)
{
    struct gpu_ring *ring = close->ring->mapping;

    if (ring->jobs == 0)
        return true;
    ring->last = close;
    return false;
}

/* ---- the worker ---- */

static bool ring_alive(struct gpu_ring *ring, uint64_t now_ms)
{
    if (now_ms >= ring->seen_ms + RING_SEEN_MS) {
        ring->seen_ms = now_ms;
        ring->seen_alive = worker_alive(&ring->worker);
    }
    return ring->seen_alive;
}

static void ring_retire(struct gpu_ring *ring)
{
    atomic_store(&ring->shared->words.dead, 1);
    ring->rests_until_ms = UINT64_MAX;
}

static void ring_rest(struct gpu_ring *ring, uint64_t now_ms)
{
    if (ring->rests_until_ms != UINT64_MAX)
        ring->rests_until_ms = now_ms + RING_REST_MS;
}

static bool ring_rests(const struct gpu_ring *ring)
{
    return ring->rests_until_ms != 0 && job_clock_ms() < ring->rests_until_ms;
}

/* ---- turns ---- */

static struct gpu_turn *turn_begin(struct gpu *g, struct gpu_ring *ring,
                                   enum ucm_copy_direction direction)
{
    uint32_t limit = ring->under_way[!direction] > 0 ? ring->slices / 2 : ring->slices - 1;
    struct gpu_turn *turn = ring->turns;

    if (ring->under_way[direction] >= limit ||
        ring->under_way[0] + ring->under_way[1] == ring->slices)
        return NULL;
    while (turn->state != TURN_FREE)
        turn++;
    turn->direction = direction;
    turn->tag = ucm_staging_tag(ring->generation, ring->next_turn++);
    if (ring->under_way[0] + ring->under_way[1] == 0) {
        atomic_store(&ring->shared->words.soon, 1);
        ucm_staging_wake(ring->shared); /* it is awake when the slice is there */
    }
    ring->under_way[direction]++;
    g->turns++;
    return turn;
}

static void turn_free(struct gpu *g, struct gpu_turn *turn)
{
    struct gpu_ring *ring = turn->ring;

    turn->state = TURN_FREE;
    ring->under_way[turn->direction]--;
    g->turns--;
    if (ring->under_way[0] + ring->under_way[1] == 0)
        atomic_store(&ring->shared->words.soon, 0);
}

static void turn_end(struct gpu *g, struct gpu_turn *turn)
{
    atomic_fetch_add(&g->strategy_bytes[COPY_STAGED], turn->piece.bytes);
    atomic_fetch_add(&g->strategy_launches[COPY_STAGED], 1);
    turn_free(g, turn);
    gpu_piece_end(g, turn->job);
}

static void turn_fail(struct gpu *g, struct gpu_turn *turn, int status)
{
    turn_free(g, turn);
    gpu_piece_fail(g, turn->job, status);
}

static void order_write(struct gpu_turn *turn)
{
    struct ucm_staging_order *order = &turn->ring->shared->orders[turn->slice];
    const struct device_job *job = turn->job;

    order->direction = turn->direction;
    order->region = job->region->ring_region;
    order->first_plane = turn->piece.first_plane;
    order->n_planes = turn->piece.n_planes;
    order->n_items = turn->piece.n_items;
    for (uint32_t i = 0; i < turn->piece.n_items; i++)
        order->blocks[i] = job->items[turn->piece.first_item + i].block;
}

static void turn_post(struct gpu_turn *turn)
{
    turn->state = TURN_POSTED;
    turn->posted_ms = job_clock_ms();
    ucm_staging_post(turn->ring->shared, turn->slice, turn->tag);
}

/* Between the slots and the slice; the stream has room. */
static CUresult turn_move(struct gpu *g, struct gpu_turn *turn)
{
    struct gpu_launch *l = gpu_launch_next(g, turn->direction);
    const struct job_piece *piece = &turn->piece;
    uint64_t slice = turn->ring->base + turn->slice * turn->ring->slice_bytes;
    uint32_t n = gpu_dma_plan_slice(g, turn->job, piece, l->items, slice,
                                    ucm_staging_pitch(piece->bytes / piece->n_items));
    CUresult r;

    if (n == 0) {
        turn->state = TURN_AGAIN;
        return CUDA_SUCCESS;
    }
    l->strategy = COPY_STAGED;
    l->cost_ns = (uint64_t)costs_dma_ns(&g->costs.of[turn->direction], gpu_dma_extents(g), n);
    l->begun_ns = uv_hrtime();
    r = gpu_dma_launch(g, g->streams[turn->direction].stream, turn->direction, n);
    if (r != CUDA_SUCCESS)
        return r;
    turn->state = turn->direction == UCM_COPY_LOAD ? TURN_FILLING : TURN_EMPTYING;
    return gpu_launch_follow(g, turn->direction, l, turn->job, piece->bytes, turn);
}

static void turn_move_or_fail(struct gpu *g, struct gpu_turn *turn)
{
    CUresult r = turn_move(g, turn);

    if (r != CUDA_SUCCESS)
        turn_fail(g, turn, gpu_refuse(g, turn->job, -EIO, r, "a slice can't be copied"));
}

/* ---- the planner ---- */

static uint32_t largest_chunk(const struct device_job *job)
{
    const struct ucm_copy_plane *planes = &job->region->planes[job->first_plane];
    uint32_t largest = 0;

    for (uint32_t p = 0; p < job->n_planes; p++)
        if (planes[p].chunk > largest)
            largest = planes[p].chunk;
    return largest;
}

/* What of a slice is used: a worker with larger ones gets no more of the bus in one go. */
static uint64_t slice_use(const struct gpu_ring *ring)
{
    return ring->slice_bytes < GPU_LAUNCH_BYTES ? ring->slice_bytes : GPU_LAUNCH_BYTES;
}

static bool next_piece(struct device_job *job, const struct gpu_ring *ring, uint64_t bytes,
                       struct job_piece *out)
{
    uint64_t most = ring->slice_bytes / ucm_staging_pitch(job_item_bytes(job));

    return job_next_piece(job, bytes, most < UCM_STAGING_ITEMS ? (uint32_t)most : UCM_STAGING_ITEMS,
                          out);
}

/* By who else runs. The answer is looked for only where it matters, and at once where the job takes
 * longer than a probe. */
static bool staged_pays(struct gpu *g, double staged_ns, double idle_ns, double busy_ns)
{
    bool if_idle = costs_staged_pays(staged_ns, idle_ns, false);
    bool if_busy = costs_staged_pays(staged_ns, busy_ns, false);
    bool if_pauses = costs_staged_pays(staged_ns, busy_ns, true);

    if ((if_idle == if_busy && if_busy == if_pauses) ||
        !(idle_ns > RING_PROBE_WORTH_NS ? gpu_others_look(g) : gpu_others_run(g)))
        return if_idle;
    return g->busy.pauses ? if_pauses : if_busy;
}

/* Both ways of the first full slice, and what its share of the whole job costs besides. Kernels of
 * ours would take turns with the companion's as with any other process's. What a slice takes
 * besides the bus nobody waits for while the bus has other work. */
static bool staged_is_faster(struct gpu *g, const struct device_job *job,
                             const struct gpu_ring *ring)
{
    enum ucm_copy_direction direction = job->op == DEVICE_DUMP ? UCM_COPY_DUMP : UCM_COPY_LOAD;
    const struct costs *costs = &g->costs.of[direction];
    struct ucm_copy_item *items = gpu_launch_next(g, direction)->items;
    struct device_job first = *job;
    struct job_piece piece;
    double times, idle_ns, busy_ns, staged_ns;
    uint32_t n;

    (void)next_piece(&first, ring, slice_use(ring), &piece);
    times = (double)job_item_bytes(job) * job->n_items / (double)piece.bytes;
    memcpy(items, job->items, piece.n_items * sizeof(*items));
    n = gpu_dma_plan(g, job, &piece, items);
    idle_ns = times * costs_direct_ns(costs, gpu_dma_extents(g), n, piece.bytes, g->turns > 0);
    busy_ns = times * costs_direct_ns(costs, gpu_dma_extents(g), n, piece.bytes, true);
    n = gpu_dma_plan_slice(g, job, &piece, items, ring->base,
                           ucm_staging_pitch(piece.bytes / piece.n_items));
    staged_ns = times * costs_dma_ns(costs, gpu_dma_extents(g), n);
    if (g->turns == 0 && g->streams[direction].n == 0)
        staged_ns += RING_FIXED_NS;
    if (n == 0 || (direction == UCM_COPY_LOAD && piece.bytes / piece.n_items < RING_RUN_LEAST))
        return false;
    return staged_pays(g, staged_ns, idle_ns, busy_ns);
}

bool gpu_ring_pays(struct gpu *g, struct device_job *job)
{
    enum copy_strategy wanted = g->config.strategy;
    const struct gpu_ring *ring = job->ring ? job->ring->mapping : NULL;

    if (!ring || job->region->ring_region == 0 || wanted == COPY_DMA || wanted == COPY_SM ||
        ring_rests(ring) || largest_chunk(job) > ring->slice_bytes)
        return false;
    return wanted == COPY_STAGED || staged_is_faster(g, job, ring);
}

/* Dumps begin with a small slice, so that the bus has work soon; the next is gathered while it
 * moves those before. */
static uint64_t dump_piece(const struct gpu_ring *ring)
{
    uint64_t bytes = RING_FIRST_BYTES;

    for (uint32_t i = 0; i < ring->slices; i++)
        if (ring->turns[i].state != TURN_FREE && ring->turns[i].direction == UCM_COPY_DUMP)
            bytes += 2 * ring->turns[i].piece.bytes;
    return bytes < slice_use(ring) ? bytes : slice_use(ring);
}

/* The bus has work at once, but the job is done only when its last slice is scattered: that is a
 * small one, and the bus fills it while those before are scattered. Where more loads follow, they
 * keep the bus busy meanwhile. The halves are three, as many slices as one direction may have. */
static uint64_t load_piece(const struct gpu *g, const struct device_job *job,
                           const struct gpu_ring *ring)
{
    uint64_t rest = (uint64_t)(job->n_items - job->next_item) * job_item_bytes(job);
    uint64_t whole = slice_use(ring), least = whole / RING_LAST_SHARE;

    if (rest > whole || rest <= least || job_queue_next_of(&g->ready, job))
        return whole;
    return rest / 2 > least ? rest / 2 : least;
}

enum gpu_ring_took gpu_ring_take(struct gpu *g, struct device_job *job)
{
    struct gpu_ring *ring = job->ring->mapping;
    struct gpu_turn *turn;

    if (ring_rests(ring))
        return GPU_RING_RESTS;
    turn = turn_begin(g, ring, job->op == DEVICE_DUMP ? UCM_COPY_DUMP : UCM_COPY_LOAD);
    if (!turn)
        return GPU_RING_FULL;
    turn->job = job;
    if (next_piece(job, ring,
                   turn->direction == UCM_COPY_DUMP ? dump_piece(ring) : load_piece(g, job, ring),
                   &turn->piece))
        list_remove(&job->link);
    job->pieces++;
    order_write(turn);
    if (turn->direction == UCM_COPY_DUMP)
        turn_post(turn);
    else
        turn_move_or_fail(g, turn);
    return GPU_RING_TOOK;
}

/* ---- what goes on ---- */

void gpu_ring_launched(struct gpu *g, struct gpu_turn *turn)
{
    if (turn->state != TURN_FILLING)
        turn_end(g, turn);
    else if (job_deserted(turn->job))
        turn_fail(g, turn, job_refuse_deserted(turn->job));
    else
        turn_post(turn);
}

/* Claimed, and nothing comes of it. A worker that runs may still begin the kernel after all, when
 * it was stopped right before: so its ring is never used again, and the copy is no good one. */
static bool turn_lost(struct gpu *g, struct gpu_turn *turn, uint64_t now_ms)
{
    bool alive = ring_alive(turn->ring, now_ms);

    if (alive && now_ms >= turn->posted_ms + RING_SLOW_MS)
        ring_rest(turn->ring, now_ms);
    if (alive && now_ms < turn->posted_ms + RING_DONE_MS)
        return false;
    ring_retire(turn->ring);
    turn_fail(g, turn,
              job_refuse(turn->job, -EIO, UCM_WIRE_DEVICE,
                         alive ? "the worker's companion claimed a slice and did not move it"
                               : "the worker died while it moved a slice"));
    return true;
}

static bool turn_unclaimed(struct gpu_turn *turn, uint64_t now_ms)
{
    struct gpu_ring *ring = turn->ring;

    if (now_ms < turn->posted_ms + RING_CLAIM_MS && ring->rests_until_ms != UINT64_MAX &&
        ring_alive(ring, now_ms))
        return false;
    if (!ucm_staging_move(ring->shared, turn->slice, turn->tag, STAGING_POSTED, STAGING_REVOKED))
        return false; /* claimed just now */
    ring_rest(ring, now_ms);
    turn->state = TURN_AGAIN;
    return true;
}

static bool turn_poll(struct gpu *g, struct gpu_turn *turn, uint64_t now_ms)
{
    struct gpu_ring *ring = turn->ring;
    uint64_t word = atomic_load(&ring->shared->words.slices[turn->slice].state);

    if (ucm_staging_tag_of(word) != turn->tag)
        return turn_lost(g, turn, now_ms);
    switch (ucm_staging_phase_of(word)) {
    case STAGING_POSTED:
        return turn_unclaimed(turn, now_ms);
    case STAGING_DONE:
        if (turn->direction == UCM_COPY_DUMP)
            turn->state = TURN_GATHERED;
        else
            turn_end(g, turn);
        return true;
    case STAGING_REFUSED:
        ring_rest(ring, now_ms);
        turn->state = TURN_AGAIN;
        return true;
    case STAGING_REVOKED: /* by the worker, which has done with this connection */
        ring_retire(ring);
        turn_fail(g, turn,
                  job_refuse(turn->job, -EIO, UCM_WIRE_DEVICE, "the worker abandoned its ring"));
        return true;
    default:
        return turn_lost(g, turn, now_ms);
    }
}

bool gpu_rings_poll(struct gpu *g)
{
    uint64_t now_ms;
    bool moved = false;

    if (g->turns == 0)
        return false;
    now_ms = job_clock_ms();
    for (struct list *node = g->rings.next; node != &g->rings; node = node->next) {
        struct gpu_ring *ring = LIST_ENTRY(node, struct gpu_ring, link);

        for (uint32_t i = 0; i < ring->slices; i++)
            if (ring->turns[i].state == TURN_POSTED)
                moved |= turn_poll(g, &ring->turns[i], now_ms);
    }
    return moved;
}

static void piece_again(struct gpu *g, struct gpu_turn *turn)
{
    struct device_job *job = turn->job;
    struct job_piece piece = turn->piece;
    CUresult r;

    turn_free(g, turn);
    r = gpu_launch_piece(g, turn->direction, job, &piece);
    if (r != CUDA_SUCCESS)
        gpu_piece_fail(g, job, gpu_refuse(g, job, -EIO, r, "a copy can't be launched"));
}

bool gpu_rings_fill(struct gpu *g, enum ucm_copy_direction direction)
{
    bool moved = false;

    if (g->turns == 0)
        return false;
    for (struct list *node = g->rings.next; node != &g->rings; node = node->next) {
        struct gpu_ring *ring = LIST_ENTRY(node, struct gpu_ring, link);

        for (uint32_t i = 0; i < ring->slices; i++) {
            struct gpu_turn *turn = &ring->turns[i];

            if ((turn->state != TURN_GATHERED && turn->state != TURN_AGAIN) ||
                turn->direction != direction || atomic_load(&g->failed) ||
                !gpu_launch_next(g, direction))
                continue;
            if (job_deserted(turn->job))
                turn_fail(g, turn, job_refuse_deserted(turn->job));
            else if (turn->state == TURN_GATHERED)
                turn_move_or_fail(g, turn);
            else
                piece_again(g, turn);
            moved = true;
        }
    }
    return moved;
}

/* What a companion has claimed it may still write: such a turn ends as ever (gpu_rings_poll), and
 * its job with it, though not as a good one. */
void gpu_rings_abandon(struct gpu *g)
{
    for (struct list *node = g->rings.next; node != &g->rings; node = node->next) {
        struct gpu_ring *ring = LIST_ENTRY(node, struct gpu_ring, link);

        ring_retire(ring);
        for (uint32_t i = 0; i < ring->slices; i++) {
            struct gpu_turn *turn = &ring->turns[i];
            bool launched = turn->state == TURN_FILLING || turn->state == TURN_EMPTYING;

            if (turn->state == TURN_FREE)
                continue;
            if (turn->state == TURN_POSTED) {
                gpu_job_fail(turn->job, gpu_refuse_failed(g, turn->job));
                continue;
            }
            turn_free(g, turn);
            if (!launched) /* the others end with their launch */
                gpu_piece_fail(g, turn->job, gpu_refuse_failed(g, turn->job));
        }
    }
}
