/* Attention over latents (MLA), as DeepSeek-V2 and V3 decode in absorbed form (arXiv 2405.04434,
 * 2.1.2). A token has one row of 576 channels for all query heads. All channels make logits, and
 * the first 512 are the value. The kernels of mla.cu take struct ucm_attend_cuda as those of
 * attend.cu do. A few fields have other meanings:
 *
 *   kv_heads, group   query heads of a sequence in row groups that share nothing but the lists: ucm_attend_mla_groups
 *   lists             1, and apart 0
 *   k of both memories; v is not read
 *   ring              tiles in a thread block's shared memory
 *   partial           float[sequences][kv_heads][splits][group][512], and 512 channels in out
 *   round, state, stop are 0: no rounds
 *
 * A step is ucm_attend_mla_*, followed, where splits is above 1, by ucm_attend_mla_merge_*. That
 * has UCM_ATTEND_MLA_MERGE_BLOCKS thread blocks for the channels of each query head. Lists that one
 * split covers are complete without it. The merge may be launched with
 * CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, but then only right after the first
 * launch. */
#ifndef UCM_KERNELS_ATTEND_MLA_CUDA_H
#define UCM_KERNELS_ATTEND_MLA_CUDA_H

#include "kernels/attend/attend_cuda.h"

#define UCM_ATTEND_MLA_CHANNELS 576u
#define UCM_ATTEND_MLA_VALUES 512u
#define UCM_ATTEND_MLA_HEADS 128u /* query heads, at most */
#define UCM_ATTEND_MLA_ROWS 32u   /* of a row group, at most */
#define UCM_ATTEND_MLA_THREADS 256u
#define UCM_ATTEND_MLA_STEP 4u  /* tiles that a thread block attends to at once */
#define UCM_ATTEND_MLA_RING 24u /* tiles in shared memory, at most; UCM_ATTEND_MLA_STEP at least */
#define UCM_ATTEND_MLA_MERGE_THREADS 128u
#define UCM_ATTEND_MLA_MERGE_BLOCKS 4u

/* Row groups of so many query heads, all of one size. */
static inline uint32_t ucm_attend_mla_groups(uint32_t heads)
{
    uint32_t groups = (heads + UCM_ATTEND_MLA_ROWS - 1) / UCM_ATTEND_MLA_ROWS;

    while (heads % groups != 0)
        groups++;
    return groups;
}

/* As ucm_attend_cuda_kernel; group: of a row group. */
static inline void ucm_attend_mla_kernel(char name[40], const char *type, int narrow,
                                         uint32_t group)
{
    snprintf(name, 40, "ucm_attend_mla_%s%s_%u", type, narrow ? "_e4m3" : "",
             group > 16 ? 32u : 16u);
}

static inline void ucm_attend_mla_merge(char name[40], const char *type)
{
    snprintf(name, 40, "ucm_attend_mla_merge_%s", type);
}

/* Shared memory besides the ring: of 16 rows, two halves of logits, weights and factors of 64
 * tokens. */
#define UCM_ATTEND_MLA_SCRATCH (16u * (2u * 72u * 4u + 72u * 2u + 4u))
static inline uint32_t ucm_attend_mla_scratch(uint32_t group)
{
    return group > 16 ? 2 * UCM_ATTEND_MLA_SCRATCH : UCM_ATTEND_MLA_SCRATCH;
}

/* Rows of a tile lie in twos, 16 bytes apart. element: bytes of a channel. */
static inline uint32_t ucm_attend_mla_tile(uint32_t element)
{
    return UCM_ATTEND_CUDA_TILE * (UCM_ATTEND_MLA_CHANNELS * element + 8);
}

#define UCM_ATTEND_MLA_STATIC 3328u /* bytes of shared memory besides the dynamic, at most */

/* Tiles of the ring, and the launch's dynamic shared memory, on a GPU whose thread blocks have at
 * most `most` bytes. If the ring is below UCM_ATTEND_MLA_STEP, that is too few. */
static inline uint32_t ucm_attend_mla_ring(uint32_t element, uint32_t group, uint32_t most)
{
    uint32_t fixed = ucm_attend_mla_scratch(group) + UCM_ATTEND_MLA_STATIC;
    uint32_t ring = most > fixed ? (most - fixed) / ucm_attend_mla_tile(element) : 0;

    return ring < UCM_ATTEND_MLA_RING ? ring : UCM_ATTEND_MLA_RING;
}

static inline uint32_t ucm_attend_mla_shared(uint32_t element, uint32_t group, uint32_t ring)
{
    return ucm_attend_mla_scratch(group) + ring * ucm_attend_mla_tile(element);
}

/* lists: sequences times row groups. A multiprocessor holds one thread block. */
static inline struct ucm_attend_cuda_cut ucm_attend_mla_cut(uint32_t lists, uint32_t tiles,
                                                            uint32_t multiprocessors)
{
    return ucm_attend_cuda_cut_of(lists, tiles, multiprocessors, UCM_ATTEND_MLA_STEP);
}

#endif
