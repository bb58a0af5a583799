/* Parts that come into windows; for the files of this room only. */
#ifndef UCMD_CACHE_GROUP_H
#define UCMD_CACHE_GROUP_H

#include "daemon/cache/cache.h"

/* relocate.c */
struct cache_moves {
    struct list ops; /* struct relocation */
    uint32_t n, most;
};

/* window.c: searches for slots in windows. */
struct cache_groups {
    uint32_t looks;  /* in this turn of the loop */
    uint64_t change; /* counts turns, and what was released: what was in vain may not be any more */
    uint64_t untaken; /* the change since which nothing could be taken from others for `group` */
    const struct arena_group *group;
    uint32_t taking; /* 1 + the extent that is emptied for another group, or 0 */
    uint32_t taken;  /* where the search for such an extent goes on */
    bool over;       /* more is lent than the budget */
};

/* ---- window.c: slots in windows ---- */

/* A slot of the group's window; blocks that nobody uses leave it, or make an extent of another group free, if
 * they must. -EAGAIN: an extent comes, see arena_alloc_window. -ENOSPC: none may be had. Or another -errno. */
int cache_group_slot(struct cache *c, struct arena_group *group, uint64_t bytes, uint64_t owner,
                     slot_ref *out);
/* An extent that is taken from its group is emptied. True: there is more for the next turn of the loop. */
bool cache_groups_step(struct cache *c);

/* ---- relocate.c ---- */

/* Relocations go on, and cache_groups_step. */
bool cache_groups_run(void *ctx);
bool cache_groups_ready(const void *ctx);

#endif
