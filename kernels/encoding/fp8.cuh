/* fp8, eight elements at a time. Rare values (NaN, infinities, scales beyond those of sane rows)
 * take the scalar code of arith.h. */
#ifndef UCM_KERNELS_ENCODING_FP8_CUH
#define UCM_KERNELS_ENCODING_FP8_CUH

#include "kernels/encoding/rows.cuh"

template <uint32_t D> struct fp8 {
    static const uint32_t DTYPE = D;
    static const bool CHANNELS = false;
    typedef uint2 code;
    typedef uint8_t scale_t;

    static __device__ __forceinline__ uint32_t scale(uint32_t largest)
    {
        return ucm_fp8_scale(D, element_magnitude<D>(largest));
    }

    static __device__ __forceinline__ uint32_t encode_one(uint32_t h, uint32_t scale)
    {
        return ucm_fp8_encode(ucm_element_decode(D, h), ucm_fp8_multiplier(scale));
    }

    static __device__ __forceinline__ uint32_t decode_one(uint32_t code, uint32_t scale)
    {
        return ucm_fp8_decode(D, code, ucm_fp8_power(scale));
    }

    /* Two codes, b's above a's. The instruction makes infinities the largest code, which is right
     * here, and NaN 0x7f. No finite value of a row reaches either. */
    static __device__ __forceinline__ uint32_t encode_pair(float a, float b)
    {
#if __CUDA_ARCH__ >= 890
        uint16_t pair;

        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b), "f"(a));
        return pair;
#else
        return ucm_fp8_encode(a, 1.0f) | ucm_fp8_encode(b, 1.0f) << 8;
#endif
    }

    static __device__ __forceinline__ uint32_t encode_word(uint32_t ab, uint32_t cd, float m)
    {
        float2 x = element_pair<D>(ab), y = element_pair<D>(cd);

        return encode_pair(x.x * m, x.y * m) | encode_pair(y.x * m, y.y * m) << 16;
    }

    static __device__ __forceinline__ uint2 encode(uint4 x, uint32_t scale)
    {
        float m = ucm_fp8_multiplier(scale);

        return make_uint2(encode_word(x.x, x.y, m), encode_word(x.z, x.w, m));
    }

    /* A code moved to the dtype's bits is its value times a power of two, also for denormals. One
     * product gives the element. */
    static __device__ __forceinline__ uint32_t pair_decode(uint32_t two, uint32_t factor)
    {
        const uint32_t down = D == UCM_ENCODING_BF16 ? 4 : 1;
        uint32_t moved = (two & 0x80008000u) | (two & 0x7f007f00u) >> down, r;

        if (D == UCM_ENCODING_BF16)
            asm("fma.rn.bf16x2 %0, %1, %2, %3;"
                : "=r"(r)
                : "r"(moved), "r"(factor), "r"(0x80008000u));
        else
            asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(moved), "r"(factor));
        return r;
    }

    /* Whether any of the four codes is an infinity or NaN. */
    static __device__ __forceinline__ uint32_t special(uint32_t codes)
    {
        uint32_t rest = ~codes & 0x7e7e7e7eu;

        return (rest - 0x01010101u) & ~rest & 0x80808080u;
    }

    static __device__ __forceinline__ bool raw_scale(uint32_t scale)
    {
        return scale <= 134 && (D == UCM_ENCODING_BF16 || scale >= 105);
    }

    static __device__ __noinline__ uint4 decode_rare(uint2 c, uint32_t scale)
    {
        uint32_t x[4], codes[2] = {c.x, c.y};

        for (uint32_t i = 0; i < 4; i++) {
            uint32_t two = codes[i / 2] >> i % 2 * 16;

            x[i] = decode_one(two & 0xffu, scale) | decode_one(two >> 8 & 0xffu, scale) << 16;
        }
        return make_uint4(x[0], x[1], x[2], x[3]);
    }

    static __device__ __forceinline__ uint4 decode(uint2 c, uint32_t scale)
    {
        uint32_t factor = D == UCM_ENCODING_BF16 ? (scale + 120u) << 7 : (scale - 104u) << 10;

        factor |= factor << 16;
        if (!raw_scale(scale) || special(c.x) | special(c.y))
            return decode_rare(c, scale);
        return make_uint4(pair_decode(__byte_perm(c.x, 0, 0x1404), factor),
                          pair_decode(__byte_perm(c.x, 0, 0x3424), factor),
                          pair_decode(__byte_perm(c.y, 0, 0x1404), factor),
                          pair_decode(__byte_perm(c.y, 0, 0x3424), factor));
    }
};

#endif
