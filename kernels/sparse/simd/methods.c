#include "kernels/sparse/simd/methods.h"

#include "kernels/sparse/simd/isa.h"

#include <stddef.h>

extern const struct ucm_digest_method UCM_ISA_NAME(sparse_mean);

const struct ucm_digest_method *const UCM_ISA_NAME(sparse_methods)[] = {
    &UCM_ISA_NAME(sparse_mean),
    NULL,
};
