#include "daemon/index/ghosts.h"

#include <stdlib.h>
#include <string.h>

void ghosts_clear(struct ghosts *g, uint64_t ghosts)
{
    uint64_t sets = ghosts / GHOST_WAYS + 1;

    free(g->set);
    g->set = calloc(sets, sizeof(*g->set));
    g->sets = g->set ? (uint32_t)sets : 0;
}

static uint16_t *ghost_set(const struct ghosts *g, uint64_t hash)
{
    return g->set[(hash >> 32) * g->sets >> 32];
}

void ghost_put(struct ghosts *g, uint64_t hash, uint32_t uses)
{
    uint16_t *set;

    if (g->sets == 0)
        return;
    set = ghost_set(g, hash);
    memmove(set + 1, set, (GHOST_WAYS - 1) * sizeof(*set));
    set[0] = (uint16_t)((hash & ~(uint64_t)GHOST_USES) | uses);
}

int ghost_take(struct ghosts *g, uint64_t hash)
{
    uint16_t *set;

    if (g->sets == 0)
        return -1;
    set = ghost_set(g, hash);
    for (uint32_t i = 0; i < GHOST_WAYS; i++) {
        uint16_t word = set[i];

        if (word == 0 || (word ^ (uint16_t)hash) > GHOST_USES)
            continue;
        memmove(set + i, set + i + 1, (GHOST_WAYS - 1 - i) * sizeof(*set));
        set[GHOST_WAYS - 1] = 0;
        return word & (int)GHOST_USES;
    }
    return -1;
}
