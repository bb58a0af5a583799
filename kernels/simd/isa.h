/* Instruction sets: which form of kernels/sparse and kernels/encoding this host runs.
 *
 * The files in their simd/ are compiled once for each, with UCM_ISA set to its name, and give the
 * same bits in each. What they define for others carries that name, so that all forms can be linked
 * into one program. Any thread. */
#ifndef UCM_KERNELS_SIMD_ISA_H
#define UCM_KERNELS_SIMD_ISA_H

enum ucm_isa {
    UCM_ISA_BASE = 0,
    UCM_ISA_AVX2 = 1,   /* with FMA and F16C */
    UCM_ISA_AVX512 = 2, /* with BW, DQ, VL and VPOPCNTDQ */
    UCM_ISA_COUNT,
};

/* The best that this host has, or less if ucm_isa_limit says so. */
enum ucm_isa ucm_isa(void);

/* For tests and measurements: what is begun later uses at most this one. */
void ucm_isa_limit(enum ucm_isa isa);

#define UCM_ISA_JOIN_(name, isa) name##_##isa
#define UCM_ISA_JOIN(name, isa) UCM_ISA_JOIN_(name, isa)
#define UCM_ISA_NAME(name) UCM_ISA_JOIN(name, UCM_ISA)

#endif
