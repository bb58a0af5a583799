#include "client/cuda/copy_agent_encoding.h"

#include "client/cuda/context.h"
#include "kernels/encoding/encoding_cuda.h"

#include <stdlib.h>

extern const unsigned char ucm_encoding_fatbin[];

CUresult copy_agent_encoding_launch(const struct copy_agent_region *region, uint32_t first_plane,
                                    uint32_t n_planes, struct ucm_copy_item *items,
                                    uint32_t n_items, uint32_t direction, CUstream stream)
{
    CUdeviceptr planes = region->encoded + first_plane * sizeof(*region->encoded_spec);
    struct ucm_encoding_spec spec = region->encoding;
    uint32_t tiles = ucm_encoding_tiles(&spec);
    void *arguments[] = {&planes, &n_planes, &items, &n_items, &spec, &tiles};

    return cuLaunchKernel(region->coders[direction], ucm_encoding_ctas(&spec, direction), 1, 1,
                          UCM_ENCODING_THREADS, 1, 1, 0, stream, arguments, NULL);
}

/* Finds the kernels, and launches each once over nothing: see kernel_warm in copy_agent.c. */
static CUresult coders_load(struct copy_agent *c, struct copy_agent_region *r)
{
    char name[UCM_ENCODING_KERNEL_NAME];
    CUresult rc = cuModuleLoadData(&r->module, ucm_encoding_fatbin);

    for (unsigned i = 0; i < 2 && rc == CUDA_SUCCESS; i++) {
        if (!ucm_encoding_kernel_name(&r->encoding, i, name))
            return CUDA_ERROR_NOT_SUPPORTED;
        rc = cuModuleGetFunction(&r->coders[i], r->module, name);
        if (rc == CUDA_SUCCESS)
            rc = copy_agent_encoding_launch(r, 0, 0, NULL, 0, i, c->streams[i][0]);
        if (rc == CUDA_SUCCESS)
            rc = cuStreamSynchronize(c->streams[i][0]);
    }
    return rc;
}

/* Every plane is one tensor, in order: a region that the daemon would refuse gets no kernel here. */
CUresult copy_agent_encoding_open(struct copy_agent *c, struct copy_agent_region *r,
                                  const struct ucm_encoding_spec *encoding)
{
    size_t bytes = r->n_planes * sizeof(*r->encoded_spec);
    char why[UCM_ENCODING_WHY];
    uint64_t slot_offset = 0;
    CUresult rc;

    if (ucm_encoding_check(encoding, why) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    r->encoding = *encoding;
    r->encoded_spec = malloc(bytes);
    if (!r->encoded_spec)
        return CUDA_ERROR_OUT_OF_MEMORY;
    for (uint32_t p = 0; p < r->n_planes; p++) {
        uint32_t tensor = p % encoding->n_tensors;
        uint64_t encoded = ucm_encoding_bytes(encoding, tensor);

        if (r->spec[p].block_bytes != ucm_encoding_raw_bytes(encoding, tensor) ||
            (r->spec[p].base | r->spec[p].stride) % UCM_ENCODING_PAGE_ALIGN != 0)
            return CUDA_ERROR_INVALID_VALUE;
        r->encoded_spec[p] = (struct ucm_encoding_plane){.base = r->spec[p].base,
                                                         .stride = r->spec[p].stride,
                                                         .slot_offset = slot_offset,
                                                         .bytes = (uint32_t)encoded,
                                                         .tensor = tensor};
        slot_offset += encoded;
    }
    rc = ucm_upload(r->encoded_spec, bytes, c->streams[0][0], &r->encoded);
    return rc == CUDA_SUCCESS ? coders_load(c, r) : rc;
}

void copy_agent_encoding_close(struct copy_agent_region *r)
{
    if (r->encoded)
        (void)cuMemFree(r->encoded);
    if (r->module)
        (void)cuModuleUnload(r->module);
    free(r->encoded_spec);
}
