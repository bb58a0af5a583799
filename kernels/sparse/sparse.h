/* Block summaries: a few bytes for each layer of a block that say which queries want the block.
 *
 * A summary is computed from one layer's K (for `stats` also V) of one block, and later scored
 * against queries. docs/design/retrieval.md defines every byte and every rounding, so that this
 * code, the CUDA form and implementations by others give the same bits. The scalar arithmetic that
 * C and CUDA share is in arith.h; scoring many blocks and choosing among them is in select.h.
 *
 * A spec says what is computed from which memory; ucm_summary_plan_init checks it and works out
 * what builds and scores need again and again. After that nothing here allocates, locks, keeps
 * state or fails, so any number of threads may use one plan.
 *
 * Promise: a build reads only bytes that the shape names (ucm_summary_extent tells how far they
 * reach) and writes exactly ucm_summary_plan.bytes bytes. Any value in K and V is allowed, NaN and
 * infinities too. */
#ifndef UCM_KERNELS_SPARSE_H
#define UCM_KERNELS_SPARSE_H

#include <stdbool.h>
#include <stdint.h>

/* ---- what a summary is computed from ---- */

#define UCM_KV_TOKENS_MAX 1024
#define UCM_KV_HEADS_MAX 1024
#define UCM_KV_HEAD_DIM_MAX 1024
/* Elements of K, and of V, of one layer of a block. A thread that has begun a summary can't be
 * stopped; the largest takes some 60 ms. */
#define UCM_KV_ELEMENTS_MAX (UINT64_C(1) << 22)
#define UCM_SUMMARY_CHOSEN_MAX 32
#define UCM_KV_OFFSET_MAX (UINT64_C(1) << 40) /* of offsets and strides */

enum ucm_kv_dtype {
    UCM_KV_F32 = 0,
    UCM_KV_F16 = 1,
    UCM_KV_BF16 = 2,
    UCM_KV_FP8_E4M3 = 3, /* 0x7f and 0xff are NaN, no infinities; the scale is 1 */
};

/* Where K and V of one layer of a block lie, in bytes from the start of the layer. The
 * head_dim channels of a token and KV head are contiguous. Little endian. */
struct ucm_kv_shape {
    uint32_t dtype; /* enum ucm_kv_dtype */
    uint32_t tokens;
    uint32_t kv_heads;
    uint32_t head_dim;   /* channels of K; a multiple of 4 */
    uint32_t v_head_dim; /* channels of V; 0: there is no V (MLA), or nobody reads it */
    uint32_t rope_dim;   /* MLA: the last channels of K are the rotated part; otherwise 0 */
    uint64_t k_offset, k_token_stride, k_head_stride;
    uint64_t v_offset, v_token_stride, v_head_stride;
};

#define UCM_SPARSE_WHY 160 /* bytes of a refusal's sentence */

/* 0; or -EINVAL, and why says in a sentence which field is wrong and what would be right. */
int ucm_kv_shape_check(const struct ucm_kv_shape *shape, char why[UCM_SPARSE_WHY]);

/* Bytes from the layer's start to the end of the last element that the shape names, of K and, if
 * with_v, of V. For a shape that was checked. */
uint64_t ucm_kv_shape_extent(const struct ucm_kv_shape *shape, bool with_v);

/* ---- specs ---- */

enum ucm_summary_method_number {
    UCM_SUMMARY_MEAN = 1,
    UCM_SUMMARY_SUBMEAN = 2,
    UCM_SUMMARY_BOX = 3,
    UCM_SUMMARY_HASH = 4,
    UCM_SUMMARY_STATS = 5,
    UCM_SUMMARY_TOKENS = 6,
};

enum ucm_summary_mean_kind {
    UCM_MEAN_PLAIN = 0,      /* the mean of the block's keys */
    UCM_MEAN_MAX = 1,        /* the largest value of each channel */
    UCM_MEAN_NORMALISED = 2, /* the mean, divided by its Euclidean length */
};

/* Which channels RoPE rotates together as pair i. */
enum ucm_rope_pairs {
    UCM_PAIRS_NEOX = 0,        /* i and i + head_dim / 2 */
    UCM_PAIRS_INTERLEAVED = 1, /* 2i and 2i + 1 */
};

