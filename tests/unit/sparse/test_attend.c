/* Attention over entries: arithmetic within its bound of the exact one, lists, NaN and infinities,
 * scales, refusals. */
#include "tests/unit/sparse/attend_rig.h"

#include <errno.h>

#define ENTRIES 24u

TestSuite(attend, .fini = rig_give_back);

struct form {
    uint32_t dtype, tokens, kv_heads, group, d, v_d, gap;
};

static const struct form forms[] = {
    {UCM_KV_F16, 16, 2, 4, 64, 64, 0},     {UCM_KV_BF16, 16, 3, 3, 128, 128, 4},
    {UCM_KV_F32, 16, 1, 1, 80, 40, 2},     {UCM_KV_FP8_E4M3, 32, 2, 16, 128, 64, 0},
    {UCM_KV_BF16, 5, 2, 7, 96, 192, 8},    {UCM_KV_F16, 40, 1, 5, 256, 256, 0},
    {UCM_KV_BF16, 16, 1, 21, 576, 512, 0}, {UCM_KV_F32, 1, 2, 128, 4, 4, 0},
};
#define FORMS (sizeof(forms) / sizeof(forms[0]))

static struct ucm_attend_spec spec_of(const struct form *f)
{
    return rig_attend(f->dtype, f->tokens, f->kv_heads, f->group, f->d, f->v_d, f->gap);
}

static void open_form(struct rig_pool *p, const struct form *f, float size)
{
    struct ucm_attend_spec spec = spec_of(f);

    rig_pool_open(p, &spec, ENTRIES);
    rig_pool_fill(p, size);
}

/* The query as a plan wants it, and an empty state. */
static float *begin(const struct ucm_attend_plan *plan, const float *q,
                    struct ucm_attend_state *state)
{
    float *query = rig_floats(plan->query_floats);

    ucm_attend_query(plan, q, query);
    ucm_attend_begin(plan, state, rig_floats(plan->state_floats));
    return query;
}

/* A list of one KV head by ucm_attend_add, in pieces of `step`: [group] rows of out, then lse. */
static float *attend_list(const struct rig_pool *p, uint32_t g, const float *q,
                          const int32_t *entries, uint32_t n, uint32_t tail, uint32_t step)
{
    const struct ucm_attend_plan *plan = &p->plan;
    uint32_t rows = plan->spec.group, v_d = plan->spec.shape.v_head_dim;
    float *out = rig_floats((uint64_t)rows * (v_d + 1));
    struct ucm_attend_state state;
    const float *query = begin(plan, q, &state);

    for (uint32_t i = 0; i < n; i += step) {
        uint32_t more = n - i < step ? n - i : step;

        cr_assert_eq(ucm_attend_add(plan, &p->memory, g, query, entries + i, more,
                                    i + more == n ? tail : 0, &state, NULL, 0),
                     0);
    }
    ucm_attend_end(plan, &state, out, out + rows * v_d);
    return out;
}

static void expect_same(const float *a, const float *b, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        cr_assert(memcmp(a + i, b + i, 4) == 0 || (isnan(a[i]) && isnan(b[i])),
                  "at %lu: %a is not %a", (unsigned long)i, (double)a[i], (double)b[i]);
}

/* ---- the arithmetic ---- */

