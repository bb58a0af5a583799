/* Asynchronous copies, waiting for what another kernel does meanwhile, and products of 16-bit types
 * with float32 sums. */
#ifndef UCM_KERNELS_ATTEND_MACHINE_CUH
#define UCM_KERNELS_ATTEND_MACHINE_CUH

#include "kernels/attend/attend_cuda.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>

#define ALL_LANES 0xffffffffu

static __device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* ---- rows of a tile, to a warp's shared memory: two stages ---- */

#define STAGES UCM_ATTEND_CUDA_STAGES
#define TILE UCM_ATTEND_CUDA_TILE

/* Rows lie in fours, 32 bytes apart. */
#define FOUR 4u
#define ROWS_BYTES(bytes) (TILE * (bytes) + TILE / FOUR * 32)

template <uint32_t BYTES> static __device__ __forceinline__ uint32_t row_offset(uint32_t row)
{
    return row * BYTES + row / FOUR * 32;
}

/* After a tile's rows of K and V follows a scale byte for each of them. */
#define SCALES_BYTES (2 * TILE)

/* Where the rows of K and V that count lie; and if they have scales, where those of K and of V
 * lie. */
struct tile_rows {
    const uint8_t *k, *v;
    uint64_t k_stride, v_stride;
    uint32_t valid;
    const uint8_t *k_scales, *v_scales;
};

template <uint32_t BYTES>
static __device__ __forceinline__ void copy_vectors(uint32_t to, const uint8_t *from, uint64_t stride, uint32_t valid)
{
#pragma unroll
    for (uint32_t i = 0; i < TILE * BYTES / 512; i++) {
        uint32_t at = i * 512 + threadIdx.x % 32 * 16, row = at / BYTES;

        if (row < valid)
            asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to + row_offset<BYTES>(row) + at % BYTES),
                         "l"(from + row * stride + at % BYTES)
                         : "memory");
    }
}

#if __CUDA_ARCH__ >= 900

/* A barrier for each stage, at which 32 lanes arrive. Its phase changes each time. */
struct arrivals {
    uint64_t *barrier;
    uint32_t phase; /* a bit for each stage */
};

static __device__ __forceinline__ void arrivals_begin(struct arrivals &a)
{
    __shared__ uint64_t barriers[UCM_ATTEND_CUDA_WARPS][STAGES];

    a.barrier = barriers[threadIdx.x / 32];
    a.phase = 0;
    if (threadIdx.x % 32 < STAGES)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 32;" ::"r"(shared_address(a.barrier + threadIdx.x % 32))
                     : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncwarp();
}

template <uint32_t BYTES>
static __device__ __forceinline__ void copy_fours(uint32_t to, const uint8_t *from, uint32_t valid, uint32_t barrier)
{
#pragma unroll
    for (uint32_t row = 0; row < TILE; row += FOUR)
        if (row < valid)
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                    to + row_offset<BYTES>(row)),
                "l"(from + row * BYTES), "r"(min(valid - row, FOUR) * BYTES), "r"(barrier)
                : "memory");
}

static __device__ __forceinline__ void copy_scales(uint32_t to, const uint8_t *from, uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 16, [%2];" ::"r"(to),
                 "l"(from), "r"(barrier)
                 : "memory");
}

/* Copies `valid` of TILE rows of K, then of V, and then their scales, if any. Rows that lie one
 * after the other go to the copy engine in pieces, since it takes long for many small ones. Other
 * rows come by 16 bytes a lane. */
