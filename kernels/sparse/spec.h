/* For the files of this module and of kernels/attend. */
#ifndef UCM_KERNELS_SPARSE_SPEC_H
#define UCM_KERNELS_SPARSE_SPEC_H

#include "kernels/sparse/sparse.h"

/* Writes the sentence and returns -EINVAL. */
int sparse_refuse(char why[UCM_SPARSE_WHY], const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* The natural logarithm of n >= 1, of a double rounded to float32. */
float sparse_ln(uint32_t n);

#endif
