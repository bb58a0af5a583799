/* Any bytes as an encoding's spec, and the rest as a tensor. It is first taken as a raw one, which
 * is encoded and decoded, then as an encoded one, which is decoded. Every form gives the bits of
 * the reference and stays within the tensor's memory. Lossless values that fit come back unchanged.
 * fp8 encodes what it decoded to the same bytes. Traps on any break of these promises. */
#include "kernels/encoding/encoding.h"
#include "kernels/simd/isa.h"
#include "tests/fuzz/fuzz.h"

#include <string.h>

#define HEAD 10

static struct ucm_encoding_spec spec_of(const uint8_t head[HEAD])
{
    struct ucm_encoding_spec spec = {
        .encoding = head[0] % 6,
        .version = 1 + (head[0] % 6 == UCM_ENCODING_Q4) + head[0] / 250,
        .dtype = head[1] % 5,
        .n_tensors = 1 + head[2] % 2,
        .axis = head[3] % 3,
        .run = head[3] / 3 % 20,
        .seed = head[4] * UINT64_C(0x0101010101010101),
    };

    for (uint32_t i = 0; i < 2; i++)
        spec.tensor[i] = (struct ucm_encoding_tensor){
            .kind = i,
            .tokens = head[5] % 41,
            .heads = head[6] % 6,
            .dim = head[7] % 3 == 0 ? head[8] : 16u * (head[8] % 17),
            .order = head[9] % 3,
        };
    return spec;
}

/* The input again and again, in memory of its own. */
static uint8_t *repeat(const uint8_t *data, size_t n, uint64_t bytes)
{
    uint8_t *out = malloc(bytes);

    must(out != NULL);
    for (uint64_t i = 0; i < bytes; i++)
        out[i] = n > 0 ? data[i % n] : 0;
    return out;
}

/* A tensor's encoded form, or its raw one. What the reference makes; every other form makes the
 * same. */
static uint8_t *converted(const struct ucm_encoding_spec *spec, uint32_t tensor,
                          const uint8_t *from, bool encodes)
{
    const struct ucm_encoding_method *method = ucm_encoding_method(spec->encoding);
    uint64_t bytes =
        encodes ? ucm_encoding_bytes(spec, tensor) : ucm_encoding_raw_bytes(spec, tensor);
    uint8_t *want = malloc(bytes), *got = malloc(bytes);

    must(want != NULL && got != NULL && (!encodes || bytes % 16 == 0));
    memset(want, 0x5a, bytes);
    (encodes ? method->encode : method->decode)(spec, tensor, from, want);
    for (int isa = UCM_ISA_AVX2; isa < UCM_ISA_COUNT; isa++) {
        ucm_isa_limit((enum ucm_isa)isa);
        memset(got, 0xa5, bytes);
        (encodes ? ucm_encode : ucm_decode)(spec, tensor, from, got);
        must(memcmp(got, want, bytes) == 0);
    }
    free(got);
    return want;
}

static void round_trip(const struct ucm_encoding_spec *spec, uint32_t tensor, const uint8_t *raw)
{
    uint8_t *encoded = converted(spec, tensor, raw, true);
    uint8_t *again = converted(spec, tensor, encoded, false), *second;

    if (spec->encoding == UCM_ENCODING_LOSSLESS && ucm_encoding_fits(spec, tensor, encoded))
        must(memcmp(again, raw, ucm_encoding_raw_bytes(spec, tensor)) == 0);
    if (spec->encoding == UCM_ENCODING_FP8) {
        second = converted(spec, tensor, again, true);
        must(memcmp(second, encoded, ucm_encoding_bytes(spec, tensor)) == 0);
        free(second);
    }
    free(again);
    free(encoded);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct ucm_encoding_spec spec;
    char why[UCM_ENCODING_WHY] = "";

    if (n < HEAD)
        return 0;
    spec = spec_of(data);
    if (ucm_encoding_check(&spec, why) < 0) {
        must(why[0] != '\0');
        return 0;
    }
    for (uint32_t tensor = 0; tensor < spec.n_tensors; tensor++) {
        uint8_t *raw = repeat(data + HEAD, n - HEAD, ucm_encoding_raw_bytes(&spec, tensor));
        uint8_t *encoded = repeat(data + HEAD, n - HEAD, ucm_encoding_bytes(&spec, tensor));

        round_trip(&spec, tensor, raw);
        free(converted(&spec, tensor, encoded, false));
        free(raw);
        free(encoded);
    }
    return 0;
}
