#include "daemon/gc/ages.h"

#include <xxhash.h>

#define SUBS_LOG2 6 /* classes to a doubling */
#define LEAST_LOG2 38

_Static_assert(GC_AGE_LEAST_NS == 1ull << LEAST_LOG2, "classes are cut from the bits of an age");

static uint32_t class_of(uint64_t age_ns)
{
    unsigned log2, class;

    if (age_ns < GC_AGE_LEAST_NS)
        return 0;
    log2 = 63u - (unsigned)__builtin_clzll(age_ns);
    class = ((log2 - LEAST_LOG2) << SUBS_LOG2) + 1;
    class += (unsigned)(age_ns >> (log2 - SUBS_LOG2)) & ((1u << SUBS_LOG2) - 1);
    return class < GC_AGES ? class : GC_AGES - 1;
}

uint32_t gc_cell(uint64_t age_ns, const void *key, size_t n)
{
    return class_of(age_ns) * GC_GROUPS + (uint32_t)(XXH3_64bits(key, n) % GC_GROUPS);
}

uint32_t gc_ages_cut(const struct gc_ages *a, uint64_t bytes)
{
    uint32_t cell = GC_CELLS, cut = GC_CELLS;
    uint64_t sum = 0;

    while (cell > GC_GROUPS && sum < bytes) {
        sum += a->bytes[--cell];
        if (a->bytes[cell] > 0)
            cut = cell;
    }
    return cut;
}

uint64_t gc_age(uint64_t now_ns, uint64_t mtime_ns)
{
    if (mtime_ns <= now_ns)
        return now_ns - mtime_ns;
    return mtime_ns - now_ns > GC_AGE_AHEAD_NS ? INT64_MAX : 0;
}
