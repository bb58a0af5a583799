/* What cr_assert and its relatives call of libcriterion: a message of a failed one. libcriterion itself brings seventeen
 * libraries (libgit2, Kerberos, mbedTLS...), whose mappings every fork of a test would copy. */
#include <criterion/criterion.h>

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

struct criterion_options criterion_options; /* full_stats: no */

void cri_asserts_passed_incr(void)
{
}

int cr_asprintf(char **strp, const char *fmt, ...)
{
    va_list args;
    int rc;

    va_start(args, fmt);
    rc = vasprintf(strp, fmt, args);
    va_end(args);
    return rc;
}

void cr_asprintf_free(char *buf)
{
    free(buf);
}

static const char *form(int msg_index)
{
    switch (msg_index) {
    case CRITERION_ASSERT_MSG_FAIL:
        return "the conditions for this assertion were not met";
    case CRITERION_ASSERT_MSG_EXPR_AS_STRINGS_FALSE:
        return "%s is false: actual=`%s` expected=`%s`";
    case CRITERION_ASSERT_MSG_IS_NULL:
        return "%s is null";
    case CRITERION_ASSERT_MSG_IS_NOT_NULL:
        return "%s is not null";
    case CRITERION_ASSERT_MSG_IS_EMPTY:
        return "%s is empty";
    case CRITERION_ASSERT_MSG_IS_NOT_EMPTY:
        return "%s is not empty";
    default:
        return "%s is false";
    }
}

/* All but the message of cr_assert_fail have the expression first, as a string. */
char *cr_translate_assert_msg(int msg_index, ...)
{
    char *message = NULL;
    va_list args;

    va_start(args, msg_index);
    if (vasprintf(&message, form(msg_index), args) < 0)
        message = NULL;
    va_end(args);
    return message;
}
