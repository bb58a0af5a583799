/* The arena: slots of DRAM. A slot holds one part of one block, for a copy in progress or as the
 * DRAM tier.
 *
 * The memory is reserved at once. A thread makes it ready extent by extent (touches it, as huge
 * pages where there are any), so that the daemon serves before a large arena is warm. An extent has
 * slots of one size; when its last slot is freed it may take another size. On a host with several
 * NUMA nodes extents are spread evenly, since they are made before any GPU is in use; an extent
 * counts for the node that its first page came to lie on.
 *
 * Promises:
 * - A slot is 4096-aligned, and as long as asked, padded to 4096. The padding is zeros when the slot is handed out.
 * - Slot memory does not move and is not unmapped before arena_free.
 * - Capacity is exact: bytes used are the sum of the padded slots.
 * - AddressSanitizer reports who touches a free slot, or the padding behind what was asked for.
 *
 * Threads: the loop only. The memory of a slot may be used from any thread. */
#ifndef UCMD_ARENA_ARENA_H
#define UCMD_ARENA_ARENA_H

#include "daemon/base/numa.h"

#include <stdbool.h>
#include <stdint.h>

#define ARENA_ALIGN 4096u

typedef uint32_t slot_ref; /* 0 is none */

struct arena;
struct ucm_window_header;
struct uv_loop_s;

enum arena_window_event {
    WINDOW_READY,  /* it has memory, and no slot was handed out */
    WINDOW_FAILED, /* there was no memory for it */
    /* It has no slots any more. Whoever registered its memory undoes that; then arena_window_let_go, which may
     * be called at once. */
    WINDOW_GOES,
    WINDOW_KEPT, /* a worker did not let go of it: nobody waits for it any more */
    WINDOW_GONE, /* its memory was given back */
};

struct arena_config {
    uint64_t size, extent; /* bytes; size is rounded down to whole extents */
    bool prefault;
    /* Map `fd`, borrowed (daemon/arena/persist.h). The thread takes the file's space extent by
     * extent, as with prefault, so that none is missing under a slot. Where there is no more, the
     * arena ends. */
    bool file;
    int fd;
    /* Nodes to spread the memory over, borrowed; NULL: do not. Needs prefault or file: memory is
     * placed by its first touch, which otherwise is another thread's. */
    const struct numa *numa;
    /* Borrowed: an extent or table of windows ends when no worker has its memory any more (daemon/base/loan.h). NULL: at once. */
    struct deadlines *deadlines;
    /* Runs on the loop when an extent is ready, before any slot of it is handed out. */
    void (*extent_ready_cb)(void *ctx, uint32_t extent, void *base, uint64_t bytes);
    /* Runs when the file system was full: the arena has less than configured. May be NULL. */
    void (*ended_cb)(void *ctx);
    /* Bytes that may be lent to windows at first; and that ever may, for which address space is reserved. */
    uint64_t window, window_max;
    /* Something happened to a window extent. On the loop. May be NULL if window_max is 0. */
    void (*window_cb)(void *ctx, enum arena_window_event event, uint32_t window, void *base,
                      uint64_t bytes);
    void *ctx;
};

int arena_new(struct uv_loop_s *loop, const struct arena_config *config, struct arena **out);
/* With a file: to be called once; nothing is ready before. 0 or -errno. */
int arena_grow(struct arena *a);
/* Ends the thread and unmaps. Nobody may use a slot any more. NULL-safe. Closes its handles on the
 * loop: run that once more afterwards. */
void arena_free(struct arena *a);
/* The process ends now, but for threads that hang in the kernel and hold it: lets go of the memory of ordinary slots. What
 * such a thread still writes there reaches nobody, nor a file that the next daemon maps. */
void arena_give_up(struct arena *a);

/* A slot of at least `bytes`, on `node` if there is one. 0: no extent of that size has a free slot,
 * and no extent is free. owner: for arena_extent_owners; less than 2^63. */
slot_ref arena_alloc(struct arena *a, uint64_t bytes, uint64_t owner, int node);
void arena_slot_free(struct arena *a, slot_ref slot);

