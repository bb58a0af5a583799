/* Which block lies in which entry of a worker's pool on the GPU. entries.c is the reference; the
 * same steps run on the device, in any number of threads, on the same arrays. Nothing here
 * allocates, locks or copies KV. The caller brings memory, and says when bytes are there.
 *
 * A *layer head* is the part of a block that an entry holds. That is the K and V of one layer, or
 * of one KV head of one layer. A *number* stands for a block: its row in the worker's summaries
 * region. Requests with a common prefix have the same numbers, and so the same entries. A *key* is
 * a number in a layer head. The table entry_of has an item for each key.
 *
 * A step is one decode of a batch. It has a number above those of earlier steps, and goes through
 * the layers in order. In each layer:
 *   resolve looks up what the layer's lists chose. A resident block gets the step's stamp. A
 *            missing one is put on the list of misses once, however many lists want it.
 *   take gives each miss an entry, whose old owner is then not resident. (copy) the caller brings
 *   the bytes, through a mapping or by a gather. publish ends each miss: its bytes are there, and
 *   from now on the key is resident; or they are not, and the key is
 *            not resident, its entry free and the key on the step's list of what was not served.
 * All stamps of a layer are written before the first entry is taken. All entries of a layer are
 * published before its attention begins. Everything else (enter, leave, want, forget) happens
 * between steps.
 *
 * A step that did not serve everything is thrown away. Its caller brings what is on the list (want,
 * take, gather, publish) and runs the step again, under the same number or a higher one. Under the
 * same number everything that it used before is still there. Under a higher one, that holds for all
 * layers up to the first that was not served. They choose the same blocks again, so they stamp them
 * before a later layer takes an entry. Each run therefore gets at least one layer further. So a
 * step ends after at most as many runs as it has layers, however large the pool is.
 *
 * Which entry is taken. A hand goes around the pool in groups of UCM_ENTRIES_GROUP. A miss takes
 * the entry with the oldest stamp of the group at the hand: free ones first, ties to the lower
 * index. The hand then moves on to the next group. An entry is passed over
 * - always if it has this step's stamp;
 * - at first, if another request has it and is at or below its floor. When the hand has gone around
 *   and found nothing, floors no longer count. So a floor never stops a step that fits the pool.
 * This rule misses at most 3 % more often than LRU, looks at one stamp an entry, and writes nothing
 * to entries that it passes. A rule by the sum of score and age keeps what scored well long ago,
 * and has up to twice the misses. With 2.6 steps' worth of memory, a step at 1/32 of the context
 * misses 2.1 % with entries of one KV head. With entries of a layer it misses 6.1 %.
 *
 * An entry counts for the request that brought its block. When that request has left, it counts for
 * the next one that uses it.
 *
 * What always holds, between any two calls:
 * 1. entry_of[k] = s >= 0 exactly if key[s] = k and s is published. So no two keys have an entry in
 *    common, and no key has two.
 * 2. entry_of[k] is UCM_ENTRIES_WANTED exactly if k is on the list of misses, once, and not yet
 *    published.
 * 3. held[r] is the number of entries that count for r.
 * 4. No entry with the stamp of the step under way is taken.
 * 5. A request that has no more than its floor loses an entry only by publish and forget. The
 *    exception is that every other entry is stamped or kept by a floor; floors_broken counts that.
 *    That can't happen while the floors together are at most the entries, and no request uses more
 *    than its floor in a step, or another's entries.
 * 6. UCM_ENTRIES_FULL is set only if all entries have the stamp of this step. */
#ifndef UCM_KERNELS_ENTRIES_H
#define UCM_KERNELS_ENTRIES_H

#include <stddef.h>
#include <stdint.h>

#define UCM_ENTRIES_GROUP 32u /* a warp */
#define UCM_ENTRIES_LAYER_HEADS_MAX (1u << 16)
#define UCM_ENTRIES_NUMBERS_MAX (1u << 26)
#define UCM_ENTRIES_MAX (1u << 28)
#define UCM_ENTRIES_REQUESTS_MAX (1u << 16)
#define UCM_ENTRIES_MISSES_MAX (1u << 24)
#define UCM_ENTRIES_WHY 200

/* In entry_of. */
#define UCM_ENTRIES_NONE (-1)   /* not resident */
#define UCM_ENTRIES_WANTED (-2) /* on the list of misses */

#define UCM_ENTRIES_NO_KEY 0xffffffffu   /* of a free entry */
#define UCM_ENTRIES_NOBODY 0xffffffffu   /* the request of an entry that counts for none */
#define UCM_ENTRIES_NO_INDEX 0xffffffffu /* in a list, after what was chosen */

/* Flags of a step. */
#define UCM_ENTRIES_UNSERVED 1u  /* some miss was not served: the step does not count */
#define UCM_ENTRIES_FULL 2u      /* because all entries are this step's */
#define UCM_ENTRIES_LIST_FULL 4u /* because a layer had more misses than the list has room for */
#define UCM_ENTRIES_STRAY                                                                          \
    8u /* a chosen block has no number, or one that the table has no row for; or its request is none */

