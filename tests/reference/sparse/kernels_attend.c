/* The attention of kernels/attend for Python tests: functions that a ctypes call finds by name. */
#include "kernels/attend/attend.h"
#include "kernels/attend/stop.h"
#include "kernels/sparse/arith.h"

#include <stddef.h>
#include <stdlib.h>

#define VISIBLE __attribute__((visibility("default")))

VISIBLE uint32_t test_attend_spec_bytes(void);
VISIBLE uint32_t test_attend_batch_bytes(void);
VISIBLE int test_attend(const struct ucm_attend_spec *spec, const struct ucm_attend_batch *batch,
                        char *why);
VISIBLE void test_attend_merge(const struct ucm_attend_part *parts, uint32_t n, uint32_t rows,
                               uint32_t channels, float *out, float *lse);
VISIBLE int test_attend_rounds(const struct ucm_attend_spec *spec, const struct ucm_stop_spec *stop,
                               struct ucm_stop_list *list, const float *q, float *out, float *lse,
                               struct ucm_stop_report *report);
VISIBLE void test_left_of(const float *log_weight, uint32_t n, struct ucm_left *left);
VISIBLE void test_log(const float *x, uint32_t n, float *out);

uint32_t test_attend_spec_bytes(void)
{
    return sizeof(struct ucm_attend_spec);
}

uint32_t test_attend_batch_bytes(void)
{
    return sizeof(struct ucm_attend_batch);
}

int test_attend(const struct ucm_attend_spec *spec, const struct ucm_attend_batch *batch, char *why)
{
    struct ucm_attend_plan plan;
    int r = ucm_attend_plan_init(&plan, spec, why);
    float *scratch;

    if (r < 0)
        return r;
    scratch = malloc(ucm_attend_scratch_floats(&plan) * sizeof(*scratch));
    r = scratch == NULL ? -1 : ucm_attend(&plan, batch, scratch);
    free(scratch);
    return r;
}

void test_attend_merge(const struct ucm_attend_part *parts, uint32_t n, uint32_t rows,
                       uint32_t channels, float *out, float *lse)
{
    ucm_attend_merge(parts, n, rows, channels, out, lse);
}

/* One KV head. q: [group][head_dim]. */
int test_attend_rounds(const struct ucm_attend_spec *spec, const struct ucm_stop_spec *stop,
                       struct ucm_stop_list *list, const float *q, float *out, float *lse,
                       struct ucm_stop_report *report)
{
    struct ucm_stop_row rows[UCM_ATTEND_GROUP_MAX];
    struct ucm_attend_plan plan;
    struct ucm_attend_state state;
    char why[UCM_SPARSE_WHY];
    int r = ucm_attend_plan_init(&plan, spec, why);
    float *query, *floats;

    if (r < 0)
        return r;
    query = malloc(plan.query_floats * sizeof(*query));
    floats = malloc(plan.state_floats * sizeof(*floats));
    if (query != NULL && floats != NULL) {
        ucm_attend_query(&plan, q, query);
        ucm_attend_begin(&plan, &state, floats);
        state.measure = true;
        list->query = query;
        r = ucm_attend_rounds(&plan, stop, list, &state, rows, report);
        ucm_attend_end(&plan, &state, out, lse);
    }
    free(query);
    free(floats);
    return r;
}

void test_left_of(const float *log_weight, uint32_t n, struct ucm_left *left)
{
    *left = ucm_left_of(log_weight, n);
}

void test_log(const float *x, uint32_t n, float *out)
{
    for (uint32_t i = 0; i < n; i++)
        out[i] = ucm_log(x[i]);
}
