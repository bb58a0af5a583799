/* One launch a step: dtypes, groups, sizes, cuts into splits, lists of all heads, windows and their tails, what is
 * not there and what is no number. */
#include "tests/gpu/attend.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct answer {
    float *out, *lse;
};

static struct answer answer_new(const struct problem *p)
{
    return (struct answer){fresh(p->rows * p->shape.d * 4), fresh(p->rows * 4)};
}

static void answer_free(struct answer *a)
{
    free(a->out);
    free(a->lse);
}

/* The C's of one KV head of a chain, over the slots that the tables lead to. */
static void reference_head(const struct problem *p, uint32_t chain, uint32_t g, float *scratch,
                           struct answer *to)
{
    const struct attend_shape *s = &p->shape;
    uint64_t l = (uint64_t)chain * s->lists + (s->lists > 1 ? g : 0);
    uint64_t row = ((uint64_t)chain * s->kv_heads + g) * s->group;
    struct ucm_attend_memory pool = {p->pool, p->slot, s->slots},
                             pages = {p->pages, p->page, s->pages};
    float *query = scratch + p->plan.state_floats;
    struct ucm_attend_state state;
    int r = 0;

    ucm_attend_query(&p->plan, p->q + row * s->d, query);
    ucm_attend_begin(&p->plan, &state, scratch);
    for (uint32_t i = 0; i < p->count[l]; i++) {
        int32_t slot = problem_slot(p, l, p->list[l * s->room + i]);

        r |= ucm_attend_add(&p->pool_plan, &pool, problem_head(p, g), query, &slot, 1, 0, &state,
                            NULL, 0);
    }
    if (s->window > 0) {
        uint32_t length = p->length[chain], blocks = (length + s->tokens - 1) / s->tokens;

        if (blocks > p->first[chain])
            r |= ucm_attend_add(&p->plan, &pages, g, query,
                                p->table + (uint64_t)chain * s->window + p->first[chain],
                                blocks - p->first[chain], length % s->tokens, &state, NULL, 0);
    }
    check(r == 0, "the reference");
    ucm_attend_end(&p->plan, &state, to->out + row * s->d, to->lse + row);
}

static void reference(const struct problem *p, struct answer *to)
{
    float *scratch = fresh(ucm_attend_scratch_floats(&p->plan) * 4);

    for (uint32_t chain = 0; chain < p->shape.chains; chain++)
        for (uint32_t g = 0; g < p->shape.kv_heads; g++)
            reference_head(p, chain, g, scratch, to);
    free(scratch);
}

static bool near(float a, float b, float by)
{
    return fabsf(a - b) <= by || (isnan(a) && isnan(b)) || (isinf(a) && a == b);
}

/* |v| is about 6 at most here. */
static void compare(const struct problem *p, const struct answer *want, const struct answer *got,
                    const char *what)
{
    const struct attend_shape *s = &p->shape;
    float by = 6 * (s->dtype == UCM_KV_F16 ? 0x1p-10f : 0x1p-8f);
    uint64_t wrong = 0, at = 0, wrong_lse = 0;

    for (uint64_t i = 0; i < p->rows * s->d; i++)
        if (!near(want->out[i], got->out[i], by)) {
            wrong++;
            at = i;
        }
    for (uint64_t i = 0; i < p->rows; i++)
        wrong_lse += !near(want->lse[i], got->lse[i], 1e-4f + 1e-5f * fabsf(want->lse[i]));
    check(wrong == 0 && wrong_lse == 0,
          "%s: dtype %u group %u d %u tokens %u lists %u apart %u split %u: %lu channels (row %lu: "
          "%g, not %g), %lu lse",
          what, s->dtype, s->group, s->d, s->tokens, s->lists, s->apart, p->args.split_tiles,
          (unsigned long)wrong, (unsigned long)(at / s->d), (double)got->out[at],
          (double)want->out[at], (unsigned long)wrong_lse);
}

static void step(struct problem *p, struct answer *got)
{
    attend_launch(&p->args, p->shape.dtype, p->shape.d);
    gpu_sync();
    problem_get(p, got->out, got->lse);
}

static uint32_t flags_of(const struct problem *p)
{
    uint32_t flags;

    gpu_get(&flags, p->args.flags, 4);
    gpu_clear(p->args.flags, 4);
    return flags;
}

static void compare_cuts(struct problem *p)
{
    static const uint32_t cuts[] = {1, 3, 8, 64, 320};
    struct answer want = answer_new(p), got = answer_new(p), again = answer_new(p);

    problem_draw(p);
    reference(p, &want);
    for (uint32_t i = few ? 2 : 0; i < (few ? 3 : 5); i++) {
        problem_cut(p, cuts[i]);
        step(p, &got);
        compare(p, &want, &got, "a step");
        step(p, &again);
        check(memcmp(got.out, again.out, p->rows * p->shape.d * 4) == 0 &&
                  memcmp(got.lse, again.lse, p->rows * 4) == 0,
              "the second run has other bits");
        check(flags_of(p) == 0, "flags");
    }
    answer_free(&want);
    answer_free(&got);
    answer_free(&again);
}

