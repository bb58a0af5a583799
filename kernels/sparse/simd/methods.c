#include "kernels/sparse/simd/methods.h"

#include "kernels/simd/isa.h"

#include <stddef.h>

extern const struct ucm_summary_method UCM_ISA_NAME(sparse_mean);
extern const struct ucm_summary_method UCM_ISA_NAME(sparse_submean);
extern const struct ucm_summary_method UCM_ISA_NAME(sparse_box);
extern const struct ucm_summary_method UCM_ISA_NAME(sparse_hash);
extern const struct ucm_summary_method UCM_ISA_NAME(sparse_stats);
extern const struct ucm_summary_method UCM_ISA_NAME(sparse_tokens);

const struct ucm_summary_method *const UCM_ISA_NAME(sparse_methods)[] = {
    &UCM_ISA_NAME(sparse_mean),
    &UCM_ISA_NAME(sparse_submean),
    &UCM_ISA_NAME(sparse_box),
    &UCM_ISA_NAME(sparse_hash),
    &UCM_ISA_NAME(sparse_stats),
    &UCM_ISA_NAME(sparse_tokens),
    NULL,
};
