#include "kernels/sparse/psa.h"

#include "kernels/sparse/arith.h"

struct ucm_weight_sum ucm_weight_none(void)
{
    return (struct ucm_weight_sum){-ucm_inf(), 0.0f};
}

void ucm_weight_add(struct ucm_weight_sum *sum, float log_weight, float times)
{
    struct ucm_weight_sum one = {log_weight, times};

    if (times > 0)
        ucm_weight_join(sum, &one);
}

/* To the larger exponent, so that e^(a - b) is at most 1. */
void ucm_weight_join(struct ucm_weight_sum *sum, const struct ucm_weight_sum *other)
{
    if (other->weight == 0 || other->top == -ucm_inf())
        return;
    if (sum->weight == 0 || other->top == ucm_inf()) {
        *sum = *other;
        return;
    }
    if (sum->top >= other->top) {
        sum->weight += other->weight * ucm_exp(other->top - sum->top);
        return;
    }
    sum->weight = other->weight + sum->weight * ucm_exp(sum->top - other->top);
    sum->top = other->top;
}

float ucm_weight_share(const struct ucm_weight_sum *covered, const struct ucm_weight_sum *left)
{
    float over;

    if (left->weight == 0)
        return 1.0f;
    if (covered->weight == 0 || left->top == ucm_inf())
        return 0.0f;
    if (covered->top >= left->top) {
        over = left->weight * ucm_exp(left->top - covered->top);
        return covered->weight / (covered->weight + over);
    }
    over = covered->weight * ucm_exp(covered->top - left->top);
    return over / (over + left->weight);
}

struct ucm_weight_sum ucm_weight_of_block(const float *logits, uint32_t n)
{
    struct ucm_weight_sum sum = ucm_weight_none();

    for (uint32_t i = 0; i < n; i++)
        ucm_weight_add(&sum, logits[i], 1.0f);
    return sum;
}

float ucm_weight_log(const struct ucm_weight_sum *sum)
{
    return sum->weight == 0 ? -ucm_inf() : sum->top + ucm_log(sum->weight);
}

/* What is left when the first i blocks are attended. */
static struct ucm_weight_sum left_after(enum ucm_psa_stop stop, uint32_t i, uint32_t n, float least,
                                        const struct ucm_weight_sum *suffix)
{
    struct ucm_weight_sum left = ucm_weight_none();

    if (stop == UCM_PSA_LEFT)
        return suffix[i];
    ucm_weight_add(&left, least, (float)(n - i));
    return left;
}

uint32_t ucm_psa_blocks(enum ucm_psa_stop stop, const float *attended, const float *left,
                        uint32_t n, uint32_t every, float eps, struct ucm_weight_sum *suffix,
                        float *share)
{
    struct ucm_weight_sum covered = ucm_weight_none(), rest;
    float least = ucm_inf();

    if (stop == UCM_PSA_LEFT) {
        suffix[n] = ucm_weight_none();
        for (uint32_t i = n; i > 0; i--) {
            suffix[i - 1] = suffix[i];
            ucm_weight_add(&suffix[i - 1], left[i - 1], 1.0f);
        }
    }
    *share = n == 0 ? 1.0f : 0.0f;
    for (uint32_t i = 0; i < n; i++) {
        ucm_weight_add(&covered, attended[i], 1.0f);
        least = ucm_min(attended[i], least);
        if ((i + 1) % every != 0 && i + 1 < n)
            continue;
        rest = left_after(stop, i + 1, n, least, suffix);
        *share = ucm_weight_share(&covered, &rest);
        if (*share >= eps)
            return i + 1;
    }
    return n;
}
