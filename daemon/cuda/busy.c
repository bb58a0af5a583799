/* What is believed of others, and the two sources of that on a GPU. */
#include "daemon/cuda/gpu.h"

#define SLOW 1.8 /* both directions at once, ours alone: 1.5 */
#define SLOW_LAUNCHES 2u

bool busy_due(const struct busy *b, uint64_t now_ns)
{
    return now_ns >= b->until_ns;
}

uint64_t busy_quiet_ns(const struct busy *b)
{
    return b->ended_ns + BUSY_QUIET_NS;
}

bool busy_probes_show(const uint64_t *took_ns, unsigned n)
{
    unsigned slow = 0, late = 0;

    for (unsigned i = 0; i < n; i++) {
        if (took_ns[i] >= BUSY_PROBE_TURN_NS)
            return true;
        slow += took_ns[i] > BUSY_PROBE_SLOW_NS;
        late += took_ns[i] > BUSY_PROBE_LATE_NS;
    }
    return slow >= BUSY_PROBES_SLOW || late >= BUSY_PROBES_LATE;
}

void busy_probed(struct busy *b, uint64_t now_ns, bool others, uint64_t waited_ns)
{
    b->slow = 0;
    if (others) {
        b->others = true;
        b->pauses = waited_ns < BUSY_PROBE_TURN_NS;
        b->clear = 0;
        b->until_ns = now_ns + BUSY_KEEP_NS;
    } else if (b->others && ++b->clear < BUSY_CLEAR) {
        b->until_ns = now_ns + BUSY_KEEP_DOUBT_NS;
    } else {
        b->others = b->pauses = false;
        b->clear = 0;
        b->until_ns = now_ns + BUSY_KEEP_IDLE_NS;
    }
}

void busy_unknown(struct busy *b, uint64_t now_ns)
{
    b->until_ns = now_ns + BUSY_KEEP_NS;
}

void busy_launch(struct busy *b, uint64_t now_ns, double took_ns, double due_ns)
{
    b->ended_ns = now_ns;
    if (due_ns <= 0)
        return;
    b->slow = took_ns > SLOW * due_ns ? b->slow + 1 : 0;
    if (b->slow < SLOW_LAUNCHES)
        return;
    b->others = true;
    b->clear = 0;
    b->until_ns = now_ns + BUSY_KEEP_NS;
}

/* ---- the sources ---- */

#define GPU_SEEN_BYTES (1u << 20) /* shorter launches say nothing */
/* While entries are under way: how much longer an answer stays valid, and how long a probe waits
 * for the entries to end. */
#define GPU_PROBE_STAGED_NS 150000000ull
#define GPU_PROBE_DRAIN_NS 3000000ull

/* How long an empty kernel takes. BUSY_PROBE_TURN_NS: longer than that, or it failed; it may still
 * run then. */
static uint64_t probe_ns(struct gpu *g)
{
    uint64_t begin_ns = uv_hrtime(), ns;
    CUresult r;

    if (gpu_kernel_launch(g, g->probe.stream, 0, 0, NULL, 0, 0, UCM_COPY_LOAD) != CUDA_SUCCESS ||
        cuda.cuEventRecord(g->probe.done, g->probe.stream) != CUDA_SUCCESS)
        return BUSY_PROBE_TURN_NS;
    g->probe.launched = true;
    do {
        r = cuda.cuEventQuery(g->probe.done);
        ns = uv_hrtime() - begin_ns;
    } while (r == CUDA_ERROR_NOT_READY && ns < BUSY_PROBE_TURN_NS);
    return r == CUDA_SUCCESS ? ns : BUSY_PROBE_TURN_NS;
}

static bool probes_show(struct gpu *g, uint64_t *longest_ns)
{
    uint64_t took_ns[BUSY_PROBES];
    bool others = false;

    *longest_ns = 0;
    for (unsigned i = 0; i < BUSY_PROBES && !others; i++) {
        took_ns[i] = probe_ns(g);
        *longest_ns = took_ns[i] > *longest_ns ? took_ns[i] : *longest_ns;
        others = busy_probes_show(took_ns, i + 1);
    }
    return others;
}

static void probe(struct gpu *g)
{
    uint64_t longest_ns = BUSY_PROBE_TURN_NS;
    bool others = true;

    if (!g->probe.launched || cuda.cuEventQuery(g->probe.done) == CUDA_SUCCESS)
        others = probes_show(g, &longest_ns); /* else the last one still waits */
    if (others && !g->busy.others && longest_ns < BUSY_PROBE_TURN_NS)
        others = probes_show(g, &longest_ns); /* once may be the host's fault */
    busy_probed(&g->busy, uv_hrtime(), others, longest_ns);
}

/* Entries that begin before the probe is possible delay it, but not for long. */
static void probe_want(struct gpu *g, uint64_t now_ns)
{
    if (g->probe.wanted)
        return;
    g->probe.wanted = true;
    g->probe.until_ns = now_ns + GPU_PROBE_DRAIN_NS;
}

bool gpu_others_run(struct gpu *g)
{
    uint64_t now_ns = uv_hrtime();

    if (g->beside.now)
        return true;
    if (!busy_due(&g->busy, now_ns) || g->entries > 0)
        return g->busy.others;
    probe_want(g, now_ns);
    return true;
}

bool gpu_others_look(struct gpu *g)
{
    uint64_t now_ns = uv_hrtime();

    if (g->beside.now)
        return true;
    if (g->entries > 0) {
        if (busy_due(&g->busy, now_ns - GPU_PROBE_STAGED_NS))
            probe_want(g, now_ns);
        return g->busy.others;
    }
    if (gpu_others_run(g) && g->probe.wanted && !gpu_streams_busy(g))
        (void)gpu_probe_ready(g);
    return g->busy.others || g->probe.wanted;
}

bool gpu_probe_ready(struct gpu *g)
{
    if (!g->probe.wanted)
        return true;
    if (g->entries > 0) { /* it would find the copy agents */
        if (uv_hrtime() < g->probe.until_ns)
            return false;
        busy_unknown(&g->busy, uv_hrtime()); /* a copy agent that hangs must not delay others */
    } else {
        if (gpu_streams_busy(g))
            return false;
        while (uv_hrtime() < busy_quiet_ns(&g->busy))
            ;
        probe(g);
    }
    g->probe.wanted = false;
    return true;
}

void gpu_kernel_seen(struct gpu *g, enum ucm_copy_direction direction, const struct gpu_launch *l)
{
    const struct costs *c = &g->costs.of[direction];
    uint64_t last_ns = g->streams[direction].done_ns;
    uint64_t begun_ns = l->begun_ns > last_ns ? l->begun_ns : last_ns, now_ns = uv_hrtime();

    busy_launch(&g->busy, now_ns, (double)(now_ns - begun_ns),
                l->cost < GPU_SEEN_BYTES || g->entries > 0 ? 0 : costs_kernel_ns(c, l->cost));
}
