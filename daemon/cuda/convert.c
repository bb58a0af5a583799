/* Encoded jobs without a copy agent: the daemon's own kernel encodes or decodes straight between
 * pinned slots and pages. Copy engines can't. */
#include "daemon/cuda/gpu.h"

#include "kernels/encoding/encoding_cuda.h"

#include <errno.h>

extern const unsigned char ucm_encoding_fatbin[];

static CUresult kernels_find(struct gpu *g, const struct ucm_encoding_spec *spec,
                             struct gpu_region *mapping)
{
    char name[UCM_ENCODING_KERNEL_NAME];
    CUresult r = CUDA_SUCCESS;

    if (!g->convert_module)
        r = cuda.cuModuleLoadData(&g->convert_module, ucm_encoding_fatbin);
    for (unsigned i = 0; i < 2 && r == CUDA_SUCCESS; i++)
        r = ucm_encoding_kernel_name(spec, i, name)
                ? cuda.cuModuleGetFunction(&mapping->converts[i], g->convert_module, name)
                : CUDA_ERROR_NOT_SUPPORTED;
    return r;
}

int gpu_convert_open(struct gpu *g, struct device_job *job)
{
    const struct device_region *region = job->region;
    struct gpu_region *mapping = region->mapping;
    CUresult r = kernels_find(g, &region->codec->spec, mapping);

    if (r != CUDA_SUCCESS)
        return gpu_refuse(g, job, -EINVAL, r, "no kernel encodes this namespace's blocks");
    return gpu_upload(g, job, &mapping->tensors, region->tensors,
                      region->n_planes * sizeof(*region->tensors),
                      "no GPU memory for the region's tensors");
}

void gpu_convert_close(struct gpu_region *mapping)
{
    if (mapping->tensors)
        (void)cuda.cuMemFree(mapping->tensors);
}

CUresult gpu_convert_launch(struct gpu *g, const struct device_job *job,
                            const struct job_piece *piece, struct ucm_copy_item *items)
{
    const struct gpu_region *mapping = job->region->mapping;
    enum ucm_copy_direction direction = job_direction(job);
    CUdeviceptr planes = mapping->tensors + piece->first_plane * sizeof(*job->region->tensors);
    uint32_t n_planes = piece->n_planes, n_items = piece->n_items;
    struct ucm_encoding_spec spec = job->region->codec->spec;
    uint32_t tiles = ucm_encoding_tiles(&spec);
    void *arguments[] = {&planes, &n_planes, &items, &n_items, &spec, &tiles};

    return cuda.cuLaunchKernel(mapping->converts[direction], ucm_encoding_ctas(&spec, direction), 1,
                               1, UCM_ENCODING_THREADS, 1, 1, 0, g->streams[direction].stream,
                               arguments, NULL);
}
