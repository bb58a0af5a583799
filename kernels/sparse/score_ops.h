/* What of scoring has a form for each instruction set: simd/score.c. */
#ifndef UCM_KERNELS_SPARSE_SCORE_OPS_H
#define UCM_KERNELS_SPARSE_SCORE_OPS_H

#include "kernels/sparse/select.h"

struct ucm_score_ops {
    /* A query head in the form that `range` reads; floats of it, a multiple of 16. */
    uint32_t (*query_floats)(const struct ucm_digest_plan *plan);
    void (*prepare)(const struct ucm_digest_plan *plan, const float *q, float *out);
    /* Scores of blocks [first, end); for softmax to job->raw. */
    void (*range)(const struct ucm_score_job *job, uint32_t first, uint32_t end);
    /* Scores in place to their shares. +inf stays, and has no part in the others' sum. */
    void (*softmax)(float *list, uint32_t n, float beta);
    /* The shares of blocks [first, end) to their scores. */
    void (*sum)(const struct ucm_score_job *job, uint32_t first, uint32_t end);
    /* rint(2^24 * exp(beta * (score - the largest))), 0 for NaN and +inf. Returns their sum. */
    uint64_t (*weigh)(const float *scores, uint32_t n, float beta, uint32_t *weights);
};

extern const struct ucm_score_ops score_ops_base, score_ops_avx2, score_ops_avx512;

/* This host's. */
const struct ucm_score_ops *score_ops(void);

#endif
