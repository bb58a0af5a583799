#include "client/cuda/copy_agent_rope.h"

#include "client/cuda/context.h"
#include "kernels/rope/rope_cuda.h"

#include <string.h>

_Static_assert(UCM_STAGING_STAYS == UCM_ROPE_STAYS, "orders say it as kernels do");

extern const unsigned char ucm_rope_fatbin[];

bool copy_agent_rope_sound(const struct copy_agent_region *r, const struct ucm_staging_order *order)
{
    return ucm_staging_shifts_sound(order, r->rerotator ? r->rope.rotary : 0);
}

CUresult copy_agent_rope_launch(const struct copy_agent_region *r,
                                const struct ucm_staging_order *order, struct ucm_copy_item *items,
                                struct ucm_rope_angle *tables, CUstream stream)
{
    const struct ucm_copy_plane *first = &r->spec[order->first_plane];
    CUdeviceptr planes = r->planes + order->first_plane * sizeof(*first);
    CUdeviceptr at = r->rope_at + order->first_plane * sizeof(uint32_t);
    uint32_t n_planes = order->n_planes, n_items = order->n_items, n_tables = order->tables;
    uint32_t tiles = ucm_rope_tiles(&r->rope, ucm_copy_largest_fragment(first, n_planes));
    uint32_t in_place = order->converts != 0;
    struct ucm_rope_spec spec = r->rope;
    void *arguments[] = {&planes, &n_planes, &items, &n_items, &at,
                         &tables, &n_tables, &spec,  &tiles,   &in_place};

    for (uint32_t i = 0; i < n_items; i++)
        items[i].memory = order->blocks[n_items + i];
    memcpy(tables, order->blocks + (size_t)n_items * UCM_STAGING_SHIFT_WORDS,
           ucm_rope_tables_bytes(&spec, n_tables));
    return cuLaunchKernel(r->rerotator, ucm_rope_ctas(in_place), 1, 1, UCM_COPY_THREADS, 1, 1,
                          ucm_rope_tables_bytes(&spec, n_tables), stream, arguments, NULL);
}

/* Finds the kernel, and launches it once over nothing: see kernel_warm in copy_agent.c. */
static CUresult rerotator_load(struct copy_agent *c, struct copy_agent_region *r)
{
    static const struct ucm_staging_order nothing;
    CUstream stream = c->streams[UCM_COPY_LOAD][0];
    char name[UCM_ROPE_KERNEL_NAME];
    CUresult rc = cuModuleLoadData(&r->rope_module, ucm_rope_fatbin);

    ucm_rope_kernel_name(&r->rope, name);
    if (rc == CUDA_SUCCESS)
        rc = cuModuleGetFunction(&r->rerotator, r->rope_module, name);
    if (rc == CUDA_SUCCESS)
        rc = copy_agent_rope_launch(r, &nothing, NULL, c->tables, stream);
    return rc == CUDA_SUCCESS ? cuStreamSynchronize(stream) : rc;
}

CUresult copy_agent_rope_open(struct copy_agent *c, struct copy_agent_region *r,
                              const struct copy_agent_rope *rope)
{
    uint64_t bytes = ucm_rope_bytes(&rope->spec);
    char why[UCM_ROPE_WHY];
    CUresult rc;

    if (ucm_rope_check(&rope->spec, why) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    for (uint32_t p = 0; p < r->n_planes; p++)
        if (rope->at[p] != UCM_ROPE_NO_K && rope->at[p] + bytes > r->spec[p].block_bytes)
            return CUDA_ERROR_INVALID_VALUE;
    r->rope = rope->spec;
    rc = ucm_upload(rope->at, r->n_planes * sizeof(rope->at[0]), c->streams[0][0], &r->rope_at);
    return rc == CUDA_SUCCESS ? rerotator_load(c, r) : rc;
}

void copy_agent_rope_close(struct copy_agent_region *r)
{
    if (r->rope_at)
        (void)cuMemFree(r->rope_at);
    if (r->rope_module)
        (void)cuModuleUnload(r->rope_module);
}
