/* Scores of many blocks, for Python tests. */
#include "kernels/sparse/select.h"

#include <stdlib.h>

/* No header declares what is found by name. */
#pragma GCC diagnostic ignored "-Wmissing-prototypes"
#pragma GCC visibility push(default)

uint32_t test_score_spec_bytes(void)
{
    return sizeof(struct ucm_score_spec);
}

/* summaries: one after the other. Each step runs in two ranges that meet at cut. Returns the number
 * of lists, or -1: refused. */
int test_scores(const struct ucm_summary_plan *plan, const struct ucm_score_spec *spec,
                const float *q, const uint8_t *summaries, uint32_t n, uint32_t cut, float *scores)
{
    struct ucm_score_blocks blocks = {.base = summaries, .stride = plan->bytes, .n = n};
    char why[UCM_SPARSE_WHY];
    struct ucm_score_job job;
    void *scratch;

    if (ucm_score_check(plan, spec, why) < 0)
        return -1;
    scratch = aligned_alloc(64, (ucm_score_scratch_bytes(plan, spec, n) + 63) / 64 * 64);
    if (scratch == NULL)
        return -1;
    ucm_score_begin(&job, plan, spec, &blocks, q, scratch, scores);
    for (uint32_t step = 0; step < ucm_score_steps(&job); step++) {
        uint32_t units = ucm_score_units(&job, step), at = cut < units ? cut : units;

        ucm_score_run(&job, step, 0, at);
        ucm_score_run(&job, step, at, units);
    }
    free(scratch);
    return (int)ucm_score_lists(plan, spec);
}

void test_history(const uint32_t *uses, uint32_t n, float *scores)
{
    ucm_score_history(uses, n, scores);
}
