/* lossless: bit for bit, NaN payloads too. Encoding says when values don't fit. Any bytes decode.
 */
#include "kernels/encoding/lossless_layout.h"
#include "tests/unit/encoding/encoding_rig.h"

static struct rig_tensor tensor_of(uint32_t tokens, uint32_t heads, uint32_t dim, uint32_t order)
{
    struct ucm_encoding_spec spec =
        rig_spec(UCM_ENCODING_LOSSLESS, UCM_ENCODING_BF16, tokens, heads, dim);

    spec.tensor[0].order = spec.tensor[1].order = order;
    return rig_tensor(&spec, 0, 0);
}

/* Whether the tensor fits. One that fits comes back bit for bit. */
static bool round_trip(struct rig_tensor *r)
{
    bool fits;

    rig_round_trip(r);
    fits = ucm_encoding_fits(&r->spec, r->tensor, r->encoded);
    if (fits)
        cr_assert_arr_eq(r->again, r->raw, r->raw_bytes);
    return fits;
}

/* Values as KV has them fit, of any size and in both orders. */
Test(encoding_lossless, kv_comes_back_bit_for_bit)
{
    for (uint32_t i = 0; i < 200; i++) {
        struct rig_tensor r = tensor_of(1 + below(40), 1 + below(5), 1 + below(200), i % 2);
        uint64_t elements = r.raw_bytes / 2;

        for (uint64_t k = 0; k < elements; k++) { /* about normal, down to 2^-13 of the largest */
            float x = rig_normal();

            rig_put(r.raw, k, ucm_bf16_encode(ucm_abs(x) < 0x1p-9f ? 0.5f : x));
        }
        rig_put(r.raw, below((uint32_t)elements), 0xffab); /* NaN with a payload */
        cr_assert(round_trip(&r));
        rig_free(&r);
    }
}

Test(encoding_lossless, one_escape_too_many_does_not_fit)
{
    struct rig_tensor r = tensor_of(16, 2, 128, 1);
    struct lossless_layout l = lossless_layout(&r.spec.tensor[0]);
    uint32_t room = 32;

    for (uint32_t escapes = room - 1; escapes <= room + 1; escapes++) {
        for (uint32_t k = 0; k < 16 * 2 * 128; k++)
            rig_put(r.raw, k, k % 100 == 0 && k / 100 < escapes ? 0x7f80 : 0x3f80);
        cr_assert_eq(round_trip(&r), escapes <= room);
        cr_assert_eq(encoding_get32(r.encoded + l.list),
                     escapes <= room ? escapes : UCM_LOSSLESS_UNFIT);
    }
    for (uint64_t i = 0; i < r.bytes; i++)
        cr_assert_eq(r.encoded[i], i >= l.list && i < l.list + 4 ? 0xff : 0);
    rig_free(&r);
}

/* The list may say anything: elements outside are skipped, and a count past the list's space is cut
 * off. */
Test(encoding_lossless, hostile_lists_decode)
{
    struct rig_tensor r = tensor_of(16, 1, 64, 0);
    struct lossless_layout l = lossless_layout(&r.spec.tensor[0]);

    memset(r.encoded, 0xff, r.bytes); /* codes: escapes; the list's count is just below the mark */
    encoding_put32(r.encoded + l.list, UCM_LOSSLESS_UNFIT - 1);
    for (uint32_t i = 0; i < l.room; i++)
        encoding_put32(r.encoded + l.list + 4 + 4 * i,
                       (i % 2 == 0 ? 1024 + i : 1023 - i) << 8 | (i + 1));
    ucm_decode(&r.spec, 0, r.encoded, r.again);
    for (uint32_t k = 0; k < 1024; k++) {
        uint32_t i = 1023 - k, e = i < l.room && i % 2 == 1 ? i + 1 : 0;

        cr_assert_eq(rig_get(r.again, k), 0x807fu | e << 7);
    }
    encoding_put32(r.encoded + l.list, UCM_LOSSLESS_UNFIT);
    ucm_decode(&r.spec, 0, r.encoded, r.again);
    for (uint32_t k = 0; k < 1024; k++)
        cr_assert_eq(rig_get(r.again, k), 0x807f);
    rig_free(&r);
}
