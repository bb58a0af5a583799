/* What backends have in common: placing, listings, temporary names. */
#include "daemon/share/backend.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

static const char name_a[] = "aabb0000000000000000000000000000-f0010000000000000000000000000000-03";

Test(share_backend, a_listing_is_cut_and_says_so)
{
    struct share_listing l = {0};

    for (uint32_t i = 0; i < SHARE_LISTING_FILES; i++)
        cr_assert_eq(share_listing_add(&l, name_a, i, 2 * i), 0);
    cr_assert_not(l.cut);
    cr_assert_eq(share_listing_add(&l, name_a, 1, 1), 0);
    cr_assert(l.cut);
    cr_assert_eq(l.n, SHARE_LISTING_FILES);
    for (uint32_t i = 0; i < l.n; i += 1001) {
        cr_assert_eq(l.files[i].bytes, i);
        cr_assert_eq(l.files[i].mtime_ns, 2 * i);
        cr_assert_str_eq(l.files[i].name, name_a);
    }
    cr_assert_leq(l.cap * sizeof(*l.files), 64u << 20, "of 512 Ki files");
    share_listing_free(&l);
    cr_assert_eq(l.n, 0);
    share_listing_free(&l);
}

Test(share_backend, a_name_that_was_given_is_looked_at)
{
    struct share_op op = {.verb = SHARE_REMOVE, .by_name = true, .bucket = 9};

    strcpy(op.name, name_a);
    cr_assert_eq(share_op_resolve(&op), 0);
    cr_assert_eq(op.bucket, 9);
    strcpy(op.name, BLOCK_FILE_TEMP_PREFIX "host-1");
    cr_assert_eq(share_op_resolve(&op), 0);
    strcpy(op.name, "..");
    cr_assert_eq(share_op_resolve(&op), -EINVAL);
}

Test(share_backend, the_bucket_is_the_identitys_first_byte)
{
    struct share_op op = {
        .verb = SHARE_FIND, .bytes = 5, .id = {.key_bytes = 16, .key = {7}, .part = 2}};

    cr_assert_eq(share_op_resolve(&op), 0);
    cr_assert_eq(op.bucket, op.file.identity[0]);
    cr_assert(block_file_name_valid(op.name));
    op.id.key_bytes = 3;
    cr_assert_eq(share_op_resolve(&op), -EINVAL);
    op.verb = SHARE_CHECK;
    cr_assert_eq(share_op_resolve(&op), 0);
}

Test(share_backend, two_roots_have_no_temporary_name_in_common)
{
    struct share_temp a, b;
    char x[BLOCK_FILE_TEMP_CAP], y[BLOCK_FILE_TEMP_CAP];

    share_temp_init(&a, "a/very long name/of a host, with \xff in it");
    b = a;
    share_temp_next(&a, x);
    share_temp_next(&b, y);
    cr_assert_str_neq(x, y);
    cr_assert(block_file_temp_valid(x));
    cr_assert(block_file_temp_valid(y));
}
