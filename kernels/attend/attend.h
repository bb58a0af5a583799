/* Attention of one decode step over blocks of KV that lie in entries. It also gives the logarithm
 * of the weights' sum, so that results over different blocks can be merged.
 *
 * A *list* is a sequence of entries, attended in that order, for the query heads of one KV head. A
 * *tile* is up to 16 consecutive tokens of a block; the last tile of a block, and of the tail
 * block, may have fewer. All arithmetic is IEEE float32 as kernels/arith.h says, in this order:
 *
 * 1. For each token: logit = scale * dot(q, k), the dot product of 32 lanes that
 *    docs/design/retrieval.md defines. scale is the spec's, times k_scale, rounded once.
 * 2. For a tile: top is the largest logit, and e = ucm_exp(logit - top) for each token. sum is the e
 *    in dot order. Channel c of out is e * v[c] by fma from 0 on, token by token. ucm_exp(NaN) is
 *    0, so a tile whose logits are all -inf weighs nothing.
 * 3. A tile joins the list's result. top' is the larger of the two tops (the list's if they are
 *    equal). keep = ucm_exp(list's top - top'), and more = ucm_exp(tile's top - top'). sum becomes
 *    fma(tile's sum, more, sum * keep), and each channel likewise. A list begins as {-inf, 0, 0}.
 * 4. At the end, out = out / sum * v_scale and lse = top + ucm_log(sum). For a list without any
 *    weight, out is 0 and lse -inf.
 *
 * So the bits depend on the list alone. They don't depend on the entries' places, the number of
 * calls that added it, the instruction set, or other lists. A list of all of a sequence's blocks in
 * their order is dense attention. Against exact arithmetic, lse is off by at most ucm_attend_slack.
 * A channel is off by the same, relative to the largest |v|, and 1e-6 of that. A device that
 * multiplies in tensor cores has other bits, and names its own bound.
 *
 * A logit that is NaN or +inf (keys that overflowed) makes its query head's out and lse NaN. NaN
 * and infinities in V reach their channel, as arithmetic has it. Nothing here allocates, locks or
 * keeps state; any number of threads may use one plan. */
#ifndef UCM_KERNELS_ATTEND_H
#define UCM_KERNELS_ATTEND_H

#include "kernels/sparse/sparse.h"

#include <stdbool.h>
#include <stdint.h>

#define UCM_ATTEND_TILE 16u
#define UCM_ATTEND_GROUP_MAX 128u /* MLA's query heads share one KV head */

/* ---- specs and plans ---- */

/* The shape says where K and V lie in an entry. MLA: V is the first channels of K, its offset and
 * strides are K's, and queries are absorbed. K must be rotated already. Attention that depends on
 * distances, such as ALiBi or a sliding window, is not possible. */
struct ucm_attend_spec {
    struct ucm_kv_shape shape;
    uint32_t group;         /* query heads of a KV head */
    float scale;            /* of logits; 0: 1 / sqrt(head_dim), which is not MLA's */
    float k_scale, v_scale; /* what stored K and V were divided by (FP8); 0: 1 */
    float soft_cap;         /* of logits; refused unless 0 */
};

struct ucm_attend_plan {
    struct ucm_attend_spec spec; /* the defaults are filled in */
    float logit_scale;           /* scale * k_scale */
    uint32_t k_floats, v_floats; /* of a row in scratch memory */
    uint32_t query_floats;       /* of a prepared group of queries */
    uint32_t state_floats;       /* of a list's result */
};

/* Returns 0; or -EINVAL, and why says in a sentence which field is wrong and what would be
 * right. */
int ucm_attend_plan_init(struct ucm_attend_plan *plan, const struct ucm_attend_spec *spec,
                         char why[UCM_SPARSE_WHY]);

/* ---- one list ---- */

/* Block b lies at base + b * stride. Numbers below 0 or from `blocks` on are not there. */
struct ucm_attend_memory {
    const void *base;
    uint64_t stride;
    uint32_t blocks;
};

/* A list's result so far, in `state_floats` of the caller's memory, aligned to 4. */
struct ucm_attend_state {
    float *top, *sum, *out; /* [group], [group], [group][v_floats] */
    uint32_t tiles;         /* that joined it */
    bool measure;           /* the caller wants key_max */
    float key_max;          /* the largest |k| of them, if it is not NaN */
};

/* q: [group][head_dim]; out: query_floats. */
void ucm_attend_query(const struct ucm_attend_plan *plan, const float *q, float *out);
void ucm_attend_begin(const struct ucm_attend_plan *plan, struct ucm_attend_state *state,
                      float *floats);
/* Attends KV head g of n more blocks; of the last one, `tail` tokens (0: all). If log_weight is not
 * NULL, [h * pitch + i] receives the logarithm of block i's weights for query head h of the group.
 * That is NaN if a logit is NaN or +inf. -ENOENT: a block is not in that memory; the state is as it
 * was. */
int ucm_attend_add(const struct ucm_attend_plan *plan, const struct ucm_attend_memory *memory,
                   uint32_t g, const float *query, const int32_t *blocks, uint32_t n, uint32_t tail,
                   struct ucm_attend_state *state, float *log_weight, uint32_t pitch);
/* out: [group][v_head_dim]; lse: [group], may be NULL. The state stays as it is. */
void ucm_attend_end(const struct ucm_attend_plan *plan, const struct ucm_attend_state *state,
                    float *out, float *lse);

/* Floats that a query and a state need together, the state first, aligned to 64 bytes. */
uint32_t ucm_attend_scratch_floats(const struct ucm_attend_plan *plan);

/* ---- bounds ---- */

/* How far top + ln(sum) of a query head is at most from the exact logarithm of its list's weights.
 * abs_sum: the sum of its query's absolute values, in any order. The state must have been measured.
 * +inf: nothing is known, for instance because products overflow. */
float ucm_attend_slack(const struct ucm_attend_plan *plan, const struct ucm_attend_state *state,
                       float abs_sum);

#endif
