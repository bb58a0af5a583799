#include "daemon/cuda/busy.h"

#include <criterion/criterion.h>

#define MS 1000000ull

Test(busy, nothing_is_known_at_first)
{
    struct busy b = {0};

    cr_assert(busy_due(&b, 1 * MS));
    cr_assert_leq(busy_quiet_ns(&b), 1 * MS);
    busy_probed(&b, 5 * MS, false, 8000);
    cr_assert(!b.others);
    cr_assert(!busy_due(&b, 5 * MS + BUSY_KEEP_IDLE_NS - 1));
    cr_assert(busy_due(&b, 5 * MS + BUSY_KEEP_IDLE_NS));
    busy_probed(&b, 5 * MS, true, 2 * MS);
    cr_assert(b.others);
    cr_assert(!busy_due(&b, 5 * MS + BUSY_KEEP_NS - 1));
    cr_assert(busy_due(&b, 5 * MS + BUSY_KEEP_NS));
}

Test(busy, no_probe_just_after_our_own_kernels)
{
    struct busy b = {0};

    busy_launch(&b, 2 * MS, 0, 0);
    cr_assert_eq(busy_quiet_ns(&b), 2 * MS + BUSY_QUIET_NS);
}

/* The host may look late at a launch that was in time. */
Test(busy, takes_two_slow_launches)
{
    struct busy b = {0};

    busy_probed(&b, 0, false, 8000);
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

/* Short kernels of others wait for ours and don't hold them up. So launches in time clear nobody,
 * and don't put off the next probe. */
Test(busy, launches_in_time_prove_nothing)
{
    struct busy b = {0};

    busy_probed(&b, 0, true, 2 * MS);
    for (unsigned i = 1; i < 100; i++)
        busy_launch(&b, i * MS, 900, 900);
    cr_assert(b.others);
    b = (struct busy){0};
    busy_probed(&b, 0, false, 8000);
    for (unsigned i = 1; i <= 200; i++)
        busy_launch(&b, i * MS, 900, 900);
    cr_assert(busy_due(&b, 200 * MS));
}

/* A probe may fall between two of the others' kernels. */
Test(busy, others_are_gone_when_several_probes_say_so)
{
    struct busy b = {0};
    uint64_t now = 0;

    busy_probed(&b, now, true, 2 * MS);
    for (unsigned i = 1; i < BUSY_CLEAR; i++) {
        now = b.until_ns;
        busy_probed(&b, now, false, 8000);
        cr_assert(b.others, "after %u", i);
        cr_assert_eq(b.until_ns, now + BUSY_KEEP_DOUBT_NS);
    }
    busy_probed(&b, now, true, 2 * MS);
    for (unsigned i = 1; i < BUSY_CLEAR; i++)
        busy_probed(&b, now, false, 8000);
    cr_assert(b.others, "counted anew");
    busy_probed(&b, now, false, 8000);
    cr_assert(!b.others);
    cr_assert_eq(b.until_ns, now + BUSY_KEEP_IDLE_NS);
}

/* The first n of a probe's kernels took `us`, the others 8. */
static bool shows(unsigned n, uint64_t us)
{
    uint64_t took_ns[BUSY_PROBES];

    for (unsigned i = 0; i < BUSY_PROBES; i++)
        took_ns[i] = (i < n ? us : 8) * 1000;
    return busy_probes_show(took_ns, BUSY_PROBES);
}

Test(busy, probes_that_wait_show_others)
{
    cr_assert(!shows(0, 8), "an idle GPU");
    cr_assert(shows(BUSY_PROBES, 200), "matrices");
    cr_assert(shows(1, 2400), "one that does not end");
    cr_assert(shows(2, 100));
    cr_assert(!shows(1, 300), "the first after a copy agent's");
    cr_assert(!shows(1, 100), "the host's doing");
    cr_assert(shows(4, 35), "short kernels, now and then waited for");
    cr_assert(!shows(3, 40), "the host's doing, on a bad day");
}

Test(busy, without_a_probe_nothing_new_is_believed)
{
    struct busy b = {0};

    busy_probed(&b, 0, true, 2 * MS);
    busy_unknown(&b, 500 * MS);
    cr_assert(b.others && !b.pauses);
    cr_assert(!busy_due(&b, 500 * MS + BUSY_KEEP_NS - 1));
    cr_assert(busy_due(&b, 500 * MS + BUSY_KEEP_NS));
}

Test(busy, others_whose_host_waits_for_their_kernels_leave_pauses)
{
    struct busy b = {0};

    busy_probed(&b, 0, true, 250000);
    cr_assert(b.others && b.pauses);
    busy_probed(&b, 0, true, 2 * MS);
    cr_assert(b.others && !b.pauses);
    busy_probed(&b, 0, true, 250000);
    for (unsigned i = 0; i < BUSY_CLEAR; i++)
        busy_probed(&b, 0, false, 8000);
    cr_assert(!b.others && !b.pauses);
}