/* The places of blocks change no bit. */
static void compare_places(struct problem *p)
{
    const struct attend_shape *s = &p->shape;
    uint64_t n = p->rows * s->d, entries = (uint64_t)s->chains * s->lists * s->room;
    struct answer tables = answer_new(p), slots = answer_new(p);
    struct ucm_attend_cuda args = p->args;
    int32_t *direct = fresh(entries * 4);

    problem_cut(p, 5);
    step(p, &tables);
    for (uint64_t i = 0; i < entries; i++)
        direct[i] = problem_slot(p, i / s->room, p->list[i]);
    args = p->args;
    p->args.list = gpu_put(0, direct, entries * 4);
    p->args.numbers = p->args.slot_of = 0; /* entries are slots */
    step(p, &slots);
    check(memcmp(tables.out, slots.out, n * 4) == 0 &&
              memcmp(tables.lse, slots.lse, p->rows * 4) == 0,
          "lists of slots have other bits than lists of positions");
    gpu_free(p->args.list);
    p->args = args;
    free(direct);
    answer_free(&tables);
    answer_free(&slots);
}

/* A block that is not resident raises the flag, wherever the way to it ends. */
static void miss(struct problem *p)
{
    struct answer got = answer_new(p);
    int32_t entry = p->list[0], number = p->numbers[entry], bad;

    problem_cut(p, 7);
    bad = UCM_ATTEND_CUDA_ORDER * 1000;
    gpu_put(p->args.list, &bad, 4);
    step(p, &got);
    check(flags_of(p) == UCM_ATTEND_NO_SLOT, "an entry that has no number");
    gpu_put(p->args.list, &entry, 4);
    bad = -1;
    gpu_put(p->args.numbers + 4 * (uint32_t)entry, &bad, 4);
    step(p, &got);
    check(flags_of(p) == UCM_ATTEND_NO_SLOT, "a number below 0");
    gpu_put(p->args.numbers + 4 * (uint32_t)entry, &number, 4);
    bad = -2;
    gpu_put(p->args.slot_of + 4 * (uint32_t)number, &bad, 4);
    step(p, &got);
    check(flags_of(p) == UCM_ATTEND_NO_SLOT, "a block that is wanted");
    gpu_put(p->args.slot_of + 4 * (uint32_t)number, &p->slot_of[number], 4);
    step(p, &got);
    check(flags_of(p) == 0, "flags when all is there");
    if (p->shape.window > 0) {
        int32_t page = p->table[p->first[0]];
        uint32_t length = p->length[0], whole = p->shape.window * p->shape.tokens;

        bad = (int32_t)p->shape.pages;
        gpu_put(p->args.table + 4 * p->first[0], &bad, 4);
        gpu_put(p->args.length, &whole, 4);
        step(p, &got);
        check(flags_of(p) == UCM_ATTEND_NO_PAGE, "a page that is not there");
        gpu_put(p->args.table + 4 * p->first[0], &page, 4);
        gpu_put(p->args.length, &length, 4);
    }
    answer_free(&got);
}

/* NaN in a key makes its rows NaN, and no others. */
static void poison(struct problem *p)
{
    struct answer want = answer_new(p), got = answer_new(p);
    uint32_t slot = (uint32_t)problem_slot(p, 0, p->list[0]);
    uint16_t nan = 0x7fff, before;
    uint64_t at = slot * p->slot + p->pool_plan.spec.shape.k_token_stride * 3 + 8;

    memcpy(&before, p->pool + at, 2);
    memcpy(p->pool + at, &nan, 2);
    gpu_put(p->args.pool.base + at, &nan, 2);
    problem_cut(p, 4);
    reference(p, &want);
    step(p, &got);
    check(isnan(got.lse[0]), "NaN in a key");
    compare(p, &want, &got, "with NaN");
    memcpy(p->pool + at, &before, 2);
    gpu_put(p->args.pool.base + at, &before, 2);
    answer_free(&want);
    answer_free(&got);
}

static const struct attend_shape shapes[] = {
    {UCM_KV_BF16, 16, 8, 4, 128, 3, 8, 37, 60, 20, 5, 0},
    {UCM_KV_BF16, 16, 8, 4, 128, 2, 8, 37, 60, 20, 5, 1},
    {UCM_KV_F16, 16, 2, 7, 64, 2, 2, 20, 33, 9, 3, 1},
    {UCM_KV_BF16, 16, 4, 16, 128, 1, 1, 60, 64, 0, 0, 0},
    {UCM_KV_F16, 32, 3, 3, 64, 4, 3, 9, 40, 11, 4, 1},
    {UCM_KV_BF16, 64, 2, 1, 256, 2, 2, 5, 12, 6, 2, 0},
    {UCM_KV_F16, 16, 1, 8, 256, 2, 1, 70, 80, 30, 17, 0},
    {UCM_KV_F16, 256, 1, 2, 128, 1, 1, 3, 5, 3, 2, 0},
    {UCM_KV_BF16, 16, 3, 3, 64, 5, 3, 150, 200, 40, 8, 0},
};

void test_steps(void)
{
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        struct problem p;

        problem_open(&p, &shapes[i]);
        for (uint32_t round = 0; round < (few ? 1 : 4); round++) {
            compare_cuts(&p);
            compare_places(&p);
            miss(&p);
            poison(&p);
        }
        problem_close(&p);
    }
}
