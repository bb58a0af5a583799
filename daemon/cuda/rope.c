/* Loads with position shifts. Copy engines don't compute: the daemon's own kernel re-rotates K in
 * the pages that engines, or a decoding, have just filled, while the next launch is under way; or
 * it re-rotates as it copies, where engines can't; or a copy agent does, whose orders hold the
 * tables of angles. */
#include "daemon/cuda/gpu.h"

#include "proto/memory/staging.h"

#include <errno.h>
#include <string.h>

extern const unsigned char ucm_rope_fatbin[];

/* A table has a cosine and a sine for each pair of channels, so as many words as channels are
 * rotated. An order and a launch have room for as many tables. */
#define TABLES_WORDS (UCM_ROPE_TABLES_BYTES / sizeof(uint32_t))

_Static_assert(TABLES_WORDS == UCM_STAGING_ITEMS, "what an order has besides its items are words");
_Static_assert(DEVICE_NO_K == UCM_ROPE_NO_K, "kernels read device_rope.at");

/* ---- the tables of a piece ---- */

/* Items of one run of keys have one table, and follow one another. */
struct walk {
    const struct ucm_rope_angle *last;
    uint32_t n; /* tables so far */
};

/* The number of the table by which an item is re-rotated. */
static uint32_t number(struct walk *w, const struct device_job *job, uint32_t item)
{
    const struct ucm_rope_angle *table = job->shifts[item];

    if (!table)
        return UCM_ROPE_STAYS;
    w->n += table != w->last;
    w->last = table;
    return w->n - 1;
}

bool gpu_rope_shifts(const struct device_job *job, const struct job_piece *piece)
{
    for (uint32_t i = 0; job->shifts && i < piece->n_items; i++)
        if (job->shifts[piece->first_item + i])
            return true;
    return false;
}

uint32_t gpu_rope_items(const struct device_job *job, uint32_t most, uint32_t words)
{
    struct walk w = {0};
    uint32_t left = job->n_items - job->next_item, i = 0;

    if (!job->shifts)
        return most;
    while (i < left && i < most) {
        (void)number(&w, job, job->next_item + i);
        if (w.n * job->region->rope->spec.rotary + (i + 1) * words > TABLES_WORDS)
            break;
        i++;
    }
    return i;
}

/* Copies them to where a launch reads them. Returns how many there are. */
static uint32_t tables_copy(const struct device_job *job, const struct job_piece *piece,
                            struct ucm_rope_angle *to)
{
    uint32_t angles = job->region->rope->spec.rotary / 2, had = 0;
    struct walk w = {0};

    for (uint32_t i = 0; i < piece->n_items; i++) {
        (void)number(&w, job, piece->first_item + i);
        if (w.n > had)
            memcpy(to + had++ * angles, w.last, angles * sizeof(*to));
    }
    return w.n;
}

/* ---- straight ---- */

static CUresult kernel_launch(const struct device_job *job, const struct job_piece *piece,
                              struct gpu_launch *l, CUstream stream, bool rerotates_in_place)
{
    const struct gpu_region *mapping = job->region->mapping;
    const struct ucm_copy_plane *first = &job->region->planes[piece->first_plane];
    struct ucm_rope_spec spec = job->region->rope->spec;
    CUdeviceptr planes = mapping->planes + piece->first_plane * sizeof(*first);
    CUdeviceptr at = mapping->rope_at + piece->first_plane * sizeof(uint32_t);
    uint32_t n_planes = piece->n_planes, n_items = piece->n_items, in_place = rerotates_in_place;
    uint32_t n_tables = tables_copy(job, piece, l->tables);
    uint32_t tiles = ucm_rope_tiles(&spec, ucm_copy_largest_fragment(first, n_planes));
    void *arguments[] = {&planes,    &n_planes, &l->items, &n_items, &at,
                         &l->tables, &n_tables, &spec,     &tiles,   &in_place};
    struct walk w = {0};

