/* What a role of test_serve sees of its own ring: C, since C++ can't read the words. */
#include "proto/memory/staging.h"

#include <stdio.h>
#include <string.h>

unsigned ring_claimed(unsigned direction);

/* The ring is the process's only memfd of its size. */
static const struct ucm_staging *ring_find(void)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    unsigned long first, last, found = 0;
    char line[512];

    while (maps && found == 0 && fgets(line, sizeof line, maps))
        if (strstr(line, "/memfd:ucm-region") && sscanf(line, "%lx-%lx", &first, &last) == 2 &&
            last - first == sizeof(struct ucm_staging))
            found = first;
    if (maps)
        fclose(maps);
    return (const struct ucm_staging *)found;
}

unsigned ring_claimed(unsigned direction)
{
    const struct ucm_staging *ring = ring_find();
    unsigned n = 0;

    for (unsigned i = 0; ring && i < UCM_MAX_STAGING_ENTRIES; i++)
        n += ucm_staging_phase_of(atomic_load(&ring->words.entries[i].state)) == STAGING_CLAIMED &&
             ring->orders[i].direction == direction;
    return n;
}
