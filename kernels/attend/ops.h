/* For the files of this room only: the arithmetic of one tile, in the form of an instruction set. */
#ifndef UCM_KERNELS_ATTEND_OPS_H
#define UCM_KERNELS_ATTEND_OPS_H

#include "kernels/attend/attend.h"

/* Query heads that a form takes at once: rows of prepared queries, of weights and of results are there for a
 * multiple of it. */
#define ATTEND_HEADS 4u
#define ATTEND_ROWS (UCM_ATTEND_GROUP_MAX + ATTEND_HEADS - 1)

/* Tokens of one KV head. */
struct attend_rows {
    const uint8_t *at;
    uint64_t stride;
    uint32_t count; /* 1 to UCM_ATTEND_TILE */
};

/* What a tile does to its list: by query heads. */
struct attend_tile {
    float e[ATTEND_ROWS][UCM_ATTEND_TILE]; /* logits, then weights */
    float top[ATTEND_ROWS], sum[ATTEND_ROWS];
    float keep[ATTEND_ROWS], more[ATTEND_ROWS];
};

struct ucm_attend_ops {
    /* The logits of all query heads. */
    void (*logits)(const struct ucm_attend_plan *plan, const struct attend_rows *k,
                   const float *query, struct attend_tile *tile);
    /* Logits become weights; top and sum; sum is NaN if a logit is NaN or +inf. */
    void (*weigh)(const struct ucm_attend_plan *plan, uint32_t count, struct attend_tile *tile);
    /* out = tile's * more + out * keep. */
    void (*values)(const struct ucm_attend_plan *plan, const struct attend_rows *v,
                   const struct attend_tile *tile, float *out);
    /* The largest |k|, or `most`. */
    float (*key_max)(const struct ucm_attend_plan *plan, const struct attend_rows *k, float most);
};

extern const struct ucm_attend_ops attend_ops_base, attend_ops_avx2;

#endif
