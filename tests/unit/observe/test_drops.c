/* When health says that the disks are too slow. */
#include "daemon/observe/drops.h"

#include <criterion/criterion.h>

#define START 1000000u

Test(drops, one_in_ten_is_too_much_and_one_in_eleven_is_not)
{
    struct drops d = {0};

    cr_assert_not(drops_count(&d, START, 0, 0));
    cr_assert_not(drops_count(&d, START + 100, 0, 1000));
    cr_assert_not(drops_count(&d, START + 200, 90, 1000));
    cr_assert(drops_count(&d, START + 300, 112, 1000));
    cr_assert_eq(d.lost, 112);
    cr_assert_eq(d.of, 1112);
}

Test(drops, it_is_said_for_a_minute_after_the_last_and_as_long_as_it_goes_on)
{
    struct drops d = {0};
    uint64_t now = START, dropped = 0;

    for (; now < START + 600000; now += 1000)
        cr_assert(drops_count(&d, now, ++dropped, 0));
    now += DROPS_WINDOW_MS;
    drops_count(&d, now, dropped, 0); /* a window of its own, in which nothing is dropped */
    now += DROPS_SHOWN_MS;
    cr_assert_not(drops_count(&d, now, dropped, 10000));
}

Test(drops, what_was_written_long_ago_hides_nothing)
{
    struct drops d = {0};

    drops_count(&d, START, 0, 1000000);
    cr_assert_not(drops_count(&d, START + DROPS_WINDOW_MS, 0, 1000000));
    cr_assert(drops_count(&d, START + DROPS_WINDOW_MS + 1, 1, 1000001));
}

Test(drops, what_a_failed_disk_dropped_is_not_said_when_it_is_back)
{
    struct drops d = {0};

    cr_assert(drops_count(&d, START, 5, 5));
    drops_excuse(&d);
    cr_assert_not(drops_count(&d, START + 1000, 50, 5));
    cr_assert_not(drops_count(&d, START + 2000, 50, 6));
    cr_assert(drops_count(&d, START + 3000, 60, 6));
}
