/* What attention over latents needs of the machine besides attend_machine.cuh. It loads matrices
 * from shared memory, and brings rows there that all warps of a thread block may wait for. */
#ifndef UCM_KERNELS_ATTEND_MLA_MACHINE_CUH
#define UCM_KERNELS_ATTEND_MLA_MACHINE_CUH

#include "kernels/attend/attend_machine.cuh"

/* Loads four matrices of 8 x 8 words of 16 bits. Lane i has the address of row i % 8 of matrix i /
 * 8. Of each matrix it gets columns 2 * (i % 4) and the next of row i / 4. */
static __device__ __forceinline__ void load_matrices(uint32_t x[4], const void *at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(shared_address(at))
                 : "memory");
}

/* The same of the matrices' transposes. */
static __device__ __forceinline__ void load_turned(uint32_t x[4], const void *at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(shared_address(at))
                 : "memory");
}

/* ---- a tile's rows ---- */

/* By one thread. */
static __device__ __forceinline__ void tile_barrier_begin(uint64_t *barrier)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#else
    asm volatile("mbarrier.init.shared.b64 [%0], 32;" ::"r"(shared_address(barrier)) : "memory");
#endif
}

/* Rows lie in twos, 16 bytes apart. */
#define TWO 2u
#define LATENT_BYTES(bytes) (TILE * (bytes) + TILE / TWO * 16)

template <uint32_t BYTES> static __device__ __forceinline__ uint32_t latent_row(uint32_t row)
{
    return row * BYTES + row / TWO * 16;
}

#if __CUDA_ARCH__ >= 900
static __device__ __forceinline__ void copy_piece(uint32_t to, const uint8_t *from, uint32_t bytes, uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
#endif

/* By a warp: `valid` rows. One phase of the barrier. */
template <uint32_t BYTES>
static __device__ __forceinline__ void copy_rows(uint8_t *to, const uint8_t *from, uint64_t stride, uint32_t valid,
                                                 uint64_t *barrier)
{
    uint32_t at = shared_address(to), lane = threadIdx.x % 32, arrives = shared_address(barrier);

#if __CUDA_ARCH__ >= 900
    if (lane != 0) /* copies by each lane would be issued one by one all the same, but slower */
        return;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(arrives), "r"(valid * BYTES) : "memory");
    if (stride == BYTES) {
#pragma unroll
        for (uint32_t row = 0; row < TILE; row += TWO)
            if (row < valid)
                copy_piece(at + latent_row<BYTES>(row), from + row * BYTES, min(valid - row, TWO) * BYTES, arrives);
        return;
    }
    for (uint32_t row = 0; row < valid; row++)
        copy_piece(at + latent_row<BYTES>(row), from + row * stride, BYTES, arrives);
#else
    for (uint32_t i = lane * 16; i < valid * BYTES; i += 512)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at + latent_row<BYTES>(i / BYTES) + i % BYTES),
                     "l"(from + i / BYTES * stride + i % BYTES)
                     : "memory");
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(arrives) : "memory");
#endif
}

/* Until the barrier's phase of that parity has ended. */
static __device__ __forceinline__ void tile_barrier_wait(uint64_t *barrier, uint32_t parity)
{
    uint32_t done;

    do
#if __CUDA_ARCH__ >= 900
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
#else
        asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
#endif
                     : "=r"(done)
                     : "r"(shared_address(barrier)), "r"(parity)
                     : "memory");
    while (!done);
}

/* The launch that waits for this one may begin as soon as all thread blocks have said so. */
static __device__ __forceinline__ void let_next_launch_begin(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif
