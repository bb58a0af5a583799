/* Frequencies of each kind of scaling, and angles. */
#include "kernels/rope/rope.h"

#include "kernels/rope/simd/forms.h"
#include "kernels/simd/isa.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#define TWO_PI 6.283185307179586476925

/* ---- frequencies: in double, rounded once ---- */

static double plain_frequency(double base, const struct ucm_rope_spec *s, uint32_t i)
{
    return pow(base, -2.0 * i / s->rotary);
}

static double dynamic_base(const struct ucm_rope_spec *s, uint64_t length)
{
    double stretch;

    if (length <= s->trained)
        return s->base;
    stretch = s->factor * (double)length / s->trained - (s->factor - 1);
    return s->base * pow(stretch, s->rotary / (s->rotary - 2.0));
}

/* The pair, as a real number, that makes so many rotations within the trained length. */
static double yarn_pair(const struct ucm_rope_spec *s, double rotations)
{
    return s->rotary * log(s->trained / (rotations * TWO_PI)) / (2 * log(s->base));
}

/* Which share of a pair's frequency is divided by factor: 0 for pairs that rotate often. */
static double yarn_share(const struct ucm_rope_spec *s, uint32_t i)
{
    double low = yarn_pair(s, s->fast), high = yarn_pair(s, s->slow), share;

    if (s->whole) {
        low = floor(low);
        high = ceil(high);
    }
    low = fmax(low, 0);
    high = fmin(high, s->rotary - 1.0);
    if (low == high)
        high += 0.001;
    share = (i - low) / (high - low);
    return fmin(fmax(share, 0), 1);
}

static double llama3_frequency(const struct ucm_rope_spec *s, double f)
{
    double rotations = s->trained * f / TWO_PI, share;

    if (rotations < s->slow)
        return f / s->factor;
    if (rotations > s->fast)
        return f;
    share = (rotations - s->slow) / (s->fast - s->slow);
    return (1 - share) * f / s->factor + share * f;
}

static double frequency(const struct ucm_rope_spec *s, double base, uint32_t i)
{
    double f = plain_frequency(base, s, i), share;

    switch ((enum ucm_rope_scaling)s->scaling) {
    case UCM_ROPE_LINEAR:
        return f / s->factor;
    case UCM_ROPE_YARN:
        share = yarn_share(s, i);
        return f / s->factor * share + f * (1 - share);
    case UCM_ROPE_LLAMA3:
        return llama3_frequency(s, f);
    case UCM_ROPE_PLAIN:
    case UCM_ROPE_DYNAMIC:
        break;
    }
    return f;
}

void ucm_rope_frequencies(const struct ucm_rope_spec *spec, uint64_t length, float *out)
{
    double base = spec->scaling == UCM_ROPE_DYNAMIC ? dynamic_base(spec, length) : spec->base;

    for (uint32_t i = 0; i < spec->rotary / 2; i++)
        out[i] = (float)frequency(spec, base, i);
}

/* ---- angles ----
 *
 * An angle is a fraction of a rotation in 64 bits. Whole rotations fall off the upper end of the
 * product of a frequency and a position. So the angle of position 2^31 is as exact as that of 1. A
 * float32 product would be wrong by a thirtieth of a radian at a million. */

__extension__ typedef unsigned __int128 u128;

/* 2^64 f / 2 pi of 0 < f <= 1. f is m 2^e; the constant is 2^100 / 2 pi. */
static uint64_t rotations_a_position(float f)
{
    const u128 scale = (u128)UINT64_C(0x28be60db9) << 64 | UINT64_C(0x391054a7f09d5f47);
    int exponent;
    uint32_t m = (uint32_t)(frexpf(f, &exponent) * 0x1p24f);
    int shift = 36 - (exponent - 24);

    return shift < 128 ? (uint64_t)(m * scale >> shift) : 0;
}

/* Taylor's series of |x| <= pi / 4: the first terms left out are below 2^-54. */
static void sin_cos(double x, double *sin, double *cos)
{
    static const double s[] = {-0x1.ae7f3e733b81fp-41, 0x1.6124613a86d09p-33,
                               -0x1.ae64567f544e4p-26, 0x1.71de3a556c734p-19,
                               -0x1.a01a01a01a01ap-13, 0x1.1111111111111p-7,
                               -0x1.5555555555555p-3};
    static const double c[] = {0x1.ae7f3e733b81fp-45, -0x1.93974a8c07c9dp-37,
                               0x1.1eed8eff8d898p-29, -0x1.27e4fb7789f5cp-22,
                               0x1.a01a01a01a01ap-16, -0x1.6c16c16c16c17p-10,
                               0x1.5555555555555p-5,  -0x1.0p-1};
    double xx = x * x, p = 0, q = 0;

    for (size_t i = 0; i < sizeof s / sizeof *s; i++)
        p = (p + s[i]) * xx;
    for (size_t i = 0; i < sizeof c / sizeof *c; i++)
        q = (q + c[i]) * xx;
    *sin = x + x * p;
    *cos = 1 + q;
}

static struct ucm_rope_angle angle_of(uint64_t rotation)
{
    uint64_t quarter = (rotation + (UINT64_C(1) << 61)) >> 62;
    int64_t rest = (int64_t)(rotation - (quarter << 62));
    double sin, cos;

    sin_cos((double)rest * 0x1.921fb54442d18p-62, &sin, &cos);
    switch (quarter & 3) {
    case 0:
        return (struct ucm_rope_angle){(float)cos, (float)sin};
    case 1:
        return (struct ucm_rope_angle){(float)-sin, (float)cos};
    case 2:
        return (struct ucm_rope_angle){(float)-cos, (float)-sin};
    default:
        return (struct ucm_rope_angle){(float)sin, (float)-cos};
    }
}

bool ucm_rope_table(const struct ucm_rope_spec *spec, const struct ucm_rope_shift *shift,
                    struct ucm_rope_angle *out)
{
    float old[UCM_ROPE_PAIRS_MAX], new[UCM_ROPE_PAIRS_MAX];
    uint64_t any = 0;

    ucm_rope_frequencies(spec, shift->old_length, old);
    ucm_rope_frequencies(spec, shift->new_length, new);
    for (uint32_t i = 0; i < spec->rotary / 2; i++) {
        uint64_t rotation = rotations_a_position(new[i]) * shift->new_position -
                            rotations_a_position(old[i]) * shift->old_position;

        any |= rotation;
        out[i] = angle_of(rotation);
    }
    return any != 0;
}

void ucm_rope_apply(const struct ucm_rope_spec *spec, const struct ucm_rope_angle *table,
                    const void *from, void *to)
{
#ifdef UCM_ISA_X86
    if (ucm_isa() >= UCM_ISA_AVX2) {
        rope_apply_avx2(spec, table, from, to);
        return;
    }
#endif
    rope_apply_base(spec, table, from, to);
}
