/* Converts the public description of an encoding to that of kernels/encoding, for libucmclient and
 * libucmclient_cuda. */
#ifndef UCM_CLIENT_FEATURES_ENCODING_SPEC_H
#define UCM_CLIENT_FEATURES_ENCODING_SPEC_H

#include "client/include/ucmclient.h"
#include "kernels/encoding/encoding.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static inline bool encoding_dtype(const char *name, uint32_t *out)
{
    static const char *const names[] = {[UCM_ENCODING_F32] = "f32",
                                        [UCM_ENCODING_F16] = "f16",
                                        [UCM_ENCODING_BF16] = "bf16",
                                        [UCM_ENCODING_FP8_E4M3] = "fp8_e4m3"};

    for (uint32_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i]) == 0) {
            *out = i;
            return true;
        }
    return false;
}

static inline void encoding_tensor(const struct ucm_encoded_form *f, const struct ucm_kv_rows *rows,
                                   struct ucm_encoding_spec *out)
{
    out->tensor[out->n_tensors] = (struct ucm_encoding_tensor){out->n_tensors, rows->tokens,
                                                               rows->heads, rows->dim, f->order};
    out->n_tensors++;
}

/* 0, or -UCM_EINVALID or -UCM_EUNSUPPORTED with why. */
static inline int encoding_spec(const struct ucm_encoded_form *f, struct ucm_encoding_spec *out,
                                char why[UCM_ENCODING_WHY])
{
    const struct ucm_encoding_method *method = ucm_encoding_method_named(f->encoding);

    *out = (struct ucm_encoding_spec){.axis = f->axis, .run = f->run, .seed = f->seed};
    if (!method || (f->version != 0 && f->version != method->version)) {
        snprintf(why, UCM_ENCODING_WHY, "this library does not know encoding \"%.32s\", version %u",
                 f->encoding, f->version);
        return -UCM_EUNSUPPORTED;
    }
    out->encoding = method->number;
    out->version = method->version;
    if (!encoding_dtype(f->dtype, &out->dtype)) {
        snprintf(why, UCM_ENCODING_WHY, "dtype is \"%.32s\"; f16, bf16 and fp8_e4m3 are known",
                 f->dtype);
        return -UCM_EINVALID;
    }
    encoding_tensor(f, &f->k, out);
    if (f->v.tokens != 0)
        encoding_tensor(f, &f->v, out);
    return ucm_encoding_check(out, why) == 0 ? 0 : -UCM_EINVALID;
}

#endif
