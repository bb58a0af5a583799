#include "daemon/share/share_internal.h"

int share_seed(struct share *s, const uint8_t fingerprint[UCM_FINGERPRINT_BYTES],
               const uint8_t **seed)
{
    *seed = NULL;
    return s->seeds ? seeds_find(s->seeds, fingerprint, seed) : 0;
}

const char *share_seeds_problem(const struct share *s)
{
    return s && s->seeds ? seeds_problem(s->seeds) : NULL;
}
