/* Thread blocks of a cluster, which see each other's shared memory. Compute capability 9.0 and
 * later. */
#ifndef UCM_KERNELS_SPARSE_CLUSTER_CUH
#define UCM_KERNELS_SPARSE_CLUSTER_CUH

#include <stdint.h>

static __device__ __forceinline__ uint32_t cluster_rank(void)
{
    uint32_t rank;

    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

static __device__ __forceinline__ uint32_t cluster_size(void)
{
    uint32_t size;

    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

/* A barrier of all threads of the cluster, in two halves. What they wrote before it is visible
 * after it. */
static __device__ __forceinline__ void cluster_arrive(void)
{
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

static __device__ __forceinline__ void cluster_wait(void)
{
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

static __device__ __forceinline__ void cluster_sync(void)
{
    cluster_arrive();
    cluster_wait();
}

/* The address in thread block `rank` of what lies at `at` in this one's shared memory. */
static __device__ __forceinline__ uint32_t cluster_address(const void *at, uint32_t rank)
{
    uint32_t here = (uint32_t)__cvta_generic_to_shared(at), there;

    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
    return there;
}

static __device__ __forceinline__ void cluster_put(uint32_t at, uint32_t x)
{
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}

static __device__ __forceinline__ void cluster_put(uint32_t at, uint64_t x)
{
    asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(at), "l"(x) : "memory");
}

static __device__ __forceinline__ uint32_t cluster_get(uint32_t at)
{
    uint32_t x;

    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(at));
    return x;
}

static __device__ __forceinline__ uint4 cluster_get4(uint32_t at)
{
    uint4 x;

    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(at));
    return x;
}

#endif
