/* Parts that come into windows; for the files of this room only. */
#ifndef UCMD_CACHE_WINDOW_H
#define UCMD_CACHE_WINDOW_H

#include "daemon/cache/cache.h"

/* relocate.c */
struct cache_relocations {
    struct list ops; /* struct relocation */
    uint32_t n, most;
};

/* window.c: searches for slots in windows. */
struct cache_windows {
    uint32_t looks;  /* in this turn of the loop */
    uint64_t change; /* counts turns, and what was released: what was in vain may not be any more */
    uint64_t untaken; /* the change since which nothing could be taken from others for `group` */
    const struct arena_group *group;
    uint32_t taking; /* 1 + the extent that is emptied for another group, or 0 */
    uint32_t taken;  /* where the search for such an extent goes on */
    bool over;       /* more is lent than the budget */
};

/* ---- relocate.c ---- */

/* Relocations that wait for something go on if they can. */
void cache_relocations_pump(struct cache *c);

/* ---- window.c: slots in windows ---- */

/* A slot of the group's window; blocks that nobody uses leave it, or make an extent of another group free, if
 * they must. -EAGAIN: an extent comes, see arena_alloc_window. -ENOSPC: none may be had. Or another -errno. */
int cache_window_slot(struct cache *c, struct arena_group *group, uint64_t bytes, uint64_t owner,
                      slot_ref *out);
/* Relocations go on, and an extent that is taken from its group is emptied. */
bool cache_windows_run(void *ctx);
bool cache_windows_ready(const void *ctx);

#endif
