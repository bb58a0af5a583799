/* Choices, against a plain sort. */
#include "kernels/sparse/select.h"

#include "kernels/sparse/arith.h"
#include "tests/unit/sparse/select_rig.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>

/* ---- the same by sorting ---- */

static const float *naive_scores;

static double naive_value(uint32_t b)
{
    return isnan(naive_scores[b]) ? -INFINITY : (double)naive_scores[b];
}

static int naive_order(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    double vx = naive_value(x), vy = naive_value(y);

    return vx != vy ? (vx < vy ? 1 : -1) : x < y ? -1 : 1;
}

static uint32_t naive_k(const struct ucm_choose_spec *spec, uint32_t n)
{
    uint64_t k = (uint64_t)floor(n * spec->sparse_ratio);

    if (spec->policy == UCM_CHOOSE_MASS)
        return n;
    if (spec->topk_tokens > 0)
        k = (uint64_t)ceil((double)spec->topk_tokens / spec->block_tokens);
    k = k > spec->min_blocks ? k : spec->min_blocks;
    return k < n ? (uint32_t)k : n;
}

/* With arith.h's own exponential: this tests which blocks are taken, not how weights are rounded.
 */
static uint64_t naive_weights(const struct ucm_choose_spec *spec, uint32_t n, uint64_t *w)
{
    float top = -INFINITY;
    uint64_t total = 0;

    for (uint32_t b = 0; b < n; b++)
        if (naive_value(b) < INFINITY)
            top = fmaxf(top, (float)naive_value(b));
    for (uint32_t b = 0; b < n; b++) {
        float x = spec->beta * ((float)naive_value(b) - top);

        w[b] = naive_value(b) == INFINITY ? 0 : ucm_weight(ucm_exp(x));
        total += w[b];
    }
    return total;
}

/* in[b]: whether block b is chosen. */
static void naive_choose(const struct ucm_choose_spec *spec, const float *scores, uint32_t n,
                         uint32_t room, bool *in)
{
    uint32_t *order = malloc(n * sizeof(*order)), k = naive_k(spec, n), taken = 0;
    uint64_t *w = malloc(n * sizeof(*w)), total, have = 0;

    naive_scores = scores;
    total = naive_weights(spec, n, w);
    room = spec->limit > 0 && spec->limit < room ? spec->limit : room;
    k = k < room ? k : room;
    for (uint32_t b = 0; b < n; b++) {
        order[b] = b;
        in[b] = taken < room && (b < spec->sink_blocks || n - b <= spec->recent_blocks);
        taken += in[b];
        have += in[b] ? w[b] : 0;
    }
    qsort(order, n, sizeof(*order), naive_order);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t b = order[i];
        bool poisoned = naive_value(b) == INFINITY;

        if (in[b])
            continue;
        if (poisoned ? taken >= room : taken >= k)
            break;
        if (spec->policy == UCM_CHOOSE_MASS && !poisoned &&
            (double)have >= spec->eps * (double)total)
            break;
        in[b] = true;
        taken++;
        have += w[b];
    }
    free(order);
    free(w);
}

/* ucm_choose_job with chunks of so many blocks, whose units run backwards. */
static uint32_t choose_in_steps(const struct ucm_choose_spec *spec, const float *scores, uint32_t n,
                                uint32_t chunk, uint32_t *index, float *chosen, uint32_t room)
{
    size_t bytes = (ucm_choose_job_bytes(spec, n, chunk) + 63) / 64 * 64;
    void *scratch = aligned_alloc(64, bytes);
    const struct ucm_choose_list list = {scores, n, index, chosen, room};
    struct ucm_choose_job job;
    uint32_t count, units;

    memset(scratch, 0xcc, bytes); /* it need not be zero */
    units = ucm_choose_begin(&job, spec, &list, chunk, scratch);
    do {
        for (uint32_t unit = units; unit > 0; unit--)
            ucm_choose_run(&job, unit - 1);
    } while (ucm_choose_next(&job, &count));
    free(scratch);
    return count;
}

/* chunk: 0 for ucm_choose. */
static void compare_form(const struct ucm_choose_spec *spec, const float *scores, uint32_t n,
                         uint32_t chunk, uint32_t room, const bool *in)
{
    uint32_t *index = malloc(room * sizeof(*index) + 1), count, expected = 0;
    float *chosen = malloc(room * sizeof(*chosen) + 1);
    void *scratch = malloc(ucm_choose_scratch_bytes(spec, n));

    count = chunk > 0 ? choose_in_steps(spec, scores, n, chunk, index, chosen, room)
                      : ucm_choose(spec, scores, n, scratch, index, chosen, room);
    for (uint32_t b = 0; b < n; b++) {
        if (!in[b])
            continue;
        cr_assert_lt(expected, count, "n %u: %u blocks, block %u is missing", n, count, b);
        cr_assert_eq(index[expected], b, "n %u, policy %u: place %u is %u and not %u", n,
                     spec->policy, expected, index[expected], b);
        cr_assert(memcmp(&chosen[expected], &scores[b], sizeof(*scores)) == 0);
        expected++;
    }
    cr_assert_eq(count, expected);
    free(index);
    free(chosen);
    free(scratch);
}