    for (uint32_t i = 0; i < n_items; i++)
        l->items[i].memory = number(&w, job, piece->first_item + i);
    return cuda.cuLaunchKernel(mapping->rope, ucm_rope_ctas(rerotates_in_place), 1, 1,
                               UCM_COPY_THREADS, 1, 1, ucm_rope_tables_bytes(&spec, n_tables),
                               stream, arguments, NULL);
}

CUresult gpu_rope_launch(struct gpu *g, const struct device_job *job, const struct job_piece *piece,
                         struct gpu_launch *l)
{
    return kernel_launch(job, piece, l, g->streams[UCM_COPY_LOAD].stream, false);
}

CUresult gpu_rope_behind(struct gpu *g, const struct device_job *job, const struct job_piece *piece,
                         struct gpu_launch *l)
{
    CUstream load = g->streams[UCM_COPY_LOAD].stream;
    CUresult r =
        cuda.cuEventRecord(l->done, load); /* the wait goes by this record, whatever follows */

    if (r == CUDA_SUCCESS)
        r = cuda.cuStreamWaitEvent(g->shifts, l->done, 0);
    if (r == CUDA_SUCCESS)
        r = kernel_launch(job, piece, l, g->shifts, true);
    if (r == CUDA_SUCCESS)
        l->behind = g->shifts;
    else
        (void)cuda.cuStreamSynchronize(
            load); /* what filled the pages runs, and no event will follow it */
    return r;
}

/* ---- through an entry ---- */

void gpu_rope_order(const struct device_job *job, const struct job_piece *piece,
                    struct ucm_staging_order *order)
{
    uint32_t *numbers = order->blocks + piece->n_items;
    struct walk w = {0};

    order->tables = 0;
    if (!gpu_rope_shifts(job, piece))
        return;
    for (uint32_t i = 0; i < piece->n_items; i++)
        numbers[i] = number(&w, job, piece->first_item + i);
    order->tables = tables_copy(job, piece, (struct ucm_rope_angle *)(numbers + piece->n_items));
}

/* ---- regions ---- */

/* With the first region that re-rotates: the kernels, and pinned memory for the tables of each
 * load's launch. */
static CUresult tables_create(struct gpu *g)
{
    size_t angles = UCM_ROPE_TABLES_BYTES / sizeof(*g->tables);
    CUresult r = CUDA_SUCCESS;

    if (!g->rope_module)
        r = cuda.cuModuleLoadData(&g->rope_module, ucm_rope_fatbin);
    if (r == CUDA_SUCCESS && !g->shifts)
        r = cuda.cuStreamCreateWithPriority(&g->shifts, CU_STREAM_NON_BLOCKING, 0);
    if (r != CUDA_SUCCESS || g->tables)
        return r;
    r = cuda.cuMemHostAlloc((void **)&g->tables, GPU_LAUNCHES * UCM_ROPE_TABLES_BYTES,
                            CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
    for (unsigned i = 0; r == CUDA_SUCCESS && i < GPU_LAUNCHES; i++)
        g->streams[UCM_COPY_LOAD].launches[i].tables = g->tables + i * angles;
    return r;
}

int gpu_rope_open(struct gpu *g, struct device_job *job)
{
    const struct device_region *region = job->region;
    struct gpu_region *mapping = region->mapping;
    char name[UCM_ROPE_KERNEL_NAME];
    CUresult r = tables_create(g);

    ucm_rope_kernel_name(&region->rope->spec, name);
    if (r == CUDA_SUCCESS)
        r = cuda.cuModuleGetFunction(&mapping->rope, g->rope_module, name);
    if (r != CUDA_SUCCESS)
        return gpu_refuse(g, job, -EIO, r,
                          "the GPU can't be prepared for loads with position shifts");
    return gpu_upload(g, job, &mapping->rope_at, region->rope->at,
                      region->n_planes * sizeof(region->rope->at[0]),
                      "no GPU memory for where K lies");
}

void gpu_rope_close(struct gpu_region *mapping)
{
    if (mapping->rope_at)
        (void)cuda.cuMemFree(mapping->rope_at);
}
