#include "proto/backoff.h"

#include <criterion/criterion.h>

Test(backoff, the_pause_doubles_up_to_its_bound_and_a_success_resets_it)
{
    struct backoff b;

    backoff_init(&b, 10, 35, 0);
    cr_assert(backoff_ready(&b, 0));
    cr_assert_eq(backoff_fail(&b, 100), 110);
    cr_assert_not(backoff_ready(&b, 109));
    cr_assert(backoff_ready(&b, 110));
    cr_assert_eq(backoff_fail(&b, 110), 130);
    cr_assert_eq(backoff_fail(&b, 130), 165);
    cr_assert_eq(backoff_fail(&b, 165), 200);
    backoff_reset(&b);
    cr_assert(backoff_ready(&b, 0));
    cr_assert_eq(backoff_fail(&b, 300), 310);
}

Test(backoff, jitter_adds_at_most_a_quarter_and_differs_by_seed)
{
    struct backoff a, b;
    bool differ = false;

    backoff_init(&a, 1000, 8000, 1);
    backoff_init(&b, 1000, 8000, 2);
    for (int i = 0; i < 20; i++) {
        uint64_t until = backoff_fail(&a, 0);

        cr_assert(until >= a.pause && until <= a.pause + a.pause / 4);
        differ = differ || until != backoff_fail(&b, 0);
    }
    cr_assert(differ);
}

Test(backoff, a_bound_at_the_end_of_the_range_does_not_overflow)
{
    struct backoff b;

    backoff_init(&b, 1, UINT64_MAX / 2, 0);
    for (int i = 0; i < 100; i++)
        backoff_fail(&b, 0);
    cr_assert_eq(b.pause, UINT64_MAX / 2);
}
