/* Parts on their way into mappings (relocate.c), and the mapping slots for them (slots.c). The
 * cache has one part's way (daemon/cache/move.h, extend.h); here is why it goes, for whom, which of
 * its tenant's slots it gets and when it is given up.
 *
 * A relocation is of one part, for all who ask for it. Thread: the event loop only. */
#ifndef UCMD_MAPPING_RELOCATE_H
#define UCMD_MAPPING_RELOCATE_H

#include "daemon/cache/extend.h"
#include "daemon/mapping/grant.h"

/* Searches for slots. */
struct mapping_search {
    uint32_t looks; /* in this iteration of the event loop */
    uint64_t iterations;
    uint64_t untaken; /* the change since which nothing could be taken from others for `group` */
    const struct arena_group *group;
    uint32_t taking; /* 1 + the slab that is emptied for another group, or 0 */
    uint32_t taken;  /* where the search for such a slab goes on */
    bool over;       /* more is granted than the budget */
};

/* All of them. */
struct relocations {
    struct cache *cache; /* borrowed, as are the next three */
    struct arena *arena;
    struct index *index;
    struct metrics *metrics;
    struct cache_mover mover;
    struct list all; /* struct relocation */
    uint32_t n, most;
    struct mapping_search search;
};

/* On zeroed memory with what it borrows. */
void relocations_open(struct relocations *rs);
/* None is under way. */
void relocations_close(struct relocations *rs);

/* Somebody wants a part to lie where workers of its tenant read it by themselves. The caller's
 * memory. */
struct mapping_move {
    uint8_t priority;  /* in: of a read, if there must be one, as cache_get's */
    bool small;        /* in: likewise, as cache_wait.small */
    bool read, copied; /* out: it was read from below; it was copied within DRAM */
    /* 0: the part lies in a slot of the group's mapping, and the caller has one reference to it.
     * Else it has none. -ENOSPC: no slot of the mapping is available; -ENOENT, -EIO, -EBUSY: as
     * cache_get's; or the kernel's error for want of memory. */
    void (*done_cb)(struct mapping_move *m, int status);
    /* The relocation's own. */
    struct list link;
};
/* Brings part `part` of a referenced block of the group's tenant into a slot of the group's
 * mapping: reads it into one, or copies it and moves the part there once nobody else uses it.
 * CACHE_READY: it is there, and the caller has one reference to it. CACHE_PENDING: done_cb will run
 * once the part was read, or was copied and others no longer use it, or that failed; a caller that
 * gives up cancels. Or -errno, as done_cb's. */
int mapping_move(struct relocations *rs, block_ref ref, uint32_t part, struct arena_group *group,
                 struct mapping_move *m);
/* done_cb will not run. If nobody else waits, a copy is dropped, and the part stays where it is.
 * m->link is initialised; m need not wait. */
void mapping_move_cancel(struct relocations *rs, struct mapping_move *m);
/* Where workers read the part, to which the caller has a reference. False: it lies in no mapping
 * slot, or was evicted by name. */
bool mapping_place(const struct relocations *rs, block_ref ref, uint32_t part,
                   struct grant_place *out);

/* ---- slots.c ---- */

/* Takes a slot of the group's mapping, if need be by evicting unused blocks from it or from a slab
 * of another group. -EAGAIN: a slab comes, see grant_slot. -ENOSPC: none is available. Or another
 * -errno. */
int mapping_slot(struct relocations *rs, struct arena_group *group, uint64_t bytes, uint64_t owner,
                 slot_ref *out);
/* A slab that is taken from its group is emptied. True: there is more for the next iteration of
 * the event loop. */
bool mapping_slots_step(struct relocations *rs);
/* There is more space to grant, or less, or a loan failed. */
void mapping_slots_changed(struct relocations *rs);

#endif
