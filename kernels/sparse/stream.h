/* What select_stream.cu and client/cuda/sparse_stream.c agree on. In a thread block one warp loads
 * tiles of whole summaries, and eight score them. Eight more choose from lists whose scores are
 * complete, so memory is read during choices. It is for launches by softmax whose lists have no
 * clusters. On an H200, 50 sequences of 8,192 blocks take 787 us in place of 1,083. A list's scores
 * must fit next to two tiles. */
#ifndef UCM_KERNELS_SPARSE_STREAM_H
#define UCM_KERNELS_SPARSE_STREAM_H

#include "kernels/sparse/select_cuda.h"

#define UCM_SELECT_STREAM_SCORERS 8u  /* warps that score; KV heads must divide it */
#define UCM_SELECT_STREAM_CHOOSERS 8u /* warps that choose */
#define UCM_SELECT_STREAM_STAGES 2u   /* tiles of summaries in shared memory */
#define UCM_SELECT_STREAM_QUERIES 8u  /* of a KV head, at most */
#define UCM_SELECT_STREAM_TICKETS 3u  /* words of the workspace: more than other kernels need */
#define UCM_SELECT_STREAM_THREADS                                                                  \
    (32u * (UCM_SELECT_STREAM_SCORERS + UCM_SELECT_STREAM_CHOOSERS + 1))

/* The kernels ucm_select_stream_rest_4_PANELS. They are for tokens with rest by UCM_METRIC_ROUNDED,
 * softmax, a list for each KV head, top k, and heads of 128 channels. PANELS is 1 or 2: at most 4 *
 * PANELS queries of a KV head. They take struct ucm_select_cuda. Of its places in shared memory
 * they use query_at, and stage_at, where STAGES tiles are. A tile has `staged` bytes a block, an
 * odd multiple of 16. A list's scores are at 0. */

#endif
