/* For the tests of scores and choices: random summaries of any method, and a job run in one
 * call. */
#ifndef UCM_TESTS_UNIT_SELECT_RIG_H
#define UCM_TESTS_UNIT_SELECT_RIG_H

#include "kernels/simd/isa.h"
#include "kernels/sparse/select.h"
#include "tests/unit/random.h"

#include <criterion/criterion.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* ---- random numbers ---- */

static inline float rig_bits(uint32_t u)
{
    float x;

    memcpy(&x, &u, sizeof(x));
    return x;
}

/* About normal. */
static inline float rig_normal(void)
{
    double sum = -6;

    for (int i = 0; i < 12; i++)
        sum += (double)below(1u << 31) * 0x1p-31;
    return (float)sum;
}

/* What a query may hold that is hard to add up: zeros of both signs, denormals, and values whose
 * products overflow. */
static inline float rig_hard(void)
{
    static const uint32_t bits[] = {0x00000000, 0x80000000, 0x00000001, 0x80000001,
                                    0x007fffff, 0x00800000, 0x7f7fffff, 0xff7fffff,
                                    0x3f800000, 0xbf800000, 0x7e000000, 0xfe000000};

    return below(3) == 0 ? rig_normal() : rig_bits(bits[below(sizeof(bits) / 4)]);
}

/* ---- summaries ---- */

/* A spec of `method` over densely packed F32 blocks. */
static inline struct ucm_summary_spec rig_spec(uint32_t method, uint32_t tokens, uint32_t kv_heads,
                                               uint32_t d)
{
    return (struct ucm_summary_spec){
        .method = method,
        .run = 4,
        .bits = 128,
        .seed = 7,
        .chosen = 3,
        .shape = {.dtype = UCM_KV_F32,
                  .tokens = tokens,
                  .kv_heads = kv_heads,
                  .head_dim = d,
                  .k_token_stride = 4 * (uint64_t)kv_heads * d,
                  .k_head_stride = 4 * (uint64_t)d},
    };
}

struct rig {
    struct ucm_summary_plan plan;
    struct ucm_score_spec spec;
    uint32_t n;
    uint8_t **at; /* each of exactly plan.bytes */
    float *q;
};

/* A bf16 scale: mostly ordinary, now and then NaN, 0, tiny, huge or infinite. */
static inline uint16_t rig_scale(bool hard)
{
    static const uint16_t odd[] = {0x7fc0, 0x0000, 0x0001, 0x7f7f, 0x7f80, 0xffc0};

    if (below(hard ? 4 : 40) == 0)
        return odd[below(hard ? 6 : 2)];
    return (uint16_t)(0x3b00 + below(0x200));
}

static inline void rig_fill(const struct ucm_summary_plan *plan, uint8_t *summary, bool hard)
{
    uint32_t heads = plan->spec.shape.kv_heads, scales = 0;

    for (uint32_t i = 0; i < plan->bytes; i++)
        summary[i] = (uint8_t)below(256);
    if (plan->spec.method == UCM_SUMMARY_HASH) {
        for (uint32_t g = 0; g < heads; g++)
            memset(summary + plan->array[1] + 4 * g, below(20) == 0, 4);
        return;
    }
    for (int a = 0; a < UCM_SUMMARY_ARRAYS && (a == 0 || plan->scale[a] != 0); a++)
        scales += plan->spec.method == UCM_SUMMARY_STATS ? heads : heads * plan->vectors;
    for (uint32_t i = 0; i < scales; i++) {
        uint16_t s = rig_scale(hard);

        memcpy(summary + plan->scale[0] + 2 * i, &s, sizeof(s));
    }
}

/* Blocks without a summary: now and then, if hard. */
static inline void rig_init(struct rig *r, const struct ucm_summary_spec *spec,
                            const struct ucm_score_spec *score, uint32_t n, bool hard)
{
    char why[UCM_SPARSE_WHY] = "";
    size_t values = (size_t)score->rows * score->q_heads * spec->shape.head_dim;

    r->spec = *score;
    r->n = n;
    ucm_isa_limit(UCM_ISA_BASE);
    cr_assert_eq(ucm_summary_plan_init(&r->plan, spec, why), 0, "%s", why);
    cr_assert_eq(ucm_score_check(&r->plan, score, why), 0, "%s", why);
    r->at = calloc(n, sizeof(*r->at));
    r->q = malloc(values * sizeof(*r->q));
    cr_assert(r->at != NULL && r->q != NULL);
    for (uint32_t b = 0; b < n; b++) {
        if (hard && below(6) == 0)
            continue;
        r->at[b] = malloc(r->plan.bytes);
        cr_assert_not_null(r->at[b]);
        rig_fill(&r->plan, r->at[b], hard);
    }
    for (size_t i = 0; i < values; i++)
        r->q[i] = hard ? rig_hard() : rig_normal();
}

static inline void rig_close(struct rig *r)
{
    for (uint32_t b = 0; b < r->n; b++)
        free(r->at[b]);
    free(r->at);
    free(r->q);
}

static inline size_t rig_scores(const struct rig *r)
{
    return (size_t)ucm_score_lists(&r->plan, &r->spec) * r->n;
}

/* Scores by the forms of an instruction set. Each step runs in two ranges that meet at `cut`
 * (modulo the step's size), the later one first. Returns memory that the caller frees. */
static inline float *rig_score(const struct rig *r, enum ucm_isa isa, uint32_t cut)
{
    struct ucm_score_blocks blocks = {.at = (const void *const *)r->at, .n = r->n};
    struct ucm_score_job job;
    float *scores = malloc(rig_scores(r) * sizeof(*scores) + 1);
    void *scratch;

    ucm_isa_limit(isa);
    scratch = aligned_alloc(64, (ucm_score_scratch_bytes(&r->plan, &r->spec, r->n) + 63) / 64 * 64);
    cr_assert(scores != NULL && scratch != NULL);
    memset(scores, 0x55, rig_scores(r) * sizeof(*scores));
    ucm_score_begin(&job, &r->plan, &r->spec, &blocks, r->q, scratch, scores);
    for (uint32_t step = 0; step < ucm_score_steps(&job); step++) {
        uint32_t units = ucm_score_units(&job, step), at = units == 0 ? 0 : cut % units;

        ucm_score_run(&job, step, at, units);
        ucm_score_run(&job, step, 0, at);
    }
    free(scratch);
    return scores;
}

#endif
