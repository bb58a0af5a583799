/* Rows, a run of channels at a time: to float32, re-rotated, and back. Loops have no branches, so
 * that compilers make vectors of them. Bits are those of kernels/rope/arith.h. */
#include "kernels/rope/arith.h"
#include "kernels/rope/simd/forms.h"
#include "kernels/simd/isa.h"

#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* ---- lanes ---- */

INLINE float f16_lane(uint32_t h)
{
    uint32_t sign = (h & 0x8000u) << 16, rest = (h & 0x7fffu) << 13;
    uint32_t small = ucm_f32_bits((float)(int32_t)(h & 0x3ffu) * 0x1p-24f);
    uint32_t x = rest + (112u << 23);

    x = rest >= 0x0f800000u ? rest | UCM_F32_INF : x;
    return ucm_f32(sign | (rest < 0x00800000u ? small : x));
}

INLINE float e4m3_lane(uint32_t b)
{
    uint32_t sign = (b & 0x80u) << 24, rest = b & 0x7fu;
    uint32_t small = ucm_f32_bits((float)(int32_t)rest * 0x1p-9f);
    uint32_t x = (rest << 20) + (120u << 23);

    x = rest == 0x7fu ? 0x7fc00000u : x;
    return ucm_f32(sign | (rest < 8 ? small : x));
}

/* The bits of ucm_rint(x) as an integer, of 0 <= x <= 2^22; of others, any. */
INLINE uint32_t rounded(float x)
{
    return ucm_f32_bits(x + 0x1.8p23f) - 0x4b400000u;
}

INLINE uint32_t bf16_code(float x)
{
    uint32_t u = ucm_f32_bits(x), sign = u >> 16 & 0x8000u, rest = u & 0x7fffffffu;
    uint32_t h = (rest + 0x7fffu + (rest >> 16 & 1)) >> 16;

    h = rest > 0x7f7f0000u ? 0x7f7fu : h;
    return rest > UCM_F32_INF ? UCM_BF16_NAN : sign | h;
}

INLINE uint32_t f16_code(float x)
{
    uint32_t u = ucm_f32_bits(x), sign = u >> 16 & 0x8000u, rest = u & 0x7fffffffu;
    uint32_t h = (rest - (112u << 23) + 0xfffu + (rest >> 13 & 1)) >> 13;

    h = rest < 0x38800000u ? rounded(ucm_f32(rest) * 0x1p24f) : h;
    h = rest > 0x477fe000u ? 0x7bffu : h;
    return rest > UCM_F32_INF ? 0x7e00u : sign | h;
}

INLINE uint32_t e4m3_code(float x)
{
    uint32_t u = ucm_f32_bits(x), sign = u >> 24 & 0x80u, rest = u & 0x7fffffffu;
    uint32_t b = ((rest + 0x7ffffu + (rest >> 20 & 1)) >> 20) - (120u << 3);

    b = rest < 0x3c800000u ? rounded(ucm_f32(rest) * 0x1p9f) : b;
    b = rest >= 0x43e00000u ? UCM_FP8_INF : b; /* 448 */
    return rest > UCM_F32_INF ? UCM_FP8_NAN : sign | b;
}

/* ---- runs of at most UCM_ROPE_ROTARY_MAX channels ---- */

union run {
    uint8_t u8[UCM_ROPE_ROTARY_MAX];
    uint16_t u16[UCM_ROPE_ROTARY_MAX];
    uint32_t u32[UCM_ROPE_ROTARY_MAX];
};

INLINE void load_run(uint32_t dtype, const uint8_t *from, uint32_t n, float *restrict out)
{
    union run run;

    memcpy(&run, from,
           (size_t)n * (dtype == UCM_ROPE_F32        ? 4
                        : dtype == UCM_ROPE_FP8_E4M3 ? 1
                                                     : 2));
    for (uint32_t i = 0; i < n; i++)
        out[i] = dtype == UCM_ROPE_F32    ? ucm_f32(run.u32[i])
                 : dtype == UCM_ROPE_F16  ? f16_lane(run.u16[i])
                 : dtype == UCM_ROPE_BF16 ? ucm_bf16_decode(run.u16[i])
                                          : e4m3_lane(run.u8[i]);
}

INLINE void store_run(uint32_t dtype, const float *restrict from, uint32_t n, uint8_t *to)
{
    union run run;

    for (uint32_t i = 0; i < n; i++)
        if (dtype == UCM_ROPE_F32)
            run.u32[i] = ucm_is_nan(from[i]) ? 0x7fc00000u : ucm_f32_bits(from[i]);
        else if (dtype == UCM_ROPE_FP8_E4M3)
            run.u8[i] = (uint8_t)e4m3_code(from[i]);
        else
            run.u16[i] = (uint16_t)(dtype == UCM_ROPE_F16 ? f16_code(from[i]) : bf16_code(from[i]));
    memcpy(to, &run, (size_t)n * (dtype == UCM_ROPE_F32 ? 4 : dtype == UCM_ROPE_FP8_E4M3 ? 1 : 2));
}

