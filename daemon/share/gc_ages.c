#include "daemon/share/gc_ages.h"

#include <string.h>

#define SUBS_LOG2 6 /* classes to a doubling */
#define LEAST_LOG2 38

_Static_assert(GC_AGE_LEAST_NS == 1ull << LEAST_LOG2, "classes are cut from the bits of an age");

static unsigned class_of(uint64_t age_ns)
{
    unsigned log2, class;

    if (age_ns < GC_AGE_LEAST_NS)
        return 0;
    log2 = 63u - (unsigned)__builtin_clzll(age_ns);
    class = ((log2 - LEAST_LOG2) << SUBS_LOG2) + 1;
    class += (unsigned)(age_ns >> (log2 - SUBS_LOG2)) & ((1u << SUBS_LOG2) - 1);
    return class < GC_AGES ? class : GC_AGES - 1;
}

/* The least age in a class that is not the first. */
static uint64_t class_from(unsigned class)
{
    unsigned octave = (class - 1) >> SUBS_LOG2, sub = (class - 1) & ((1u << SUBS_LOG2) - 1);

    return ((1ull << SUBS_LOG2) + sub) << (LEAST_LOG2 - SUBS_LOG2 + octave);
}

void gc_ages_init(struct gc_ages *a)
{
    memset(a, 0, sizeof(*a));
}

void gc_ages_init_within(struct gc_ages *a, uint64_t age_ns)
{
    unsigned class = class_of(age_ns);
    uint64_t from = class_from(class);
    /* The last one has no end: it is looked at as if it were as wide as the one before it. */
    uint64_t width = 1ull << (63u - (unsigned)__builtin_clzll(from) - SUBS_LOG2);

    memset(a, 0, sizeof(*a));
    a->from_ns = from;
    a->to_ns = class < GC_AGES - 1 ? from + width : UINT64_MAX;
    a->width_ns = width / GC_AGES;
}

static unsigned place_of(const struct gc_ages *a, uint64_t age_ns)
{
    uint64_t n;

    if (!a->width_ns)
        return class_of(age_ns);
    n = (age_ns - a->from_ns) / a->width_ns;
    return n < GC_AGES ? (unsigned)n : GC_AGES - 1;
}

void gc_ages_add(struct gc_ages *a, uint64_t age_ns, uint64_t bytes)
{
    if (!a->width_ns || (age_ns >= a->from_ns && age_ns < a->to_ns))
        a->bytes[place_of(a, age_ns)] += bytes;
}

struct gc_cut gc_ages_cut(const struct gc_ages *a, uint64_t bytes)
{
    struct gc_cut cut = {.age_ns = GC_AGE_NEVER};
    unsigned least = a->width_ns ? 0 : 1, i = GC_AGES;
    uint64_t sum = 0;

    while (i > least && sum < bytes)
        sum += a->bytes[--i];
    if (sum == 0)
        return cut;
    cut.age_ns = a->width_ns ? a->from_ns + i * a->width_ns : class_from(i);
    if (sum > bytes)
        cut.over = sum - bytes;
    cut.need = a->bytes[i] - cut.over;
    return cut;
}

uint64_t gc_age(uint64_t now_ns, uint64_t mtime_ns)
{
    if (mtime_ns <= now_ns)
        return now_ns - mtime_ns;
    return mtime_ns - now_ns > GC_AGE_AHEAD_NS ? INT64_MAX : 0;
}
