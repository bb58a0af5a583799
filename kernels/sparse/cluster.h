/* What select_cluster.cu and client/cuda/sparse_cluster.c agree on. A cluster of thread blocks has
 * one list. Its scores stay in shared memory, and thread blocks exchange softmax and choice
 * directly. It is for launches whose lists all get a cluster at once, 15 on an H200: 8,192 blocks
 * take 39.7 us in place of 53.7. */
#ifndef UCM_KERNELS_SPARSE_CLUSTER_H
#define UCM_KERNELS_SPARSE_CLUSTER_H

#include "kernels/sparse/select_cuda.h"

#define UCM_SELECT_CLUSTER_MOST 16u     /* thread blocks of a cluster */
#define UCM_SELECT_CLUSTER_THREADS 512u /* of a thread block, at most */
#define UCM_SELECT_CLUSTER_LEAST 256u   /* and at least */
#define UCM_SELECT_CLUSTER_RING 6528u   /* bytes, of a warp: vectors on their way */
#define UCM_SELECT_CLUSTER_QUERIES 32u  /* of a KV head */

/* The kernels ucm_select_cluster_rest_4_PANELS. They are for tokens with rest by
 * UCM_METRIC_ROUNDED, a list for each KV head, top k, and heads of 128 channels. PANELS is 1 or 2:
 * 4 * PANELS queries of a KV head at once. They take struct ucm_select_cuda. Of its places in
 * shared memory they use raw_pitch, query_at, and stage_at, which is a ring for each warp. */

#endif
