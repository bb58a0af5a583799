/* Error codes, names and sentences on their way to a peer. */
#include "proto/errors.h"

#include <criterion/criterion.h>
#include <string.h>

Test(errors, texts_are_cut_between_characters)
{
    struct ucm_error e = {0};
    char two[301];

    for (size_t i = 0; i < 300; i += 2)
        memcpy(two + i, "\xc3\xa9", 3);
    cr_assert_eq(ucm_error_set(&e, UCM_WIRE_IO, "%s", two), -UCM_WIRE_IO);
    /* there is room for 239 bytes; the last one would be half a character */
    cr_assert_eq(strlen(e.text), 238);
    cr_assert_eq(ucm_error_set(&e, UCM_WIRE_IO, "x%s", two), -UCM_WIRE_IO);
    cr_assert_eq(strlen(e.text), 239);
    cr_assert_eq(ucm_error_set(&e, UCM_WIRE_IO, "%s", "short"), -UCM_WIRE_IO);
    cr_assert_eq(ucm_error_set(&e, UCM_WIRE_BUSY, "more: %s", e.text), -UCM_WIRE_BUSY);
    cr_assert_str_eq(e.text, "more: short");
    cr_assert_eq(e.code, UCM_WIRE_BUSY);
    cr_assert_eq(ucm_error_set(NULL, UCM_WIRE_BUSY, "nobody listens"), -UCM_WIRE_BUSY);
}

Test(errors, names_are_known)
{
    cr_assert_str_eq(ucm_error_name(UCM_WIRE_INVALID), "INVALID");
    cr_assert_str_eq(ucm_error_name(UCM_WIRE_INTERNAL), "INTERNAL");
    cr_assert_str_eq(ucm_error_name(98), "UNKNOWN");
    cr_assert_not_null(ucm_error_sentence(98));
}
