/* One launch a step: dtypes, groups, sizes, cuts into splits, lists of all heads, windows and their
 * tails. Also blocks that are not there, NaN and infinities. */
#include "tests/gpu/attend.h"

#include <math.h>
#include <string.h>

static void compare_cuts(struct problem *p)
{
    static const uint32_t cuts[] = {1, 3, 8, 64, 320};
    struct answer want = answer_new(p), got = answer_new(p), again = answer_new(p);

    problem_draw(p);
    answer_reference(p, &want);
    for (uint32_t i = few ? 2 : 0; i < (few ? 3 : 5); i++) {
        problem_cut(p, cuts[i]);
        answer_step(p, &got);
        answer_compare(p, &want, &got, "a step");
        answer_step(p, &again);
        answer_same(p, &got, &again, "the second run");
        check(problem_flags(p) == 0, "flags");
    }
}

/* The places of blocks change no bit. */
static void compare_places(struct problem *p)
{
    const struct attend_shape *s = &p->shape;
    uint64_t items = (uint64_t)s->sequences * s->lists * s->room;
    struct answer tables = answer_new(p), entries = answer_new(p);
    struct ucm_attend_cuda args = p->args;
    int32_t *direct = fresh(items * 4);

    problem_cut(p, 5);
    answer_step(p, &tables);
    for (uint64_t i = 0; i < items; i++)
        direct[i] = problem_entry(p, i / s->room, p->list[i]);
    args = p->args;
    p->args.list = gpu_put(0, direct, items * 4);
    p->args.numbers = p->args.entry_of = 0; /* items are entries */
    answer_step(p, &entries);
    answer_same(p, &tables, &entries, "lists of entries, not of positions");
    p->args = args;
}

/* A step with another word at a place of the GPU's memory. */
static void step_with(struct problem *p, CUdeviceptr at, int32_t word, uint32_t flags,
                      const char *what)
{
    struct answer got = answer_new(p);
    int32_t before;

    gpu_get(&before, at, 4);
    gpu_put(at, &word, 4);
    answer_step(p, &got);
    check(problem_flags(p) == flags, "%s", what);
    gpu_put(at, &before, 4);
}

/* A block that is not resident raises the flag, wherever the way to it ends. */
static void miss(struct problem *p)
{
    uint32_t item = (uint32_t)p->list[0], number = (uint32_t)p->numbers[item];

    problem_cut(p, 7);
    step_with(p, p->args.list, UCM_ATTEND_CUDA_ORDER * 1000, UCM_ATTEND_NO_ENTRY,
              "an item that has no number");
    step_with(p, p->args.numbers + 4 * item, -1, UCM_ATTEND_NO_ENTRY, "a number below 0");
    step_with(p, p->args.entry_of + 4 * number, -2, UCM_ATTEND_NO_ENTRY, "a block that is wanted");
    step_with(p, p->args.list, p->list[0], 0, "flags when all is there");
    if (p->shape.window > 0) {
        uint32_t whole = p->shape.window * p->shape.tokens;

        gpu_put(p->args.length, &whole, 4);
        step_with(p, p->args.table + 4 * p->first[0], (int32_t)p->shape.pages, UCM_ATTEND_NO_PAGE,
                  "a page that is not there");
        gpu_put(p->args.length, &p->length[0], 4);
    }
}

/* NaN in a key makes its rows NaN, and no others. */
static void poison(struct problem *p)
{
    struct answer want = answer_new(p), got = answer_new(p);
    uint32_t entry = (uint32_t)problem_entry(p, 0, p->list[0]);
    uint16_t nan = 0x7fff, before; /* E4M3: two */
    uint64_t at = entry * p->entry + p->pool_plan.spec.shape.k_token_stride * 3 + 8;

    memcpy(&before, p->pool + at, 2);
    memcpy(p->pool + at, &nan, 2);
    gpu_put(p->args.pool.base + at, &nan, 2);
    problem_cut(p, 4);
    answer_reference(p, &want);
    answer_step(p, &got);
    check(isnan(got.lse[0]), "NaN in a key");
    answer_compare(p, &want, &got, "with NaN");
    memcpy(p->pool + at, &before, 2);
    gpu_put(p->args.pool.base + at, &before, 2);
}

