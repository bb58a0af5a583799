/* Elements of a word of 32 bits as float32, and back: the bits of kernels/rope/arith.h, by
 * instructions where the GPU has them. */
#ifndef UCM_KERNELS_ROPE_WORDS_CUH
#define UCM_KERNELS_ROPE_WORDS_CUH

extern "C" {
#include "kernels/rope/arith.h"
}

template <uint32_t DTYPE> struct words {
    static constexpr uint32_t bytes = DTYPE == UCM_ROPE_F32        ? 4
                                      : DTYPE == UCM_ROPE_FP8_E4M3 ? 1
                                                                   : 2;
    static constexpr uint32_t n = 4 / bytes; /* elements of a word */

    static __device__ __forceinline__ uint32_t bits_of(uint32_t word, uint32_t i)
    {
        return bytes == 4 ? word : word >> (i * 8 * bytes) & ((1u << (8 * bytes % 32)) - 1);
    }
    static __device__ __forceinline__ void decode(uint32_t word, float out[n])
    {
#pragma unroll
        for (uint32_t i = 0; i < n; i++)
            out[i] = ucm_rope_decode(DTYPE, bits_of(word, i));
    }
    static __device__ __forceinline__ uint32_t encode(const float x[n])
    {
        uint32_t word = 0;

#pragma unroll
        for (uint32_t i = 0; i < n; i++)
            word |= ucm_rope_encode(DTYPE, x[i]) << (i * 8 * bytes % 32);
        return word;
    }
};

static __device__ __forceinline__ void half_pair_decode(uint32_t two, float out[2])
{
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
        : "=f"(out[0]), "=f"(out[1])
        : "r"(two));
}

template <> __device__ __forceinline__ void words<UCM_ROPE_F16>::decode(uint32_t word, float out[2])
{
    half_pair_decode(word, out);
}

/* fminf and fmaxf drop NaN, which the instruction would give other bits. */
static __device__ __forceinline__ uint32_t half_encode(float x)
{
    float within = fminf(fmaxf(x, -65504.0f), 65504.0f);
    unsigned short bits;

    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(within));
    return ucm_is_nan(x) ? 0x7e00u : bits;
}

template <> __device__ __forceinline__ uint32_t words<UCM_ROPE_F16>::encode(const float x[2])
{
    return half_encode(x[0]) | half_encode(x[1]) << 16;
}

#if __CUDA_ARCH__ >= 890
template <>
__device__ __forceinline__ void words<UCM_ROPE_FP8_E4M3>::decode(uint32_t word, float out[4])
{
    uint32_t low, high;

    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; "
        "cvt.rn.f16x2.e4m3x2 %1, b; }"
        : "=r"(low), "=r"(high)
        : "r"(word));
    half_pair_decode(low, out);
    half_pair_decode(high, out + 2);
}

/* The instruction turns values past 448 into 448, with the sign, and NaN into 0x7f. */
template <> __device__ __forceinline__ uint32_t words<UCM_ROPE_FP8_E4M3>::encode(const float x[4])
{
    uint32_t word;

    asm("{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, %2, %1; "
        "cvt.rn.satfinite.e4m3x2.f32 b, %4, %3; mov.b32 %0, {a, b}; }"
        : "=r"(word)
        : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]));
    return word;
}
#endif

#endif