/* lse may be off by the stated slack, and out by twice that and the division. */
static void compare_with_exact(const struct rig_pool *p, const float *q, const int32_t *entries,
                               uint32_t n, uint32_t tail)
{
    const struct ucm_attend_plan *plan = &p->plan;
    const struct ucm_kv_shape *s = &plan->spec.shape;
    uint32_t rows = plan->spec.group, v_d = s->v_head_dim;
    float *out = rig_floats((uint64_t)rows * (v_d + 1));
    struct ucm_attend_state state;
    const float *query = begin(plan, q, &state);

    state.measure = true;
    cr_assert_eq(ucm_attend_add(plan, &p->memory, 0, query, entries, n, tail, &state, NULL, 0), 0);
    ucm_attend_end(plan, &state, out, out + rows * v_d);
    for (uint32_t h = 0; h < rows; h++) {
        const float *one = q + h * s->head_dim;
        struct rig_exact r = {.top = -INFINITY};
        double slack, exact;
        float abs_sum = 0;

        for (uint32_t i = 0; i < n; i++)
            rig_exact_add(p, one, entries[i], 0, i + 1 == n && tail > 0 ? tail : s->tokens, &r);
        for (uint32_t c = 0; c < s->head_dim; c++)
            abs_sum += fabsf(one[c]);
        slack = (double)ucm_attend_slack(plan, &state, abs_sum);
        exact = r.top + log(r.sum);
        cr_assert_float_eq((double)state.top[h] + log((double)state.sum[h]), exact, slack);
        cr_assert_float_eq((double)out[rows * v_d + h], exact, slack + 1e-6 * fabs(exact));
        for (uint32_t c = 0; c < v_d; c++)
            cr_assert_float_eq((double)out[h * v_d + c], r.out[c] / r.sum,
                               (2 * slack + 1e-6) * r.largest);
        cr_assert_lt(slack, 0.01);
    }
}

Test(attend, exact_arithmetic_within_the_bound)
{
    for (uint32_t round = 0; round < 24; round++) {
        const struct form *f = &forms[round % FORMS];
        struct rig_pool p;
        int32_t entries[12];
        float *q;

        open_form(&p, f, round % 3 == 2 ? 12.0f : 1.0f);
        q = rig_normals((uint64_t)f->group * f->d, round % 3 == 1 ? 4.0f : 1.0f);
        for (uint32_t i = 0; i < 12; i++)
            entries[i] = (int32_t)below(ENTRIES);
        compare_with_exact(&p, q, entries, 1 + below(12), below(f->tokens));
    }
}

/* A block's weight is the sum that its own softmax would divide by. */
Test(attend, weights_of_blocks)
{
    struct rig_pool p;
    int32_t entries[6] = {3, 1, 2, 0, 5, 4};
    float *q = rig_normals(4 * 64, 1), weight[4][8];
    struct ucm_attend_state state;
    const float *query;

    open_form(&p, &forms[0], 2);
    query = begin(&p.plan, q, &state);
    ucm_attend_add(&p.plan, &p.memory, 1, query, entries, 6, 7, &state, weight[0], 8);
    for (uint32_t h = 0; h < 4; h++) {
        double all = 0;

        for (uint32_t i = 0; i < 6; i++) {
            struct rig_exact r = {.top = -INFINITY};

            rig_exact_add(&p, q + h * 64, entries[i], 1, i == 5 ? 7 : 16, &r);
            cr_assert_float_eq((double)weight[h][i], r.top + log(r.sum), 1e-4);
            all += exp((double)weight[h][i] - (double)state.top[h]);
        }
        cr_assert_float_eq(all, (double)state.sum[h], 1e-4 * all);
    }
}

/* ---- lists ---- */

/* With 100 % of the budget it is dense attention, whatever entries the blocks lie in, and however
 * they came. */
