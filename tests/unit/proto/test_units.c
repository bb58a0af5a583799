/* Sizes and durations as people write them: one rule for the configuration and for command lines. */
#include "proto/units.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>

static char why[UNITS_WHY_BYTES];

static void size_is(const char *text, uint64_t bytes)
{
    uint64_t got = 0;

    cr_assert_eq(units_parse_size(text, &got, why), 0, "%s", why);
    cr_assert_eq(got, bytes, "%s", text);
}

static void size_refused(const char *text, const char *says)
{
    uint64_t got = 7;

    cr_assert_eq(units_parse_size(text, &got, why), -EINVAL, "taken: %s", text);
    cr_assert_not_null(strstr(why, says), "\"%s\" does not say \"%s\"", why, says);
}

Test(units, sizes_are_powers_of_1024_only)
{
    size_is("0", 0);
    size_is("4096", 4096);
    size_is("1B", 1);
    size_is("64KiB", 64 << 10);
    size_is("3MiB", 3 << 20);
    size_is("4GiB", 4ull << 30);
    size_is("2TiB", 2ull << 40);
    size_refused("4KB", "write 4KiB");
    size_refused("4GB", "write 4GiB");
    size_refused("4g", "write 4GiB");
    size_refused("4mib", "write 4MiB");
    size_refused("1.5GiB", "whole number");
    size_refused("", "whole number");
    size_refused("-1", "whole number");
    size_refused("4PiB", "whole number");
    size_refused("18446744073709551616", "whole number");
    size_refused("16777216TiB", "too large");
}

Test(units, durations_name_their_unit)
{
    uint64_t ms = 7;

    cr_assert_eq(units_parse_duration("0", &ms, why), 0);
    cr_assert_eq(ms, 0);
    cr_assert_eq(units_parse_duration("90min", &ms, why), 0);
    cr_assert_eq(ms, 90 * 60000);
    cr_assert_eq(units_parse_duration("2h", &ms, why), 0);
    cr_assert_eq(ms, 7200000);
    cr_assert_eq(units_parse_duration("30", &ms, why), -EINVAL);
    cr_assert_not_null(strstr(why, "no unit"));
    cr_assert_eq(units_parse_duration("5m", &ms, why), -EINVAL);
    cr_assert_not_null(strstr(why, "write 5min or 5ms"));
    cr_assert_eq(units_parse_duration("soon", &ms, why), -EINVAL);
    cr_assert_not_null(strstr(why, "e.g. 30s"));
}

Test(units, text_has_the_largest_unit_that_is_whole)
{
    char buf[UNITS_TEXT_BYTES];

    cr_assert_str_eq(units_size_text(buf, 0), "0B");
    cr_assert_str_eq(units_size_text(buf, 1536), "1536B");
    cr_assert_str_eq(units_size_text(buf, 3ull << 30), "3GiB");
    cr_assert_str_eq(units_duration_text(buf, 90000), "90s");
    cr_assert_str_eq(units_duration_text(buf, 1001), "1001ms");
    cr_assert_str_eq(units_duration_text(buf, 3600000), "1h");
}
