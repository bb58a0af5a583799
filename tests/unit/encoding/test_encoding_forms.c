/* ucm_encode and ucm_decode give the reference's bits with each instruction set: every encoding,
 * element and size, and any encoded bytes. */
#include "kernels/simd/isa.h"
#include "tests/unit/encoding/encoding_rig.h"

static const char *const isas[UCM_ISA_COUNT] = {"base", "avx2", "avx512"};

/* Every form gives the same bytes, in memory of the exact size. */
static void compare_encode(const struct rig_tensor *r, const char *what)
{
    const struct ucm_encoding_method *m = ucm_encoding_method(r->spec.encoding);
    uint8_t *encoded = (uint8_t *)malloc(r->bytes + r->odd) + r->odd;

    m->encode(&r->spec, r->tensor, r->raw, r->encoded);
    for (int isa = UCM_ISA_BASE; isa < UCM_ISA_COUNT; isa++) {
        ucm_isa_limit((enum ucm_isa)isa);
        memset(encoded, 0x5a, r->bytes);
        ucm_encode(&r->spec, r->tensor, r->raw, encoded);
        for (uint64_t i = 0; i < r->bytes; i++)
            cr_assert_eq(encoded[i], r->encoded[i], "%s %s in %s: byte %u is %02x, not %02x",
                         m->name, what, isas[isa], (unsigned)i, encoded[i], r->encoded[i]);
    }
    free(encoded - r->odd);
}

static void compare_decode(const struct rig_tensor *r, const char *what)
{
    const struct ucm_encoding_method *m = ucm_encoding_method(r->spec.encoding);
    uint8_t *raw = (uint8_t *)malloc(r->raw_bytes + r->odd) + r->odd;

    m->decode(&r->spec, r->tensor, r->encoded, r->again);
    for (int isa = UCM_ISA_BASE; isa < UCM_ISA_COUNT; isa++) {
        ucm_isa_limit((enum ucm_isa)isa);
        memset(raw, 0x5a, r->raw_bytes);
        ucm_decode(&r->spec, r->tensor, r->encoded, raw);
        for (uint64_t i = 0; i < r->raw_bytes; i++)
            cr_assert_eq(raw[i], r->again[i], "%s %s in %s: byte %u is %02x, not %02x", m->name,
                         what, isas[isa], (unsigned)i, raw[i], r->again[i]);
    }
    free(raw - r->odd);
}

/* Random bytes, and nearly valid ones: an encoded form with some bytes changed. */
static void compare_hostile(struct rig_tensor *r)
{
    compare_decode(r, "encoded");
    for (uint32_t i = 0; i < 1 + r->bytes / 16; i++)
        r->encoded[rig_below((uint32_t)r->bytes)] = (uint8_t)rig_random();
    compare_decode(r, "changed");
    for (uint64_t i = 0; i < r->bytes; i++)
        r->encoded[i] = (uint8_t)rig_random();
    compare_decode(r, "random");
}

static void compare_all(const struct ucm_encoding_spec *spec, uint32_t tensor, uint32_t odd)
{
    for (uint32_t values = 0; values <= RIG_VALUES; values++) {
        struct rig_tensor r = rig_tensor(spec, tensor, odd);

        rig_fill(spec, tensor, (enum rig_values)values, r.raw);
        compare_encode(&r, "values");
        compare_hostile(&r);
        rig_free(&r);
    }
}

static bool accepted(struct ucm_encoding_spec *spec)
{
    char why[UCM_ENCODING_WHY];

    return ucm_encoding_check(spec, why) == 0;
}

Test(encoding_forms, every_size)
{
    static const uint32_t dims[] = {1, 2, 7, 8, 15, 16, 17, 31, 33, 64, 80, 96, 127, 128, 192, 576};

    for (const struct ucm_encoding_method *const *m = ucm_encoding_methods; *m != NULL; m++)
        for (uint32_t i = 0; i < 16 * sizeof(dims) / sizeof(dims[0]); i++) {
            struct ucm_encoding_spec spec = rig_spec((*m)->number, UCM_ENCODING_F16 + i / 8 % 2,
                                                     1 + i % 5, 1 + i % 3, dims[i / 16]);

            spec.axis = i % 2;
            spec.run = i % 3 == 0 ? 0 : 1 + i % 4;
            spec.seed = i;
            spec.tensor[0].order = spec.tensor[1].order = i / 2 % 2;
            if (!accepted(&spec))
                continue;
            compare_all(&spec, i / 4 % 2, i % 3);
        }
}

/* Each 16-bit pattern, among others of its kind and scaled by one large value. */
Test(encoding_forms, every_element)
{
    for (const struct ucm_encoding_method *const *m = ucm_encoding_methods; *m != NULL; m++)
        for (uint32_t i = 0; i < 8; i++) {
            struct ucm_encoding_spec spec =
                rig_spec((*m)->number, UCM_ENCODING_F16 + i % 2, 16, 32, 128);
            struct rig_tensor r;

            spec.axis = i / 2 % 2;
            if (!accepted(&spec))
                continue;
            r = rig_tensor(&spec, 0, 0);
            for (uint32_t h = 0; h < 65536; h++) {
                uint32_t x = i / 4 ? (h * 37 & 0xffff) : h;

                memcpy(r.raw + 2 * h, &(uint16_t){(uint16_t)x}, 2);
            }
            compare_encode(&r, "every element");
            compare_hostile(&r);
            rig_free(&r);
        }
}

/* Every code with every scale byte, or every BF16 scale. */
Test(encoding_forms, every_code)
{
    for (uint32_t i = 0; i < 4; i++) {
        bool fp8 = i / 2;
        struct ucm_encoding_spec spec =
            rig_spec(fp8 ? UCM_ENCODING_FP8 : UCM_ENCODING_INT8, UCM_ENCODING_F16 + i % 2,
                     fp8 ? 16 : 256, fp8 ? 16 : 256, fp8 ? 256 : 33);
        struct rig_tensor r = rig_tensor(&spec, 0, 0);
        uint32_t elements = 256 * (fp8 ? 256 : 256 * 33);

        for (uint32_t k = 0; k < elements; k++)
            r.encoded[k] = (uint8_t)(fp8 ? k : k % 33 < 9 ? k % 33 - 4 + 128 : k * 7);
        for (uint32_t k = elements; k < r.bytes; k++)
            r.encoded[k] = (uint8_t)(fp8          ? k - elements
                                     : k % 2 == 0 ? (k - elements) / 2
                                                  : (k - elements) / 512);
        compare_decode(&r, "every code");
        rig_free(&r);
    }
}