/* Where it lies; slot_bytes (NULL: none): how long it is, padded. */
void *arena_memory(struct arena *a, slot_ref slot, uint64_t *slot_bytes);
uint32_t arena_extent_of(const struct arena *a,
                         slot_ref slot); /* also the number of its registered buffer */
uint64_t arena_slot_bytes(struct arena *a, slot_ref slot); /* padded */
uint64_t arena_padded(uint64_t bytes);
int arena_slot_node(struct arena *a, slot_ref slot); /* NUMA_NONE: not known */

/* To empty an extent for another size. visit runs for each slot in use and may free it. Once visit
 * returns false no more slots are visited, and arena_extent_owners returns false. A slot of an earlier run has the owner 0 until arena_slot_own. */
bool arena_extent_owners(struct arena *a, uint32_t extent, bool (*visit)(void *ctx, uint64_t owner),
                         void *ctx);
/* closed: no slot of the extent is handed out until its last slot is freed, or it is opened again.
 * The extent has slots in use. */
void arena_extent_close(struct arena *a, uint32_t extent, bool closed);
bool arena_extent_closed(const struct arena *a, uint32_t extent);
/* 0: it has no slots, is not ready, or is a window's. */
uint64_t arena_extent_slot_bytes(const struct arena *a, uint32_t extent);

/* Takes a slot of an earlier run, before arena_grow. It is in use from then on; its memory may be
 * touched when its extent is ready. 0: there is no such slot, it is taken, or its extent has slots
 * of another size. */
slot_ref arena_slot_take(struct arena *a, uint32_t extent, uint32_t slot, uint64_t bytes);
void arena_slot_position(struct arena *a, slot_ref slot, uint32_t *extent, uint32_t *number);
void arena_slot_own(struct arena *a, slot_ref slot, uint64_t owner);
/* 0: its extent is ready; -EAGAIN: not yet; -ENOSPC: it never will be. */
int arena_slot_ready(struct arena *a, slot_ref slot);

uint64_t arena_slots_used(const struct arena *a);
uint64_t arena_bytes_used(const struct arena *a);
uint64_t arena_bytes_ready(const struct arena *a);
uint64_t arena_bytes_configured(const struct arena *a); /* when it has grown */
/* Of the extents that will be ready next, `bytes` of them and one at least, some has no slot of an
 * earlier run. */
bool arena_space_comes(const struct arena *a, uint64_t bytes);
uint64_t arena_extent_bytes(const struct arena *a);
uint32_t arena_extents(const struct arena *a); /* numbers of extents, those of windows included */

/* ---- windows: extents that workers of one tenant map, and read by themselves ----
 *
 * Window extents are numbered from 0, here and on the wire; where this header says `extent` they follow the
 * ordinary ones. One is lent to a group, which is a tenant: it gets memory of its own (a memfd), which never
 * holds another tenant's bytes. It is given back when it has no slot in use and no worker maps it; the next
 * loan of that number has another memfd. What is lent never exceeds the budget, memory included that only a
 * worker still maps.
 *
 * A slot of a window extent is a slot as any other. Its generation in the group's table (proto/window.h) is
 * even from arena_slot_publish until arena_slot_retract or arena_slot_free, and odd or 0 otherwise. */

struct arena_group;

/* Where workers read a slot. */
struct arena_place {
    uint32_t window, slot; /* numbers of the window extent, and of the slot in it */
    uint64_t generation;
};

/* Finds or makes the group of that tenant, and its table. 0; -EOPNOTSUPP: the arena has no windows; or
 * -errno. */
int arena_group_open(struct arena *a, const char *tenant, struct arena_group **out);
/* One more open. */
void arena_group_ref(struct arena_group *g);
/* Once for each open. A group that extents are lent to lives on. */
void arena_group_close(struct arena *a, struct arena_group *g);
const char *arena_group_tenant(const struct arena_group *g);
/* The table's descriptor, read-only and borrowed, and a copy of its header. */
int arena_group_table(const struct arena_group *g, struct ucm_window_header *out);

