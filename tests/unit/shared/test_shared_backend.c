/* What backends have in common: placing, listings, temporary names. */
#include "daemon/shared/backend.h"

#include "daemon/format/checksum.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>

static const char name_a[] = "aabb0000000000000000000000000000-f0010000000000000000000000000000-03";

Test(shared_backend, a_listing_is_cut_and_says_so)
{
    struct shared_listing l = {0};

    for (uint32_t i = 0; i < SHARED_LISTING_FILES; i++)
        cr_assert_eq(shared_listing_add(&l, name_a, i, 2 * i), 0);
    cr_assert_not(l.cut);
    cr_assert_eq(shared_listing_add(&l, name_a, 1, 1), 0);
    cr_assert(l.cut);
    cr_assert_eq(l.n, SHARED_LISTING_FILES);
    for (uint32_t i = 0; i < l.n; i += 1001) {
        cr_assert_eq(l.files[i].bytes, i);
        cr_assert_eq(l.files[i].mtime_ns, 2 * i);
        cr_assert_str_eq(l.files[i].name, name_a);
    }
    cr_assert_leq(l.cap * sizeof(*l.files), 64u << 20, "of 512 Ki files");
    shared_listing_free(&l);
    cr_assert_eq(l.n, 0);
    shared_listing_free(&l);
}

Test(shared_backend, a_name_that_was_given_is_looked_at)
{
    struct shared_op op = {.verb = SHARED_REMOVE, .by_name = true, .bucket = 9};

    strcpy(op.name, name_a);
    cr_assert_eq(shared_op_resolve(&op), 0);
    cr_assert_eq(op.bucket, 9);
    strcpy(op.name, BLOCK_FILE_TEMP_PREFIX "host-1");
    cr_assert_eq(shared_op_resolve(&op), 0);
    strcpy(op.name, "..");
    cr_assert_eq(shared_op_resolve(&op), -EINVAL);
}

Test(shared_backend, the_bucket_is_the_identitys_first_byte)
{
    struct shared_op op = {
        .verb = SHARED_FIND, .bytes = 5, .id = {.key_bytes = 16, .key = {7}, .part = 2}};

    cr_assert_eq(shared_op_resolve(&op), 0);
    cr_assert_eq(op.bucket, op.file.identity[0]);
    cr_assert(block_file_name_valid(op.name));
    op.id.key_bytes = 3;
    cr_assert_eq(shared_op_resolve(&op), -EINVAL);
    op.verb = SHARED_CHECK;
    cr_assert_eq(shared_op_resolve(&op), 0);
}

Test(shared_backend, two_roots_have_no_temporary_name_in_common)
{
    struct shared_temp a, b;
    char x[BLOCK_FILE_TEMP_CAP], y[BLOCK_FILE_TEMP_CAP];

    shared_temp_init(&a, "a/very long name/of a host, with \xff in it");
    b = a;
    shared_temp_next(&a, x);
    shared_temp_next(&b, y);
    cr_assert_str_neq(x, y);
    cr_assert(block_file_temp_valid(x));
    cr_assert(block_file_temp_valid(y));
}

/* ---- files in one piece of memory ---- */

#define FILE_BYTES (BLOCK_FILE_HEADER_BYTES + BLOCK_FILE_ENCRYPTION_BYTES + (600u << 10))

static uint8_t slot[600u << 10], file[FILE_BYTES];

static struct shared_op part_op(enum shared_verb verb, uint64_t bytes, bool encrypted)
{
    struct shared_op op = {.verb = verb,
                           .id = {.key_bytes = 16, .key = {3}, .part = 1},
                           .data = slot,
                           .bytes = bytes,
                           .encrypted = encrypted};

    memset(op.header + BLOCK_FILE_HEADER_BYTES, 0x5a, BLOCK_FILE_ENCRYPTION_BYTES);
    cr_assert_eq(shared_op_resolve(&op), 0);
    return op;
}

static void slot_fill(void)
{
    for (uint32_t i = 0; i < sizeof(slot); i++)
        slot[i] = (uint8_t)(i * 7 >> 4);
}

/* The file is the one that header and slot make, and comes back as it went. */
static void packs(uint64_t bytes, bool encrypted)
{
    struct shared_op write = part_op(SHARED_WRITE, bytes, encrypted), like = write;
    struct shared_op read = part_op(SHARED_READ, bytes, encrypted);
    uint64_t head = shared_op_head_bytes(&write);

    slot_fill();
    shared_op_pack(&write, file);
    like.file.encrypted = encrypted;
    like.file.checksum =
        encrypted ? checksum_of(like.header + BLOCK_FILE_HEADER_BYTES, BLOCK_FILE_ENCRYPTION_BYTES)
                  : checksum_of(slot, bytes);
    block_file_encode(&like.file, like.header);
    cr_assert_arr_eq(file, like.header, head);
    cr_assert_arr_eq(file + head, slot, bytes);
    memset(slot, 0, sizeof(slot));
    cr_assert_eq(shared_op_unpack(&read, file), 0, "%llu bytes", (unsigned long long)bytes);
    cr_assert_arr_eq(slot, file + head, bytes);
    cr_assert_eq(shared_op_verify(&read), 0);
    if (!encrypted)
        file[head + bytes - 1] ^= 1;
    else
        file[head - 1] ^= 1;
    cr_assert_eq(shared_op_unpack(&read, file), -EBADMSG);
}

Test(shared_backend, a_file_comes_out_of_memory_as_it_went_in)
{
    static const uint64_t sizes[] = {1,      4096,         (256u << 10) - 1, 256u << 10,
                                     262145, (512u << 10), 600u << 10};

    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        packs(sizes[i], false);
        packs(sizes[i], true);
    }
}

Test(shared_backend, a_file_of_another_kind_or_part_does_not_come_out)
{
    struct shared_op write = part_op(SHARED_WRITE, 4096, false);
    struct shared_op encrypted = part_op(SHARED_READ, 4096 - BLOCK_FILE_ENCRYPTION_BYTES, true);
    struct shared_op other = part_op(SHARED_READ, 4096, false);

    slot_fill();
    shared_op_pack(&write, file);
    cr_assert_eq(shared_op_unpack(&encrypted, file), -EBADMSG);
    other.id.key[0]++;
    cr_assert_eq(shared_op_resolve(&other), 0);
    cr_assert_eq(shared_op_unpack(&other, file), -EBADMSG);
}
