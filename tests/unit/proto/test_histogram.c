#include "proto/histogram.h"

#include <criterion/criterion.h>

static uint32_t bucket_of(uint64_t ns)
{
    struct histogram h = {0};
    uint32_t i = 0;

    histogram_add(&h, ns, 1);
    cr_assert_eq(h.sum_ns, ns);
    while (h.bucket[i] == 0)
        i++;
    return i;
}

Test(histogram, each_bound_belongs_to_the_bucket_below_it_and_the_next_nanosecond_to_the_one_above)
{
    for (uint32_t i = 0; i < HISTOGRAM_BUCKETS - 1; i++) {
        uint64_t ns = histogram_bound_us(i) * 1000;

        cr_assert_eq(bucket_of(ns), i);
        cr_assert_eq(bucket_of(ns + 1), i + 1);
    }
    cr_assert_eq(bucket_of(0), 0);
    cr_assert_eq(bucket_of(UINT64_MAX), HISTOGRAM_BUCKETS - 1);
    cr_assert_eq(histogram_bound_us(HISTOGRAM_BUCKETS - 2), UINT64_C(1) << HISTOGRAM_DOUBLINGS);
}

Test(histogram, a_power_of_two_ends_a_bucket)
{
    for (uint32_t log2 = 2; log2 <= HISTOGRAM_DOUBLINGS; log2++)
        cr_assert_eq(histogram_bound_us(histogram_bucket_below(log2)), UINT64_C(1) << log2);
}

Test(histogram, a_quantile_is_within_an_eighth)
{
    struct histogram h = {0};

    cr_assert_eq(histogram_quantile_us(&h, 500), 0);
    for (uint64_t us = 1; us <= 100000; us++)
        histogram_add(&h, us * 1000, 1);
    cr_assert_eq(histogram_total(&h), 100000);
    for (uint32_t of_1000 = 100; of_1000 < 1000; of_1000 += 100) {
        double q = (double)histogram_quantile_us(&h, of_1000), exact = 100.0 * of_1000;

        cr_assert(q > exact * 7 / 8 && q < exact * 9 / 8, "%u: %.0f", of_1000, q);
    }
    cr_assert_leq(histogram_quantile_us(&h, 1000), 114688); /* the bound of the last one's bucket */
}

Test(histogram, what_took_longest_has_the_last_bound)
{
    struct histogram h = {0};

    histogram_add(&h, UINT64_MAX, 1);
    cr_assert_eq(histogram_quantile_us(&h, 990), UINT64_C(1) << HISTOGRAM_DOUBLINGS);
}
