/* What a spec and a shift may say. */
#include "kernels/rope/rope.h"

#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

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
        return refuse(why,
                      "dtype is %u; f32 (0), f16 (1), bf16 (2) and fp8_e4m3 (3) can be re-rotated",
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
    if (s->run > UCM_ROPE_RUN_MAX)
        return refuse(why, "a row holds %u tokens of each channel; at most %u are allowed", s->run,
                      UCM_ROPE_RUN_MAX);
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

int ucm_rope_check_shift(const struct ucm_rope_shift *shift, char why[UCM_ROPE_WHY])
{
    int r = check_position("the old position", shift->old_position, why);

    if (r == 0)
        r = check_position("the new position", shift->new_position, why);
    if (r == 0)
        r = check_position("the old length", shift->old_length, why);
    return r == 0 ? check_position("the new length", shift->new_length, why) : r;
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

uint32_t ucm_rope_element_bytes(const struct ucm_rope_spec *spec)
{
    return spec->dtype == UCM_ROPE_F32 ? 4 : spec->dtype == UCM_ROPE_FP8_E4M3 ? 1 : 2;
}

/* Tokens of a row. */
static uint32_t ucm_rope_tokens(const struct ucm_rope_spec *spec)
{
    return spec->run > 1 ? spec->run : 1;
}

uint64_t ucm_rope_bytes(const struct ucm_rope_spec *spec)
{
    return (uint64_t)spec->rows * spec->dim * ucm_rope_tokens(spec) * ucm_rope_element_bytes(spec);
}
