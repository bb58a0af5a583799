/* Elements of all types, rows and dot products, over the vectors of kernels/simd/vec.h. */
#ifndef UCM_KERNELS_SPARSE_VEC_H
#define UCM_KERNELS_SPARSE_VEC_H

#include "kernels/simd/vec.h"
#include "kernels/sparse/arith.h"
#include "kernels/sparse/sparse.h"

/* The sum of a dot product's lanes: halves are added to halves. */
VEC_INLINE float vec_fold(vec_f sum[UCM_DOT_LANES / VEC])
{
    for (int half = UCM_DOT_LANES / VEC / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            sum[i] += sum[i + half];
    for (int h = VEC / 2; h > 0; h /= 2)
        sum[0] += vec_swap(sum[0], h);
    return sum[0][0];
}

VEC_INLINE uint32_t vec_element_bytes(uint32_t dtype)
{
    return dtype == UCM_KV_F32 ? 4 : dtype == UCM_KV_FP8_E4M3 ? 1 : 2;
}

VEC_INLINE vec_f vec_decode(uint32_t dtype, const uint8_t *p)
{
    vec_f v;

    switch (dtype) {
    case UCM_KV_F16:
        return vec_f16(p);
    case UCM_KV_BF16:
        return vec_bf16(p);
    case UCM_KV_FP8_E4M3:
        return vec_fp8(p);
    default:
        memcpy(&v, p, sizeof(v));
        return v;
    }
}

/* Channels c .. c + VEC - 1 of a row of n; those from n on are 0 and are not read. */
VEC_INLINE vec_f vec_part(uint32_t dtype, const uint8_t *row, uint32_t c, uint32_t n)
{
    uint32_t size = vec_element_bytes(dtype);
    uint8_t part[4 * VEC] = {0};

    if (c < n)
        memcpy(part, row + c * size, (n - c < VEC ? n - c : VEC) * size);
    return vec_decode(dtype, part);
}

/* STEP(c, channels from c on) for each vector of a row of n channels. */
#define VEC_EACH(dtype, row, n, STEP)                                                              \
    do {                                                                                           \
        uint32_t c_ = 0, size_ = vec_element_bytes(dtype);                                         \
                                                                                                   \
        for (; c_ + VEC <= (n); c_ += VEC)                                                         \
            STEP(c_, vec_decode(dtype, (row) + c_ * size_));                                       \
        if (c_ < (n))                                                                              \
            STEP(c_, vec_part(dtype, row, c_, n));                                                 \
    } while (0)

#endif
