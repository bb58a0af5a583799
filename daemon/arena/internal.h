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
    uint32_t slots, n_free;
    uint8_t *used; /* bitmap, one byte a slot: tells a double free, and which owners are real */
};

struct arena_class {
    struct arena_class *next;
    struct list partial; /* extents with a free slot */
    uint64_t slot_bytes;
    uint32_t extents;
};

struct arena {
    struct arena_config config;
    uv_loop_t *loop;
    char *base;
    uint32_t extents, ready, slot_bits;
    uint32_t limit; /* extents that there will be */
    struct extent *extent;
    struct list free;
    struct arena_class *classes;
    uint64_t used_bytes;

    uv_async_t grown; /* the thread made `touched` extents ready */
    pthread_t thread;
    pthread_mutex_t lock; /* guards the three below */
    uint32_t touched;
    bool stop, ended; /* ended: there will be no more than `touched` */
    bool threaded;
};

/* arena.c: the extent after the last that is ready is ready, too. */
void arena_extent_ready(struct arena *a, uint32_t extent);
/* grow.c: the thread ends; its handle is the caller's to close, if there is one (threaded). */
void arena_grow_stop(struct arena *a);

#endif