/* The same, and NaN for a row's scale; then for one of V, which reaches all channels. */
static void poison_encoded(struct problem *p)
{
    struct answer want = answer_new(p), got = answer_new(p);
    uint32_t entry = (uint32_t)problem_entry(p, 0, p->list[0]), tokens = p->shape.tokens;
    uint32_t codes = 2 * tokens * p->shape.d,
             at[] = {3 * p->shape.d + 8, codes + 5, codes + tokens};
    uint8_t *bytes = p->encoded + entry * p->args.pool.stride;

    problem_cut(p, 4);
    for (uint32_t i = 0; i < 3; i++) {
        uint8_t before = bytes[at[i]];

        bytes[at[i]] = i == 0 ? 0x7f : 0xff;
        problem_decode(p, entry);
        answer_reference(p, &want);
        answer_step(p, &got);
        check(isnan(i < 2 ? got.lse[0] : got.out[0]), "NaN in an encoded entry");
        answer_compare(p, &want, &got, "encoded, with NaN");
        bytes[at[i]] = before;
        problem_decode(p, entry);
    }
}

static const struct attend_shape shapes[] = {
    {UCM_KV_BF16, 16, 8, 4, 128, 3, 8, 37, 60, 20, 5, 0, 0, 0},
    {UCM_KV_BF16, 16, 8, 4, 128, 2, 8, 37, 60, 20, 5, 1, 0, 0},
    {UCM_KV_F16, 16, 2, 7, 64, 2, 2, 20, 33, 9, 3, 1, 0, 0},
    {UCM_KV_BF16, 16, 4, 16, 128, 1, 1, 60, 64, 0, 0, 0, 0, 0},
    {UCM_KV_F16, 32, 3, 3, 64, 4, 3, 9, 40, 11, 4, 1, 0, 0},
    {UCM_KV_BF16, 64, 2, 1, 256, 2, 2, 5, 12, 6, 2, 0, 0, 0},
    {UCM_KV_F16, 16, 1, 8, 256, 2, 1, 70, 80, 30, 17, 0, 0, 0},
    {UCM_KV_F16, 256, 1, 2, 128, 1, 1, 3, 5, 3, 2, 0, 0, 0},
    {UCM_KV_BF16, 16, 3, 3, 64, 5, 3, 150, 200, 40, 8, 0, 0, 0},
    {UCM_KV_BF16, 16, 8, 4, 128, 3, 8, 37, 60, 20, 5, 1, 1, 0},
    {UCM_KV_F16, 32, 2, 16, 64, 2, 1, 20, 33, 9, 3, 0, 1, 0},
    {UCM_KV_BF16, 16, 2, 5, 256, 2, 2, 30, 40, 9, 3, 1, 1, 0},
    {UCM_KV_BF16, 16, 3, 7, 64, 2, 3, 30, 40, 9, 3, 1, 1, 0},
    {UCM_KV_F16, 64, 1, 8, 128, 2, 1, 12, 20, 9, 3, 0, 1, 0},
    {UCM_KV_BF16, 16, 2, 12, 256, 2, 2, 30, 40, 9, 3, 1, 0, 0},
    {UCM_KV_F16, 16, 2, 16, 256, 2, 1, 30, 40, 9, 3, 0, 1, 0},
    {UCM_KV_BF16, 16, 8, 4, 128, 3, 8, 37, 60, 20, 5, 1, ENCODED, 0},
    {UCM_KV_F16, 32, 2, 16, 64, 2, 2, 20, 33, 9, 3, 1, ENCODED, 0},
    {UCM_KV_F16, 16, 2, 4, 128, 2, 2, 90, 99, 0, 0, 1, ENCODED, 0},
    {UCM_KV_BF16, 16, 2, 5, 256, 2, 2, 30, 40, 9, 3, 1, ENCODED, 0},
};

void test_steps_of(const struct attend_shape *shape)
{
    struct problem p;

    problem_open(&p, shape);
    for (uint32_t round = 0; round < (few ? 1 : 4); round++) {
        compare_cuts(&p);
        compare_places(&p);
        miss(&p);
        if (shape->narrow == ENCODED)
            poison_encoded(&p);
        else
            poison(&p);
    }
    memory_end();
}

void test_steps(void)
{
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++)
        test_steps_of(&shapes[i]);
}