/* The rotary part of a row. x of pair i is in[step * i], and y lies `apart` after it. */
INLINE void rerotate_run(const struct ucm_rope_angle *restrict table, uint32_t half, uint32_t step,
                         uint32_t apart, const float *restrict in, float *restrict out)
{
    for (uint32_t i = 0; i < half; i++) {
        float x = in[step * i], y = in[step * i + apart];

        out[step * i] = ucm_rope_x(x, y, table[i]);
        out[step * i + apart] = ucm_rope_y(x, y, table[i]);
    }
}

INLINE void rerotate_rows(const struct ucm_rope_spec *s, uint32_t dtype,
                          const struct ucm_rope_angle *table, const uint8_t *from, uint8_t *to)
{
    float in[UCM_ROPE_ROTARY_MAX], out[UCM_ROPE_ROTARY_MAX];
    uint32_t element = ucm_rope_element_bytes(s), half = s->rotary / 2;
    uint64_t bytes = (uint64_t)s->dim * element, first = (uint64_t)s->first * element;
    bool copies = from != to && s->rotary < s->dim;

    for (uint32_t row = 0; row < s->rows; row++, from += bytes, to += bytes) {
        if (copies)
            memcpy(to, from, bytes);
        load_run(dtype, from + first, s->rotary, in);
        if (s->pairs == UCM_ROPE_HALVES)
            rerotate_run(table, half, 1, half, in, out);
        else
            rerotate_run(table, half, 2, 1, in, out);
        store_run(dtype, out, s->rotary, to + first);
    }
}

/* One pair of channels of a row that holds `run` tokens of each. */
INLINE void rerotate_pair(uint32_t dtype, uint32_t element, uint32_t run,
                          struct ucm_rope_angle angle, uint8_t *x, uint8_t *y)
{
    float in[UCM_ROPE_ROTARY_MAX], out[UCM_ROPE_ROTARY_MAX];
    const uint32_t most = UCM_ROPE_ROTARY_MAX / 2;

    for (uint32_t done = 0, n; done < run; done += n) {
        n = run - done < most ? run - done : most;
        load_run(dtype, x + (uint64_t)done * element, n, in);
        load_run(dtype, y + (uint64_t)done * element, n, in + most);
        for (uint32_t t = 0; t < n; t++) {
            out[t] = ucm_rope_x(in[t], in[most + t], angle);
            out[most + t] = ucm_rope_y(in[t], in[most + t], angle);
        }
        store_run(dtype, out, n, x + (uint64_t)done * element);
        store_run(dtype, out + most, n, y + (uint64_t)done * element);
    }
}

INLINE void rerotate_columns(const struct ucm_rope_spec *s, uint32_t dtype,
                             const struct ucm_rope_angle *table, const uint8_t *from, uint8_t *to)
{
    uint32_t element = ucm_rope_element_bytes(s);
    uint64_t channel = (uint64_t)s->run * element, bytes = s->dim * channel;

    for (uint32_t row = 0; row < s->rows; row++, from += bytes, to += bytes) {
        if (from != to)
            memcpy(to, from, bytes);
        for (uint32_t i = 0; i < s->rotary / 2; i++)
            rerotate_pair(dtype, element, s->run, table[i], to + ucm_rope_channel_x(s, i) * channel,
                          to + ucm_rope_channel_y(s, i) * channel);
    }
}

INLINE void rerotate_tensor(const struct ucm_rope_spec *s, uint32_t dtype,
                            const struct ucm_rope_angle *table, const uint8_t *from, uint8_t *to)
{
    if (s->run > 1)
        rerotate_columns(s, dtype, table, from, to);
    else
        rerotate_rows(s, dtype, table, from, to);
}

void UCM_ISA_NAME(rope_apply)(const struct ucm_rope_spec *spec, const struct ucm_rope_angle *table,
                              const uint8_t *from, uint8_t *to)
{
    switch ((enum ucm_rope_dtype)spec->dtype) {
    case UCM_ROPE_F32:
        rerotate_tensor(spec, UCM_ROPE_F32, table, from, to);
        break;
    case UCM_ROPE_F16:
        rerotate_tensor(spec, UCM_ROPE_F16, table, from, to);
        break;
    case UCM_ROPE_BF16:
        rerotate_tensor(spec, UCM_ROPE_BF16, table, from, to);
        break;
    case UCM_ROPE_FP8_E4M3:
        rerotate_tensor(spec, UCM_ROPE_FP8_E4M3, table, from, to);
        break;
    }
}
