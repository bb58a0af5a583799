#include "daemon/format/nvme_format.h"

#include "daemon/format/checksum.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const struct nvme_record_header record = {
    .uuid = {1, 2, 3},
    .fingerprint = {4, 5, 6},
    .key = {7, 8, 9},
    .key_bytes = 16,
    .part = 3,
    .segment = 0x01020304,
    .record = 17,
    .payload_bytes = 1048576,
    .generation = 0x1122334455667788,
    .sequence = 0x99,
    .checksum = 0xabcdef,
};

/* Checksums of layers lie after the fields that every version has. */
Test(nvme_format, record_with_layers)
{
    uint64_t sums[NVME_LAYERS_MAX];
    struct nvme_record_header in = record, out;
    uint8_t page[NVME_PAGE];

    for (unsigned i = 0; i < NVME_LAYERS_MAX; i++)
        sums[i] = UINT64_C(0x0101010101010101) * (i % 251 + 1);
    in.payload_bytes = NVME_LAYERS_MAX * 4100;
    in.layer_bytes = 4100;
    in.layer_sums = sums;
    nvme_record_header_encode(&in, page);
    cr_assert_eq(nvme_record_header_decode(page, &out), 0);
    cr_assert_eq(memcmp(page + 136, "\4\20\0\0\0\0\0\0\1\1\1\1\1\1\1\1\2", 17), 0);
    cr_assert_eq(out.layer_bytes, 4100);
    cr_assert_null(out.layer_sums);
    for (unsigned i = 0; i < NVME_LAYERS_MAX; i++)
        cr_assert_eq(nvme_layer_sum(page, i), sums[i]);
    for (unsigned bytes = 0; bytes < 4; bytes++) { /* it does not divide, one layer, too many */
        static const uint64_t bad[] = {4101, NVME_LAYERS_MAX * 4100, 2050, UINT64_MAX};
        uint64_t sum;

        for (unsigned k = 0; k < 8; k++)
            page[136 + k] = (uint8_t)(bad[bytes] >> 8 * k);
        sum = checksum_of(page, NVME_PAGE - 8);
        for (unsigned k = 0; k < 8; k++)
            page[NVME_PAGE - 8 + k] = (uint8_t)(sum >> 8 * k);
        cr_assert_eq(nvme_record_header_decode(page, &out), -EBADMSG, "%u", bytes);
    }
}

Test(nvme_format, checksums_of_pieces)
{
    static uint8_t data[12 * 5000];
    uint64_t sums[12];

    for (unsigned i = 0; i < sizeof(data); i++)
        data[i] = (uint8_t)(i * 31 >> 3);
    for (unsigned piece = 5000; piece <= sizeof(data); piece *= 2) {
        if (sizeof(data) % piece != 0)
            continue;
        cr_assert_eq(checksum_fragments(data, sizeof(data), piece, sums),
                     checksum_of(data, sizeof(data)));
        for (unsigned i = 0; i < sizeof(data) / piece; i++)
            cr_assert_eq(sums[i], checksum_of(data + i * piece, piece));
    }
}

/* The offsets of docs/design/storage-format.md: files outlive the compiler that wrote them. */
Test(nvme_format, record_bytes_are_where_the_text_says)
{
    struct nvme_record_header out;
    uint8_t page[NVME_PAGE];
    uint64_t sum;

    nvme_record_header_encode(&record, page);
    cr_assert_eq(nvme_record_header_decode(page, &out), 0);
    cr_assert_eq(memcmp(&out, &record, sizeof(out)), 0);
    cr_assert_eq(memcmp(page, "UCMS\1\0\0\0\4\3\2\1\21\0\0\0", 16), 0);
    cr_assert_eq(memcmp(page + 16, record.uuid, 16), 0);
    cr_assert_eq(memcmp(page + 32, record.fingerprint, 32), 0);
    cr_assert_eq(memcmp(page + 64, record.key, 32), 0);
    cr_assert_eq(memcmp(page + 96, "\20\0\0\0\3\0\0\0", 8), 0);
    cr_assert_eq(memcmp(page + 104, "\0\0\20\0\0\0\0\0", 8), 0);
    cr_assert_eq(memcmp(page + 112, "\x88\x77\x66\x55\x44\x33\x22\x11", 8), 0);
    cr_assert_eq(memcmp(page + 120, "\x99\0\0\0\0\0\0\0", 8), 0);
    cr_assert_eq(memcmp(page + 128, "\xef\xcd\xab\0\0\0\0\0", 8), 0);
    for (unsigned i = 136; i < NVME_PAGE - 8; i++)
        cr_assert_eq(page[i], 0);
    sum = checksum_of(page, NVME_PAGE - 8);
    for (unsigned i = 0; i < 8; i++)
        cr_assert_eq(page[NVME_PAGE - 8 + i], (uint8_t)(sum >> (8 * i)));
}

Test(nvme_format, xxh3_is_the_published_one)
{
    /* the reference value of XXH3-64 for no input */
    cr_assert_eq(checksum_of("", 0), 0x2d06800538d394c2ull);
}

