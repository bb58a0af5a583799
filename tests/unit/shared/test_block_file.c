#include "daemon/shared/block_file.h"

#include "daemon/format/bytes.h"
#include "daemon/format/checksum.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>

static const struct block_file_id id = {
    .fingerprint = {0xf0, 0x01}, .key = {0xaa, 0xbb}, .key_bytes = 16, .part = 3};

static struct block_file_header header_of(const struct block_file_id *i)
{
    struct block_file_header h = {
        .payload_bytes = 1048576, .checksum = 0x1122334455667788, .part = i->part};
    char name[BLOCK_FILE_NAME_CAP];

    cr_assert_eq(block_file_locate(i, h.identity, name), 0);
    return h;
}

/* Other hosts' readers rely on these offsets of docs/design/storage-format.md. */
Test(block_file, bytes_are_where_the_text_says)
{
    struct block_file_header h = header_of(&id);
    uint8_t b[BLOCK_FILE_HEADER_BYTES];

    block_file_encode(&h, b);
    cr_assert_eq(memcmp(b, "UCMB", 4), 0);
    cr_assert_eq(get32(b + 4), 1);
    cr_assert_eq(get64(b + 8), 1048576);
    cr_assert_eq(get64(b + 16), 0x1122334455667788);
    cr_assert_eq(get32(b + 24), 3);
    cr_assert_eq(memcmp(b + 32, h.identity, 16), 0);
    cr_assert_eq(get64(b + 56), checksum_of(b, 56));
}

Test(block_file, every_flipped_bit_is_refused)
{
    struct block_file_header h = header_of(&id);
    uint8_t b[BLOCK_FILE_HEADER_BYTES];
    uint64_t sum = 0;

    block_file_encode(&h, b);
    cr_assert_eq(block_file_decode(b, &h, &sum), 0);
    cr_assert_eq(sum, h.checksum);
    sum = 7;
    for (unsigned bit = 0; bit < 8 * sizeof(b); bit++) {
        b[bit / 8] ^= (uint8_t)(1u << bit % 8);
        cr_assert_lt(block_file_decode(b, &h, &sum), 0, "bit %u", bit);
        b[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    cr_assert_eq(sum, 7, "untouched on failure");
}

Test(block_file, another_part_key_namespace_or_length_is_refused)
{
    struct block_file_id others[5] = {id, id, id, id, id};
    struct block_file_header mine = header_of(&id), theirs;
    uint8_t b[BLOCK_FILE_HEADER_BYTES];
    uint64_t sum;

    others[0].part = 2;
    others[1].key[15] = 1;
    others[2].key_bytes = 17;      /* the same bytes, and a zero */
    others[3].fingerprint[31] = 1; /* beyond what the name has of it */
    for (unsigned i = 0; i < 5; i++) {
        theirs = header_of(&others[i]);
        theirs.payload_bytes += i == 4;
        block_file_encode(&theirs, b);
        cr_assert_eq(block_file_decode(b, &mine, &sum), -ESTALE, "%u", i);
    }
}

Test(block_file, foreign_bytes_and_versions_are_told_apart)
{
    struct block_file_header h = header_of(&id);
    uint8_t b[BLOCK_FILE_HEADER_BYTES] = {0};
    uint64_t sum;

    cr_assert_eq(block_file_decode(b, &h, &sum), -EILSEQ);
    block_file_encode(&h, b);
    put32(b + 4, 3);
    cr_assert_eq(block_file_decode(b, &h, &sum), -EPROTONOSUPPORT);
}

Test(block_file, names)
{
    uint8_t identity[BLOCK_FILE_IDENTITY_BYTES];
    char name[BLOCK_FILE_NAME_CAP];
    struct block_file_id bad = id;

    cr_assert_eq(block_file_locate(&id, identity, name), 0);
    cr_assert_str_eq(name, "aabb0000000000000000000000000000-f0010000000000000000000000000000-03");
    cr_assert(block_file_name_valid(name));
    name[0] = 'A';
    cr_assert_not(block_file_name_valid(name));
    cr_assert_not(block_file_name_valid(""));
    cr_assert_not(block_file_name_valid("../x"));
    cr_assert_not(block_file_name_valid(".tmp-a"));
    cr_assert_not(block_file_name_valid(
        "aabb0000000000000000000000000000-f0010000000000000000000000000000-030"));
    bad.key_bytes = 15;
    cr_assert_eq(block_file_locate(&bad, identity, name), -EINVAL);
    bad.key_bytes = 33;
    cr_assert_eq(block_file_locate(&bad, identity, name), -EINVAL);
    bad = id;
    bad.part = UCM_MAX_PARTS;
    cr_assert_eq(block_file_locate(&bad, identity, name), -EINVAL);
}

static void temp_prefix_differs(const char *than, const char *host, uint32_t pid, uint64_t started)
{
    char prefix[BLOCK_FILE_TEMP_CAP];

    block_file_temp_prefix(host, pid, started, prefix);
    cr_assert_str_neq(prefix, than);
}

Test(block_file, temporary_names_differ_by_all_that_makes_them_unique)
{
    static const char host[] = "node/1.rack-7.a-very-long-name-of-a-host";
    char name[BLOCK_FILE_TEMP_CAP];

    block_file_temp_prefix(host, UINT32_MAX, UINT64_MAX, name);
    cr_assert_str_eq(name, ".tmp-node_1.rack_7.a_very_long_name_o-ffffffff-ffffffffffffffff-");
    temp_prefix_differs(name, "other", UINT32_MAX, UINT64_MAX);
    temp_prefix_differs(name, host, 1, UINT64_MAX);
    temp_prefix_differs(name, host, UINT32_MAX, 1);
    cr_assert_eq(strlen(name) + 16 + 1, BLOCK_FILE_TEMP_CAP, "room for the number");
    strcat(name, "0123456789abcdef");
    cr_assert(block_file_temp_valid(name));
    cr_assert_not(block_file_name_valid(name));
}

Test(block_file, temporary_names_lead_nowhere)
{
    char longest[BLOCK_FILE_TEMP_CAP + 1];

    cr_assert(block_file_temp_valid(BLOCK_FILE_TEMP_PREFIX "host_1.x-0-1"));
    cr_assert_not(block_file_temp_valid(".tmp"));
    cr_assert_not(block_file_temp_valid(BLOCK_FILE_TEMP_PREFIX "/../x"));
    cr_assert_not(block_file_temp_valid(BLOCK_FILE_TEMP_PREFIX "a\nb"));
    cr_assert_not(block_file_temp_valid(BLOCK_FILE_TEMP_PREFIX "\xe4"));
    memset(longest, 'a', sizeof(longest));
    memcpy(longest, BLOCK_FILE_TEMP_PREFIX, strlen(BLOCK_FILE_TEMP_PREFIX));
    longest[BLOCK_FILE_TEMP_CAP] = '\0';
    cr_assert_not(block_file_temp_valid(longest));
    longest[BLOCK_FILE_TEMP_CAP - 1] = '\0';
    cr_assert(block_file_temp_valid(longest));
}
