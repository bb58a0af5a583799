#include "kernels/simd/isa.h"

#include <stdatomic.h>

static _Atomic int limit = UCM_ISA_COUNT - 1;

static enum ucm_isa host_isa(void)
{
#ifdef UCM_ISA_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512vpopcntdq"))
        return UCM_ISA_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return UCM_ISA_AVX2;
#endif
    return UCM_ISA_BASE;
}

enum ucm_isa ucm_isa(void)
{
    enum ucm_isa isa = host_isa();
    int most = atomic_load_explicit(&limit, memory_order_relaxed);

    return (int)isa < most ? isa : (enum ucm_isa)most;
}

void ucm_isa_limit(enum ucm_isa isa)
{
    atomic_store_explicit(&limit, (int)isa, memory_order_relaxed);
}