static void compare(const struct ucm_choose_spec *spec, const float *scores, uint32_t n,
                    uint32_t room)
{
    bool *in = malloc(n + 1);

    naive_choose(spec, scores, n, room, in);
    for (enum ucm_isa isa = UCM_ISA_BASE; isa < UCM_ISA_COUNT; isa++) {
        ucm_isa_limit(isa);
        compare_form(spec, scores, n, 0, room, in);
        compare_form(spec, scores, n, 1 + n / 3, room, in);
        compare_form(spec, scores, n, 16 + n / 256, room, in);
    }
    free(in);
}

/* ---- scores ---- */

static const uint32_t odd_bits[] = {0x7f800000, 0xff800000, 0x7fc00000, 0xffc00001, 0x00000000,
                                    0x80000000, 0x00000001, 0x80000001, 0x7f7fffff, 0xff7fffff};

static float score_of_kind(int kind)
{
    switch (kind) {
    case 0:
        return rig_normal();
    case 1: /* many ties */
        return (float)below(5);
    case 2: /* all bits */
        return rig_bits(below(UINT32_MAX));
    case 3:
        return rig_bits(odd_bits[below(10)]);
    case 4: /* keys that differ in their last digit only */
        return rig_bits(0x3f800000 + below(900));
    case 5: /* and in their middle one */
        return rig_bits(0x3f800000 + (below(1000) << 10));
    default: /* few poisoned among equal ones */
        return below(10) == 0 ? INFINITY : 1.5f;
    }
}

static struct ucm_choose_spec random_spec(uint32_t n)
{
    struct ucm_choose_spec spec;

    ucm_choose_defaults(&spec);
    spec.sparse_ratio = below(101) / 100.0;
    spec.min_blocks = below(3) == 0 ? below(n + 2) : 0;
    spec.sink_blocks = below(2) == 0 ? below(3) : below(n + 2);
    spec.recent_blocks = below(2) == 0 ? below(3) : below(n + 2);
    if (below(3) == 0)
        spec.topk_tokens = 1 + below(16 * n + 1);
    if (below(3) == 0)
        spec.limit = 1 + below(n + 1);
    return spec;
}

Test(choose, top_k_is_what_a_sort_gives)
{
    for (int round = 0; round < 4000; round++) {
        uint32_t n = 1 + below(round % 100 == 0 ? 5000 : 60);
        struct ucm_choose_spec spec = random_spec(n);
        float *scores = malloc(n * sizeof(*scores) + 1);

        spec.policy = UCM_CHOOSE_TOPK;
        for (uint32_t b = 0; b < n; b++)
            scores[b] = score_of_kind(round % 7);
        compare(&spec, scores, n, below(2) == 0 ? n : below(n + 1));
        free(scores);
    }
}

Test(choose, mass_is_what_a_sort_gives)
{
    for (int round = 0; round < 2000; round++) {
        uint32_t n = 1 + below(round % 50 == 0 ? 3000 : 60);
        struct ucm_choose_spec spec = random_spec(n);
        float *scores = malloc(n * sizeof(*scores));
        uint32_t poison = below(3) == 0 ? 1 + below(20) : 0;

        spec.policy = UCM_CHOOSE_MASS;
        spec.eps = below(1001) / 1000.0;
        spec.beta = 0.6931472f;
        for (uint32_t b = 0; b < n; b++) {
            scores[b] = poison != 0 && below(poison) == 0 ? INFINITY : -(float)below(12);
            scores[b] = below(30) == 0 ? NAN : scores[b];
            scores[b] = round % 4 == 0 ? 4 * score_of_kind(round / 4 % 7) : scores[b];
        }
        compare(&spec, scores, n, n);
        free(scores);
    }
}

Test(choose, mass_needs_nothing_beyond_the_windows_when_nothing_weighs)
{
    float scores[10];
    struct ucm_choose_spec spec;
    uint32_t index[10];
    char scratch[1 << 16];

    ucm_choose_defaults(&spec);
    spec.policy = UCM_CHOOSE_MASS;
    for (uint32_t b = 0; b < 10; b++)
        scores[b] = b % 2 == 0 ? -INFINITY : NAN;
    cr_assert_eq(ucm_choose(&spec, scores, 10, scratch, index, NULL, 10), 3);
    cr_assert(index[0] == 0 && index[1] == 8 && index[2] == 9);
}

