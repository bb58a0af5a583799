/* The answer that a step of a problem must give, by the C of kernels/attend, and how near an answer
 * is. */
#include "tests/gpu/attend.h"

#include "kernels/arith.h"

#include <math.h>
#include <string.h>

struct answer answer_new(const struct problem *p)
{
    return (struct answer){fresh(p->rows * p->v * 4), fresh(p->rows * 4)};
}

/* The C's of one KV head of a sequence, over the entries that the tables lead to. */
static void reference_head(const struct problem *p, uint32_t sequence, uint32_t g, float *scratch,
                           struct answer *to)
{
    const struct attend_shape *s = &p->shape;
    uint64_t l = (uint64_t)sequence * s->lists + (s->lists > 1 ? g : 0);
    uint64_t row = ((uint64_t)sequence * s->kv_heads + g) * s->group;
    struct ucm_attend_memory pool = {p->pool, p->entry, s->entries},
                             pages = {p->pages, p->page, s->pages};
    float *query = scratch + p->plan.state_floats;
    struct ucm_attend_state state;
    int r = 0;

    ucm_attend_query(&p->plan, p->q + row * s->d, query);
    ucm_attend_begin(&p->plan, &state, scratch);
    for (uint32_t i = 0; i < p->count[l]; i++) {
        int32_t entry = problem_entry(p, l, p->list[l * s->room + i]);

        r |= ucm_attend_add(&p->pool_plan, &pool, problem_head(p, g), query, &entry, 1, 0, &state,
                            NULL, 0);
    }
    if (s->window > 0) {
        uint32_t length = p->length[sequence], blocks = (length + s->tokens - 1) / s->tokens;

        if (blocks > p->first[sequence])
            r |= ucm_attend_add(&p->plan, &pages, g, query,
                                p->table + (uint64_t)sequence * s->window + p->first[sequence],
                                blocks - p->first[sequence], length % s->tokens, &state, NULL, 0);
    }
    check(r == 0, "the reference");
    ucm_attend_end(&p->plan, &state, to->out + row * p->v, to->lse + row);
}

void answer_reference(const struct problem *p, struct answer *to)
{
    float *scratch = fresh(ucm_attend_scratch_floats(&p->plan) * 4);

    for (uint32_t sequence = 0; sequence < p->shape.sequences; sequence++)
        for (uint32_t g = 0; g < p->shape.kv_heads; g++)
            reference_head(p, sequence, g, scratch, to);
}

static bool near(float a, float b, float by)
{
    return fabsf(a - b) <= by || (isnan(a) && isnan(b)) || (isinf(a) && a == b);
}

void answer_compare(const struct problem *p, const struct answer *want, const struct answer *got,
                    const char *what)
{
    const struct attend_shape *s = &p->shape;
    float by = problem_v(p) * (s->dtype == UCM_KV_F16 ? 0x1p-10f : 0x1p-8f);
    uint64_t wrong = 0, at = 0, wrong_lse = 0;

    for (uint64_t i = 0; i < p->rows * p->v; i++)
        if (!near(want->out[i], got->out[i], by)) {
            wrong++;
            at = i;
        }
    for (uint64_t i = 0; i < p->rows; i++)
        wrong_lse += !near(want->lse[i], got->lse[i], 1e-4f + 1e-5f * fabsf(want->lse[i]));
    check(wrong == 0 && wrong_lse == 0,
          "%s: dtype %u group %u d %u tokens %u lists %u apart %u narrow %u split %u: %lu channels "
          "(row %lu: "
          "%g, not %g), %lu lse",
          what, s->dtype, s->group, s->d, s->tokens, s->lists, s->apart, s->narrow,
          p->args.split_tiles, (unsigned long)wrong, (unsigned long)(at / p->v),
          (double)got->out[at], (double)want->out[at], (unsigned long)wrong_lse);
}

void answer_same(const struct problem *p, const struct answer *want, const struct answer *got,
                 const char *what)
{
    check(memcmp(want->out, got->out, p->rows * p->v * 4) == 0 &&
              memcmp(want->lse, got->lse, p->rows * 4) == 0,
          "%s: other bits", what);
}

void answer_get(const struct problem *p, struct answer *to)
{
    uint64_t n = p->rows * p->v;
    uint16_t *bits = fresh(n * 2);

    gpu_get(bits, p->args.out, n * 2);
    gpu_get(to->lse, p->args.lse, p->rows * 4);
    for (uint64_t i = 0; i < n; i++)
        to->out[i] =
            p->shape.dtype == UCM_KV_F16 ? ucm_f16_decode(bits[i]) : ucm_bf16_decode(bits[i]);
}

void answer_step(const struct problem *p, struct answer *to)
{
    problem_launch(p, &p->args);
    gpu_sync();
    answer_get(p, to);
}