/* 0: a slot of an extent that is lent to the group. Else there is none now:
 * - -EAGAIN: an extent is being lent or given back; window_cb runs when that has ended;
 * - -ENOSPC: the budget is lent, and nothing of it comes back by itself;
 * - -EFBIG: no extent is as long; or an errno of the group's last loan, for a while after it failed. */
int arena_alloc_window(struct arena *a, struct arena_group *g, uint64_t bytes, uint64_t owner,
                       slot_ref *out);
/* The next slot of that size in use in the group's extents, round and round, and its owner; 0: there is none. */
slot_ref arena_group_next(struct arena *a, struct arena_group *g, uint64_t bytes, uint64_t *owner);
/* Who goes round these slots in several steps counts here. NULL: the group has no extent with slots of that size. */
struct arena_round {
    uint64_t slots; /* that there are, in use or not */
    uint64_t looks; /* in a row that were in vain */
    uint64_t vain;  /* the caller's own: when all were */
};
struct arena_round *arena_group_round(const struct arena *a, struct arena_group *g, uint64_t bytes);
/* Groups by what they have lent, the most first, `but` left out: the one behind that one (NULL: the first).
 * NULL: there are no more. */
struct arena_group *arena_group_most(struct arena *a, const struct arena_group *but,
                                     const struct arena_group *behind);
/* An extent of the group's with slots in use, for arena_extent_owners: the one at `i`, modulo how many extents
 * it has lent; UINT32_MAX: that one has no slots in use, or is closed. */
uint32_t arena_group_extent(struct arena *a, const struct arena_group *g, uint32_t i);
uint32_t arena_groups(const struct arena *a);

/* Whose it is; NULL: it lies in an ordinary extent. */
struct arena_group *arena_slot_group(struct arena *a, slot_ref slot);
/* The slot's bytes are whole, and do not change until arena_slot_retract: readers may use them. */
void arena_slot_publish(struct arena *a, slot_ref slot);
/* Readers miss the slot from now on. To be called before anybody is asked to write into it. Nothing of a slot
 * that is not published. Both: nothing of a slot in an ordinary extent. */
void arena_slot_retract(struct arena *a, slot_ref slot);
/* False: the slot is not published. */
bool arena_slot_place(struct arena *a, slot_ref slot, struct arena_place *out);

/* The descriptor of a window extent that is lent, read-only and borrowed. */
int arena_window_fd(struct arena *a, uint32_t window);
/* A worker gets that descriptor. Until release the extent is lent to no other group. */
void arena_window_map(struct arena *a, uint32_t window);
void arena_window_release(struct arena *a, uint32_t window);
/* revoke_cb runs when an extent without slots, which workers of its group map, is wanted by another one, or the
 * budget was lowered: they should release it. It runs on the loop, not inside a call of the arena. */
void arena_window_watch(struct arena *a,
                        void (*revoke_cb)(void *ctx, struct arena_group *g, uint32_t window),
                        void *ctx);
bool arena_window_revoked(const struct arena *a, uint32_t window);
/* The window extent at this address. */
uint32_t arena_window_at(const struct arena *a, const void *base);
/* After WINDOW_GOES. */
void arena_window_let_go(struct arena *a, uint32_t window);

/* A budget below what is lent takes effect as extents are given back. */
void arena_window_budget_set(struct arena *a, uint64_t bytes);
uint64_t arena_window_budget(const struct arena *a);
/* More is lent than that, without what is being given back. */
bool arena_window_over(const struct arena *a);
/* Bytes lent to the group, or with NULL to all; what comes or goes counts. */
uint64_t arena_window_lent(const struct arena *a, const struct arena_group *g);
/* The same of extents that ended, and that workers keep mapped. A group that keeps some may have so much less. */
uint64_t arena_window_kept(const struct arena *a, const struct arena_group *g);
uint64_t arena_window_used(const struct arena *a); /* of them by slots */

/* Nodes that the memory is spread over; 0: it is not. Memory that lies elsewhere counts for none.
 */
uint32_t arena_nodes(const struct arena *a);
struct arena_node {
    int node;
    uint64_t ready_bytes, used_bytes;
};
void arena_node(const struct arena *a, uint32_t i, struct arena_node *out);

#endif
