/* While one process's queue of copies is not empty, the driver gives it a copy engine for about a
 * millisecond before it looks at another's: an engine's inputs, a few KiB, then wait for that long
 * in every step. So alongside a worker that computes the next launch comes when the last one has
 * ended. */
#include "daemon/cuda/gpu.h"

#define BESIDE_HOLD_MS 300      /* a worker that decodes stores a block now and then */
#define BESIDE_SLACK_NS 100000u /* a load that was late may catch up so much */
#define BESIDE_URGENT_MS 1000   /* so near its deadline a load gets the whole bus */

/* What the region's worker said; if nothing, the place of what ends first. */
static struct gpu_said *said_by(struct gpu *g, const struct device_region *region)
{
    struct gpu_said *first = g->beside.said;

    for (unsigned i = 0; i < GPU_BESIDE_WORKERS; i++) {
        struct gpu_said *s = &g->beside.said[i];

        if (s->region == region)
            return s;
        if (s->until_ms < first->until_ms)
            first = s;
    }
    return first;
}

void gpu_beside_told(struct gpu *g, const struct device_job *job)
{
    if (job->beside == DEVICE_BESIDE_STEPS && g->config.busy_max_percent < 100)
        *said_by(g, job->region) = (struct gpu_said){job->region, job_clock_ms() + BESIDE_HOLD_MS};
    else if (job->beside == DEVICE_BESIDE_NOTHING)
        gpu_beside_forget(g, job->region);
}

void gpu_beside_forget(struct gpu *g, const struct device_region *region)
{
    struct gpu_said *s = said_by(g, region);

    if (s->region == region)
        *s = (struct gpu_said){.region = NULL};
}

/* A gather is what a step waits for. */
static bool urgent(const struct device_job *job, uint64_t now_ms)
{
    return job->beside == DEVICE_BESIDE_AWAITED ||
           (job->deadline_ms > 0 && now_ms + BESIDE_URGENT_MS >= job->deadline_ms);
}

void gpu_beside_look(struct gpu *g)
{
    const struct device_job *job = job_queue_first(&g->queued, DEVICE_LOAD);
    uint64_t now_ms = job_clock_ms();

    g->beside.now = false;
    for (unsigned i = 0; i < GPU_BESIDE_WORKERS; i++)
        g->beside.now |= now_ms < g->beside.said[i].until_ms;
    g->beside.hurry = g->beside.now && job && urgent(job, now_ms);
}

static double share_ns(const struct gpu *g, enum ucm_copy_direction direction, uint64_t bytes)
{
    return (double)bytes * g->costs.of[direction].byte_ns * 100 / g->config.busy_max_percent;
}

bool gpu_beside_suffices(const struct gpu *g, enum ucm_copy_direction direction, double ns,
                         uint64_t bytes)
{
    return g->beside.now && ns <= share_ns(g, direction, bytes);
}

/* What is read from the GPU costs its kernels next to nothing: dumps only leave gaps. */
void gpu_beside_launched(struct gpu *g, enum ucm_copy_direction direction, uint64_t bytes)
{
    struct gpu_stream *s = &g->streams[direction];
    uint64_t earliest_ns = uv_hrtime() - BESIDE_SLACK_NS;

    if (!g->beside.now || direction != UCM_COPY_LOAD) {
        s->next_ns = 0;
        return;
    }
    if (s->next_ns < earliest_ns || g->beside.hurry) /* an urgent load leaves no debt to others */
        s->next_ns = earliest_ns;
    s->next_ns += (uint64_t)share_ns(g, direction, bytes);
}

bool gpu_beside_allows(const struct gpu *g, enum ucm_copy_direction direction)
{
    const struct gpu_stream *s = &g->streams[direction];

    if (!g->beside.now)
        return true;
    return s->n == 0 && (s->next_ns == 0 || g->beside.hurry || uv_hrtime() >= s->next_ns);
}

uint64_t gpu_beside_next_ns(struct gpu *g)
{
    uint64_t next_ns = g->streams[UCM_COPY_LOAD].next_ns;
    bool wants = g->entries > 0 || job_queue_first(&g->queued, DEVICE_LOAD);

    return g->beside.now && wants && next_ns > uv_hrtime() ? next_ns : 0;
}