template <uint32_t BYTES>
static __device__ __forceinline__ void copy_tile(uint8_t *to, const struct tile_rows &r, struct arrivals &a,
                                                 uint32_t stage)
{
    uint32_t barrier = shared_address(a.barrier + stage), k = shared_address(to), v = k + ROWS_BYTES(BYTES);
    uint32_t scales = r.k_scales ? SCALES_BYTES : 0;

    if (r.k_stride == BYTES && r.v_stride == BYTES) {
        if (threadIdx.x % 32 != 0)
            return;
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], 31;" ::"r"(barrier) : "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                     "r"(2 * r.valid * BYTES + scales)
                     : "memory");
        copy_fours<BYTES>(k, r.k, r.valid, barrier);
        copy_fours<BYTES>(v, r.v, r.valid, barrier);
        if (scales != 0) {
            copy_scales(v + ROWS_BYTES(BYTES), r.k_scales, barrier);
            copy_scales(v + ROWS_BYTES(BYTES) + TILE, r.v_scales, barrier);
        }
        return;
    }
    copy_vectors<BYTES>(k, r.k, r.k_stride, r.valid);
    copy_vectors<BYTES>(v, r.v, r.v_stride, r.valid);
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

/* ahead: the other stage's copy has begun since then. */
static __device__ __forceinline__ void arrivals_wait(struct arrivals &a, uint32_t stage, bool ahead)
{
    uint32_t done;

    do
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(shared_address(a.barrier + stage)), "r"(a.phase >> stage & 1)
                     : "memory");
    while (!done);
    a.phase ^= 1u << stage;
}

/* Call it before the copy engine writes where something else wrote. */
static __device__ __forceinline__ void stores_before_copies(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Call it before copies read what another kernel has stored meanwhile, as this thread knows. An
 * acquire alone orders no loads of the copy engine. */
static __device__ __forceinline__ void arrived_before_copies(void)
{
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

#else

struct arrivals {
};

static __device__ __forceinline__ void arrivals_begin(struct arrivals &)
{
}

template <uint32_t BYTES>
static __device__ __forceinline__ void copy_tile(uint8_t *to, const struct tile_rows &r, struct arrivals &, uint32_t)
{
    copy_vectors<BYTES>(shared_address(to), r.k, r.k_stride, r.valid);
    copy_vectors<BYTES>(shared_address(to) + ROWS_BYTES(BYTES), r.v, r.v_stride, r.valid);
    if (r.k_scales && threadIdx.x % 32 < 2)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared_address(to) + 2 * ROWS_BYTES(BYTES) +
                                                                       threadIdx.x % 32 * TILE),
                     "l"(threadIdx.x % 32 == 0 ? r.k_scales : r.v_scales)
                     : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
}

static __device__ __forceinline__ void arrivals_wait(struct arrivals &, uint32_t, bool ahead)
{
    if (ahead)
        asm volatile("cp.async.wait_group 1;" ::: "memory");
    else
        asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncwarp();
}

static __device__ __forceinline__ void stores_before_copies(void)
{
}

static __device__ __forceinline__ void arrived_before_copies(void)
{
}

#endif

/* Loads words of shared memory in one instruction. */
template <uint32_t WORDS> static __device__ __forceinline__ void load_words(uint32_t x[WORDS], const uint8_t *at)
{
    if constexpr (WORDS == 4)
        *(uint4 *)x = *(const uint4 *)at;
    else
        *(uint2 *)x = *(const uint2 *)at;
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

/* Waits until the launch that this one overlaps has ended, and all of its stores are visible. */
static __device__ __forceinline__ void await_launch(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* ---- products ---- */

/* A lane has row lane / 4, columns 2 * (lane % 4) and the next, of 8 x 8; then of its transpose. */
static __device__ __forceinline__ uint32_t turned(uint32_t x)
{
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(x));
    return x;
}

/* The low two of E4M3 as float16, exactly. */
static __device__ __forceinline__ uint32_t e4m3_pair(uint32_t x)
{
#if __CUDA_ARCH__ >= 890
    __half2_raw h = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)x, __NV_E4M3);

    return h.x | (uint32_t)h.y << 16;
#else /* there is no such instruction: bits in place are 2^-8 of the value, except NaN */
    uint32_t apart = __byte_perm(x, 0, 0x1404), size = apart & 0x7f007f00, y = (apart & 0x80008000) | size >> 1;

    asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(y) : "r"(0x5c005c00));
    return y | (((size + 0x01000100) & 0x80008000) >> 15) * 0x7e00;
#endif
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
