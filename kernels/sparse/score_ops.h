/* The parts of scoring that have a form for each instruction set, see simd/score.c. */
#ifndef UCM_KERNELS_SPARSE_SCORE_OPS_H
#define UCM_KERNELS_SPARSE_SCORE_OPS_H

#include "kernels/sparse/select.h"

struct ucm_score_ops {
    /* Floats of a query head in the form that `range` reads; a multiple of 16. */
    uint32_t (*query_floats)(const struct ucm_summary_plan *plan);
    /* Brings q, the i-th query head of the `group` of a KV head, into that form. queries: the KV
     * head's. */
    void (*prepare)(const struct ucm_summary_plan *plan, const float *q, uint32_t i, uint32_t group,
                    float *queries);
    /* Scores of blocks [first, end); for softmax to job->raw. */
    void (*range)(const struct ucm_score_job *job, uint32_t first, uint32_t end);
    /* Turns scores into their shares, in place. +inf stays, and does not count in the others'
     * sum. */
    void (*softmax)(float *list, uint32_t n, float beta);
    /* Turns the shares of blocks [first, end) into their scores. */
    void (*sum)(const struct ucm_score_job *job, uint32_t first, uint32_t end);
    /* The largest score that is neither NaN nor +inf; -inf: there is none. */
    float (*top)(const float *scores, uint32_t n);
    /* rint(2^24 * exp(beta * (score - top))), 0 for NaN and +inf. Returns their sum. */
    uint64_t (*weigh)(const float *scores, uint32_t n, float top, float beta, uint32_t *weights);
    /* How many of n keys are at least `least`. NULL: not faster than a radix selection. */
    uint32_t (*count)(const uint32_t *keys, uint32_t n, uint32_t least);
    /* Writes base + i for the keys above `above` and the first `ties` that equal it; at most room.
     * Returns how many. */
    uint32_t (*put)(const uint32_t *keys, uint32_t n, uint32_t above, uint32_t ties, uint32_t base,
                    uint32_t *index, uint32_t room);
};

uint32_t choose_put_plain(const uint32_t *keys, uint32_t n, uint32_t above, uint32_t ties,
                          uint32_t base, uint32_t *index, uint32_t room);

extern const struct ucm_score_ops score_ops_base, score_ops_avx2, score_ops_avx512;

/* This host's. */
const struct ucm_score_ops *score_ops(void);

#endif
