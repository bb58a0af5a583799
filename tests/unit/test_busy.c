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

Test(busy, asks_ever_less_often_while_others_are_there)
{
    uint64_t now = 0, last = 0;

    b = (struct busy){0};
    busy_judge(&b, now, true);
    for (unsigned i = 0; i < 10; i++) {
        cr_assert_leq(last, b.until_ns - now);
        last = b.until_ns - now;
        now = b.until_ns;
        busy_judge(&b, now, true);
    }
    cr_assert_eq(last, BUSY_KEEP_MOST_NS);
    now = b.until_ns;
    busy_judge(&b, now, false);
    cr_assert_eq(b.until_ns - now, BUSY_KEEP_NS);
    busy_judge(&b, now + BUSY_KEEP_NS, true);
    cr_assert_eq(b.until_ns - now - BUSY_KEEP_NS, BUSY_KEEP_NS, "from the start");
}

/* What a launch of ours shows counts for more than an older probe. */
Test(busy, a_launch_ends_a_long_wait)
{
    b = (struct busy){0};
    for (unsigned i = 0; i < 10; i++)
        busy_judge(&b, i * 2000 * MS, true);
    busy_launch(&b, 20000 * MS, 900, 900);
    cr_assert(!b.others);
    cr_assert(busy_due(&b, 20000 * MS + BUSY_KEEP_NS));
}
