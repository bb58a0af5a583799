/* Re-rotating K to another position.
 *
 * Rotary embedding rotates each pair of a key's channels by its frequency times the token's
 * position (Su et al., "RoFormer", arXiv 2104.09864). Rotations add: K of one position becomes that
 * of another by a rotation through the difference. So a block's K can serve at any position. V is
 * the same at all positions. A factor that the model multiplies rotated K with (YaRN's) stays in
 * it.
 *
 * docs/design/blend.md defines the angles, every rounding, and the error. This code and its CUDA
 * form give the same bits. Angles are computed here, on the host; kernels read tables of them.
 *
 * Promise: nothing here allocates, locks or keeps state, so any number of threads may call it.
 * Re-rotating reads and writes only the rows of one tensor. Any value is allowed, NaN and
 * infinities too, and any alignment. */
#ifndef UCM_KERNELS_ROPE_H
#define UCM_KERNELS_ROPE_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define UCM_ROPE_DIM_MAX 4096    /* channels of a row */
#define UCM_ROPE_ROTARY_MAX 1024 /* of which are rotated */
#define UCM_ROPE_PAIRS_MAX (UCM_ROPE_ROTARY_MAX / 2)
#define UCM_ROPE_ROWS_MAX (1u << 22)
#define UCM_ROPE_RUN_MAX 65536 /* tokens of a row */
#define UCM_ROPE_POSITION_MAX ((UINT64_C(1) << 31) - 1)

enum ucm_rope_dtype { /* the numbers of enum ucm_kv_dtype */
                      UCM_ROPE_F32 = 0,
                      UCM_ROPE_F16 = 1,
                      UCM_ROPE_BF16 = 2,
                      UCM_ROPE_FP8_E4M3 = 3,
};

/* Which channels of the rotary part are a pair: i and i + rotary / 2, or 2 i and 2 i + 1. */
enum ucm_rope_pairing { UCM_ROPE_HALVES = 0, UCM_ROPE_NEIGHBOURS = 1 };

/* How frequencies differ from base^(-2 i / rotary). On the wire: numbers keep their meaning. */
enum ucm_rope_scaling {
    UCM_ROPE_PLAIN = 0,
    UCM_ROPE_LINEAR = 1,  /* all divided by factor */
    UCM_ROPE_DYNAMIC = 2, /* base grows with the sequence's length, past `trained` */
    UCM_ROPE_YARN = 3,    /* arXiv 2309.00071 */
    UCM_ROPE_LLAMA3 = 4,  /* that of Llama 3.1's models */
};

/* A tensor is `rows` rows of `dim` channels, contiguous. In each row, channels [first, first +
 * rotary) are rotated, and the others stay. A row is a token of a KV head (MLA: a token, whose
 * rotary part lies after the latent). With `run` above 1 it has `run` tokens of a head, those of a
 * channel side by side. Channel c of token t is its element c run + t. */
struct ucm_rope_spec {
    uint32_t dtype; /* enum ucm_rope_dtype */
    uint32_t rows, dim, first, rotary;
    uint32_t pairs;   /* enum ucm_rope_pairing */
    uint32_t scaling; /* enum ucm_rope_scaling; it says which of the following it uses */
    uint32_t
        trained; /* dynamic, yarn, llama3: the length, in tokens, that the model was trained for
                         before it was scaled */
    double base;
    double factor; /* all but plain: how many times longer; at least 1 */
    double fast,
        slow;     /* yarn: beta_fast and beta_slow, in rotations within `trained`: 32 and 1 where a
                          model says nothing. llama3: high_freq_factor and low_freq_factor */
    bool whole;   /* yarn: the ramp begins and ends at whole pairs ("truncate"), as in most
                   * models */
    uint32_t run; /* 0 and 1: a row is one token. More: not on a GPU */
};

/* From where to where a run of tokens moves: the positions of its first token. Dynamic scaling
 * computed its frequencies for the lengths, which are at most UCM_ROPE_POSITION_MAX. All lengths up
 * to `trained` mean the same, and other kinds ignore them. If two lengths give different
 * frequencies, a table serves the first token alone. */
struct ucm_rope_shift {
    uint64_t old_position, new_position;
    uint64_t old_length, new_length;
};

#define UCM_ROPE_WHY 200 /* bytes of a refusal's sentence */

/* 0; or -EINVAL, and why says in a sentence which field is wrong and what would be right. All other
 * functions take what these accept. */
int ucm_rope_check(const struct ucm_rope_spec *spec, char why[UCM_ROPE_WHY]);
int ucm_rope_check_shift(const struct ucm_rope_shift *shift, char why[UCM_ROPE_WHY]);

/* The number of "linear" and so on. "default" and no name (n is 0) are plain. -EINVAL: no such
 * kind. */
int ucm_rope_scaling_named(const char *name, uint32_t n, uint32_t *out);

/* Radians a position for each pair (rotary / 2 of them), rounded to float32, as engines hold
 * them. */
void ucm_rope_frequencies(const struct ucm_rope_spec *spec, uint64_t length, float *out);

struct ucm_rope_angle {
    float cos, sin;
};

/* Writes rotary / 2 angles of a shift. False: the shift leaves every bit as it is, and the table is
 * unused. */
bool ucm_rope_table(const struct ucm_rope_spec *spec, const struct ucm_rope_shift *shift,
                    struct ucm_rope_angle *out);

uint32_t ucm_rope_element_bytes(const struct ucm_rope_spec *spec);
uint64_t ucm_rope_bytes(const struct ucm_rope_spec *spec); /* of a tensor */

/* Re-rotates a tensor by a table. `to` is `from`, or memory that does not overlap with it. */
void ucm_rope_apply(const struct ucm_rope_spec *spec, const struct ucm_rope_angle *table,
                    const void *from, void *to);

#ifdef __cplusplus
}
#endif

#endif
