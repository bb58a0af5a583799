#include "daemon/device/busy.h"

#include <criterion/criterion.h>

#define MS 1000000ull

Test(busy, nothing_is_known_at_first)
{
    struct busy b = {0};

    cr_assert(busy_due(&b, 1 * MS));
    cr_assert_leq(busy_quiet_ns(&b), 1 * MS);
    busy_probed(&b, 5 * MS, false);
    cr_assert(!b.others);
    cr_assert(!busy_due(&b, 5 * MS + BUSY_KEEP_IDLE_NS - 1));
    cr_assert(busy_due(&b, 5 * MS + BUSY_KEEP_IDLE_NS));
    busy_probed(&b, 5 * MS, true);
    cr_assert(b.others);
    cr_assert(!busy_due(&b, 5 * MS + BUSY_KEEP_NS - 1));
    cr_assert(busy_due(&b, 5 * MS + BUSY_KEEP_NS));
}

Test(busy, no_probe_just_behind_our_own_kernels)
{
    struct busy b = {0};

    busy_launch(&b, 2 * MS, 0, 0);
    cr_assert_eq(busy_quiet_ns(&b), 2 * MS + BUSY_QUIET_NS);
}

/* The host may look late at a launch that was in time. */
Test(busy, takes_two_slow_launches)
{
    struct busy b = {0};

    busy_probed(&b, 0, false);
    busy_launch(&b, 2 * MS, 9000, 900);
    cr_assert(!b.others, "one is no proof");
    busy_launch(&b, 3 * MS, 1000, 900);
    busy_launch(&b, 4 * MS, 9000, 900);
    cr_assert(!b.others, "not in a row");
    busy_launch(&b, 4 * MS, 9000, 0);
    cr_assert(!b.others, "too short to tell");
    busy_launch(&b, 5 * MS, 9000, 900);
    cr_assert(b.others);
    cr_assert(!busy_due(&b, 5 * MS + BUSY_KEEP_NS - 1));
}

/* Short kernels of others wait for ours and don't hold them up: launches in time neither clear
 * nobody nor put the next probe off. */
Test(busy, launches_in_time_prove_nothing)
{
    struct busy b = {0};

    busy_probed(&b, 0, true);
    for (unsigned i = 1; i < 100; i++)
        busy_launch(&b, i * MS, 900, 900);
    cr_assert(b.others);
    busy_probed(&b, 0, false);
    for (unsigned i = 1; i <= 200; i++)
        busy_launch(&b, i * MS, 900, 900);
    cr_assert(busy_due(&b, 200 * MS));
}
