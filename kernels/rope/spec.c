/* What a spec may say, frequencies of each kind of scaling, and angles. */
#include "kernels/rope/rope.h"

#include "kernels/isa.h"
#include "kernels/rope/simd/forms.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#define TWO_PI 6.283185307179586476925

/* ---- checks ---- */

static int refuse(char why[UCM_ROPE_WHY], const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static int refuse(char why[UCM_ROPE_WHY], const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(why, UCM_ROPE_WHY, format, args);
    va_end(args);
    return -EINVAL;
}

static int check_rows(const struct ucm_rope_spec *s, char why[UCM_ROPE_WHY])
{
    if (s->dtype > UCM_ROPE_FP8_E4M3)
        return refuse(why, "dtype is %u; f32 (0), f16 (1), bf16 (2) and fp8_e4m3 (3) can be turned",
                      s->dtype);
    if (s->rows < 1 || s->rows > UCM_ROPE_ROWS_MAX)
        return refuse(why, "%u rows; 1 to %u are allowed", s->rows, UCM_ROPE_ROWS_MAX);
    if (s->dim < 2 || s->dim > UCM_ROPE_DIM_MAX)
        return refuse(why, "a row has %u channels; 2 to %u are allowed", s->dim, UCM_ROPE_DIM_MAX);
    if (s->rotary < 2 || s->rotary > UCM_ROPE_ROTARY_MAX || s->rotary % 2 != 0)
        return refuse(why, "%u channels turn; an even number of 2 to %u can", s->rotary,
                      UCM_ROPE_ROTARY_MAX);
    if (s->first > s->dim || s->rotary > s->dim - s->first)
        return refuse(why, "channels %u to %u turn, but a row has %u", s->first,
                      s->first + s->rotary - 1, s->dim);
    if (s->pairs > UCM_ROPE_NEIGHBOURS)
        return refuse(why,
                      "pairs is %u; 0 (neox: the halves of the rotary part) and 1 (interleaved: "
                      "neighbours) are known",
                      s->pairs);
    return 0;
}

static int check_scaling(const struct ucm_rope_spec *s, char why[UCM_ROPE_WHY])
{
    if (s->scaling > UCM_ROPE_LLAMA3)
        return refuse(why,
                      "scaling is %u; plain (0), linear (1), dynamic (2), yarn (3) and llama3 (4) "
                      "are known",
                      s->scaling);
    if (!(s->base > 1 && s->base <= 1e12))
        return refuse(why, "the base is %g; it is more than 1 and at most 1e12", s->base);
    if (s->scaling == UCM_ROPE_PLAIN)
        return 0;
    if (!(s->factor >= 1 && s->factor <= 1e6))
        return refuse(why, "the factor is %g; 1 to 1e6 are allowed", s->factor);
    if (s->scaling == UCM_ROPE_LINEAR)
        return 0;
    if (s->trained < 1 || s->trained > UCM_ROPE_POSITION_MAX)
        return refuse(why, "this kind of scaling needs the trained length: 1 to %u tokens, not %u",
                      (unsigned)UCM_ROPE_POSITION_MAX, s->trained);
    if (s->scaling == UCM_ROPE_DYNAMIC)
        return s->rotary > 2 ? 0 : refuse(why, "dynamic scaling needs more than 2 rotary channels");
    if (!(s->slow > 0 && s->fast > s->slow && s->fast <= 1e6))
        return refuse(why, "fast is %g and slow %g; they are above 0, fast above slow", s->fast,
                      s->slow);
    return 0;
}

int ucm_rope_check(const struct ucm_rope_spec *spec, char why[UCM_ROPE_WHY])
{
    int r = check_rows(spec, why);

    return r == 0 ? check_scaling(spec, why) : r;
}

static int check_position(const char *what, uint64_t value, char why[UCM_ROPE_WHY])
{
    if (value <= UCM_ROPE_POSITION_MAX)
        return 0;
    return refuse(why, "%s is %llu; 0 to %llu are allowed", what, (unsigned long long)value,
                  (unsigned long long)UCM_ROPE_POSITION_MAX);
}

int ucm_rope_check_turn(const struct ucm_rope_turn *turn, char why[UCM_ROPE_WHY])
{
    int r = check_position("the old position", turn->old_position, why);

    if (r == 0)
        r = check_position("the new position", turn->new_position, why);
    if (r == 0)
        r = check_position("the old length", turn->old_length, why);
    return r == 0 ? check_position("the new length", turn->new_length, why) : r;
}

int ucm_rope_scaling_named(const char *name, uint32_t n, uint32_t *out)
{
    static const struct {
        const char *name;
        uint32_t scaling;
    } names[] = {{"", UCM_ROPE_PLAIN},        {"default", UCM_ROPE_PLAIN},
                 {"linear", UCM_ROPE_LINEAR}, {"dynamic", UCM_ROPE_DYNAMIC},
                 {"yarn", UCM_ROPE_YARN},     {"llama3", UCM_ROPE_LLAMA3}};

    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strlen(names[i].name) == n && (n == 0 || memcmp(names[i].name, name, n) == 0)) {
            *out = names[i].scaling;
            return 0;
        }
    return -EINVAL;
}

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

/* What share of a pair's frequency is divided by factor: 0 of those that turn often. */
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
 * product of a frequency and a position, so the angle of position 2^31 is as exact as that of 1: a
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

bool ucm_rope_table(const struct ucm_rope_spec *spec, const struct ucm_rope_turn *turn,
                    struct ucm_rope_angle *out)
{
    float old[UCM_ROPE_PAIRS_MAX], new[UCM_ROPE_PAIRS_MAX];
    uint64_t any = 0;

    ucm_rope_frequencies(spec, turn->old_length, old);
    ucm_rope_frequencies(spec, turn->new_length, new);
    for (uint32_t i = 0; i < spec->rotary / 2; i++) {
        uint64_t rotation = rotations_a_position(new[i]) * turn->new_position -
                            rotations_a_position(old[i]) * turn->old_position;

        any |= rotation;
        out[i] = angle_of(rotation);
    }
    return any != 0;
}

/* ---- rows ---- */

uint32_t ucm_rope_element_bytes(const struct ucm_rope_spec *spec)
{
    return spec->dtype == UCM_ROPE_F32 ? 4 : spec->dtype == UCM_ROPE_FP8_E4M3 ? 1 : 2;
}

uint64_t ucm_rope_bytes(const struct ucm_rope_spec *spec)
{
    return (uint64_t)spec->rows * spec->dim * ucm_rope_element_bytes(spec);
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
