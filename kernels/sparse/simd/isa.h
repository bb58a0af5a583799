/* The files of this folder are compiled once for each instruction set, with UCM_ISA set to its name.
 * What they define for others carries that name, so that all forms can be linked into one program. */
#ifndef UCM_KERNELS_SPARSE_ISA_H
#define UCM_KERNELS_SPARSE_ISA_H

#include "kernels/sparse/sparse.h"

#define UCM_ISA_JOIN_(name, isa) name##_##isa
#define UCM_ISA_JOIN(name, isa) UCM_ISA_JOIN_(name, isa)
#define UCM_ISA_NAME(name) UCM_ISA_JOIN(name, UCM_ISA)

#endif
