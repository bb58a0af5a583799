/* hash: the signs of each key after a random rotation. Two Hadamard transforms with random signs
 * stand for the orthogonal matrix, so that the seed alone names it. */
#include "kernels/simd/isa.h"
#include "kernels/sparse/simd/rows.h"
#include "kernels/sparse/spec.h"

static uint32_t power_of_two(uint32_t n)
{
    uint32_t size = 1;

    while (size < n)
        size *= 2;
    return size;
}

static int check_segment(const char *name, uint32_t channels, uint32_t bits,
                         char why[UCM_SPARSE_WHY])
{
    uint32_t most = power_of_two(channels) * UCM_HASH_CHUNKS_MAX;

    if (bits > most)
        return sparse_refuse(why, "%u bits are too many for the %u channels of %s; %u is the most",
                             bits, channels, name, most);
    return 0;
}

static int check(const struct ucm_summary_spec *spec, char why[UCM_SPARSE_WHY])
{
    uint32_t rope = spec->shape.rope_dim, d = spec->shape.head_dim;
    int r;

    if (spec->bits != 64 && spec->bits != 128 && spec->bits != 256)
        return sparse_refuse(why, "bits is %u; 64, 128 and 256 are allowed", spec->bits);
    if (rope == 0 && spec->rope_bits != 0)
        return sparse_refuse(why, "rope_bits is %u without a rope_dim", spec->rope_bits);
    if (rope != 0 && (spec->rope_bits < 1 || spec->rope_bits >= spec->bits))
        return sparse_refuse(why, "rope_bits is %u; with a rope_dim 1 to %u are allowed",
                             spec->rope_bits, spec->bits - 1);
    r = check_segment(rope != 0 ? "the latent part" : "K", d - rope, spec->bits - spec->rope_bits,
                      why);
    return r < 0 || rope == 0 ? r : check_segment("the rotated part", rope, spec->rope_bits, why);
}

/* Returns where the next segment's flips begin. */
static uint32_t plan_segment(struct ucm_summary_plan *plan, uint32_t i, uint32_t first,
                             uint32_t channels, uint32_t bits, uint32_t flips)
{
    uint32_t size = power_of_two(channels), chunks = (bits + size - 1) / size;

    plan->segment[i] = (struct ucm_hash_segment){first, channels, size, bits, chunks, flips};
    for (uint32_t v = 0; v < 2 * chunks; v++)
        for (uint32_t c = 0; c < size; c++) {
            uint64_t signs = ucm_hash_signs(plan->spec.seed, i, v / 2, v % 2, c);

            plan->flip[flips++] = (uint32_t)(signs >> c % 64 & 1) << 31;
        }
    return flips;
}

static void plan_hash(struct ucm_summary_plan *plan)
{
    const struct ucm_summary_spec *spec = &plan->spec;
    uint32_t rope = spec->shape.rope_dim, latent = spec->shape.head_dim - rope, flips;

    flips = plan_segment(plan, 0, 0, latent, spec->bits - spec->rope_bits, 0);
    if (rope != 0)
        plan_segment(plan, 1, latent, rope, spec->rope_bits, flips);
    plan->n_segments = rope != 0 ? 2 : 1;
    plan->vectors = spec->shape.tokens;
    plan->channels = spec->bits / 8;
    plan->array[1] = spec->shape.kv_heads * plan->vectors * plan->channels;
    plan->bytes = plan->array[1] + 4 * spec->shape.kv_heads;
    plan->query_floats = spec->bits / 32;
}

/* The transform of fewer channels than a vector has. */
static void transform_few(float *x, const uint32_t *flips, uint32_t n)
{
    for (uint32_t c = 0; c < n; c++)
        x[c] = ucm_f32(ucm_f32_bits(x[c]) ^ flips[c]);
    for (uint32_t h = 1; h < n; h *= 2)
        for (uint32_t i = 0; i < n; i += 2 * h)
            for (uint32_t j = i; j < i + h; j++) {
                float a = x[j], b = x[j + h];

                x[j] = a + b;
                x[j + h] = a - b;
            }
}

/* Stage h, for h of at least a vector. */
static void stage(float *x, uint32_t n, uint32_t h)
{
    for (uint32_t i = 0; i < n; i += 2 * h)
        for (uint32_t j = i; j < i + h; j += VEC) {
            vec_f a = vec_load(x + j), b = vec_load(x + j + h);

            vec_store(x + j, a + b);
            vec_store(x + j + h, a - b);
        }
}

/* Stages h and 2h in one pass. */
static void two_stages(float *x, uint32_t n, uint32_t h)
{
    for (uint32_t i = 0; i < n; i += 4 * h)
        for (uint32_t j = i; j < i + h; j += VEC) {
            vec_f a = vec_load(x + j), b = vec_load(x + j + h);
            vec_f c = vec_load(x + j + 2 * h), d = vec_load(x + j + 3 * h);
            vec_f ab = a + b, ba = a - b, cd = c + d, dc = c - d;

            vec_store(x + j, ab + cd);
            vec_store(x + j + h, ba + dc);
            vec_store(x + j + 2 * h, ab - cd);
            vec_store(x + j + 3 * h, ba - dc);
        }
}

