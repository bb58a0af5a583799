/* Shared by the files of this module only: arena.c has the slots, life.c makes slabs ready, and
 * begins and ends all; daemon/mapping/grant_internal.h has what grants slabs to groups. */
#ifndef UCMD_ARENA_INTERNAL_H
#define UCMD_ARENA_INTERNAL_H

#include "daemon/arena/arena.h"

#include "daemon/base/list.h"

#include <pthread.h>
#include <uv.h>

/* In slab.owner: the slot is free; the low 32 bits have the next free one. */
#define SLOT_FREE (UINT64_C(1) << 63)

struct slab {
    /* In its home's free list, in `partial`, or (full, closed, not ready) in none. One that is
     * granted may be in its group's empty list. */
    struct list link;
    char *base;
    uint64_t *owner;            /* by slot */
    struct list *partial;       /* where it is while it has free slots that may be handed out */
    uint64_t slot_bytes;        /* of each of its slots */
    uint32_t slots;             /* 0: it may take any slot size */
    uint32_t n_free, free_slot; /* of the free ones, those that were given back: the first one */
    /* The first one that was not handed out since it has slots of this size; slots: none. */
    uint32_t fresh;
    uint32_t home;
    struct arena_group *group; /* that it is granted to */
    bool closed;               /* it is being emptied: not in arena.partial */
};

/* The slabs of one NUMA node. The last home has those of no node in particular; without placement
 * it is the only one. */
struct arena_home {
    struct list free; /* slabs without slots */
    uint32_t n_free, ready;
    uint64_t used_bytes;
};

struct arena {
    struct arena_config config;
    uv_loop_t *loop;
    char *base;
    uint32_t slabs, ready, slot_bits;
    uint32_t limit; /* slabs that there will be */
    struct slab *slab;
    uint32_t nodes; /* homes that are a node: config.numa's, or none */
    struct arena_home *home;
    struct list *partial; /* slabs with free slots, by slot size and home */
    uint64_t used_slots, used_bytes;

    uv_async_t grown; /* the thread made `touched` slabs ready */
    pthread_t thread;
    pthread_mutex_t lock; /* guards the three below */
    uint32_t touched;
    bool stop, ended; /* ended: `touched` grows no further */
    bool threaded;
    bool unplaced; /* the thread's: placing failed, and was logged */

    struct granter *granter; /* daemon/mapping/grant_internal.h */
    uint32_t granted;        /* slabs that may be granted to groups, after `slabs` */
    /* the first ones, which have been: no memory is touched for the others */
    uint32_t granted_used;
    /* one of theirs is free */
    void (*granted_freed)(struct arena *a, struct slab *e, uint32_t slot);
    unsigned handles; /* of the event loop, to be closed */
};

/* arena.c: the next slab is ready. */
void arena_slab_ready(struct arena *a, uint32_t slab);
/* The home of a node; the last one for a node that is not among config.numa's. */
uint32_t arena_home_of(const struct arena *a, int node);
/* Divides the slab into slots. 0 or -ENOMEM. */
int arena_carve(struct arena *a, struct slab *e, uint64_t slot_bytes);
/* Hands out a free slot of the slab for so many bytes. */
slot_ref arena_slot_hand_out(struct arena *a, struct slab *e, uint64_t bytes, uint64_t owner);
/* Its memory goes to somebody else. */
void arena_slab_unpoison(const struct arena *a, uint32_t slab);

static inline bool arena_slab_granted(const struct arena *a, uint32_t slab)
{
    return slab >= a->slabs;
}

static inline bool arena_slot_used(const struct slab *e, uint32_t slot)
{
    return !(e->owner[slot] & SLOT_FREE);
}

/* daemon/mapping/grant.c: address space for config.granted_max, or what there is. 0 or -errno. */
int arena_granted_init(struct arena *a);
/* The thread has ended, and nobody uses or maps anything. */
void arena_granted_close(struct arena *a);
/* The handle of the event loop that is to be closed; NULL: none. */
uv_async_t *arena_granted_handle(struct arena *a);
void arena_granted_stop(struct arena *a);

#endif
