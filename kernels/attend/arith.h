/* What blocks that are left weigh, and the share of what is attended: one text for C and CUDA.
 * stop.h says what it promises, and kernels/arith.h by which rules it is compiled. */
#ifndef UCM_KERNELS_ATTEND_ARITH_H
#define UCM_KERNELS_ATTEND_ARITH_H

#include "kernels/sparse/arith.h"

/* More than the relative error of anything here whose result must not be too small. Such a result
 * has an exponential of 2 units, whose argument, at most 88, is rounded; three products; and a
 * quotient. */
#define UCM_LEFT_UP (1.0f + 0x1p-16f)
#define UCM_LEFT_LEAST 0x1p-125f /* more than e^-87 */

/* units * 2^-40 * e^top. Units are whole and rounded up, so blocks can be added and taken away in
 * any order. When all were taken away, nothing is left. */
struct ucm_left {
    float top;
    uint32_t unknown; /* blocks of which nothing is known */
    uint64_t units;
};

/* Whether a logarithm of a weight is known. +inf and NaN are not. */
UCM_HD uint32_t ucm_left_is_known(float log_weight)
{
    return log_weight < ucm_inf();
}

/* e^x, rounded up; x at most 0, and not NaN. */
UCM_HD float ucm_left_exp(float x)
{
    return ucm_max(ucm_exp(x) * UCM_LEFT_UP, UCM_LEFT_LEAST);
}

UCM_HD uint64_t ucm_left_units(float top, float log_weight)
{
    if (log_weight == -ucm_inf())
        return 0;
    return (uint64_t)(ucm_left_exp(log_weight - top) * 0x1p40f) + 1;
}

/* The next float, or the one after it. */
UCM_HD float ucm_left_round_up(float x)
{
    return x + ucm_abs(x) * 0x1p-23f + 0x1p-126f;
}

/* The logarithm of what a block weighs at most, by its `box` score. ln_tokens is rounded to
 * nearest. */
UCM_HD float ucm_left_of_box(float logit_scale, float box_score, float ln_tokens)
{
    float bound = ucm_left_round_up(ucm_left_round_up(logit_scale * box_score) +
                                    ucm_left_round_up(ln_tokens));

    return ucm_is_nan(bound) ? ucm_inf() : bound;
}

/* What is left, divided by sum * e^top, rounded up. slack: top + ln(sum) may be too large by this
 * much. */
UCM_HD float ucm_left_ratio(float top, float sum, float slack, const struct ucm_left *left)
{
    float units = (float)left->units * 0x1p-40f, gap = left->top - top + slack;

    if (left->unknown > 0)
        return ucm_inf();
    if (left->units == 0)
        return 0.0f;
    if (!(sum > 0) || !(gap < 87.0f)) /* nothing is attended, or NaN */
        return ucm_inf();
    if (gap > 0)
        return units / (ucm_exp(-gap) * sum) * UCM_LEFT_UP * UCM_LEFT_UP;
    return ucm_max(units * ucm_left_exp(gap) / sum * UCM_LEFT_UP, UCM_LEFT_LEAST);
}

/* The share that follows from the ratios' sum, rounded down. */
UCM_HD float ucm_left_share_of(float ratio)
{
    return ratio == 0 ? 1.0f : 1.0f / (1.0f + ratio * UCM_LEFT_UP) * (1.0f - 0x1p-22f);
}

/* PSA's rule: `left` blocks that weigh e^lightest each. */
UCM_HD struct ucm_left ucm_left_alike(float lightest, uint32_t left)
{
    struct ucm_left rest;

    rest.top = lightest;
    rest.unknown = 0;
    rest.units = lightest == -ucm_inf() ? 0 : (uint64_t)left << 40;
    return rest;
}

#endif
