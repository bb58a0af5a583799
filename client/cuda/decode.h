/* The inside of struct ucm_cuda_decode: for the files decode*.c. */
#ifndef UCM_CUDA_DECODE_H
#define UCM_CUDA_DECODE_H

#include "client/cuda/context.h"
#include "client/include/ucmclient_cuda_decode.h"
#include "kernels/attend/attend_cuda.h"
#include "kernels/attend/mla_cuda.h"
#include "kernels/entries/entries_cuda.h"

#include <cuda.h>
#include <pthread.h>
#include <stdbool.h>

/* What launches take that follows from the options alone, without memory. */
struct decode_plan {
    struct ucm_cuda_decode_options options; /* the defaults are filled in */
    struct ucm_cuda_decode_info info;
    struct ucm_entries_shape shape;
    struct ucm_entries_gather gather;
    struct ucm_attend_cuda attend;
    struct ucm_attend_cuda_order order; /* with a rule */
    float logit_scale;                  /* attend.scale_log2 in natural logarithms */
    bool latent;                        /* MLA */
    bool narrow;                        /* entries have FP8, as stored or encoded */
    uint32_t shared_bytes;
    /* Offsets in the workspace, whose first counters_bytes must be 0 at first. */
    uint64_t done, flags, counters_bytes, partial, partial_sum;
    uint32_t batch; /* keys of one call between steps that travel together */
};

/* decode_plan.c. Checks the options, and plans all but splits and memory, which come when the GPU is known. */
int decode_plan(struct decode_plan *plan, const struct ucm_cuda_decode_options *options);
/* thread_block_bytes: of shared memory, that one can have. */
int decode_plan_memory(struct decode_plan *plan, uint32_t multiprocessors,
                       uint32_t thread_block_bytes);
#define DECODE_ALIGN 256u /* of what lies in the workspace */

/* Room for so many bytes after *end, which moves on: their offset. */
static inline uint64_t decode_plan_place(uint64_t *end, uint64_t bytes)
{
    uint64_t at = *end;

    *end = (at + bytes + DECODE_ALIGN - 1) / DECODE_ALIGN * DECODE_ALIGN;
    return at;
}

enum decode_kernel {
    DECODE_NEXT,
    DECODE_RESOLVE,
    DECODE_GATHER,
    DECODE_END,
    DECODE_WANT,
    DECODE_PUT,
    DECODE_FORGET,
    DECODE_LEAVE,
    DECODE_ATTEND,
    DECODE_ORDER,
    DECODE_MERGE, /* splits of latents */
    DECODE_KERNELS
};

/* A batch on its way to the GPU: so many of each. */
struct decode_scratch {
    uint64_t *from; /* pinned, as all that has no _gpu */
    uint32_t *key, *request;
    CUdeviceptr from_gpu, key_gpu, request_gpu;
};

/* Memory of the mapping that the GPU knows. */
struct decode_range {
    const uint8_t *host;
    CUdeviceptr gpu;
    uint64_t bytes, opened;
    bool wanted; /* back, or of an earlier connection */
};

struct ucm_cuda_decode {
    struct decode_plan plan;
    CUdevice dev;
    CUcontext context;
    CUmodule entries_module, attend_module;
    CUfunction kernel[DECODE_KERNELS];
    bool beside; /* a layer's launches overlap */
    CUdeviceptr tables, workspace;
    struct ucm_entries entries;      /* in `tables` */
    struct ucm_entries_word *word;   /* pinned */
    struct ucm_entries_place *place; /* [numbers], pinned: what the GPU's table has */
    struct decode_scratch scratch;
    uint32_t *floors; /* [requests] */
    uint64_t floors_sum;
    pthread_mutex_t
        mapping_lock; /* of the rest: ucm_cuda_decode_mapping_register runs alongside other calls */
    struct ucm_mapping *mapping;
    struct decode_range *range;
    uint32_t n_ranges, ranges_room;
};

/* decode_launch.c, with the context entered. */
CUresult decode_launch(struct ucm_cuda_decode *d, enum decode_kernel kernel, uint32_t blocks,
                       uint32_t threads, void **arguments, CUstream stream);

CUresult decode_launch_grid(struct ucm_cuda_decode *d, enum decode_kernel kernel,
                            const uint32_t grid[3], uint32_t threads, void **arguments,
                            CUstream stream);

/* The blocks of one round of a layer's lists. */
struct decode_round {
    uint32_t number;
    struct ucm_attend_cuda_stop stop;
    CUdeviceptr begin, end; /* uint32_t[sequences][lists] */
};
/* Entries for them, misses, attention. round NULL: all of the lists. */
CUresult decode_launch_lists(struct ucm_cuda_decode *d, const struct ucm_cuda_decode_layer *layer,
                             uint32_t layer_head, const struct decode_round *round,
                             CUstream stream);

/* decode_rounds.c. The options' defaults are filled in; offsets in the workspace become addresses. */
int decode_rounds_check(struct ucm_cuda_decode_options *options);
void decode_rounds_plan(struct decode_plan *plan, uint64_t *end);
void decode_rounds_place(struct decode_plan *plan, CUdeviceptr workspace);
int decode_rounds_layer_check(const struct ucm_cuda_decode_options *options,
                              const struct ucm_cuda_decode_layer *layer);
CUresult decode_rounds_launch(struct ucm_cuda_decode *d, const struct ucm_cuda_decode_layer *layer,
                              uint32_t layer_head, CUstream stream);

/* decode_mapping.c, with the context entered. Puts what `place` has from number `first` to `last` on the GPU, and waits. */
CUresult decode_places_upload(struct ucm_cuda_decode *d, uint32_t first, uint32_t last,
                              CUstream stream);
/* Takes everything from the GPU; no kernel reads it any more. */
void decode_mapping_end(struct ucm_cuda_decode *d);

#endif
