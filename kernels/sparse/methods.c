/* The methods, in the form that this host runs. */
#include "kernels/sparse/simd/methods.h"
#include "kernels/isa.h"

#include <stddef.h>
#include <string.h>

static const struct ucm_digest_method *const *methods(void)
{
    switch (ucm_isa()) {
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
