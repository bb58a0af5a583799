/* Parts move into windows, where workers of their tenant read them by themselves. */
#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"

#include <errno.h>

int cache_relocate(struct cache *c, block_ref ref, uint32_t part, struct arena_group *group,
                   struct cache_move *m)
{
    (void)c;
    (void)ref;
    (void)part;
    (void)group;
    list_init(&m->link);
    return -ENOSPC;
}

void cache_relocate_cancel(struct cache *c, struct cache_move *m)
{
    (void)c;
    list_remove(&m->link);
}

bool cache_window_place(struct cache *c, block_ref ref, uint32_t part, struct arena_place *out)
{
    const struct part *p = cache_part(c, ref, part);

    return p->dram == PART_DRAM_READY && arena_slot_place(c->arena, part_slot(p), out);
}
