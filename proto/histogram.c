#include "proto/histogram.h"

uint64_t histogram_bound_us(uint32_t bucket)
{
    if (bucket >= HISTOGRAM_BUCKETS - 1)
        return UINT64_MAX;
    if (bucket < 4)
        return bucket + 1;
    return (UINT64_C(5) + bucket % 4) << (bucket / 4 - 1);
}

uint32_t histogram_bucket_below(uint32_t log2_us)
{
    return 4 * (log2_us - 1) - 1;
}

uint64_t histogram_total(const struct histogram *h)
{
    uint64_t n = 0;

    for (uint32_t i = 0; i < HISTOGRAM_BUCKETS; i++)
        n += h->bucket[i];
    return n;
}

uint64_t histogram_quantile_us(const struct histogram *h, uint32_t of_1000)
{
    uint64_t rank = histogram_total(h) * of_1000, below = 0;

    for (uint32_t i = 0; i < HISTOGRAM_BUCKETS; i++) {
        uint64_t n = h->bucket[i] * 1000, from, to;

        if (n == 0 || below + n < rank) {
            below += n;
            continue;
        }
        from = i > 0 ? histogram_bound_us(i - 1) : 0;
        if (i == HISTOGRAM_BUCKETS - 1)
            return from;
        to = histogram_bound_us(i);
        return from + (uint64_t)((double)(to - from) * (double)(rank - below) / (double)n + 0.5);
    }
    return 0;
}
