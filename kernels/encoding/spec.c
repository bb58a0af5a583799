/* What a spec may say, its sizes, its identity, and the table of encodings. */
#include "kernels/encoding/arith.h"
#include "kernels/encoding/method.h"
#include "kernels/encoding/simd/forms.h"
#include "kernels/simd/isa.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>

#define IDENTITY_VERSION 1
#define RUN_AT 72 /* after the tensors; 0 in identities of before it was there */

const struct ucm_encoding_method *const ucm_encoding_methods[] = {
    &encoding_fp8, &encoding_int8, &encoding_q4, &encoding_lossless, NULL,
};

const struct ucm_encoding_method *ucm_encoding_method(uint32_t number)
{
    for (const struct ucm_encoding_method *const *m = ucm_encoding_methods; *m != NULL; m++)
        if ((*m)->number == number)
            return *m;
    return NULL;
}

const struct ucm_encoding_method *ucm_encoding_method_named(const char *name)
{
    for (const struct ucm_encoding_method *const *m = ucm_encoding_methods; *m != NULL; m++)
        if (strcmp((*m)->name, name) == 0)
            return *m;
    return NULL;
}

/* ---- checks ---- */

static const char *dtype_name(uint32_t dtype)
{
    static const char *const names[] = {"f32", "f16", "bf16", "fp8_e4m3"};

    return dtype <= UCM_ENCODING_FP8_E4M3 ? names[dtype] : "unknown";
}

/* "f16 or bf16" */
static void dtype_list(uint32_t dtypes, char out[64])
{
    size_t n = 0;

    out[0] = '\0';
    for (uint32_t d = 0; d <= UCM_ENCODING_FP8_E4M3; d++)
        if (dtypes >> d & 1)
            n += (size_t)snprintf(out + n, 64 - n, "%s%s", n > 0 ? " or " : "", dtype_name(d));
}

static int check_size(uint32_t tensor, const char *name, uint32_t value, uint32_t most,
                      char why[UCM_ENCODING_WHY])
{
    if (value >= 1 && value <= most)
        return 0;
    return encoding_refuse(why, "%s of tensor %u (%s) is %u; 1 to %u are allowed", name, tensor,
                           tensor == 0 ? "K" : "V", value, most);
}

static int check_tensor(const struct ucm_encoding_spec *spec, uint32_t tensor,
                        char why[UCM_ENCODING_WHY])
{
    const struct ucm_encoding_tensor *s = &spec->tensor[tensor];
    int r;

    if (s->kind != tensor)
        return encoding_refuse(why, "tensor %u has kind %u; tensor 0 is K (0), tensor 1 V (1)",
                               tensor, s->kind);
    if (s->order > UCM_ENCODING_HND)
        return encoding_refuse(why,
                               "order of tensor %u is %u; 0 (token after token) and 1 (head after "
                               "head) are allowed",
                               tensor, s->order);
    r = check_size(tensor, "tokens", s->tokens, UCM_ENCODING_TOKENS_MAX, why);
    if (r == 0)
        r = check_size(tensor, "heads", s->heads, UCM_ENCODING_HEADS_MAX, why);
    if (r == 0)
        r = check_size(tensor, "dim", s->dim, UCM_ENCODING_DIM_MAX, why);
    if (r == 0 && (uint64_t)s->tokens * s->heads * s->dim > UCM_ENCODING_ELEMENTS_MAX)
        r = encoding_refuse(why, "%u tokens of %u heads of %u are more than %u elements", s->tokens,
                            s->heads, s->dim, (unsigned)UCM_ENCODING_ELEMENTS_MAX);
    return r;
}

int ucm_encoding_check(const struct ucm_encoding_spec *spec, char why[UCM_ENCODING_WHY])
{
    const struct ucm_encoding_method *m = ucm_encoding_method(spec->encoding);
    char list[64];
    int r = 0;

    if (m == NULL)
        return encoding_refuse(why, "there is no encoding %u", spec->encoding);
    if (spec->version != m->version)
        return encoding_refuse(why, "version %u of %s is not known here; %u is", spec->version,
                               m->name, m->version);
    if (spec->dtype > UCM_ENCODING_FP8_E4M3 || (m->dtypes >> spec->dtype & 1) == 0) {
        dtype_list(m->dtypes, list);
        return encoding_refuse(why, "dtype %u (%s) can't be encoded as %s; %s can", spec->dtype,
                               dtype_name(spec->dtype), m->name, list);
    }
    if (spec->n_tensors < 1 || spec->n_tensors > UCM_ENCODING_TENSORS_MAX)
        return encoding_refuse(why, "%u tensors; 1 (MLA) and 2 (K, V) are allowed",
                               spec->n_tensors);
    for (uint32_t i = 0; r == 0 && i < spec->n_tensors; i++)
        r = check_tensor(spec, i, why);
    return r == 0 && m->check != NULL ? m->check(spec, why) : r;
}

/* ---- sizes ---- */

uint64_t ucm_encoding_raw_bytes(const struct ucm_encoding_spec *spec, uint32_t tensor)
{
    uint64_t elements = encoding_elements(&spec->tensor[tensor]);

    return spec->dtype == UCM_ENCODING_FP8_E4M3 ? elements
           : spec->dtype == UCM_ENCODING_F32    ? 4 * elements
                                                : 2 * elements;
}

