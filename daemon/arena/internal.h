/* Shared by the files of this room only: arena.c has the slots, grow.c makes extents ready. */
#ifndef UCMD_ARENA_INTERNAL_H
#define UCMD_ARENA_INTERNAL_H

#include "daemon/arena/arena.h"

#include "daemon/base/list.h"

#include <pthread.h>
#include <uv.h>

struct extent {
    struct list link; /* in arena.free, in its class's partial list, or nowhere (full, not ready) */
    struct arena_class *class;
    uint64_t *owner;     /* one a slot in use */
    uint32_t *free_slot; /* stack of free slots; NULL until the extent has a class */
    uint32_t slots, n_free, home;
    uint8_t *used; /* bitmap, one byte a slot: tells a double free, and which owners are real */
};

struct arena_class {
    struct arena_class *next;
    uint64_t slot_bytes;
    uint32_t extents;
    struct list partial[]; /* extents with a free slot, by home */
};

/* Memory of one NUMA node, the extents' home. The last home, the only one where nothing is placed,
 * is of memory that lies anywhere. */
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
    bool unplaced; /* the thread's: it was told that extents can't be placed */
};

/* arena.c: the extent after the last that is ready is ready, too. */
void arena_extent_ready(struct arena *a, uint32_t extent);
/* The home that memory of the node is kept in; the last: of no node in particular. */
uint32_t arena_home_of(const struct arena *a, int node);
/* grow.c: the thread ends; its handle is the caller's to close, if there is one (threaded). */
void arena_grow_stop(struct arena *a);

#endif
