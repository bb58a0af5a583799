/* Counts durations. Loop only. No lock, no allocation, some nanoseconds. */
#ifndef UCMD_OBSERVE_HISTOGRAM_H
#define UCMD_OBSERVE_HISTOGRAM_H

#include "proto/histogram.h"

static inline void histogram_count(struct histogram *h, uint64_t ns)
{
    h->sum_ns += ns;
    h->bucket[histogram_bucket(ns)]++;
}

#endif
