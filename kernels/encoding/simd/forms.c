#include "kernels/encoding/simd/forms.h"

#include "kernels/encoding/simd/lanes.h"

const struct encoding_form UCM_ISA_NAME(encoding_forms)[ENCODING_FORMS] = {
    [UCM_ENCODING_FP8] = {UCM_ISA_NAME(fp8_encode), UCM_ISA_NAME(fp8_decode)},
    [UCM_ENCODING_INT8] = {UCM_ISA_NAME(int8_encode), UCM_ISA_NAME(int8_decode)},
    [UCM_ENCODING_Q4] = {UCM_ISA_NAME(q4_encode), UCM_ISA_NAME(q4_decode)},
    [UCM_ENCODING_LOSSLESS] = {UCM_ISA_NAME(lossless_encode), UCM_ISA_NAME(lossless_decode)},
};