Test(attend, all_blocks_through_lists_are_dense_attention)
{
    for (uint32_t f = 0; f < FORMS; f++) {
        const struct ucm_attend_spec spec = spec_of(&forms[f]);
        struct rig_pool dense, sparse;
        int32_t in_order[ENTRIES], anywhere[ENTRIES];
        uint32_t tail = below(forms[f].tokens);
        float *q = rig_normals((uint64_t)forms[f].group * forms[f].d, 1), *a, *b;
        uint64_t n = (uint64_t)forms[f].group * (forms[f].v_d + 1);

        open_form(&dense, &forms[f], 1);
        rig_pool_open(&sparse, &spec, ENTRIES);
        for (uint32_t i = 0; i < ENTRIES; i++)
            in_order[i] = anywhere[i] = (int32_t)i;
        for (uint32_t i = ENTRIES - 1; i > 0; i--) {
            uint32_t j = below(i + 1);
            int32_t t = anywhere[i];

            anywhere[i] = anywhere[j];
            anywhere[j] = t;
        }
        for (uint32_t i = 0; i < ENTRIES; i++)
            memcpy(sparse.bytes + (uint32_t)anywhere[i] * sparse.memory.stride,
                   dense.bytes + i * dense.memory.stride, ucm_kv_shape_extent(&spec.shape, true));
        a = attend_list(&dense, 0, q, in_order, ENTRIES, tail, ENTRIES);
        b = attend_list(&sparse, 0, q, anywhere, ENTRIES, tail, 1 + below(ENTRIES));
        expect_same(a, b, n);
    }
}

Test(attend, an_empty_list_and_a_block_that_is_not_there)
{
    int32_t entries[] = {0, ENTRIES, -1};
    float *q = rig_normals(4 * 64, 1), *out, *query;
    struct ucm_attend_state state;
    struct rig_pool p;

    open_form(&p, &forms[0], 1);
    out = attend_list(&p, 0, q, entries, 0, 0, 1);
    for (uint32_t i = 0; i < 4 * 64; i++)
        cr_assert_eq(out[i], 0.0f);
    for (uint32_t i = 0; i < 4; i++)
        cr_assert_eq(out[4 * 64 + i], -INFINITY);
    query = begin(&p.plan, q, &state);
    for (uint32_t first = 0; first < 2; first++)
        cr_assert_eq(
            ucm_attend_add(&p.plan, &p.memory, 0, query, entries + first, 2, 0, &state, NULL, 0),
            -ENOENT);
    cr_assert(state.tiles == 0 && state.sum[0] == 0, "none is skipped");
}

Test(attend, logits_far_apart)
{
    struct ucm_attend_spec spec = rig_attend(UCM_KV_F32, 16, 1, 1, 64, 64, 0);
    float *q = rig_normals(64, 0), *out;
    int32_t entries[] = {0, 1, 2};
    struct rig_pool p;

    q[0] = 8;
    rig_pool_open(&p, &spec, ENTRIES);
    rig_pool_fill(&p, 1);
    for (uint32_t t = 0; t < 16; t++) /* logits of 10,000 in entry 1, and -10,000 in entry 2 */
        for (int32_t b = 0; b < 3; b++) {
            float k = b == 0 ? 0 : b == 1 ? 1e4f : -1e4f;

            memcpy(rig_at(&p, b, 0, t, false, 0), &k, 4);
        }
    out = attend_list(&p, 0, q, entries, 3, 0, 3);
    cr_assert_float_eq(out[64], 1e4f + logf(16), 1e-2);
    for (uint32_t c = 0; c < 64; c++) {
        float x;
        double mean = 0;

        for (uint32_t t = 0; t < 16; t++) {
            memcpy(&x, rig_at(&p, 1, 0, t, true, c), 4);
            mean += (double)x / 16;
        }
        cr_assert_float_eq((double)out[c], mean, 1e-5);
    }
}

/* ---- what is no number, and scales ---- */

