/* Shared by the files of this room only: arena.c has the slots, grow.c makes extents ready. */
#ifndef UCMD_ARENA_INTERNAL_H
#define UCMD_ARENA_INTERNAL_H

#include "daemon/arena/arena.h"

#include "daemon/base/list.h"

#include <pthread.h>
#include <uv.h>

struct extent {
    struct list link; /* in its home's free list, in its class's partial list, or (full, not ready)
                       * in none */
    struct arena_class *class;
    uint64_t *owner;     /* one a slot in use */
    uint32_t *free_slot; /* stack of free slots; NULL until the extent has a class */
    uint32_t slots, n_free, home;
    uint8_t *used; /* a byte for each slot: it is in use */
};

struct arena_class {
    struct arena_class *next;
    uint64_t slot_bytes;
    uint32_t extents;
    struct list partial[]; /* extents with a free slot, by home */
};

/* The extents of one NUMA node. The last home has those of no node in particular; without placement
 * it is the only one. */
struct arena_home {
    struct list free; /* extents without a class */
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
    struct arena_class *classes;
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