struct ucm_entries_shape {
    uint32_t layer_heads, numbers; /* of the table */
    uint32_t entries;
    uint32_t requests; /* at most so many at once, 0 .. requests - 1 */
    uint32_t misses;   /* room of the list of misses and of that of keys not served */
};

struct ucm_entries_miss {
    uint32_t key;
    int32_t entry;    /* UCM_ENTRIES_NONE until it is taken, or if none was found */
    uint32_t request; /* the request that wanted it first */
};

/* What steps keep for themselves and tell the host. */
struct ucm_entries_step {
    uint64_t now;      /* the step's number, from 1 on */
    uint32_t hand;     /* turns of the hand so far; groups are counted around */
    uint32_t misses;   /* since the last publish; may be more than fit in the list */
    uint32_t unserved; /* keys not served of this step, likewise; a key that did not fit may count
                   * twice */
    uint32_t flags;
    uint32_t done; /* on the device: thread blocks of a launch that are done; 0 between launches */
    uint64_t missed, taken, floors_broken; /* since init */
};

/* Plain arrays in one piece of memory, the host's or the GPU's. */
struct ucm_entries {
    struct ucm_entries_shape shape;
    uint32_t groups;
    uint64_t *stamp;               /* [entries] the last step that used it; 0: free, or none did */
    struct ucm_entries_step *step; /* [1] */
    int32_t *entry_of;             /* [layer_heads][numbers] */
    uint32_t *key;                 /* [entries] */
    uint32_t *request;             /* [entries] */
    uint32_t *held, *floor;        /* [requests] */
    struct ucm_entries_miss *miss; /* [misses] */
    uint32_t *unserved;            /* [misses] keys */
};

/* 0; or -EINVAL, and why says which field is wrong. */
int ucm_entries_check(const struct ucm_entries_shape *shape, char why[UCM_ENTRIES_WHY]);

/* Bytes for a shape that ucm_entries_check accepts. memory: aligned to 64; only its address is
 * used. */
size_t ucm_entries_bytes(const struct ucm_entries_shape *shape);
void ucm_entries_layout(struct ucm_entries *s, const struct ucm_entries_shape *shape, void *memory);

static inline uint32_t ucm_entries_key(const struct ucm_entries_shape *shape, uint32_t layer_head,
                                       uint32_t number)
{
    return layer_head * shape->numbers + number;
}

/* Afterwards no key is resident, no request is there, and the next step may have any number from 1
 * on. */
void ucm_entries_init(struct ucm_entries *s);

/* Request r, which is not there yet, gets a floor. -ENOSPC: the floors would add up to more than
 * the entries. A floor takes no entries; it only limits what others take. */
int ucm_entries_enter(struct ucm_entries *s, uint32_t request, uint32_t floor);
/* Entries that count for it stay resident and then count for none. */
void ucm_entries_leave(struct ucm_entries *s, uint32_t request);
/* These numbers are given back. Other blocks may get them, so they are no longer resident in any
 * layer head. */
void ucm_entries_forget(struct ucm_entries *s, const uint32_t *numbers, uint32_t n);

/* now: at least that of the step before, and equal for a replay. If that step never ended, its
 * misses have not arrived. */
void ucm_entries_begin(struct ucm_entries *s, uint64_t now);

/* What a selection wrote, sequence by sequence; sequences that are one request may have the same
 * one. */
struct ucm_entries_lists {
    uint32_t sequences, lists, room;
    /* 0: all lists are of one layer head; 1: list l is of layer_head + l, a KV head's */
    uint32_t apart;
    const uint32_t
        *index; /* [sequences][lists][room] of the sequence's blocks; UCM_ENTRIES_NO_INDEX: none */
    const uint32_t *count;       /* [sequences][lists] */
    const uint32_t *begin, *end; /* [sequences][lists]: only these of a list's items; NULL: all */
    /* [sequences][table_stride]: the number of each block of a sequence */
    const int32_t *table;
    uint64_t table_stride;
    const uint32_t *request; /* [sequences] */
};

void ucm_entries_resolve(struct ucm_entries *s, uint32_t layer_head,
                         const struct ucm_entries_lists *lists);
/* As if a list had chosen a key: for blocks that the step made, and for those that were not
 * served. */
void ucm_entries_want(struct ucm_entries *s, uint32_t key, uint32_t request);
/* Takes entries for the misses that have none yet, in the order of the list. The device takes in
 * any order. */
void ucm_entries_take(struct ucm_entries *s);
/* Ends all misses. arrived[i] is 0 if the bytes of miss i are not there. A miss without an entry
 * has no bytes. */
void ucm_entries_publish(struct ucm_entries *s, const uint8_t *arrived);

/* Checks whether 1, 2 and 3 above hold. If not, -EUCLEAN, and why says what does not. Reads
 * everything, so it is for tests. */
int ucm_entries_verify(const struct ucm_entries *s, char why[UCM_ENTRIES_WHY]);

#endif
