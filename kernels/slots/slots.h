/* Who lies in which slot of a worker's pool on the GPU. slots.c is the reference; the same steps run on the device, in any
 * number of threads, on the same arrays. Nothing here allocates, locks or copies KV: the caller brings memory, and says
 * when bytes are there.
 *
 * A *strand* is what all slots hold of a block: the K and V of one layer, or of one KV head of one layer. A *number* stands
 * for a block: its row in the worker's summaries region. Requests with a common prefix have the same numbers, and so the
 * same slots. A *key* is a number in a strand. The table slot_of has an entry for each key.
 *
 * A step is one decode of a batch. It has a number, above those of the steps before, and goes through the layers
 * in order. In each of them:
 *   resolve  looks up what the layer's lists chose. What is resident gets the step's stamp. What is not is put on
 *            the list of misses, once, however many lists want it.
 *   take     gives each miss a slot, whose old owner is then not resident.
 *   (copy)   somebody brings the bytes, through a mapping or by a gather.
 *   publish  ends each miss: its bytes are there, and from now on the key is resident; or they are not, and the key is
 *            not resident, its slot free and the key on the step's list of what was not served.
 * All stamps of a layer are there before the first slot is taken, and all slots of a layer are published before its
 * attention begins. Everything else (enter, leave, want, forget) happens between steps.
 *
 * A step that did not serve everything is thrown away. Its caller brings what is on the list (want, take, gather,
 * publish) and runs the step again, under the same number or a higher one. Under the same number everything that it
 * used before is still there. So it is under a higher one for all layers up to the first that was not
 * served: they choose the same blocks again, so they stamp them before a later layer takes a slot. Each run therefore
 * gets at least one layer further, and a step ends after as many runs as it has layers, however large the pool is.
 *
 * Which slot is taken. A hand goes around the pool in groups of UCM_SLOTS_GROUP. A miss takes, of the group at
 * the hand, the slot with the oldest stamp, free ones first, the first of equals; and the hand goes on to the next
 * group. A slot is passed over
 * - always if it has this step's stamp;
 * - at first, if another request has it and no more than its floor. When the hand has gone around and found
 *   nothing, floors no longer count: a step that fits the pool is never stopped by one.
 * This rule misses at most 3 % more often than LRU, looks at one stamp a slot, and writes nothing
 * to slots that it passes. A sum of score and age keeps what scored well long ago: up to twice the
 * misses. A step at 1/32 of the context misses 2.1 % with slots of one KV head in 2.6 steps' worth
 * of memory, and 6.1 % with slots of a layer.
 *
 * A slot counts for the request that brought its block. After that one has left, it counts for the next request
 * that uses it.
 *
 * What always holds, between any two calls:
 * 1. slot_of[k] = s >= 0 exactly if key[s] = k and s is published. So no two keys have a slot in common, and no key
 *    has two.
 * 2. slot_of[k] is UCM_SLOTS_WANTED exactly if k is on the list of misses, once, and not yet published.
 * 3. held[r] is the number of slots that count for r.
 * 4. Nothing that has the stamp of the step under way is taken.
 * 5. A request that has no more than its floor loses a slot only by publish and forget, or when every other slot is
 *    stamped or kept by a floor, which counts in floors_broken. It doesn't happen while the floors together are at most
 *    the slots, no request uses more slots in a step than its floor, and none uses another's.
 * 6. UCM_SLOTS_FULL is set only if all slots have the stamp of this step. */
#ifndef UCM_KERNELS_SLOTS_H
#define UCM_KERNELS_SLOTS_H

#include <stddef.h>
#include <stdint.h>

#define UCM_SLOTS_GROUP 32u /* a warp */
#define UCM_SLOTS_STRANDS_MAX (1u << 16)
#define UCM_SLOTS_NUMBERS_MAX (1u << 26)
#define UCM_SLOTS_MAX (1u << 28)
#define UCM_SLOTS_REQUESTS_MAX (1u << 16)
#define UCM_SLOTS_MISSES_MAX (1u << 24)
#define UCM_SLOTS_WHY 200

/* In slot_of. */
#define UCM_SLOTS_NONE (-1)   /* not resident */
#define UCM_SLOTS_WANTED (-2) /* on the list of misses */

#define UCM_SLOTS_NO_KEY 0xffffffffu   /* of a free slot */
#define UCM_SLOTS_NOBODY 0xffffffffu   /* the request of a slot that counts for none */
#define UCM_SLOTS_NO_INDEX 0xffffffffu /* in a list, behind what was chosen */

/* Flags of a step. */
#define UCM_SLOTS_UNSERVED 1u  /* some miss was not served: the step does not count */
#define UCM_SLOTS_FULL 2u      /* because all slots are this step's */
#define UCM_SLOTS_LIST_FULL 4u /* because a layer had more misses than the list has room for */
#define UCM_SLOTS_STRAY                                                                            \
    8u /* a chosen block has no number, or one that the table has no row for; or its request is none */

