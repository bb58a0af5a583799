/* Faster forms of encodings, once for each instruction set, with the bits of the reference. Indexed
 * by the encoding's number; NULL: the reference is as fast. */
#ifndef UCM_KERNELS_ENCODING_FORMS_H
#define UCM_KERNELS_ENCODING_FORMS_H

#include "kernels/encoding/encoding.h"

struct encoding_form {
    void (*encode)(const struct ucm_encoding_spec *spec, uint32_t tensor, const uint8_t *raw,
                   uint8_t *encoded);
    void (*decode)(const struct ucm_encoding_spec *spec, uint32_t tensor, const uint8_t *encoded,
                   uint8_t *raw);
};

#define ENCODING_FORMS (UCM_ENCODING_LOSSLESS + 1)

extern const struct encoding_form encoding_forms_avx2[ENCODING_FORMS];
extern const struct encoding_form encoding_forms_avx512[ENCODING_FORMS];

#endif
