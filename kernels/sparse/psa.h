/* When to stop attending: PSA's rule, an estimate and a certificate, as pure functions.
 *
 * Blocks are attended in the order of their scores, `every` at a time. Each block has a weight, the sum
 * over its tokens of e^(beta * q . k), kept as a logarithm because it overflows. What is covered is
 * the weight of the attended blocks over that of all; the rules differ in what they take the blocks
 * that are left to weigh:
 * - PSA's: each as much as the lightest one attended. Too little where the order is wrong.
 * - estimated: what their scores say, of `stats` or of `tokens` with rest.
 * - certified: at most tokens * e^(beta * bound), the bound being the `box` score. With it the share is
 *   never more than what is truly covered, rounding of this arithmetic (1e-5 of it) aside. */
#ifndef UCM_KERNELS_SPARSE_PSA_H
#define UCM_KERNELS_SPARSE_PSA_H

#include <stdint.h>

/* weight * e^top; a sum of nothing is {-inf, 0}. */
struct ucm_weight_sum {
    float top, weight;
};

struct ucm_weight_sum ucm_weight_none(void);
/* Adds times * e^log_weight. log_weight +inf (a block that cannot be judged) makes the sum infinite. */
void ucm_weight_add(struct ucm_weight_sum *sum, float log_weight, float times);
void ucm_weight_join(struct ucm_weight_sum *sum, const struct ucm_weight_sum *other);
/* covered / (covered + left): 1 where nothing is left, 0 where nothing is covered. */
float ucm_weight_share(const struct ucm_weight_sum *covered, const struct ucm_weight_sum *left);

/* The weight of a block whose n tokens have these logits, beta * q . k. */
struct ucm_weight_sum ucm_weight_of_block(const float *logits, uint32_t n);
/* Its logarithm, within 1e-6. */
float ucm_weight_log(const struct ucm_weight_sum *sum);

enum ucm_psa_stop {
    UCM_PSA_RULE = 0,
    UCM_PSA_LEFT = 1, /* estimated or certified, by what `left` holds */
};

/* How many of n blocks are attended, best first, until the share reaches eps.
 * attended[i]: the log weight of the i-th best block. left[i]: what the rule takes block i to weigh at
 * most while it is left (UCM_PSA_LEFT): an estimate, or ln(tokens) + beta * a box score.
 * suffix: scratch, n + 1 sums (UCM_PSA_LEFT). *share: what is covered then, by the rule. */
uint32_t ucm_psa_blocks(enum ucm_psa_stop stop, const float *attended, const float *left,
                        uint32_t n, uint32_t every, float eps, struct ucm_weight_sum *suffix,
                        float *share);

#endif
