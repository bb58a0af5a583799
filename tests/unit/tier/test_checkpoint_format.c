/* The bytes that restarts depend on: checkpoint spans, names and identities, whole and damaged.
 */
#include "daemon/checkpoint/format.h"
#include "daemon/index/internal.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>

#define ENTRIES 5u

static uint8_t span[2048];

static size_t span_make(void)
{
    struct checkpoint_span r = {
        .segment = 7, .from = 10, .to = 40, .entries = ENTRIES, .sequence = 99, .stride = 8192};

    memset(r.uuid, 3, sizeof(r.uuid));
    for (uint32_t i = 0; i < ENTRIES; i++) {
        struct nvme_record_header h = {.record = 10 + i,
                                       .payload_bytes = 4000 + i,
                                       .key_bytes = 32,
                                       .part = i,
                                       .sequence = 1000 + i,
                                       .checksum = i};

        h.key[31] = (uint8_t)i;
        h.fingerprint[0] = (uint8_t)(i + 1);
        checkpoint_entry_encode(span, i, &h);
    }
    checkpoint_span_finish(span, &r);
    return checkpoint_span_bytes(ENTRIES);
}

Test(checkpoint, spans_come_back)
{
    struct checkpoint_span r;
    struct nvme_record_header h;
    size_t n = span_make();

    cr_assert_eq(checkpoint_span_decode(span, n, &r), 0);
    cr_assert_eq(r.segment, 7u);
    cr_assert_eq(r.from, 10u);
    cr_assert_eq(r.to, 40u);
    cr_assert_eq(r.sequence, 99u);
    cr_assert_eq(r.stride, 8192u);
    for (uint32_t i = 0; i < ENTRIES; i++) {
        cr_assert(checkpoint_entry_decode(span, i, &h));
        cr_assert_eq(h.record, 10 + i);
        cr_assert_eq(h.payload_bytes, 4000 + i);
        cr_assert_eq(h.part, i);
        cr_assert_eq(h.sequence, 1000 + i);
        cr_assert_eq(h.key[31], i);
        cr_assert_eq(h.fingerprint[0], i + 1);
    }
}

Test(checkpoint, no_flipped_bit_passes)
{
    struct checkpoint_span r;
    size_t n = span_make();

    for (size_t bit = 0; bit < 8 * n; bit++) {
        span[bit / 8] ^= (uint8_t)(1u << bit % 8);
        cr_assert_neq(checkpoint_span_decode(span, n, &r), 0, "bit %zu", bit);
        span[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    for (size_t cut = 0; cut < n; cut++)
        cr_assert_eq(checkpoint_span_decode(span, cut, &r), -EAGAIN);
}

Test(checkpoint, identities_come_back_or_are_refused)
{
    const uint32_t layers[] = {3, 5};
    const uint8_t salt[] = {1, 2, 3};
    struct ns_identity id = {.tenant = "uid:1",
                             .model = "m",
                             .revision = "",
                             .dtype = "bf16",
                             .layout = "l/1",
                             .block_tokens = 16,
                             .key_bytes = 20,
                             .parts = 2,
                             .layers = layers,
                             .layer_bytes = 4096,
                             .salt = salt,
                             .salt_bytes = sizeof(salt)};
    uint8_t bytes[NS_CANONICAL_MAX], again[NS_CANONICAL_MAX];
    struct ns_identity_memory memory;
    struct ns_identity back;
    int n = ns_identity_encode(&id, bytes, sizeof(bytes));

    cr_assert_gt(n, 0);
    cr_assert_eq(ns_identity_decode(bytes, (size_t)n, &memory, &back), 0);
    cr_assert_str_eq(back.tenant, "uid:1");
    cr_assert_str_eq(back.revision, "");
    cr_assert_eq(back.layers[1], 5u);
    cr_assert_eq(ns_identity_encode(&back, again, sizeof(again)), n);
    cr_assert_arr_eq(bytes, again, (size_t)n);
    for (int cut = 0; cut < n; cut++)
        cr_assert_eq(ns_identity_decode(bytes, (size_t)cut, &memory, &back), -EBADMSG);
    cr_assert_eq(ns_identity_decode(bytes, (size_t)n + 1, &memory, &back), -EBADMSG);
    cr_assert_eq(ns_identity_encode(&id, bytes, (size_t)n - 1), -ENOSPC);
    /* other bytes are refused or are another identity, and never crash */
    for (int i = 0; i < n; i++)
        for (unsigned v = 0; v < 256; v += 51) {
            uint8_t was = bytes[i];

            bytes[i] = (uint8_t)v;
            (void)ns_identity_decode(bytes, (size_t)n, &memory, &back);
            bytes[i] = was;
        }
}

Test(checkpoint, names_come_back)
{
    static struct nvme_ns_record name, back;
    static uint8_t page[NVME_PAGE];

    name.identity_bytes = NVME_IDENTITY_BYTES;
    name.from_sequence = 77;
    memset(name.fingerprint, 5, sizeof(name.fingerprint));
    memset(name.identity, 6, sizeof(name.identity));
    nvme_ns_record_encode(&name, page);
    cr_assert_eq(nvme_ns_record_decode(page, &back), 0);
    cr_assert_eq(memcmp(&name, &back, sizeof(name)), 0);
    for (unsigned at = 0; at < NVME_PAGE; at++) {
        page[at] ^= 1;
        cr_assert_lt(nvme_ns_record_decode(page, &back), 0, "byte %u", at);
        page[at] ^= 1;
    }
}
