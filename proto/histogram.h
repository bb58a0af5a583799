/* Histograms of durations: their shape, on both sides of the wire, and counting.
 *
 * Buckets lie evenly on a logarithmic scale, four to each doubling, from 1 us to 67 s. So a
 * quantile is known to within an eighth. Each bound is a whole number of microseconds and belongs
 * to the bucket below it.
 * Threads: no state; one thread at a time may use a histogram. */
#ifndef UCM_PROTO_HISTOGRAM_H
#define UCM_PROTO_HISTOGRAM_H

#include <stdint.h>

#define HISTOGRAM_DOUBLINGS 26
/* The last one has no bound. */
#define HISTOGRAM_BUCKETS (4 * (HISTOGRAM_DOUBLINGS - 1) + 1)

struct histogram {
    uint64_t sum_ns;
    uint64_t bucket[HISTOGRAM_BUCKETS];
};

/* Counts n durations of so many nanoseconds. No lock, no allocation, some nanoseconds. */
static inline void histogram_add(struct histogram *h, uint64_t ns, uint64_t n)
{
    uint64_t us = ns / 1000 + (ns % 1000 != 0), v = us > 0 ? us - 1 : 0;
    uint32_t log2 = v < 4 ? 1 : 63 - (uint32_t)__builtin_clzll(v);

    h->sum_ns += n * ns;
    if (log2 >= HISTOGRAM_DOUBLINGS)
        h->bucket[HISTOGRAM_BUCKETS - 1] += n;
    else
        h->bucket[v < 4 ? v : 4 * (log2 - 1) + (v >> (log2 - 2) & 3)] += n;
}

/* The upper bound of a bucket; UINT64_MAX for the last. */
uint64_t histogram_bound_us(uint32_t bucket);
/* The bucket below a bound that is a power of two, at least 4 us. */
uint32_t histogram_bucket_below(uint32_t log2_us);
uint64_t histogram_total(const struct histogram *h);
/* The duration that a fraction `of_1000` / 1000 of all does not exceed, interpolated in its bucket.
 * 0: it is empty. */
uint64_t histogram_quantile_us(const struct histogram *h, uint32_t of_1000);

#endif