Test(nvme_format, other_pages_round_trip)
{
    struct nvme_super super = {.uuid = {1}, .segment_bytes = 64 << 20, .data_offset = 1 << 20};
    struct nvme_state state = {.uuid = {2}, .epoch = 77, .segments = 1023};
    struct nvme_segment_header segment = {
        .uuid = {3}, .segment = 5, .sequence = 1ull << 41, .stride = 8192};
    struct nvme_super super_out;
    struct nvme_state state_out;
    struct nvme_segment_header segment_out;
    uint8_t page[NVME_PAGE];

    nvme_super_encode(&super, page);
    cr_assert_eq(memcmp(page, "UCMDNVME\1\0\0\0", 12), 0);
    cr_assert_eq(nvme_super_decode(page, &super_out), 0);
    cr_assert_eq(memcmp(&super, &super_out, sizeof(super)), 0);
    cr_assert_eq(nvme_state_decode(page, &state_out), -EILSEQ);
    nvme_state_encode(&state, page);
    cr_assert_eq(nvme_state_decode(page, &state_out), 0);
    cr_assert_eq(memcmp(&state, &state_out, sizeof(state)), 0);
    nvme_segment_header_encode(&segment, page);
    cr_assert_eq(nvme_segment_header_decode(page, &segment_out), 0);
    cr_assert_eq(segment_out.segment, 5);
    cr_assert_eq(segment_out.sequence, 1ull << 41);
    cr_assert_eq(segment_out.stride, 8192);
    cr_assert_eq(memcmp(segment.uuid, segment_out.uuid, 16), 0);
}

Test(nvme_format, a_quarantine_round_trips)
{
    struct nvme_quarantine in = {.uuid = {4}, .change = 9, .count = NVME_QUARANTINE_MAX}, out;
    uint8_t page[NVME_PAGE];

    for (uint32_t i = 0; i < in.count; i++)
        in.segment[i] = 7 * i;
    nvme_quarantine_encode(&in, page);
    cr_assert_eq(memcmp(page, "UCMQ\1\0\0\0", 8), 0);
    cr_assert_eq(nvme_quarantine_decode(page, &out), 0);
    cr_assert_eq(memcmp(in.uuid, out.uuid, sizeof(in.uuid)), 0);
    cr_assert_eq(out.change, in.change);
    cr_assert_eq(out.count, in.count);
    cr_assert_eq(memcmp(in.segment, out.segment, sizeof(in.segment)), 0);
    page[4000] ^= 1;
    cr_assert_eq(nvme_quarantine_decode(page, &out), -EBADMSG);
    page[4] = 2;
    cr_assert_eq(nvme_quarantine_decode(page, &out), -EPROTONOSUPPORT);
}

Test(nvme_format, every_flipped_bit_is_found)
{
    uint8_t page[NVME_PAGE];
    struct nvme_record_header out = {.part = 42}, before = out;

    nvme_record_header_encode(&record, page);
    for (unsigned bit = 0; bit < NVME_PAGE * 8; bit++) {
        page[bit / 8] ^= (uint8_t)(1u << bit % 8);
        cr_assert_neq(nvme_record_header_decode(page, &out), 0, "bit %u", bit);
        page[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    cr_assert_eq(memcmp(&out, &before, sizeof(out)), 0, "out was touched");
}

Test(nvme_format, torn_zero_and_random_pages_do_not_pass)
{
    uint8_t old[NVME_PAGE], fresh[NVME_PAGE], page[NVME_PAGE] = {0};
    struct nvme_segment_header a = {.sequence = 1, .stride = 8192}, out;
    struct nvme_segment_header b = {.sequence = 2, .stride = 1 << 20};

    cr_assert_eq(nvme_segment_header_decode(page, &out), -EILSEQ);
    nvme_segment_header_encode(&a, old);
    nvme_segment_header_encode(&b, fresh);
    for (unsigned sectors = 1; sectors < 8; sectors++) {
        memcpy(page, old, NVME_PAGE);
        memcpy(page, fresh, 512 * sectors);
        cr_assert_eq(nvme_segment_header_decode(page, &out), -EBADMSG);
    }
    srand(1);
    for (unsigned round = 0; round < 1000; round++) {
        for (unsigned i = 4; i < NVME_PAGE; i++)
            page[i] = (uint8_t)rand();
        cr_assert_neq(nvme_segment_header_decode(page, &out), 0);
    }
}

/* A checksum alone is no proof of sense: someone may have written it on purpose. */
Test(nvme_format, fields_out_of_bounds_do_not_pass)
{
    struct nvme_super super = {.segment_bytes = 12345, .data_offset = 1 << 20};
    struct nvme_record_header out, bad[] = {record, record, record};
    uint8_t page[NVME_PAGE];

    bad[0].key_bytes = 33;
    bad[1].payload_bytes = 0;
    bad[2].part = UCM_MAX_PARTS;
    for (unsigned i = 0; i < 3; i++) {
        nvme_record_header_encode(&bad[i], page);
        cr_assert_eq(nvme_record_header_decode(page, &out), -EBADMSG, "%u", i);
    }
    nvme_super_encode(&super, page);
    cr_assert_eq(nvme_super_decode(page, &super), -EBADMSG);
}

Test(nvme_format, loc_keeps_its_fields)
{
    uint64_t sequence = (3ull << 40) + 0x123456;
    uint64_t loc = nvme_loc(255, NVME_LOC_PAGES - 1, sequence);

    cr_assert_eq(nvme_loc_file(loc), 255);
    cr_assert_eq(nvme_loc_page(loc), NVME_LOC_PAGES - 1);
    cr_assert_eq(nvme_loc_generation(loc), nvme_generation(sequence));
    for (uint64_t i = 1; i < 100000; i++)
        cr_assert_neq(nvme_generation(sequence), nvme_generation(sequence + i));
}

Test(nvme_format, records_fit_their_segment)
{
    for (uint64_t bytes = 1; bytes < 3 << 20; bytes += 77777) {
        uint64_t stride = nvme_stride(bytes), n = nvme_records(64 << 20, stride);

        cr_assert_eq(stride % NVME_PAGE, 0);
        cr_assert_geq(stride, bytes + NVME_PAGE);
        cr_assert_leq(nvme_record_offset(stride, n - 1) + stride, 64 << 20);
    }
}
