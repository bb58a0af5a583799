/* The methods, in the form that this host runs. A method checks its spec and makes a plan from
 * it. */
#include "kernels/sparse/simd/methods.h"
#include "kernels/simd/isa.h"
#include "kernels/sparse/spec.h"

#include <stddef.h>
#include <string.h>

static const struct ucm_summary_method *const *methods(void)
{
    switch (ucm_isa()) {
#ifdef UCM_ISA_X86
    case UCM_ISA_AVX512:
        return sparse_methods_avx512;
    case UCM_ISA_AVX2:
        return sparse_methods_avx2;
#endif
    default:
        return sparse_methods_base;
    }
}

const struct ucm_summary_method *ucm_summary_method(uint32_t number)
{
    for (const struct ucm_summary_method *const *m = methods(); *m != NULL; m++)
        if ((*m)->number == number)
            return *m;
    return NULL;
}

int ucm_summary_check(const struct ucm_summary_spec *spec, char why[UCM_SPARSE_WHY])
{
    const struct ucm_summary_method *method = ucm_summary_method(spec->method);
    int r;

    if (method == NULL)
        return sparse_refuse(why, "there is no summary method %u", spec->method);
    r = ucm_kv_shape_check(&spec->shape, why);
    return r < 0 ? r : method->check(spec, why);
}

/* ---- plans ---- */

static void make_plan(struct ucm_summary_plan *plan, const struct ucm_summary_spec *spec)
{
    *plan = (struct ucm_summary_plan){
        .spec = *spec,
        .method = ucm_summary_method(spec->method),
        .vectors = 1,
        .channels = spec->shape.head_dim,
        .query_floats = spec->shape.head_dim,
    };
    plan->metrics = plan->method->metrics;
    plan->method->plan(plan);
    if (plan->vector_bytes == 0)
        plan->vector_bytes = plan->channels;
    plan->bytes = (plan->bytes + 3) / 4 * 4;
    plan->query_floats = (plan->query_floats + 15) / 16 * 16;
}

int ucm_summary_plan_init(struct ucm_summary_plan *plan, const struct ucm_summary_spec *spec,
                          char why[UCM_SPARSE_WHY])
{
    int r = ucm_summary_check(spec, why);

    if (r == 0)
        make_plan(plan, spec);
    return r;
}

uint32_t ucm_summary_bytes(const struct ucm_summary_spec *spec)
{
    struct ucm_summary_plan plan;

    make_plan(&plan, spec);
    return plan.bytes;
}

/* ---- through the plan ---- */

void ucm_summary_build(const struct ucm_summary_plan *plan, const void *layer, void *out)
{
    /* What the arrays leave free of the last four bytes is 0. */
    memset((uint8_t *)out + plan->bytes - 4, 0, 4);
    plan->method->build(plan, layer, out);
}

void ucm_summary_query(const struct ucm_summary_plan *plan, const float *q, float *out)
{
    memset(out, 0, plan->query_floats * sizeof(*out));
    plan->method->query(plan, q, out);
}

float ucm_summary_score(const struct ucm_summary_plan *plan, enum ucm_score_metric metric,
                        const float *query, const void *summary, uint32_t g)
{
    return plan->method->score(plan, metric, query, summary, g);
}
