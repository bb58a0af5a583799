#include "daemon/seal/seeds.h"
#include "daemon/share/share_internal.h"

int share_seeds_open(struct share *s, void (*changed_cb)(void *ctx))
{
    const struct share_settings *set = &s->settings;

    if (!set->seal || !set->seeds || set->seeds[0] == '\0')
        return 0;
    return seeds_open(set->loop, set->seeds, set->seeds_ms, changed_cb, s, &s->seeds);
}

void share_seeds_close(struct share *s)
{
    seeds_close(s->seeds);
}

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
