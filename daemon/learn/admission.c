#include "daemon/learn/learn.h"

#define HITS_AT_STAKE 128u   /* one hit in so many may be lost */
#define EVIDENCE 1024u       /* parts that NVMe let go of unused, before any block is refused */
#define COUNT_MAX (1u << 22) /* then all count half */

/* Blocks that are stored one after the other: a stretch is longer than chains are, since a prefix
 * is of use only as a whole. */
#define STRETCH 1024u
#define STRETCHES 16u

static void halve(struct admission *a)
{
    a->hits /= 2;
    a->stored /= 2;
    a->returned /= 2;
    a->unused /= 2;
}

void admission_hits(struct admission *a, uint32_t n)
{
    a->hits += n;
    if (a->hits >= COUNT_MAX)
        halve(a);
}

void admission_returned(struct admission *a)
{
    if (++a->returned >= COUNT_MAX)
        halve(a);
}

void admission_unused(struct admission *a)
{
    if (++a->unused >= COUNT_MAX)
        halve(a);
}

bool admission_reused_only(const struct admission *a)
{
    uint64_t seen = (uint64_t)a->returned + a->unused;

    return a->unused >= EVIDENCE &&
           (uint64_t)a->stored * a->returned / seen < a->hits / HITS_AT_STAKE;
}

bool admission_first(struct admission *a)
{
    if (++a->stored >= COUNT_MAX)
        halve(a);
    return !admission_reused_only(a) || a->stored / STRETCH % STRETCHES == 0;
}