/* Random signs, then the fast Walsh-Hadamard transform, not normalised. */
static void transform(float *x, const uint32_t *flips, uint32_t n)
{
    uint32_t h = VEC;

    if (n < VEC) {
        transform_few(x, flips, n);
        return;
    }
    for (uint32_t c = 0; c < n; c += VEC) {
        vec_i signs;

        memcpy(&signs, flips + c, sizeof(signs));
        vec_store(x + c, vec_hadamard((vec_f)((vec_i)vec_load(x + c) ^ signs)));
    }
    for (; 2 * h < n; h *= 4)
        two_stages(x, n, h);
    if (h < n)
        stage(x, n, h);
}

/* ORs n bits, at most 64, into words from bit `at` on. The bits there are 0. */
static void put_bits(uint64_t *words, uint32_t at, uint64_t bits, uint32_t n)
{
    uint32_t shift = at % 64;

    bits &= ~UINT64_C(0) >> (64 - n);
    words[at / 64] |= bits << shift;
    if (shift + n > 64)
        words[at / 64 + 1] |= bits >> (64 - shift);
}

/* The signs of n values, which fill whole vectors; what lies after the n values does not count. */
static void put_signs(uint64_t *words, uint32_t at, const float *x, uint32_t n)
{
    for (uint32_t i = 0; i < n; i += 64) {
        uint32_t most = n - i < 64 ? n - i : 64;
        uint64_t bits = 0;

        for (uint32_t c = 0; c < most; c += VEC)
            bits |= (uint64_t)vec_positive(vec_load(x + i + c)) << c;
        put_bits(words, at + i, bits, most);
    }
}

static void hash_key(const struct ucm_summary_plan *plan, const float *k, uint64_t *words)
{
    _Alignas(64) float x[ROW_MAX];
    uint32_t at = 0;

    memset(words, 0, plan->channels);
    for (uint32_t i = 0; i < plan->n_segments; i++) {
        const struct ucm_hash_segment *s = &plan->segment[i];

        for (uint32_t left = s->bits, w = 0; left > 0; w++) {
            const uint32_t *flips = plan->flip + s->flips + 2 * w * s->size;
            uint32_t bits = left < s->size ? left : s->size;
            uint32_t end = s->size < VEC ? VEC : s->size;

            memcpy(x, k + s->first, s->channels * sizeof(*x));
            memset(x + s->channels, 0, (end - s->channels) * sizeof(*x));
            transform(x, flips, s->size);
            transform(x, flips + s->size, s->size);
            put_signs(words, at, x, bits);
            at += bits;
            left -= bits;
        }
    }
}

static void build(const struct ucm_summary_plan *plan, const uint8_t *layer, uint8_t *out)
{
    const struct ucm_kv_shape *shape = &plan->spec.shape;
    uint64_t words[UCM_HASH_WORDS_MAX];
    _Alignas(64) float k[ROW_MAX];

    for (uint32_t g = 0; g < shape->kv_heads; g++) {
        uint8_t *data = out + g * plan->vectors * plan->channels;
        struct rows r = rows_of_k(shape, layer, g);
        uint32_t poison = 0;

        for (uint32_t t = 0; t < r.count; t++) {
            poison |= !rows_decode(&r, t, k);
            hash_key(plan, k, words);
            memcpy(data + t * plan->channels, words, plan->channels);
        }
        if (poison)
            memset(data, 0, plan->vectors * plan->channels);
        memcpy(out + plan->array[1] + 4 * g, &poison, sizeof(poison));
    }
}

static void query(const struct ucm_summary_plan *plan, const float *q, float *out)
{
    uint64_t words[UCM_HASH_WORDS_MAX];

    hash_key(plan, q, words);
    memcpy(out, words, plan->channels);
}

static float score(const struct ucm_summary_plan *plan, enum ucm_score_metric metric,
                   const float *query_words, const uint8_t *summary, uint32_t g)
{
    const uint8_t *data = summary + g * plan->vectors * plan->channels;
    uint32_t bits = plan->spec.bits, least = bits, poison;
    uint64_t q[UCM_HASH_WORDS_MAX], k[UCM_HASH_WORDS_MAX];

    (void)metric;
    memcpy(&poison, summary + plan->array[1] + 4 * g, sizeof(poison));
    if (poison != 0)
        return ucm_inf();
    memcpy(q, query_words, plan->channels);
    for (uint32_t t = 0; t < plan->vectors; t++) {
        uint32_t distance = 0;

        memcpy(k, data + t * plan->channels, plan->channels);
        for (uint32_t w = 0; w < bits / 64; w++)
            distance += (uint32_t)__builtin_popcountll(q[w] ^ k[w]);
        least = distance < least ? distance : least;
    }
    return (float)((int32_t)bits - 2 * (int32_t)least);
}

const struct ucm_summary_method UCM_ISA_NAME(sparse_hash) = {
    .number = UCM_SUMMARY_HASH,
    .name = "hash",
    .check = check,
    .plan = plan_hash,
    .build = build,
    .query = query,
    .score = score,
    .metrics = 1u << UCM_METRIC_DOT,
};
