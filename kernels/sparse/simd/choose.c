/* A choice's loops over keys, by vectors. */
#include "kernels/sparse/simd/score_tile.h"

#ifdef UCM_LANES

#if UCM_LANES == 16

uint32_t UCM_ISA_NAME(choose_count)(const uint32_t *keys, uint32_t n, uint32_t least)
{
    __m512i bound = _mm512_set1_epi32((int32_t)least);
    uint32_t count = 0, i = 0;

    for (; i + 16 <= n; i += 16)
        count += (uint32_t)__builtin_popcount(
            _mm512_cmpge_epu32_mask(_mm512_loadu_si512(keys + i), bound));
    for (; i < n; i++)
        count += keys[i] >= least;
    return count;
}

/* The lowest n set bits of a mask. */
static __mmask16 lowest(__mmask16 mask, uint32_t n)
{
    uint32_t left = mask;

    if ((uint32_t)__builtin_popcount(left) <= n)
        return mask;
    for (; n > 0; n--)
        left &= left - 1;
    return (__mmask16)(mask & ~left);
}

uint32_t UCM_ISA_NAME(choose_put)(const uint32_t *keys, uint32_t n, uint32_t above, uint32_t ties,
                                  uint32_t base, uint32_t *index, uint32_t room)
{
    __m512i bound = _mm512_set1_epi32((int32_t)above);
    __m512i number =
        _mm512_add_epi32(_mm512_set1_epi32((int32_t)base),
                         _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    uint32_t put = 0;

    for (uint32_t i = 0; i < n && put < room; i += 16) {
        __mmask16 there = (__mmask16)(n - i < 16 ? (1u << (n - i)) - 1 : 0xffff);
        __m512i key = _mm512_maskz_loadu_epi32(there, keys + i);
        __mmask16 in = _mm512_mask_cmpgt_epu32_mask(there, key, bound);

        if (ties > 0) {
            __mmask16 tie = lowest(_mm512_mask_cmpeq_epu32_mask(there, key, bound), ties);

            ties -= (uint32_t)__builtin_popcount(tie);
            in |= tie;
        }
        in = lowest(in, room - put);
        _mm512_mask_compressstoreu_epi32(index + put, in, number);
        put += (uint32_t)__builtin_popcount(in);
        number = _mm512_add_epi32(number, _mm512_set1_epi32(16));
    }
    return put;
}

#else

uint32_t UCM_ISA_NAME(choose_count)(const uint32_t *keys, uint32_t n, uint32_t least)
{
    __m256i bound = _mm256_set1_epi32((int32_t)least), sum = _mm256_setzero_si256();
    uint32_t lane[8], count = 0, i = 0;

    for (; i + 8 <= n; i += 8) {
        __m256i key = _mm256_loadu_si256((const __m256i *)(keys + i));
        __m256i in = _mm256_cmpeq_epi32(_mm256_max_epu32(key, bound), key); /* -1: it is */

        sum = _mm256_sub_epi32(sum, in);
    }
    _mm256_storeu_si256((__m256i *)lane, sum);
    for (uint32_t l = 0; l < 8; l++)
        count += lane[l];
    for (; i < n; i++)
        count += keys[i] >= least;
    return count;
}

uint32_t UCM_ISA_NAME(choose_put)(const uint32_t *keys, uint32_t n, uint32_t above, uint32_t ties,
                                  uint32_t base, uint32_t *index, uint32_t room)
{
    return choose_put_plain(keys, n, above, ties, base, index, room);
}

#endif

#else
typedef int choose_unused;
#endif
