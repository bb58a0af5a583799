/* The summaries of kernels/sparse for Python tests: functions that a ctypes call finds by name. */
#include "kernels/simd/isa.h"
#include "kernels/sparse/arith.h"
#include "kernels/sparse/sparse.h"

#include <stddef.h>
#include <stdlib.h>

/* No header declares what is found by name. */
#pragma GCC diagnostic ignored "-Wmissing-prototypes"
#pragma GCC visibility push(default)

/* Sets the instruction set of later plans and returns what this host then uses. */
uint32_t test_isa(uint32_t most)
{
    ucm_isa_limit(most);
    return ucm_isa();
}

uint32_t test_spec_bytes(void)
{
    return sizeof(struct ucm_summary_spec);
}

struct ucm_summary_plan *test_plan(const struct ucm_summary_spec *spec, char *why)
{
    struct ucm_summary_plan *plan = malloc(sizeof(*plan));

    if (plan != NULL && ucm_summary_plan_init(plan, spec, why) < 0) {
        free(plan);
        return NULL;
    }
    return plan;
}

void test_plan_free(struct ucm_summary_plan *plan)
{
    free(plan);
}

uint32_t test_bytes(const struct ucm_summary_plan *plan)
{
    return plan->bytes;
}

uint64_t test_extent(const struct ucm_summary_spec *spec)
{
    return ucm_summary_extent(spec);
}

/* n blocks, a layer every stride bytes. */
void test_build(const struct ucm_summary_plan *plan, const uint8_t *layers, uint64_t stride,
                uint32_t n, uint8_t *out)
{
    for (uint32_t b = 0; b < n; b++)
        ucm_summary_build(plan, layers + b * stride, out + (uint64_t)b * plan->bytes);
}

/* q: [q_heads][head_dim]; scores: [q_heads][n]. */
int test_score(const struct ucm_summary_plan *plan, uint32_t metric, const float *q,
               uint32_t q_heads, const uint8_t *summaries, uint32_t n, float *scores)
{
    const struct ucm_kv_shape *shape = &plan->spec.shape;
    float *query = malloc(plan->query_floats * sizeof(*query));

    if (query == NULL || (plan->metrics >> metric & 1) == 0) {
        free(query);
        return -1;
    }
    for (uint32_t h = 0; h < q_heads; h++) {
        ucm_summary_query(plan, q + h * shape->head_dim, query);
        for (uint32_t b = 0; b < n; b++)
            scores[h * n + b] =
                ucm_summary_score(plan, metric, query, summaries + (uint64_t)b * plan->bytes,
                                  h / (q_heads / shape->kv_heads));
    }
    free(query);
    return 0;
}

void test_exp(const float *x, uint32_t n, float *out)
{
    for (uint32_t i = 0; i < n; i++)
        out[i] = ucm_exp(x[i]);
}

/* ucm_fma as this file's instruction set has it: without FMA. */
void test_fma(const float *a, const float *b, const float *c, uint32_t n, float *out)
{
    for (uint32_t i = 0; i < n; i++)
        out[i] = ucm_fma(a[i], b[i], c[i]);
}
