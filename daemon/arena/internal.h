/* Shared by the files of this room only: arena.c has the slots, grow.c makes extents ready. */
#ifndef UCMD_ARENA_INTERNAL_H
#define UCMD_ARENA_INTERNAL_H

#include "daemon/arena/arena.h"

#include "daemon/base/list.h"

#include <pthread.h>
#include <uv.h>

/* In extent.owner: the slot is free; the low 32 bits have the next free one. */
#define SLOT_FREE (UINT64_C(1) << 63)

struct extent {
    struct list
        link; /* in its home's free list, in arena.partial, or (full, closed, not ready) in none */
    uint64_t *owner;     /* by slot */
    uint64_t slot_bytes; /* of each of its slots */
    uint32_t slots;      /* 0: it may take any slot size */
    uint32_t n_free, free_slot;
    uint32_t home;
    bool closed; /* it is being emptied: not in arena.partial */
};

/* The extents of one NUMA node. The last home has those of no node in particular; without placement
 * it is the only one. */
struct arena_home {
    struct list free; /* extents without slots */
    uint32_t n_free, ready;
    uint64_t used_bytes;
};

struct arena {
    struct arena_config config;
    uv_loop_t *loop;
    char *base;
    uint32_t extents, ready, slot_bits;
    uint32_t limit; /* extents that there will be */
    struct extent *extent;
    uint32_t nodes; /* homes that are a node: config.numa's, or none */
    struct arena_home *home;
    struct list *partial; /* extents with free slots, by slot size and home */
    uint64_t used_slots, used_bytes;

    uv_async_t grown; /* the thread made `touched` extents ready */
    pthread_t thread;
    pthread_mutex_t lock; /* guards the three below */
    uint32_t touched;
    bool stop, ended; /* ended: there will be no more than `touched` */
    bool threaded;
    bool unplaced; /* the thread's: placing failed, and was logged */
};

/* arena.c: the next extent is ready. */
void arena_extent_ready(struct arena *a, uint32_t extent);
/* The home of a node; the last one for a node that is not among config.numa's. */
uint32_t arena_home_of(const struct arena *a, int node);
/* grow.c: ends the thread. The caller closes `grown` if `threaded`. */
void arena_grow_stop(struct arena *a);

#endif
