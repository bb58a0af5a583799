/* Asynchronous copies, matrices in shared memory, products of 16-bit types with float32 sums, and waiting for what another
 * kernel does meanwhile. */
#ifndef UCM_KERNELS_ATTEND_MACHINE_CUH
#define UCM_KERNELS_ATTEND_MACHINE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#define ALL_LANES 0xffffffffu

static __device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* 16 bytes; zeros if there is no source. */
static __device__ __forceinline__ void copy16(void *to, const void *from, bool there)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(there ? 16 : 0)
                 : "memory");
}

static __device__ __forceinline__ void copies_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int N>
static __device__ __forceinline__ void copies_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* ---- what another kernel does meanwhile ---- */

static __device__ __forceinline__ int32_t load_acquire(const int32_t *at)
{
    int32_t x;

    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    return x;
}

static __device__ __forceinline__ uint64_t nanoseconds(void)
{
    uint64_t x;

    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(x)::"memory");
    return x;
}

static __device__ __forceinline__ void pause(void)
{
    __nanosleep(64);
}

/* The launch that this one overlaps has ended, and all of it is seen. */
static __device__ __forceinline__ void await_launch(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* ---- matrices ---- */

static __device__ __forceinline__ void matrices(uint32_t r[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

static __device__ __forceinline__ void matrices_turned(uint32_t r[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

template <typename T> struct element;

template <> struct element<__nv_bfloat16> {
    static __device__ __forceinline__ void multiply(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
    {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    static __device__ __forceinline__ uint32_t pair(float low, float high)
    {
        __nv_bfloat162 p = __floats2bfloat162_rn(low, high);

        return *(uint32_t *)&p;
    }
    static __device__ __forceinline__ float widen(uint32_t bits)
    {
        return __uint_as_float(bits << 16);
    }
};

template <> struct element<__half> {
    static __device__ __forceinline__ void multiply(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
    {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    static __device__ __forceinline__ uint32_t pair(float low, float high)
    {
        __half2 p = __floats2half2_rn(low, high);

        return *(uint32_t *)&p;
    }
    static __device__ __forceinline__ float widen(uint32_t bits)
    {
        __half_raw h;

        h.x = (unsigned short)bits;
        return __half2float(__half(h));
    }
};

#endif
