/* The arena: slots of DRAM. A slot holds one part of one block, for a copy in progress or as the
 * DRAM tier.
 *
 * The memory is reserved in one go. A thread touches it slab by slab, as huge pages if there are
 * any, so that the daemon serves before a large arena is ready. A slab has slots of one size; when
 * its last slot is freed it may take another size. On a host with several NUMA nodes slabs are
 * spread evenly, since they are made before any GPU is in use; a slab counts for the node that its
 * first page came to lie on.
 *
 * Promises:
 * - A slot is 4096-aligned, and as long as asked, padded to 4096. The padding is zeros when the
 *   slot is handed out.
 * - Slot memory does not move and is not unmapped before arena_free.
 * - Capacity is exact: bytes used are the sum of the padded slots.
 * - AddressSanitizer reports accesses to a free slot, or to the padding after the requested bytes.
 *
 * Threads: the event loop only. The memory of a slot may be used from any thread. */
#ifndef UCMD_ARENA_ARENA_H
#define UCMD_ARENA_ARENA_H

#include "daemon/base/numa.h"

#include <stdbool.h>
#include <stdint.h>

#define ARENA_ALIGN 4096u

typedef uint32_t slot_ref; /* 0 is none */

struct arena;
struct uv_loop_s;

/* Events of a slab that may be granted to a group (daemon/mapping/grant.h). */
enum arena_granted_event {
    GRANTED_READY,  /* it has memory, and no slot was handed out */
    GRANTED_FAILED, /* there was no memory for it */
    /* It has no slots any more. Whoever registered its memory undoes that; then grant_let_go, which
     * may be called at once. */
    GRANTED_GOES,
    GRANTED_KEPT, /* a worker did not let go of it: nobody waits for it any more */
    GRANTED_GONE, /* its memory was given back */
};

struct arena_config {
    uint64_t size, slab; /* bytes; size is rounded down to whole slabs */
    bool prefault;
    /* Map `fd`, borrowed (daemon/snapshot/persist.h). The thread allocates the file's space slab by
     * slab, as with prefault, so that every slot has its space. The arena ends where space runs
     * out. */
    bool file;
    int fd;
    /* Nodes to spread the memory over, borrowed; NULL: do not. Needs prefault or file: memory is
     * placed by its first touch, which otherwise is another thread's. */
    const struct numa *numa;
    /* Borrowed: a slab or table of a shared mapping ends when no worker has its memory any more
     * (daemon/mapping/loan.h). NULL: at once. */
    struct deadlines *deadlines;
    /* Runs on the event loop when a slab is ready, before any slot of it is handed out. */
    void (*slab_ready_cb)(void *ctx, uint32_t slab, void *base, uint64_t bytes);
    /* Runs when the file system was full: the arena has less than configured. May be NULL. */
    void (*ended_cb)(void *ctx);
    /* Bytes that may be granted at first; and that ever may, for which address space is
     * reserved. */
    uint64_t granted, granted_max;
    /* Something happened to the slab with that number of those that may be granted. On the event
     * loop. May be NULL if granted_max is 0. */
    void (*granted_cb)(void *ctx, enum arena_granted_event event, uint32_t number, void *base,
                       uint64_t bytes);
    void *ctx;
};

int arena_new(struct uv_loop_s *loop, const struct arena_config *config, struct arena **out);
/* With a file: to be called once; nothing is ready before. 0 or -errno. */
int arena_grow(struct arena *a);
/* Ends the thread and unmaps. Nobody may use a slot any more. NULL-safe. Closes its handles on the
 * event loop: run that once more afterwards. */
void arena_free(struct arena *a);

/* A slot of at least `bytes`, on `node` if there is one. 0: no slab of that size has a free slot,
 * and no slab is free. owner: for arena_slab_owners; less than 2^63. */
slot_ref arena_alloc(struct arena *a, uint64_t bytes, uint64_t owner, int node);
void arena_slot_free(struct arena *a, slot_ref slot);

/* Where it lies; slot_bytes (NULL: none): how long it is, padded. */
void *arena_memory(struct arena *a, slot_ref slot, uint64_t *slot_bytes);
uint32_t arena_slab_of(const struct arena *a,
                       slot_ref slot); /* also the number of its registered buffer */
uint64_t arena_slot_bytes(struct arena *a, slot_ref slot); /* padded */
uint64_t arena_padded(uint64_t bytes);
int arena_slot_node(const struct arena *a, slot_ref slot); /* NUMA_NONE: not known */

/* Empties a slab for another size. visit runs for each slot in use and may free it. If visit
 * returns false, the walk stops and arena_slab_owners returns false. A slot of an earlier run has
 * the owner 0 until arena_slot_own. */
bool arena_slab_owners(struct arena *a, uint32_t slab, bool (*visit)(void *ctx, uint64_t owner),
                       void *ctx);
/* closed: no slot of the slab is handed out until its last slot is freed, or it is opened again.
 * The slab has slots in use. */
void arena_slab_close(struct arena *a, uint32_t slab, bool closed);
bool arena_slab_closed(const struct arena *a, uint32_t slab);
/* 0: it has no slots, is not ready, or is granted. */
uint64_t arena_slab_slot_bytes(const struct arena *a, uint32_t slab);

/* Takes a slot of an earlier run, before arena_grow. It is in use from then on; its memory may be
 * touched when its slab is ready. 0: there is no such slot, it is taken, or its slab has slots
 * of another size. */
slot_ref arena_slot_take(struct arena *a, uint32_t slab, uint32_t slot, uint64_t bytes);
void arena_slot_position(struct arena *a, slot_ref slot, uint32_t *slab, uint32_t *number);
void arena_slot_own(struct arena *a, slot_ref slot, uint64_t owner);
/* 0: its slab is ready; -EAGAIN: not yet; -ENOSPC: it never will be. */
int arena_slot_ready(struct arena *a, slot_ref slot);

uint64_t arena_slots_used(const struct arena *a);
uint64_t arena_bytes_used(const struct arena *a);
uint64_t arena_bytes_ready(const struct arena *a);
uint64_t arena_bytes_configured(const struct arena *a); /* when it has grown */
/* Whether one of the slabs that will be ready next (`bytes` of them, at least one) has no slot of
 * an earlier run. */
bool arena_space_comes(const struct arena *a, uint64_t bytes);
uint64_t arena_slab_bytes(const struct arena *a);
/* numbers of slabs, those that may be granted included */
uint32_t arena_slabs(const struct arena *a);

/* ---- groups: some slabs are granted to a tenant, whose workers read their slots by themselves
 * (daemon/mapping/grant.h) ----
 *
 * They are numbered from 0 and, where this header says `slab`, follow the ordinary ones. A slot
 * of one is a slot as any other, and the daemon tells readers what it holds. */

/* Whose it is; NULL: it lies in an ordinary slab. */
struct arena_group *arena_slot_group(const struct arena *a, slot_ref slot);
/* The slot's bytes are whole, and do not change until arena_slot_retract: readers may use them. */
void arena_slot_publish(struct arena *a, slot_ref slot);
/* Readers miss the slot from now on. To be called before anybody is asked to write into it. Nothing
 * of a slot that is not published. Both: nothing of a slot in an ordinary slab. */
void arena_slot_retract(struct arena *a, slot_ref slot);

/* Nodes that the memory is spread over; 0: it is not. Memory that lies elsewhere counts for none.
 */
uint32_t arena_nodes(const struct arena *a);
struct arena_node {
    int node;
    uint64_t ready_bytes, used_bytes;
};
void arena_node(const struct arena *a, uint32_t i, struct arena_node *out);

#endif
