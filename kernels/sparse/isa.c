/* Which form of the files in simd/ this host runs. */
#include "kernels/sparse/simd/methods.h"

#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

static _Atomic int limit = UCM_ISA_COUNT - 1;

static enum ucm_sparse_isa host_isa(void)
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

enum ucm_sparse_isa ucm_sparse_isa(void)
{
    enum ucm_sparse_isa isa = host_isa();
    int most = atomic_load_explicit(&limit, memory_order_relaxed);

    return (int)isa < most ? isa : (enum ucm_sparse_isa)most;
}

void ucm_sparse_isa_limit(enum ucm_sparse_isa isa)
{
    atomic_store_explicit(&limit, (int)isa, memory_order_relaxed);
}

static const struct ucm_digest_method *const *methods(void)
{
    switch (ucm_sparse_isa()) {
#ifdef UCM_ISA_X86
    case UCM_ISA_AVX512:
        return sparse_methods_avx512;
    case UCM_ISA_AVX2:
        return sparse_methods_avx2;
#endif
    default:
        return sparse_methods_base;
    }
}

const struct ucm_digest_method *ucm_digest_method(uint32_t number)
{
    for (const struct ucm_digest_method *const *m = methods(); *m != NULL; m++)
        if ((*m)->number == number)
            return *m;
    return NULL;
}

const struct ucm_digest_method *ucm_digest_method_named(const char *name)
{
    for (const struct ucm_digest_method *const *m = methods(); *m != NULL; m++)
        if (strcmp((*m)->name, name) == 0)
            return *m;
    return NULL;
}