uint64_t ucm_encoding_bytes(const struct ucm_encoding_spec *spec, uint32_t tensor)
{
    return ucm_encoding_method(spec->encoding)->bytes(spec, tensor);
}

uint64_t ucm_encoding_raw_layer_bytes(const struct ucm_encoding_spec *spec)
{
    uint64_t sum = 0;

    for (uint32_t i = 0; i < spec->n_tensors; i++)
        sum += ucm_encoding_raw_bytes(spec, i);
    return sum;
}

uint64_t ucm_encoding_layer_bytes(const struct ucm_encoding_spec *spec)
{
    uint64_t sum = 0;

    for (uint32_t i = 0; i < spec->n_tensors; i++)
        sum += ucm_encoding_bytes(spec, i);
    return sum;
}

/* ---- identity ---- */

static uint8_t *put(uint8_t *to, uint64_t value, unsigned bytes)
{
    for (unsigned i = 0; i < bytes; i++)
        *to++ = (uint8_t)(value >> 8 * i);
    return to;
}

void ucm_encoding_identity(const struct ucm_encoding_spec *spec,
                           uint8_t out[UCM_ENCODING_IDENTITY_BYTES])
{
    const struct ucm_encoding_method *m = ucm_encoding_method(spec->encoding);
    uint8_t *to = out;

    memset(out, 0, UCM_ENCODING_IDENTITY_BYTES);
    to = put(to, IDENTITY_VERSION, 4);
    to = put(to, spec->encoding, 4);
    to = put(to, spec->version, 4);
    to = put(to, spec->dtype, 4);
    to = put(to, spec->n_tensors, 4);
    to = put(to, m->uses_axis ? spec->axis : 0, 4);
    to = put(to, m->uses_seed ? spec->seed : 0, 8);
    for (uint32_t i = 0; i < spec->n_tensors; i++) {
        const struct ucm_encoding_tensor *s = &spec->tensor[i];
        bool order = m->uses_order != NULL && m->uses_order(spec, i);

        to = put(to, s->kind, 4);
        to = put(to, s->tokens, 4);
        to = put(to, s->heads, 4);
        to = put(to, s->dim, 4);
        to = put(to, order ? s->order : 0, 4);
    }
    if (m->uses_axis && ucm_int8_run(spec, 0) < spec->tensor[0].tokens)
        put(out + RUN_AT, ucm_int8_run(spec, 0), 4);
}

static uint32_t get32(const uint8_t **at)
{
    uint32_t value = encoding_get32(*at);

    *at += 4;
    return value;
}

int ucm_encoding_parse(const uint8_t bytes[UCM_ENCODING_IDENTITY_BYTES],
                       struct ucm_encoding_spec *out)
{
    struct ucm_encoding_spec spec = {0};
    uint8_t again[UCM_ENCODING_IDENTITY_BYTES];
    char why[UCM_ENCODING_WHY];
    const uint8_t *at = bytes + 4; /* after the version, which `again` has */

    spec.encoding = get32(&at);
    spec.version = get32(&at);
    spec.dtype = get32(&at);
    spec.n_tensors = get32(&at);
    spec.axis = get32(&at);
    spec.seed = get32(&at);
    spec.seed |= (uint64_t)get32(&at) << 32;
    for (uint32_t i = 0; i < UCM_ENCODING_TENSORS_MAX; i++) {
        struct ucm_encoding_tensor *s = &spec.tensor[i];

        s->kind = get32(&at);
        s->tokens = get32(&at);
        s->heads = get32(&at);
        s->dim = get32(&at);
        s->order = get32(&at);
    }
    spec.run = encoding_get32(bytes + RUN_AT);
    if (ucm_encoding_check(&spec, why) != 0)
        return -EINVAL;
    ucm_encoding_identity(&spec, again);
    if (memcmp(again, bytes, sizeof(again)) != 0)
        return -EINVAL;
    *out = spec;
    return 0;
}

/* ---- through the table ---- */

static struct encoding_form form_of(uint32_t encoding)
{
    const struct ucm_encoding_method *m = ucm_encoding_method(encoding);
    struct encoding_form form = {NULL, NULL};

#ifdef UCM_ISA_X86
    enum ucm_isa isa = ucm_isa();

    if (isa == UCM_ISA_AVX512)
        form = encoding_forms_avx512[encoding];
    else if (isa == UCM_ISA_AVX2)
        form = encoding_forms_avx2[encoding];
#endif
    if (form.encode == NULL)
        form.encode = m->encode;
    if (form.decode == NULL)
        form.decode = m->decode;
    return form;
}

void ucm_encode(const struct ucm_encoding_spec *spec, uint32_t tensor, const void *raw,
                void *encoded)
{
    form_of(spec->encoding).encode(spec, tensor, raw, encoded);
}

void ucm_decode(const struct ucm_encoding_spec *spec, uint32_t tensor, const void *encoded,
                void *raw)
{
    form_of(spec->encoding).decode(spec, tensor, encoded, raw);
}

bool ucm_encoding_fits(const struct ucm_encoding_spec *spec, uint32_t tensor, const void *encoded)
{
    const struct ucm_encoding_method *m = ucm_encoding_method(spec->encoding);

    return m->fits == NULL || m->fits(spec, tensor, encoded);
}
