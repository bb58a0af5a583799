/* ucm_rope_apply for each instruction set, with the bits of kernels/rope/arith.h. */
#ifndef UCM_KERNELS_ROPE_FORMS_H
#define UCM_KERNELS_ROPE_FORMS_H

#include "kernels/rope/rope.h"

typedef void rope_apply_fn(const struct ucm_rope_spec *spec, const struct ucm_rope_angle *table,
                           const uint8_t *from, uint8_t *to);

rope_apply_fn rope_apply_base, rope_apply_avx2;

#endif