struct ucm_slots_shape {
    uint32_t strands, numbers; /* of the table */
    uint32_t slots;
    uint32_t requests; /* at most so many at once, 0 .. requests - 1 */
    uint32_t misses;   /* room of the list of misses and of that of keys not served */
};

struct ucm_slots_miss {
    uint32_t key;
    int32_t slot;     /* UCM_SLOTS_NONE until it is taken, or if none was found */
    uint32_t request; /* that wanted it first */
};

/* What steps keep for themselves and tell the host. */
struct ucm_slots_step {
    uint64_t now;    /* the step's number, from 1 on */
    uint32_t hand;   /* turns so far; groups are counted around */
    uint32_t misses; /* since the last publish; may be more than the list has room for */
    uint32_t
        unserved; /* of this step, the same; a key for which there was no room may count twice */
    uint32_t flags;
    uint32_t done; /* on the device: thread blocks of a launch that are done; 0 between launches */
    uint64_t missed, taken, floors_broken; /* since init */
};

/* Plain arrays in one piece of memory, the host's or the GPU's. */
struct ucm_slots {
    struct ucm_slots_shape shape;
    uint32_t groups;
    uint64_t *stamp;             /* [slots] the last step that used it; 0: free, or none did */
    struct ucm_slots_step *step; /* [1] */
    int32_t *slot_of;            /* [strands][numbers] */
    uint32_t *key;               /* [slots] */
    uint32_t *request;           /* [slots] */
    uint32_t *held, *floor;      /* [requests] */
    struct ucm_slots_miss *miss; /* [misses] */
    uint32_t *unserved;          /* [misses] keys */
};

/* 0; or -EINVAL, and why says which field is wrong. */
int ucm_slots_check(const struct ucm_slots_shape *shape, char why[UCM_SLOTS_WHY]);

/* Of a shape that ucm_slots_check accepts. memory: aligned to 64; only its address is used. */
size_t ucm_slots_bytes(const struct ucm_slots_shape *shape);
void ucm_slots_layout(struct ucm_slots *s, const struct ucm_slots_shape *shape, void *memory);

static inline uint32_t ucm_slots_key(const struct ucm_slots_shape *shape, uint32_t strand,
                                     uint32_t number)
{
    return strand * shape->numbers + number;
}

/* Nobody is resident, no request is there, the next step is any from 1 on. */
void ucm_slots_init(struct ucm_slots *s);

/* Request r, which is not there, gets a floor. -ENOSPC: with it the floors are more than the slots. Nothing is
 * allocated by it: it is kept from what others take. */
int ucm_slots_enter(struct ucm_slots *s, uint32_t request, uint32_t floor);
/* What counts for it stays resident and counts for nobody. */
void ucm_slots_leave(struct ucm_slots *s, uint32_t request);
/* Numbers that are given back: other blocks may get them, so nothing of them is resident in any strand. */
void ucm_slots_forget(struct ucm_slots *s, const uint32_t *numbers, uint32_t n);

/* now: at least that of the step before; the same for a replay. If that step never ended, its misses have not arrived. */
void ucm_slots_begin(struct ucm_slots *s, uint64_t now);

/* What a selection wrote, sequence by sequence; sequences that are one request may have the same
 * one. */
struct ucm_slots_lists {
    uint32_t sequences, lists, room;
    uint32_t apart; /* 0: all lists are of one strand; 1: list l is of strand + l, a KV head's */
    const uint32_t
        *index; /* [sequences][lists][room] of the sequence's blocks; UCM_SLOTS_NO_INDEX: none */
    const uint32_t *count;       /* [sequences][lists] */
    const uint32_t *begin, *end; /* [sequences][lists]: only these of a list's entries; NULL: all */
    /* [sequences][table_stride]: the number of each block of a sequence */
    const int32_t *table;
    uint64_t table_stride;
    const uint32_t *request; /* [sequences] */
};

void ucm_slots_resolve(struct ucm_slots *s, uint32_t strand, const struct ucm_slots_lists *lists);
/* As if a list had chosen a key: for blocks that the step made, and for those that were not served. */
void ucm_slots_want(struct ucm_slots *s, uint32_t key, uint32_t request);
/* For the misses that have no slot yet, in the order of the list. The device takes in any order. */
void ucm_slots_take(struct ucm_slots *s);
/* Ends all misses; arrived[i], of miss i, is 0 if its bytes are not there. A miss without a slot has none. */
void ucm_slots_publish(struct ucm_slots *s, const uint8_t *arrived);

/* Whether 1, 2 and 3 above hold; if not, -EUCLEAN, and why says what does not. Reads everything: for tests. */
int ucm_slots_verify(const struct ucm_slots *s, char why[UCM_SLOTS_WHY]);

#endif
