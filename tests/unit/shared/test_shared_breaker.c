/* When a root that failed is asked again: failures in a row, pauses that grow, one trial at a time.
 */
#include "daemon/shared/breaker.h"

#include <criterion/criterion.h>

static struct breaker b;

static void setup(void)
{
    breaker_init(&b, 3, 0x5eed);
}

TestSuite(shared_breaker, .init = setup, .timeout = 10);

static uint64_t open_at(uint64_t now_ms)
{
    cr_assert_not(breaker_bad(&b, now_ms));
    cr_assert_not(breaker_bad(&b, now_ms));
    cr_assert(breaker_bad(&b, now_ms));
    return b.backoff.until;
}

Test(shared_breaker, opens_after_failures_in_a_row_only)
{
    for (int i = 0; i < 20; i++) {
        cr_assert_not(breaker_bad(&b, 1));
        cr_assert_not(breaker_bad(&b, 1));
        cr_assert_not(breaker_good(&b));
    }
    cr_assert(breaker_closed(&b));
    open_at(1);
    cr_assert_not(breaker_closed(&b));
}

Test(shared_breaker, one_trial_after_the_pause)
{
    uint64_t until = open_at(1000);

    cr_assert_geq(until, 1000 + BREAKER_PAUSE_MS);
    cr_assert_leq(until, 1000 + BREAKER_PAUSE_MS * 5 / 4);
    cr_assert_not(breaker_try(&b, until - 1));
    cr_assert(breaker_try(&b, until));
    cr_assert_not(breaker_try(&b, until), "a second trial alongside the first");
    cr_assert(breaker_good(&b));
    cr_assert(breaker_closed(&b));
}

Test(shared_breaker, pauses_double_up_to_the_longest_and_begin_again)
{
    uint64_t now = open_at(0), pause = BREAKER_PAUSE_MS;

    for (int i = 0; i < 12; i++) {
        cr_assert(breaker_try(&b, now));
        cr_assert_not(breaker_bad(&b, now), "it was open already");
        pause = pause * 2 < BREAKER_PAUSE_MAX_MS ? pause * 2 : BREAKER_PAUSE_MAX_MS;
        cr_assert_geq(b.backoff.until, now + pause);
        cr_assert_leq(b.backoff.until, now + pause + pause / 4);
        now = b.backoff.until;
    }
    cr_assert_eq(pause, BREAKER_PAUSE_MAX_MS);
    cr_assert(breaker_try(&b, now));
    cr_assert(breaker_good(&b));
    cr_assert_leq(open_at(now), now + BREAKER_PAUSE_MS * 5 / 4);
}

Test(shared_breaker, late_news_change_nothing_while_it_is_open)
{
    uint64_t until = open_at(0);

    for (int i = 0; i < 10; i++)
        cr_assert_not(breaker_bad(&b, 100));
    cr_assert_eq(b.backoff.until, until);
}

Test(shared_breaker, a_trial_that_told_nothing_may_be_made_again)
{
    uint64_t until = open_at(0);

    cr_assert(breaker_try(&b, until));
    breaker_again(&b, until + 5);
    cr_assert(breaker_try(&b, until + 5));
}

Test(shared_breaker, hosts_do_not_come_back_at_once)
{
    struct breaker other;
    int apart = 0;

    breaker_init(&other, 1, 77);
    breaker_init(&b, 1, 78);
    for (uint64_t now = 0; now < 5; now++) {
        breaker_bad(&b, now);
        breaker_bad(&other, now);
        apart += b.backoff.until != other.backoff.until;
        breaker_good(&b);
        breaker_good(&other);
    }
    cr_assert_gt(apart, 0);
}