/* What a `tokens` summary holds of the tokens that were not chosen. */
enum ucm_tokens_rest {
    UCM_REST_NONE = 0,
    UCM_REST_MEAN = 1, /* their mean; all vectors have 4 bits a channel, and are summed */
};

#define UCM_SUMMARY_KEEP_MAX (UCM_KV_HEAD_DIM_MAX / 2 / 8)

/* Fields that the method does not use are ignored; zero them. */
struct ucm_summary_spec {
    uint32_t method;                    /* enum ucm_summary_method_number */
    uint32_t kind;                      /* mean: enum ucm_summary_mean_kind */
    uint32_t run;                       /* submean: tokens a mean; divides shape.tokens */
    uint32_t pairs;                     /* submean with keep: enum ucm_rope_pairs */
    uint32_t keep_bytes;                /* submean: head_dim / 16 rounded up, or 0: all channels */
    uint8_t keep[UCM_SUMMARY_KEEP_MAX]; /* bit i % 8 of byte i / 8: pair i is kept */
    uint32_t bits;                      /* hash: 64, 128 or 256 a token and KV head */
    uint32_t rope_bits;                 /* hash with rope_dim: those of bits for the rotated part */
    uint64_t seed;                      /* hash */
    uint32_t chosen;                    /* tokens: how many stand for the block */
    uint32_t rest;                      /* tokens: enum ucm_tokens_rest */
    float beta; /* stats, rest; scoring only: what logits are scaled by; 0: 1 / sqrt(head_dim) */
    struct ucm_kv_shape shape;
};

/* As ucm_kv_shape_check. */
int ucm_summary_check(const struct ucm_summary_spec *spec, char why[UCM_SPARSE_WHY]);

/* How far the shape reaches, for a spec that ucm_summary_check accepts; includes V only if the
 * method reads it. */
uint64_t ucm_summary_extent(const struct ucm_summary_spec *spec);

/* The spec in fixed-width little-endian fields, for hashing into a namespace's identity. Fields
 * that do not change a summary's bytes are 0, so specs that mean the same summary have the same
 * form:
 *
 *   at 0    u32 version (1), method, kind (mean) or rest (tokens), run (submean)
 *   at 16   u32 pairs (submean, with a bitmap that leaves a pair out), bits, rope_bits (hash)
 *   at 28   u32 chosen (tokens)
 *   at 32   u64 seed (hash)
 *   at 40   u8 keep[64] (submean; 0 if it keeps all pairs)
 *   at 104  u32 dtype, tokens, kv_heads, head_dim, v_head_dim (stats), rope_dim (hash)
 *   at 128  u64 k_offset, k_token_stride (0 for one token), k_head_stride (0 for one KV head)
 *   at 152  the same of V (stats with V) */
#define UCM_SUMMARY_CANONICAL_BYTES 176
void ucm_summary_canonical(const struct ucm_summary_spec *spec,
                           uint8_t out[UCM_SUMMARY_CANONICAL_BYTES]);

/* ---- plans ---- */

#define UCM_SUMMARY_ARRAYS 3
#define UCM_HASH_WORDS_MAX 4    /* 64-bit words of a token's hash */
#define UCM_HASH_CHUNKS_MAX 8   /* transforms of one segment */
#define UCM_HASH_SEGMENTS_MAX 2 /* MLA's latent and rotated parts */

/* One part of the channels that is hashed by itself. */
struct ucm_hash_segment {
    uint32_t first, channels; /* of K */
    uint32_t size;            /* channels padded to a power of two: bits of one transform */
    uint32_t bits, chunks;    /* chunks * size >= bits */
    uint32_t flips;           /* where its first sign vector begins in ucm_summary_plan.flip */
};

/* A checked spec and what follows from it. Plain data; only method is a pointer. */
struct ucm_summary_plan {
    struct ucm_summary_spec spec; /* beta is filled in */
    const struct ucm_summary_method *method;
    uint32_t bytes; /* of a summary: one layer of one block */

