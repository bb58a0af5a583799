/* The memory that the daemon and a worker's CUDA copy agent share to move copies through a staging
 * ring: entries of the worker's GPU memory. The worker creates it (a sealed memfd, a new one for
 * every ring.register) and sends it; both map it. docs/design/mappings.md, "Staging rings",
 * describes it.
 *
 * Each entry has an order and one state word. The daemon writes the order and posts it. The
 * copy agent claims the order, moves the entry with one kernel and says done, or refuses. The
 * daemon may revoke an order that nobody has claimed. A load's bytes are in the entry before its
 * order is posted; the daemon fetches a dump's bytes after done. So no GPU work of one side ever
 * waits for the other side: a process that dies or hangs leaves only a word behind.
 *
 * Promises:
 * - An order is either claimed or revoked, never both, in whatever order the processes act.
 * - A tag names one order of one registration.
 * - Neither side uses anything that the other may write as an address or a length unchecked: the
 *   daemon reads only state words, the copy agent checks a copy of every order against its own
 *   registration.
 * Threads: one on each side, and whichever abandons the ring. */
#ifndef UCM_PROTO_STAGING_H
#define UCM_PROTO_STAGING_H

#include "proto/limits.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define UCM_STAGING_ITEMS 4096 /* blocks of one order */
#define UCM_STAGING_PAGE 4096  /* bytes of the words */
#define UCM_STAGING_ALIGN 16u  /* items begin at multiples of this in an entry */

enum ucm_staging_phase {
    STAGING_FREE = 0,
    STAGING_POSTED = 1,  /* by the daemon */
    STAGING_CLAIMED = 2, /* by the copy agent: done or refused will follow */
    STAGING_DONE = 3,    /* by the copy agent: the entry was moved */
    STAGING_REFUSED = 4, /* by the copy agent: it did nothing */
    STAGING_REVOKED = 5, /* by the daemon or client library: too slow, or the connection broke */
};

struct ucm_staging_entry {
    _Atomic uint64_t state; /* tag << 8 | phase */
    uint8_t unused[56];
};

struct ucm_staging_order {
    uint32_t direction; /* 0 load, 1 dump */
    uint32_t region;    /* ring_region of region.register */
    uint32_t first_plane, n_planes, n_items;
    /* Not 0: items are in the encoding of the region's namespace, pages are not */
    uint32_t converts;
    /* Not 0: K of the items is re-rotated, by so many tables of angles. Block ids are then followed
     * by a number for each item: which of the tables its K is re-rotated by, or none
     * (UCM_STAGING_STAYS); and these by the tables. */
    uint32_t tables;
    uint32_t unused[9];
    uint32_t blocks[UCM_STAGING_ITEMS]; /* item i begins at i * ucm_staging_pitch() */
};

#define UCM_STAGING_SHIFT_WORDS 2u /* of an item in an order that re-rotates */
#define UCM_STAGING_STAYS UINT32_MAX

#define UCM_STAGING_KNOWS_CONVERSION 1u /* orders with `converts` */
#define UCM_STAGING_KNOWS_SHIFTED 2u    /* and with `tables` */

struct ucm_staging_words {
    _Atomic uint32_t generation; /* of this registration, 1 to 4095; by the daemon */
    _Atomic uint32_t dead;       /* not 0: no kernel may begin any more; by either */
    _Atomic uint32_t bell;       /* counts posts; a futex */
    _Atomic uint32_t asleep;     /* not 0: the copy agent waits for the bell */
    _Atomic uint32_t soon;       /* not 0: orders are near, sleep lightly; by the daemon */
    /* Bits of UCM_STAGING_KNOWS_, by the copy agent: the orders that it can carry out. It gets no
     * others. */
    _Atomic uint32_t knows;
    uint8_t unused[40];
    struct ucm_staging_entry entries[UCM_MAX_STAGING_ENTRIES];
};

struct ucm_staging {
    union {
        struct ucm_staging_words words;
        uint8_t page[UCM_STAGING_PAGE];
    };
    struct ucm_staging_order orders[UCM_MAX_STAGING_ENTRIES];
    uint8_t padding[UCM_STAGING_PAGE -
                    sizeof(struct ucm_staging_order) * UCM_MAX_STAGING_ENTRIES % UCM_STAGING_PAGE];
};

/* A tag: the registration's generation above the number of the order. Never 0. */
#define UCM_STAGING_GENERATIONS 4096u
#define UCM_STAGING_NUMBERS (1u << 20)
static inline uint32_t ucm_staging_tag(uint32_t generation, uint32_t number)
{
    return generation << 20 | number % UCM_STAGING_NUMBERS;
}
static inline uint32_t ucm_staging_generation(uint32_t tag)
{
    return tag >> 20;
}
/* From a random number, never 0. */
static inline uint32_t ucm_staging_generation_of(uint32_t random)
{
    return 1 + random % (UCM_STAGING_GENERATIONS - 1);
}

/* The parts of a state word. */
static inline uint32_t ucm_staging_tag_of(uint64_t state)
{
    return (uint32_t)(state >> 8);
}
static inline enum ucm_staging_phase ucm_staging_phase_of(uint64_t state)
{
    return (enum ucm_staging_phase)(state & 0xff);
}

/* Bytes from an item to the next in an entry. */
static inline uint64_t ucm_staging_pitch(uint64_t item_bytes)
{
    return (item_bytes + UCM_STAGING_ALIGN - 1) / UCM_STAGING_ALIGN * UCM_STAGING_ALIGN;
}

/* Daemon: posts the entry's order, which is written. Wakes a sleeping copy agent. */
void ucm_staging_post(struct ucm_staging *staging, uint32_t entry, uint32_t tag);
/* Either side: takes an order from one phase to another. false: it is not in phase `from`. */
bool ucm_staging_move(struct ucm_staging *staging, uint32_t entry, uint32_t tag,
                      enum ucm_staging_phase from, enum ucm_staging_phase to);
/* Copy agent: sleeps for at most timeout_ms, or until the bell differs from `bell`, which the
 * caller read before it looked for orders. */
void ucm_staging_sleep(struct ucm_staging *staging, uint32_t bell, unsigned timeout_ms);
void ucm_staging_wake(struct ucm_staging *staging);
/* Client library, after its connection broke: revokes every posted order, so that none is claimed
 * any more, and waits for the claimed ones to end. false: timeout_ms passed before that. */
bool ucm_staging_abandon(struct ucm_staging *staging, unsigned timeout_ms);

/* Copy agent: does the order fit an entry of entry_bytes, and a region with so many blocks and
 * planes? `order` is a copy that the other side can't change. fragment(ctx, plane) returns a
 * plane's bytes. *item_bytes: of one item. */
bool ucm_staging_order_sound(const struct ucm_staging_order *order, uint64_t entry_bytes,
                             uint32_t blocks, uint32_t planes,
                             uint32_t (*fragment)(const void *ctx, uint32_t plane), const void *ctx,
                             uint64_t *item_bytes);
/* The same of an order that is sound so far, and its turns: do the tables, of so many words each,
 * fit after their numbers, and are these right? table_words 0: the region's K is not
 * re-rotated. */
bool ucm_staging_shifts_sound(const struct ucm_staging_order *order, uint32_t table_words);

#endif
