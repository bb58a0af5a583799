#include "client/cuda/error.h"
#include "client/cuda/sparse_select.h"

#define CLUSTER 8u               /* any GPU that has clusters has these */
#define SHARED_MOST (210u << 10) /* dynamic, of a thread block: some is static */
#define THREADS_STEP 128u

extern const unsigned char ucm_select_cluster_fatbin[];

static uint32_t div_up(uint32_t n, uint32_t by)
{
    return (n + by - 1) / by;
}

/* Dynamic shared memory of a thread block: scores of its blocks by every query, the queries, a ring for each warp. */
static uint32_t shared_plan(struct ucm_cuda_select *s)
{
    struct ucm_select_cuda *a = &s->args;
    uint32_t group = UCM_SELECT_CUDA_MATRIX_BLOCKS, panels = div_up(a->queries_a_head, 8) * 2;
    uint32_t most = div_up(div_up(a->max_blocks, group), s->cluster) * group;

    a->raw_pitch = div_up(most, 32) * 32 + 8; /* what a warp stores at once lies in 32 banks */
    a->query_at = a->queries_a_head * a->raw_pitch * (uint32_t)sizeof(float);
    a->stage_at = a->query_at + panels * 8 * WARP_LANES * (uint32_t)sizeof(uint32_t);
    return a->stage_at + s->threads / WARP_LANES * UCM_SELECT_CLUSTER_RING;
}

bool sparse_has_clusters(const uint8_t *gpu)
{
    CUdevice dev;
    int major;

    return ucm_device_find(gpu, &dev) == CUDA_SUCCESS &&
           cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, dev) ==
               CUDA_SUCCESS &&
           major >= 9;
}

bool sparse_cluster_serves(const struct ucm_cuda_select *s, const uint8_t *gpu,
                           enum ucm_select_cuda_family family)
{
    const struct ucm_select_cuda *a = &s->args;

    return family == UCM_SELECT_REST && a->channels == 128 && a->rounds > 0 &&
           a->heads == UCM_HEADS_EACH && a->policy == UCM_CHOOSE_TOPK &&
           a->queries_a_head <= UCM_SELECT_CLUSTER_QUERIES && sparse_has_clusters(gpu);
}

static CUlaunchConfig config_of(const struct ucm_cuda_select *s, uint32_t sequences,
                                CUstream stream, CUlaunchAttribute *cluster)
{
    *cluster = (CUlaunchAttribute){.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
                                   .value.clusterDim = {s->cluster, 1, 1}};
    return (CUlaunchConfig){.gridDimX = sequences * s->args.lists * s->cluster,
                            .gridDimY = 1,
                            .gridDimZ = 1,
                            .blockDimX = s->threads,
                            .blockDimY = 1,
                            .blockDimZ = 1,
                            .sharedMemBytes = s->shared_bytes,
                            .hStream = stream,
                            .attrs = cluster,
                            .numAttrs = 1};
}

/* As many warps as the list leaves room for. All lists must be chosen from at once: of many, kernels of select.cu keep
 * more of the GPU busy. */
static CUresult sizes_plan(struct ucm_cuda_select *s)
{
    CUlaunchAttribute attribute;
    CUlaunchConfig config;
    int at_once = 0;
    CUresult r;

    s->cluster = CLUSTER;
    s->threads = UCM_SELECT_CLUSTER_THREADS;
    while ((s->shared_bytes = shared_plan(s)) > SHARED_MOST &&
           s->threads > UCM_SELECT_CLUSTER_LEAST)
        s->threads -= THREADS_STEP;
    if (s->shared_bytes > SHARED_MOST)
        return CUDA_ERROR_NOT_SUPPORTED;
    config = config_of(s, s->sequences, NULL, &attribute);
    r = cuOccupancyMaxActiveClusters(&at_once, s->kernel.function, &config);
    if (r == CUDA_SUCCESS && (uint32_t)at_once < s->args.lists)
        r = CUDA_ERROR_NOT_SUPPORTED;
    if (r == CUDA_SUCCESS && (uint32_t)at_once / s->args.lists < s->sequences)
        s->sequences = (uint32_t)at_once / s->args.lists;
    return r;
}

int sparse_cluster_open(struct ucm_cuda_select *s, const uint8_t *gpu)
{
    const char *name =
        s->args.queries_a_head > 4 ? "ucm_select_cluster_rest_4_2" : "ucm_select_cluster_rest_4_1";
    int r = sparse_kernel_open(&s->kernel, gpu, ucm_select_cluster_fatbin, name, SHARED_MOST);
    CUresult rc;

    if (r != 0)
        return r;
    rc = sizes_plan(s);
    if (rc == CUDA_SUCCESS)
        return 0;
    s->cluster = 0;
    sparse_kernel_close(&s->kernel);
    return cuda_fail_driver(rc, "a cluster for each list of a sequence");
}

CUresult sparse_cluster_launch(struct ucm_cuda_select *s, const struct ucm_select_cuda *args,
                               CUstream stream)
{
    void *arguments[] = {(void *)args};
    CUlaunchAttribute attribute;
    CUlaunchConfig config =
        config_of(s, args->sequences > 0 ? args->sequences : 1, stream, &attribute);

    return cuLaunchKernelEx(&config, s->kernel.function, arguments, NULL);
}
