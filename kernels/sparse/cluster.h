/* What select_cluster.cu and client/cuda/sparse_cluster.c agree on. A cluster of thread blocks has
 * one list: its scores stay in shared memory, and softmax and choice go from one thread block to
 * the others directly. For launches whose lists all have a cluster at once, 15 on an H200: 8,192
 * blocks take 39.7 us in place of 53.7. */
#ifndef UCM_KERNELS_SPARSE_CLUSTER_H
#define UCM_KERNELS_SPARSE_CLUSTER_H

#include "kernels/sparse/select_cuda.h"

#define UCM_SELECT_CLUSTER_MOST 16u     /* thread blocks of a cluster */
#define UCM_SELECT_CLUSTER_THREADS 512u /* of a thread block, at most */
#define UCM_SELECT_CLUSTER_LEAST 256u   /* and at least */
#define UCM_SELECT_CLUSTER_RING 6528u   /* bytes, of a warp: vectors on their way */
#define UCM_SELECT_CLUSTER_QUERIES 32u  /* of a KV head */

/* The kernels ucm_select_cluster_rest_4_PANELS, for tokens with rest by UCM_METRIC_ROUNDED, a list for each KV head and top
 * k: heads of 128 channels, 4 * PANELS queries of a KV head at once, 1 or 2. They take struct ucm_select_cuda; of its
 * places in shared memory raw_pitch, query_at, and stage_at: a ring for each warp. */

#endif
