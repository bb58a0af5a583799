#include "daemon/device/busy.h"

#include <criterion/criterion.h>

#define MS 1000000ull

static struct busy b;

Test(busy, nothing_is_known_at_first)
{
    b = (struct busy){0};
    cr_assert(busy_due(&b, 0));
    busy_judge(&b, 5 * MS, false);
    cr_assert(!b.others);
    cr_assert(!busy_due(&b, 5 * MS + BUSY_KEEP_NS - 1));
    cr_assert(busy_due(&b, 5 * MS + BUSY_KEEP_NS));
}

/* The host may look late at a launch that was in time. */
Test(busy, takes_two_slow_launches)
{
    b = (struct busy){0};
    busy_launch(&b, 1 * MS, 1000, 900);
    cr_assert(!b.others);
    busy_launch(&b, 2 * MS, 9000, 900);
    cr_assert(!b.others, "one is no proof");
    busy_launch(&b, 3 * MS, 1000, 900);
    busy_launch(&b, 4 * MS, 9000, 900);
    cr_assert(!b.others, "not in a row");
    busy_launch(&b, 5 * MS, 9000, 900);
    cr_assert(b.others);
    cr_assert(!busy_due(&b, 5 * MS + BUSY_KEEP_NS - 1));
    busy_launch(&b, 6 * MS, 1000, 900);
    cr_assert(!b.others, "one in time is one that nobody held up");
}

Test(busy, a_launch_counts_for_more_than_an_older_word)
{
    b = (struct busy){0};
    busy_judge(&b, 0, true);
    cr_assert(b.others);
    busy_launch(&b, 1 * MS, 900, 900);
    cr_assert(!b.others);
    cr_assert(busy_due(&b, 1 * MS + BUSY_KEEP_NS));
}
