/* hash: the smallest Hamming distance between a query head's bits and the block's tokens'. A vector
 * holds several tokens' words. Tokens left at the end go one by one. */
#include "kernels/sparse/simd/score_tile.h"

#ifdef UCM_LANES

#include <string.h>

#define VECTOR_WORDS (UCM_LANES / 2)

#if UCM_LANES == 16

typedef __m512i words;

LANES_INLINE words w_load(const void *p)
{
    return _mm512_loadu_si512(p);
}

LANES_INLINE words w_most(void)
{
    return _mm512_set1_epi64(UCM_HASH_WORDS_MAX * 64);
}

/* In each 64-bit lane the distance of the lane's token. */
LANES_INLINE words w_distance(words a, words b, uint32_t token_words)
{
    words n = _mm512_popcnt_epi64(_mm512_xor_si512(a, b));

    if (token_words >= 2)
        n = _mm512_add_epi64(n, _mm512_permutex_epi64(n, 0xb1));
    if (token_words == 4)
        n = _mm512_add_epi64(n, _mm512_permutex_epi64(n, 0x4e));
    return n;
}

LANES_INLINE words w_min(words a, words b)
{
    return _mm512_min_epu64(a, b);
}

LANES_INLINE uint32_t w_least(words a)
{
    return (uint32_t)_mm512_reduce_min_epu64(a);
}

#else

typedef __m256i words;

LANES_INLINE words w_load(const void *p)
{
    return _mm256_loadu_si256(p);
}

LANES_INLINE words w_most(void)
{
    return _mm256_set1_epi64x(UCM_HASH_WORDS_MAX * 64);
}

/* Bits are counted by nibbles, through a table in a shuffle. */
LANES_INLINE words w_distance(words a, words b, uint32_t token_words)
{
    const words table = _mm256_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4, 0, 1, 1, 2,
                                         1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4);
    const words nibble = _mm256_set1_epi8(0x0f);
    words x = _mm256_xor_si256(a, b);
    words low = _mm256_shuffle_epi8(table, _mm256_and_si256(x, nibble));
    words high = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(x, 4), nibble));
    words n = _mm256_sad_epu8(_mm256_add_epi8(low, high), _mm256_setzero_si256());

    if (token_words >= 2)
        n = _mm256_add_epi64(n, _mm256_permute4x64_epi64(n, 0xb1));
    if (token_words == 4)
        n = _mm256_add_epi64(n, _mm256_permute4x64_epi64(n, 0x4e));
    return n;
}

/* Distances fit into a lane's low half. */
LANES_INLINE words w_min(words a, words b)
{
    return _mm256_min_epi32(a, b);
}

LANES_INLINE uint32_t w_least(words a)
{
    __m128i m = _mm_min_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));

    return (uint32_t)_mm_cvtsi128_si32(_mm_min_epi32(m, _mm_unpackhi_epi64(m, m)));
}

#endif

/* A query head's words, as often as a vector has room for them. */
LANES_INLINE words spread(const float *q, uint32_t token_words)
{
    uint64_t one[UCM_HASH_WORDS_MAX], all[VECTOR_WORDS];

    memcpy(one, q, token_words * sizeof(*one));
    for (uint32_t i = 0; i < VECTOR_WORDS; i++)
        all[i] = one[i % token_words];
    return w_load(all);
}

/* The least distance of tokens [first, n), and `least`. */
static uint32_t tokens_left(const uint8_t *data, const float *q, uint32_t first, uint32_t n,
                            uint32_t token_words, uint32_t least)
{
    uint64_t a[UCM_HASH_WORDS_MAX], b[UCM_HASH_WORDS_MAX];

    memcpy(a, q, token_words * sizeof(*a));
    for (uint32_t i = first; i < n; i++) {
        uint32_t distance = 0;

        memcpy(b, data + i * token_words * sizeof(*b), token_words * sizeof(*b));
        for (uint32_t w = 0; w < token_words; w++)
            distance += (uint32_t)__builtin_popcountll(a[w] ^ b[w]);
        least = distance < least ? distance : least;
    }
    return least;
}

LANES_INLINE void hash_panel(const struct score_tile *t, uint32_t g, const float *q, uint32_t n,
                             uint32_t token_words, vec out[][TILE_VECS])
{
    const struct ucm_summary_plan *plan = t->plan;
    uint32_t tokens = plan->vectors, from = g * tokens * plan->channels;
    uint32_t whole = tokens - tokens % (VECTOR_WORDS / token_words);
    float score[PANEL][TILE];
    words query[PANEL];

    for (uint32_t i = 0; i < n; i++)
        query[i] = spread(q + i * t->query_floats, token_words);
    for (uint32_t b = 0; b < TILE; b++) {
        const uint8_t *data = t->at[b] + from;
        words least[PANEL];
        uint32_t poison;

        tile_prefetch(t, b, from, tokens * plan->channels);
        memcpy(&poison, t->at[b] + plan->array[1] + 4 * g, sizeof(poison));
        LANES_UNROLL
        for (uint32_t i = 0; i < n; i++)
            least[i] = w_most();
        for (uint32_t w = 0; w < whole * token_words; w += VECTOR_WORDS) {
            words k = w_load(data + w * sizeof(uint64_t));

            LANES_UNROLL
            for (uint32_t i = 0; i < n; i++)
                least[i] = w_min(least[i], w_distance(k, query[i], token_words));
        }
        LANES_UNROLL
        for (uint32_t i = 0; i < n; i++) {
            uint32_t distance = w_least(least[i]);

            if (whole < tokens)
                distance = tokens_left(data, q + i * t->query_floats, whole, tokens, token_words,
                                       distance);
            score[i][b] = poison != 0
                              ? ucm_inf()
                              : (float)((int32_t)(64 * token_words) - 2 * (int32_t)distance);
        }
    }
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t v = 0; v < TILE_VECS; v++)
            out[i][v] = v_load(score[i] + v * UCM_LANES);
}

LANES_INLINE void panel_64(const struct score_tile *t, uint32_t g, const float *q, uint32_t n,
                           vec out[][TILE_VECS])
{
    hash_panel(t, g, q, n, 1, out);
}

LANES_INLINE void panel_128(const struct score_tile *t, uint32_t g, const float *q, uint32_t n,
                            vec out[][TILE_VECS])
{
    hash_panel(t, g, q, n, 2, out);
}

LANES_INLINE void panel_256(const struct score_tile *t, uint32_t g, const float *q, uint32_t n,
                            vec out[][TILE_VECS])
{
    hash_panel(t, g, q, n, 4, out);
}

static PANEL_BY_COUNT(score_64, panel_64) static PANEL_BY_COUNT(
    score_128, panel_128) static PANEL_BY_COUNT(score_256, panel_256)

    void UCM_ISA_NAME(score_panel_hash)(const struct score_tile *t, uint32_t g, const float *q,
                                        uint32_t n, vec out[][TILE_VECS])
{
    switch (t->plan->spec.bits) {
    case 64:
        score_64(t, g, q, n, out);
        break;
    case 128:
        score_128(t, g, q, n, out);
        break;
    default:
        score_256(t, g, q, n, out);
    }
}

#else
typedef int score_hash_unused;
#endif
