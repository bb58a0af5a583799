/* ucm_encode and ucm_decode give the reference's bits with each instruction set: every encoding,
 * element and size, and any encoded bytes. */
#include "kernels/simd/isa.h"
#include "tests/unit/encoding/encoding_rig.h"

static const char *const isas[UCM_ISA_COUNT] = {"base", "avx2", "avx512"};

/* Every form gives the reference's bytes, in memory of the exact size. */
static void compare(const struct rig_tensor *r, bool decode, const char *what)
{
    const struct ucm_encoding_method *m = ucm_encoding_method(r->spec.encoding);
    const uint8_t *from = decode ? r->encoded : r->raw;
    uint8_t *wanted = decode ? r->again : r->encoded, *got;
    uint64_t n = decode ? r->raw_bytes : r->bytes;

    got = (uint8_t *)malloc(n + r->odd) + r->odd;
    (decode ? m->decode : m->encode)(&r->spec, r->tensor, from, wanted);
    for (int isa = UCM_ISA_BASE; isa < UCM_ISA_COUNT; isa++) {
        ucm_isa_limit((enum ucm_isa)isa);
        memset(got, 0x5a, n);
        (decode ? ucm_decode : ucm_encode)(&r->spec, r->tensor, from, got);
        for (uint64_t i = 0; i < n; i++)
            cr_assert_eq(got[i], wanted[i], "%s %s in %s: byte %u is %02x, not %02x", m->name, what,
                         isas[isa], (unsigned)i, got[i], wanted[i]);
    }
    free(got - r->odd);
}

/* Random bytes, and nearly valid ones: an encoded form with some bytes changed. */
static void compare_hostile(struct rig_tensor *r)
{
    compare(r, true, "encoded");
    for (uint32_t i = 0; i < 1 + r->bytes / 16; i++)
        r->encoded[below((uint32_t)r->bytes)] = (uint8_t)below(256);
    compare(r, true, "changed");
    for (uint64_t i = 0; i < r->bytes; i++)
        r->encoded[i] = (uint8_t)below(256);
    compare(r, true, "random");
}

static void compare_all(const struct ucm_encoding_spec *spec, uint32_t tensor, uint32_t odd)
{
    for (uint32_t values = 0; values <= RIG_VALUES; values++) {
        struct rig_tensor r = rig_tensor(spec, tensor, odd);

        rig_fill(spec, tensor, (enum rig_values)values, r.raw);
        compare(&r, false, "values");
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
            for (uint32_t h = 0; h < 65536; h++)
                rig_put(r.raw, h, i / 4 ? h * 37 : h);
            compare(&r, false, "every element");
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
        compare(&r, true, "every code");
        rig_free(&r);
    }
}
