/* The memory that the daemon and a worker's CUDA companion share to move copies through slices of
 * the worker's GPU memory: the worker makes it (a sealed memfd, new for every ring.register) and
 * sends it, both map it. docs/protocol.md, "Rings", is its text.
 *
 * A slice goes through turns, each of one word: the daemon writes an order and posts the turn, the
 * companion claims it, moves the slice with one kernel, and says done; or it refuses. A turn that
 * nobody has claimed can be revoked. For a load the slice's bytes are there before the turn is
 * posted; for a dump the daemon fetches them after done. So neither side's GPU work ever waits for
 * the other's: what a process that died or hangs leaves behind is a word.
 *
 * Promises: of claimed and revoked only one happens, whatever the two processes do when. A tag
 * names one turn of one registration. Nothing that the other side may write here is used as an
 * address or a length unchecked: the daemon reads turns alone, the companion checks a copy of every
 * order against its own registration.
 * Threads: one on each side, and whoever abandons the ring. */
#ifndef UCM_PROTO_RING_H
#define UCM_PROTO_RING_H

#include "proto/limits.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define UCM_RING_ITEMS 4096 /* blocks of one order */
#define UCM_RING_PAGE 4096  /* the words */
#define UCM_RING_ALIGN 16u  /* items begin at such bytes in a slice */

enum ucm_ring_phase {
    RING_FREE = 0,
    RING_POSTED = 1,  /* by the daemon */
    RING_CLAIMED = 2, /* by the companion: done or refused will follow */
    RING_DONE = 3,    /* by the companion: the slice was moved */
    RING_REFUSED = 4, /* by the companion: it does nothing for this turn */
    RING_REVOKED = 5, /* it was too slow, or its connection broke */
};

struct ucm_ring_slice {
    _Atomic uint64_t turn; /* tag << 8 | phase */
    uint8_t unused[56];
};

struct ucm_ring_order {
    uint32_t direction; /* 0 load, 1 dump */
    uint32_t region;    /* ring_region of region.register */
    uint32_t first_plane, n_planes, n_items;
    uint32_t unused[11];
    uint32_t
        blocks[UCM_RING_ITEMS]; /* item i begins ucm_ring_pitch() * i behind the slice's start */
};

struct ucm_ring_words {
    _Atomic uint32_t generation; /* of this registration, 1 to 4095; by the daemon */
    _Atomic uint32_t dead;       /* not 0: no kernel may begin any more; by either */
    _Atomic uint32_t bell;       /* counts posts; a futex */
    _Atomic uint32_t asleep;     /* not 0: the companion waits at the bell */
    _Atomic uint32_t soon;       /* not 0: turns are under way, sleep lightly; by the daemon */
    uint8_t unused[44];
    struct ucm_ring_slice slices[UCM_MAX_SLICES];
};

struct ucm_ring {
    union {
        struct ucm_ring_words words;
        uint8_t page[UCM_RING_PAGE];
    };
    struct ucm_ring_order orders[UCM_MAX_SLICES];
    uint8_t padding[UCM_RING_PAGE - sizeof(struct ucm_ring_order) * UCM_MAX_SLICES % UCM_RING_PAGE];
};

/* Tags: the registration's generation above the number of the turn. Never 0. */
#define UCM_RING_GENERATIONS 4096u
#define UCM_RING_TURNS (1u << 20)
static inline uint32_t ucm_ring_tag(uint32_t generation, uint32_t turn)
{
    return generation << 20 | turn % UCM_RING_TURNS;
}
static inline uint32_t ucm_ring_generation(uint32_t tag)
{
    return tag >> 20;
}
/* From a random number, never 0. */
static inline uint32_t ucm_ring_generation_of(uint32_t random)
{
    return 1 + random % (UCM_RING_GENERATIONS - 1);
}

/* What is to be seen in `turn`. */
static inline uint32_t ucm_ring_turn_tag(uint64_t turn)
{
    return (uint32_t)(turn >> 8);
}
static inline enum ucm_ring_phase ucm_ring_turn_phase(uint64_t turn)
{
    return (enum ucm_ring_phase)(turn & 0xff);
}

/* From an item to the next in a slice. */
static inline uint64_t ucm_ring_pitch(uint64_t item_bytes)
{
    return (item_bytes + UCM_RING_ALIGN - 1) / UCM_RING_ALIGN * UCM_RING_ALIGN;
}

/* The daemon: the order is written. Wakes a companion that sleeps. */
void ucm_ring_post(struct ucm_ring *ring, uint32_t slice, uint32_t tag);
/* Takes a turn from one phase to another; false: it is not in the phase `from` (any more). */
bool ucm_ring_move(struct ucm_ring *ring, uint32_t slice, uint32_t tag, enum ucm_ring_phase from,
                   enum ucm_ring_phase to);
/* The companion: waits at the bell for at most timeout_ms, but not when it has rung since `bell`
 * was read. */
void ucm_ring_sleep(struct ucm_ring *ring, uint32_t bell, unsigned timeout_ms);
void ucm_ring_wake(struct ucm_ring *ring);
/* The worker, when its connection broke: no turn is claimed from now on, and those that were have
 * ended; after timeout_ms it gives up on them, and returns false. */
bool ucm_ring_abandon(struct ucm_ring *ring, unsigned timeout_ms);

/* Is this an order for a slice of slice_bytes, of a region with so many blocks and planes? Of a
 * copy that the other side can't change. chunk(ctx, plane) is a plane's bytes. *item_bytes: of one
 * item. */
bool ucm_ring_order_sound(const struct ucm_ring_order *order, uint64_t slice_bytes, uint32_t blocks,
                          uint32_t planes, uint32_t (*chunk)(const void *ctx, uint32_t plane),
                          const void *ctx, uint64_t *item_bytes);

#endif
