#include "daemon/index/admission.h"

#define HITS_AT_STAKE 128u   /* one hit in so many may be lost */
#define EVIDENCE 1024u       /* parts that NVMe let go of unused, before any block is refused */
#define COUNT_MAX (1u << 22) /* then all count half */

/* Blocks that are stored one after the other: a stretch is longer than chains are, since a prefix
 * is of use only as a whole. */
#define STRETCH 1024u
#define STRETCHES 16u

static void count(struct admission *a, uint32_t *n, uint32_t more)
{
    *n += more;
    if (*n < COUNT_MAX)
        return;
    a->hits /= 2;
    a->stored /= 2;
    a->returned /= 2;
    a->unused /= 2;
}

void admission_hits(struct admission *a, uint32_t n)
{
    count(a, &a->hits, n);
}

void admission_returned(struct admission *a)
{
    count(a, &a->returned, 1);
}

void admission_unused(struct admission *a)
{
    count(a, &a->unused, 1);
}

bool admission_reused_only(const struct admission *a)
{
    uint64_t seen = (uint64_t)a->returned + a->unused;

    return a->unused >= EVIDENCE &&
           (uint64_t)a->stored * a->returned / seen < a->hits / HITS_AT_STAKE;
}

bool admission_first(struct admission *a)
{
    count(a, &a->stored, 1);
    return !admission_reused_only(a) || a->stored / STRETCH % STRETCHES == 0;
}
