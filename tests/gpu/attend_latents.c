/* Attention over latents (MLA): the same cases as for heads, and some of its own. Those are numbers
 * of query heads, rings, log-sums that lie far apart, and empty lists. */
#include "tests/gpu/attend.h"

#include <math.h>

static void compare(struct problem *p, struct answer *want, const char *what)
{
    struct answer got = answer_new(p);

    answer_step(p, &got);
    answer_compare(p, want, &got, what);
    check(problem_flags(p) == 0, "%s: flags", what);
}

/* However few tiles fit into a thread block's memory, the bits are the same. */
static void test_rings(void)
{
    static const struct attend_shape shapes[] = {
        {UCM_KV_BF16, 16, 1, 16, 576, 2, 1, 40, 50, 20, 5, 0, 0, 1},
        {UCM_KV_F16, 16, 1, 32, 576, 1, 1, 40, 50, 20, 5, 0, 1, 1},
    };
    static const uint32_t rings[] = {4, 5, 7, 8, 9};

    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        struct answer want, got;
        struct problem p;

        problem_open(&p, &shapes[i]);
        problem_draw(&p);
        problem_cut(&p, 23);
        want = answer_new(&p);
        got = answer_new(&p);
        answer_step(&p, &want);
        for (size_t r = few ? 3 : 0; r < sizeof(rings) / sizeof(rings[0]); r++) {
            p.args.ring = rings[r];
            answer_step(&p, &got);
            answer_same(&p, &want, &got, "another ring");
        }
        memory_end();
    }
}

/* Queries so large that a few tokens have all of the weight: splits' log-sums are hundreds apart.
 */
static void test_far(void)
{
    static const struct attend_shape shape = {UCM_KV_BF16, 16, 1,  24, 576, 2, 1,
                                              40,          50, 20, 5,  0,   0, 1};
    struct problem p;
    struct answer want;

    problem_open(&p, &shape);
    problem_draw(&p);
    for (uint64_t i = 0; i < p.rows * shape.d; i++) {
        p.q[i] *= 64;
        p.q16[i] = (uint16_t)(p.q16[i] & 0x7fff ? p.q16[i] + (6 << 7) : p.q16[i]);
    }
    gpu_put(p.args.q, p.q16, p.rows * shape.d * 2);
    want = answer_new(&p);
    answer_reference(&p, &want);
    problem_cut(&p, 2);
    compare(&p, &want, "log-sums far apart");
    problem_cut(&p, 320);
    compare(&p, &want, "log-sums far apart, one split");
    memory_end();
}

/* Nothing to attend to, for all heads: 0 and -inf, with and without splits. */
static void test_empty(void)
{
    static const struct attend_shape shape = {UCM_KV_BF16, 16, 1, 16, 576, 3, 1,
                                              8,           10, 4, 2,  0,   0, 1};
    struct problem p;
    struct answer want;
    uint32_t wrong = 0;

    problem_open(&p, &shape);
    problem_draw(&p);
    for (uint32_t c = 0; c < shape.sequences; c++) {
        p.count[c] = 0;
        p.length[c] = p.first[c] * shape.tokens;
    }
    gpu_put(p.args.count, p.count, shape.sequences * 4);
    gpu_put(p.args.length, p.length, shape.sequences * 4);
    want = answer_new(&p);
    answer_reference(&p, &want);
    for (uint64_t i = 0; i < p.rows; i++)
        wrong += !(isinf(want.lse[i]) && want.lse[i] < 0);
    check(wrong == 0, "the reference of empty lists");
    problem_cut(&p, 3);
    compare(&p, &want, "empty lists");
    memory_end();
}

void test_latents(void)
{
    static const struct attend_shape shapes[] = {
        {UCM_KV_BF16, 16, 1, 16, 576, 3, 1, 37, 60, 20, 5, 1, 0, 1},
        {UCM_KV_F16, 16, 1, 128, 576, 2, 1, 20, 33, 9, 3, 1, 0, 1},
        {UCM_KV_BF16, 64, 1, 64, 576, 2, 1, 9, 12, 6, 2, 0, 0, 1},
        {UCM_KV_F16, 32, 1, 5, 576, 5, 1, 30, 40, 11, 7, 1, 0, 1},
        {UCM_KV_BF16, 16, 1, 20, 576, 1, 1, 150, 160, 0, 0, 0, 0, 1},
        {UCM_KV_BF16, 16, 1, 33, 576, 2, 1, 20, 30, 40, 30, 1, 0, 1},
        {UCM_KV_BF16, 16, 1, 16, 576, 3, 1, 37, 60, 20, 5, 1, 1, 1},
        {UCM_KV_F16, 16, 1, 40, 576, 2, 1, 20, 33, 9, 3, 0, 1, 1},
        {UCM_KV_BF16, 256, 1, 32, 576, 1, 1, 3, 5, 3, 2, 0, 1, 1},
    };
    static const struct attend_shape beside[] = {
        {UCM_KV_BF16, 16, 1, 16, 576, 3, 1, 37, 640, 20, 5, 1, 0, 1},
        {UCM_KV_F16, 32, 1, 64, 576, 2, 1, 20, 300, 11, 4, 1, 1, 1},
    };

    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++)
        test_steps_of(&shapes[i]);
    test_rings();
    test_far();
    test_empty();
    for (size_t i = 0; i < sizeof(beside) / sizeof(beside[0]); i++) {
        test_beside_of(&beside[i], 3);
        test_beside_of(&beside[i], 14);
    }
}