    /* The arrays of a summary, as byte offsets in the order of docs/design/retrieval.md's list.
     * Vector j of head g of array a begins at array[a] + (g * vectors + j) * vector_bytes. hash has
     * 32-bit poison words at array[1] + 4 * g. */
    uint32_t array[UCM_SUMMARY_ARRAYS];
    uint32_t scale[UCM_SUMMARY_ARRAYS]; /* bf16: scale[a] + 2 * (g * vectors + j); aligned to 2 */
    uint32_t vectors;  /* a head: 1; submean: tokens / run; hash: tokens; tokens: chosen + rest */
    uint32_t channels; /* of a vector; stats' V: shape.v_head_dim; hash: bits / 8 */
    uint32_t vector_bytes; /* channels; tokens with rest: 16 for each 32 of them */
    uint32_t query_floats; /* of a prepared query, a multiple of 16 */
    uint32_t metrics;      /* bit m: enum ucm_score_metric m is defined */

    float ln_count; /* stats: ln(shape.tokens); tokens with rest: ln of the tokens not chosen */
    uint16_t channel[UCM_KV_HEAD_DIM_MAX]; /* submean: which channel of K is a vector's i-th */
    uint32_t n_segments;                   /* hash */
    struct ucm_hash_segment segment[UCM_HASH_SEGMENTS_MAX];
    /* hash: what the channels' sign bits are XORed with (0 or 1 << 31). Vector (w, j) of a segment
     * begins at its flips + (2 * w + j) * size. */
    uint32_t flip[UCM_HASH_SEGMENTS_MAX * 2 * UCM_KV_HEAD_DIM_MAX];
};

/* Checks the spec; 0, or -EINVAL with the sentence as ucm_summary_check gives it. About 20 us. */
int ucm_summary_plan_init(struct ucm_summary_plan *plan, const struct ucm_summary_spec *spec,
                          char why[UCM_SPARSE_WHY]);

/* Bytes of a summary, for a spec that ucm_summary_check accepts: a multiple of 4. */
uint32_t ucm_summary_bytes(const struct ucm_summary_spec *spec);

/* ---- building and scoring one summary ---- */

/* layer: the layer, ucm_summary_extent bytes, any alignment; out: plan->bytes, aligned to 4. */
void ucm_summary_build(const struct ucm_summary_plan *plan, const void *layer, void *out);

enum ucm_score_metric {
    UCM_METRIC_DOT = 0, /* the scores of the list in docs/design/retrieval.md */
    UCM_METRIC_L2 = 1,  /* minus the squared distance; mean, submean and tokens without rest only */
    UCM_METRIC_ROUNDED =
        2, /* UCM_METRIC_DOT of ucm_summary_round's query; mean, submean and tokens only */
};

/* Prepares what scores need of a query head's head_dim values, once for all blocks. out has
 * query_floats. mean, tokens: q. submean: its kept channels. box: q, then the sum of its absolute
 * values. stats: q, then its squares. hash: the query's bits, words as pairs of floats' bits. The
 * rest is 0. */
void ucm_summary_query(const struct ucm_summary_plan *plan, const float *q, float *out);

/* For UCM_METRIC_ROUNDED, before ucm_summary_query. Rounds the channels that the method scores so
 * that their sums with summaries are exact; the others stay. All become NaN if a value is NaN or
 * not below 2^100. out may be q. */
void ucm_summary_round(const struct ucm_summary_plan *plan, const float *q, float *out);

/* The raw score of a prepared query head against KV head g of one summary (aligned to 4); +inf if
 * the head is poisoned. It is the reference with which faster scoring is compared. */
float ucm_summary_score(const struct ucm_summary_plan *plan, enum ucm_score_metric metric,
                        const float *query, const void *summary, uint32_t g);

/* ---- methods ---- */

/* One file in simd/ and one line in simd/methods.c each. */
struct ucm_summary_method {
    uint32_t number;
    const char *name;
    /* Refuses parameters; the shape is checked already. Fills in why as ucm_summary_check does. */
    int (*check)(const struct ucm_summary_spec *spec, char why[UCM_SPARSE_WHY]);
    /* Sets the plan's fields from its spec; bytes need not be padded yet. */
    void (*plan)(struct ucm_summary_plan *plan);
    void (*build)(const struct ucm_summary_plan *plan, const uint8_t *layer, uint8_t *out);
    void (*query)(const struct ucm_summary_plan *plan, const float *q, float *out);
    float (*score)(const struct ucm_summary_plan *plan, enum ucm_score_metric metric,
                   const float *query, const uint8_t *summary, uint32_t g);
    uint32_t metrics; /* of ucm_summary_plan, unless its parameters allow less */
};

/* NULL: no such method. */
const struct ucm_summary_method *ucm_summary_method(uint32_t number);

#endif