Test(choose, poisoned_blocks_are_in_beyond_k_and_the_lowest_where_room_ends)
{
    float scores[100];
    struct ucm_choose_spec spec;
    uint32_t index[100];
    char scratch[1 << 16];

    ucm_choose_defaults(&spec);
    for (uint32_t b = 0; b < 100; b++)
        scores[b] = b >= 20 && b < 80 ? INFINITY : 1;
    cr_assert_eq(ucm_choose(&spec, scores, 100, scratch, index, NULL, 100), 63);
    cr_assert(index[0] == 0 && index[1] == 20 && index[60] == 79 && index[61] == 98);
    cr_assert_eq(ucm_choose(&spec, scores, 100, scratch, index, NULL, 30), 30);
    cr_assert(index[0] == 0 && index[1] == 20 && index[27] == 46 && index[28] == 98);
    cr_assert_eq(ucm_choose_room(&spec, 100), 30);
    cr_assert_eq(ucm_choose_limit(&spec, 100), 100);
    spec.limit = 2;
    cr_assert_eq(ucm_choose_room(&spec, 100), 2);
    cr_assert_eq(ucm_choose_limit(&spec, 100), 2);
    cr_assert_eq(ucm_choose_limit(&spec, 1), 1);
}

Test(choose, what_the_summary_says)
{
    struct ucm_summary_spec summary = {.method = UCM_SUMMARY_BOX,
                                       .shape = {.tokens = 32, .head_dim = 64}};
    struct ucm_choose_spec spec = {.policy = UCM_CHOOSE_MASS};
    char why[UCM_SPARSE_WHY];

    cr_assert_eq(ucm_choose_for(&summary, &spec, why), 0);
    cr_assert(spec.block_tokens == 32 && spec.beta == 0.125f);
    summary.method = UCM_SUMMARY_STATS;
    cr_assert_eq(ucm_choose_for(&summary, &spec, why), 0);
    cr_assert_eq(spec.beta, 0.125f, "it was given");
    spec.beta = 0;
    cr_assert_eq(ucm_choose_for(&summary, &spec, why), 0);
    cr_assert_eq(spec.beta, 1);
    summary.method = UCM_SUMMARY_TOKENS;
    cr_assert_eq(ucm_score_beta(&summary, 0), 0.125f);
    summary.rest = UCM_REST_MEAN;
    cr_assert_eq(ucm_score_beta(&summary, 0), 1);
    spec.beta = -1;
    cr_assert_eq(ucm_choose_for(&summary, &spec, why), -EINVAL);
}

Test(choose, nothing_to_choose_from)
{
    struct ucm_choose_spec spec;
    char scratch[1 << 16];
    uint32_t index;

    ucm_choose_defaults(&spec);
    for (spec.policy = 0; spec.policy < 2; spec.policy++)
        cr_assert_eq(ucm_choose(&spec, NULL, 0, scratch, &index, NULL, 0), 0);
}

Test(choose, the_largest_list)
{
    uint32_t n = UCM_SCORE_BLOCKS_MAX;
    float *scores = malloc(n * sizeof(*scores));
    struct ucm_choose_spec spec;

    for (uint32_t b = 0; b < n; b++)
        scores[b] = rig_normal();
    ucm_choose_defaults(&spec);
    compare(&spec, scores, n, n);
    free(scores);
}

static void refused(struct ucm_choose_spec spec, const char *word)
{
    char why[UCM_SPARSE_WHY] = "";

    cr_assert_eq(ucm_choose_check(&spec, why), -EINVAL);
    cr_assert_not_null(strstr(why, word), "\"%s\" says nothing of %s", why, word);
}

Test(choose, wrong_specs_are_refused_with_a_sentence)
{
    struct ucm_choose_spec good, bad;
    char why[UCM_SPARSE_WHY];

    ucm_choose_defaults(&good);
    cr_assert_eq(ucm_choose_check(&good, why), 0);
    refused((bad = good, bad.policy = 2, bad), "policy");
    refused((bad = good, bad.sparse_ratio = 1.5, bad), "sparse_ratio");
    refused((bad = good, bad.sparse_ratio = NAN, bad), "sparse_ratio");
    refused((bad = good, bad.topk_tokens = 1, bad.block_tokens = 0, bad), "block_tokens");
    refused((bad = good, bad.sink_blocks = UINT32_MAX, bad), "sink_blocks");
    good.policy = UCM_CHOOSE_MASS;
    cr_assert_eq(ucm_choose_check(&good, why), 0);
    refused((bad = good, bad.eps = -0.1, bad), "eps");
    refused((bad = good, bad.eps = NAN, bad), "eps");
    refused((bad = good, bad.beta = 0, bad), "beta");
    refused((bad = good, bad.beta = INFINITY, bad), "beta");
}