Test(attend, keys_and_values_that_are_no_numbers)
{
    struct ucm_attend_spec spec = rig_attend(UCM_KV_F32, 16, 2, 2, 64, 64, 0);
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    float *q = rig_normals(2 * 64, 1), *key, *value, *other;
    int32_t entries[] = {4, 5, 6};
    struct rig_pool p;

    q[3] = 1;
    q[64 + 3] = -1;
    rig_pool_open(&p, &spec, ENTRIES);
    for (uint32_t i = 0; i < 3; i++) {
        rig_pool_fill(&p, 1);
        memcpy(rig_at(&p, 5, 1, 2, false, 3), &bad[i], 4);
        key = attend_list(&p, 1, q, entries, 3, 0, 3);
        other = attend_list(&p, 0, q, entries, 3, 0, 3); /* of the other KV head */
        rig_pool_fill(&p, 1);
        memcpy(rig_at(&p, 5, 1, 2, true, 3), &bad[i], 4);
        value = attend_list(&p, 1, q, entries, 3, 0, 3);
        for (uint32_t h = 0; h < 2; h++) { /* an infinite logit on one side weighs nothing */
            bool nan = i == 0 || (i == 1) == (h == 0);

            cr_assert_eq(isnan(key[128 + h]), nan);
            cr_assert(isfinite(other[128 + h]) && isfinite(value[128 + h]));
            for (uint32_t c = 0; c < 64; c++) {
                cr_assert_eq(isnan(key[h * 64 + c]), nan);
                cr_assert(isfinite(other[h * 64 + c]));
                cr_assert_eq(isfinite(value[h * 64 + c]) == 0, c == 3);
            }
        }
    }
}

/* The result is as if K and V had been multiplied by the scales. */
Test(attend, scales_of_keys_and_values)
{
    struct ucm_attend_spec spec = rig_attend(UCM_KV_FP8_E4M3, 16, 1, 2, 64, 64, 0);
    float *q = rig_normals(2 * 64, 1), *plain, *scaled;
    int32_t entries[] = {0, 1, 2, 3};
    struct rig_pool p;
    char why[UCM_SPARSE_WHY];

    rig_pool_open(&p, &spec, ENTRIES);
    rig_pool_fill(&p, 1);
    plain = attend_list(&p, 0, q, entries, 4, 5, 4);
    spec.k_scale = 0.5f;
    spec.v_scale = 4;
    spec.scale = 0.25f; /* twice 1 / sqrt(64) */
    cr_assert_eq(ucm_attend_plan_init(&p.plan, &spec, why), 0);
    scaled = attend_list(&p, 0, q, entries, 4, 5, 4);
    for (uint32_t i = 0; i < 2 * 64; i++)
        cr_assert_eq(scaled[i], 4 * plain[i]);
    expect_same(scaled + 128, plain + 128, 2);
}

/* ---- what is refused ---- */

Test(attend, refusals_are_sentences)
{
    struct ucm_attend_spec good = rig_attend(UCM_KV_BF16, 16, 1, 16, 576, 512, 0), bad;
    struct ucm_attend_plan plan;
    char why[UCM_SPARSE_WHY] = "";

    good.shape.rope_dim = 64;
    good.scale = 0.07f;
    cr_assert_eq(ucm_attend_plan_init(&plan, &good, why), 0);
#define REFUSED(field, value, sentence)                                                            \
    do {                                                                                           \
        bad = good;                                                                                \
        bad.field = value;                                                                         \
        cr_assert_eq(ucm_attend_plan_init(&plan, &bad, why), -EINVAL);                             \
        cr_assert_str_eq(why, sentence);                                                           \
    } while (0)
    REFUSED(soft_cap, 30, "soft_cap is 30; logits that are capped are not supported");
    REFUSED(scale, 0,
            "scale is 0; with rope_dim (MLA) it must be given, since 1 / sqrt(head_dim) is not the "
            "model's");
    REFUSED(scale, -1, "scale is -1; it must be finite and not negative");
    REFUSED(v_scale, INFINITY, "v_scale is inf; it must be finite and not negative");
    REFUSED(group, 0, "group is 0; 1 to 128 query heads of a KV head are allowed");
    REFUSED(group, 129, "group is 129; 1 to 128 query heads of a KV head are allowed");
    REFUSED(shape.v_head_dim, 0, "v_head_dim is 0; for MLA give the channels of K that V is");
    REFUSED(shape.head_dim, 66, "head_dim is 66; multiples of 4 up to 1024 are allowed");
}
