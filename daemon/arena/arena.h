/* The arena: DRAM slots, staging and DRAM tier in one. A slot holds one part of one block.
 *
 * Memory is reserved at once and made ready extent by extent by a thread of its own (touched, huge
 * pages where there are any), so that the daemon serves before a large arena is warm. An extent is
 * carved into slots of one size; when its last slot is freed it may take another size. On a host
 * of several NUMA nodes extents are spread over them evenly, since they are made before any GPU is
 * in use; an extent counts as of the node that its first page came to lie on.
 * Promise: slots are 4096-aligned and at least as long as asked, padded to 4096; slot memory never
 * moves or unmaps until arena_free. Capacity is exact: bytes used = sum of padded slots.
 * Threads: the loop only, but for the memory itself, which whoever got the slot may use. */
#ifndef UCMD_ARENA_ARENA_H
#define UCMD_ARENA_ARENA_H

#include "daemon/base/numa.h"

#include <stdbool.h>
#include <stdint.h>

#define ARENA_ALIGN 4096u

typedef uint32_t slot_ref; /* 0 is none */

struct arena;
struct uv_loop_s;

struct arena_config {
    uint64_t size, extent; /* bytes; size is rounded down to whole extents */
    bool prefault;
    bool file; /* map `fd`, borrowed (daemon/arena/persist.h). Its room is taken extent by extent as
                * if prefault were set, so that it can't run out under a slot; where it ends the
                * arena ends. */
    int fd;
    /* Nodes to spread the memory over, borrowed; NULL: as it comes. So it does without prefault
     * or a file, too: it is placed when it is touched, and then others touch it first. */
    const struct numa *numa;
    /* Called on the loop when an extent has become ready, before any slot of it was handed out. */
    void (*extent_ready)(void *ctx, uint32_t extent, void *base, uint64_t bytes);
    /* A file's room ended: there is less than configured from now on. May be NULL. */
    void (*ended)(void *ctx);
    void *ctx;
};

int arena_new(struct uv_loop_s *loop, const struct arena_config *config, struct arena **out);
/* Of a file: nothing is ready before this call, which comes once. 0 or -errno. */
int arena_grow(struct arena *a);
/* Stops the growing thread and unmaps. Nobody may use a slot any more. NULL-safe. Closes its
 * handles on the loop: run it once more afterwards. */
void arena_free(struct arena *a);

/* A slot of at least `bytes`; owner is kept with it for arena_extent_owners. On `node` when an
 * extent there has room or is free, else on any. 0 when no extent of the size has room and no
 * extent is free. */
slot_ref arena_alloc(struct arena *a, uint64_t bytes, uint64_t owner, int node);
void arena_slot_free(struct arena *a, slot_ref slot);

void *arena_memory(struct arena *a, slot_ref slot);
uint32_t arena_extent_of(struct arena *a, slot_ref slot);  /* index of its registered buffer, too */
uint64_t arena_slot_bytes(struct arena *a, slot_ref slot); /* padded */
uint64_t arena_padded(uint64_t bytes);
int arena_slot_node(struct arena *a, slot_ref slot); /* NUMA_NONE: not known */

/* Calls visit for each slot in use of the slot's extent, until it says false: to empty it for
 * another size. One that was kept has the owner 0 until it gets another. */
void arena_extent_owners(struct arena *a, slot_ref slot, bool (*visit)(void *ctx, uint64_t owner),
                         void *ctx);

/* Slots of an earlier run in a file's memory: taken before arena_grow, in use from then on, but
 * not to be touched before their extent is ready. 0 when there is no such slot, or it is taken, or
 * its extent has slots of another size. */
slot_ref arena_slot_keep(struct arena *a, uint32_t extent, uint32_t slot, uint64_t bytes);
void arena_slot_place(struct arena *a, slot_ref slot, uint32_t *extent, uint32_t *number);
void arena_slot_own(struct arena *a, slot_ref slot, uint64_t owner);
/* -EAGAIN: not yet; -ENOSPC: it never will be. */
int arena_slot_ready(struct arena *a, slot_ref slot);

uint64_t arena_slots_used(const struct arena *a);
uint64_t arena_bytes_used(const struct arena *a);
uint64_t arena_bytes_ready(const struct arena *a);
uint64_t arena_bytes_configured(const struct arena *a); /* what there will be */
/* An extent in which nothing was kept is among those of the next `bytes`, one extent at least, that
 * get ready. */
bool arena_room_comes(const struct arena *a, uint64_t bytes);
uint64_t arena_extent_bytes(const struct arena *a);

/* Nodes that the memory is spread over; 0: nothing is placed. What came to lie elsewhere counts for
 * none of them. */
uint32_t arena_nodes(const struct arena *a);
struct arena_node {
    int node;
    uint64_t ready_bytes, used_bytes;
};
void arena_node(const struct arena *a, uint32_t i, struct arena_node *out);

#endif
