/* The table of methods, once for each instruction set; ends with NULL. */
#ifndef UCM_KERNELS_SPARSE_METHODS_H
#define UCM_KERNELS_SPARSE_METHODS_H

#include "kernels/sparse/sparse.h"

extern const struct ucm_summary_method *const sparse_methods_base[];
extern const struct ucm_summary_method *const sparse_methods_avx2[];
extern const struct ucm_summary_method *const sparse_methods_avx512[];

#endif
