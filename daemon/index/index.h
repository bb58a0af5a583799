/* The index: namespaces, and for each a table from key to block. It stores what is cached where;
 * the cache (daemon/cache), and nobody else, changes that state.
 *
 * A block is in the table from the first layer that a dump brings until no tier holds anything of
 * it.
 *
 * Promises:
 * - Finding n keys costs about n cache misses, which overlap.
 * - No operation takes longer because the table grows: linear hashing splits one bucket an insert,
 *   and memory is in chunks that never move. A thread touches up to 8 MiB of it ahead.
 * - Hashes have a secret of this process: a client that chooses keys can't make chains long.
 * - A block with one part takes at most INDEX_BLOCK_BYTES, its place in the table included. One
 *   with more parts counts as more (ns.index_bytes), so that the index's memory has a bound, too.
 * - A pointer to a block or part is valid until index_remove.
 *
 * Thread: the event loop only. */
#ifndef UCMD_INDEX_INDEX_H
#define UCMD_INDEX_INDEX_H

#include "daemon/base/form.h"
#include "daemon/base/limit.h"
#include "daemon/learn/learn.h"
#include "daemon/tenant/tenant.h"
#include "proto/limits.h"

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- blocks ---- */

#define INDEX_BLOCK_BYTES 128u

/* A block's number; 0 is none. It stays the same while the block is in the index, and no two
 * namespaces share one: a tier keeps it as the owner of a place. */
typedef uint32_t block_ref;

enum part_dram {
    PART_DRAM_NONE = 0,
    PART_DRAM_PENDING_WRITE, /* a dump is writing it */
    PART_DRAM_PENDING_READ,  /* a read is writing it */
    PART_DRAM_READY,
};

enum part_nvme {
    PART_NVME_NONE = 0,
    PART_NVME_WRITING,
    PART_NVME_READY,
};

/* What this host believes to lie on the shared tier, whose files may go at any time. */
enum part_shared {
    PART_SHARED_NONE = 0,
    PART_SHARED_UNVERIFIED, /* a shared lookup did not ask for it, but for keys around it */
    PART_SHARED_WRITING,    /* this host is writing it */
    PART_SHARED_KNOWN,      /* a root said so, or this host read or wrote it */
};

struct part {
    union {
        uint64_t loc;  /* READY: where the tier has it; opaque */
        void *write;   /* WRITING: the cache's operation */
    } nvme_at;         /* by `nvme`; read by part_loc and part_write */
    uint64_t checksum; /* XXH3-64 of the payload of a copy on NVMe, or of bytes in DRAM that came
                        * with a snapshot; 0: not known */
    union {
        uint32_t slot;   /* READY: in the arena */
        uint32_t number; /* PENDING_WRITE, PENDING_READ: of the pending write or read */
        /* by `dram`; read by part_slot, part_pending_write and part_pending_read */
    } dram_at;
    uint16_t dram : 2;      /* enum part_dram */
    uint16_t nvme : 2;      /* enum part_nvme */
    uint16_t shared : 2;    /* enum part_shared */
    uint16_t root : 4;      /* shared_root_id of what is UNVERIFIED or KNOWN; 0: not known */
    uint16_t moving : 1;    /* somebody moves it: cache_move_claim */
    uint16_t encrypted : 1; /* the copy on NVMe is encrypted: `checksum` is 8 bytes of its tag */
    uint16_t users;         /* copies, reads and writes under way: the slot stays meanwhile */
};

static inline uint32_t part_slot(const struct part *p)
{
    assert(p->dram == PART_DRAM_READY);
    return p->dram_at.slot;
}

static inline uint32_t part_pending_write(const struct part *p)
{
    assert(p->dram == PART_DRAM_PENDING_WRITE);
    return p->dram_at.number;
}

static inline uint32_t part_pending_read(const struct part *p)
{
    assert(p->dram == PART_DRAM_PENDING_READ);
    return p->dram_at.number;
}

static inline uint64_t part_loc(const struct part *p)
{
    assert(p->nvme == PART_NVME_READY);
    return p->nvme_at.loc;
}

static inline void *part_write(const struct part *p)
{
    assert(p->nvme == PART_NVME_WRITING);
    return p->nvme_at.write;
}

/* The copy on NVMe is the one at loc. */
static inline bool part_is_at(const struct part *p, uint64_t loc)
{
    return p->nvme == PART_NVME_READY && p->nvme_at.loc == loc;
}

/* Users by requests that a part may have; the rest is the cache's own. */
#define PART_USERS_MAX (UINT16_MAX - 256)

struct block {
    uint8_t key[UCM_MAX_KEY_BYTES]; /* the namespace's key_bytes, the rest 0 */
    uint32_t hash_next;             /* the index's */
    uint32_t list_prev, list_next;  /* in one block_list: the policy's with BLOCK_IN_POLICY,
                                     * cache/part.c's with BLOCK_BELOW or BLOCK_SHARED_ONLY */
    uint32_t policy_data;           /* the policy's */
    uint32_t ns;                    /* id of its namespace */
    uint32_t leases;      /* of clients and running requests: while > 0 it stays in some tier */
    uint16_t whole_parts; /* parts that are whole in some tier; all of them: it is complete */
    uint16_t dram_parts;  /* parts that are READY in DRAM */
    uint16_t local_parts : 15; /* parts with anything in DRAM or on NVMe, or on its way there */
    uint16_t grouped : 1;      /* in the policy's lists of its tenant; the policy's */
    uint16_t flags;            /* BLOCK_* */
    struct part part[];        /* ns->parts of them */
};

enum {
    BLOCK_PINNED = 1,    /* an operator pinned it: it is not evicted from the cache */
    BLOCK_IN_POLICY = 2, /* in the eviction policy of DRAM */
    BLOCK_DELETING = 4,  /* evicted while in use: not found any more, freed with its last user */
    BLOCK_QUEUED = 8,    /* in the write-back queue of NVMe */
    BLOCK_SHARED_QUEUED = 16, /* in the write-back queue of the shared tier */
    BLOCK_SHARED_ONLY = 32,   /* listed: no part is in DRAM or on NVMe */
    BLOCK_BELOW = 64,         /* listed: some part is on NVMe, none in DRAM */
    BLOCK_PREFETCHED = 128,   /* a prefetch brought it into DRAM, and nobody used it yet */
};

/* ---- namespaces ---- */

/* Blocks are interchangeable when all of this agrees. The caller owns strings, layers (`parts` of
 * them) and salt; index_ns_open copies them. */
struct ns_identity {
    const char *tenant, *model, *revision, *dtype, *layout;
    uint32_t block_tokens, key_bytes, parts;
    const uint32_t *layers;
    uint64_t layer_bytes;
    const uint8_t *salt;
    uint32_t salt_bytes;
};

/* Is a record of the namespace on the tier's stable storage, so that a later start finds its
 * blocks? */
enum ns_record { NS_RECORD_NONE, NS_RECORD_PENDING, NS_RECORD_WRITTEN, NS_RECORD_FAILED };

struct ns {
    uint32_t id; /* from 1; another namespace gets it only after a long while */
    uint8_t fingerprint[UCM_FINGERPRINT_BYTES];
    struct ns_identity identity;
    const uint8_t *canonical; /* the identity as docs/protocol.md, "Fingerprint" has it */
    uint32_t canonical_bytes;
    uint64_t block_bytes; /* of all parts of a block */
    uint64_t index_bytes; /* what a block counts as in the index, with its place in the table */
    const struct form *part_forms; /* one for each part; in one allocation with this */
    uint64_t blocks;               /* in the table, complete or not */
    uint32_t refs;                 /* references, by index_ns_ref */
    /* The index's own. */
    uint64_t used; /* when, by ns_set.clock */
    struct ns *chain;
    struct ns_table *table;
    struct tenant *tenant;     /* which it refers to */
    struct limit_owner *owner; /* its creator, or the tenant; NULL: it is not counted */
    struct {
        uint64_t lookups, lookup_keys, lookup_hits, loads, load_bytes, dumps, dump_bytes,
            evicted_blocks;
    } traffic;       /* as the tenant's metrics count it */
    struct ns *base; /* what index_ns_derive said; or NULL */
    /* The cache's own. */
    uint64_t dram_bytes, nvme_bytes, shared_bytes; /* of its parts in each tier */
    uint64_t slot_bytes;                           /* of a block's slots; 0: not summed up yet */
    struct admission admission;                    /* to NVMe */
    struct admission *admits; /* what decides: this, or its base's, as both forms of a block count
                                 for the raw one's */
    uint32_t purges;          /* under way */
    uint64_t purged;          /* how many began, and how many ended */
    uint64_t wiped;           /* how many began that spare no tier */
    uint8_t record;           /* enum ns_record */
    uint64_t record_from;     /* tier_ns_record.from_sequence of a record that failed */
    /* State of the feature that follows its blocks; NULL: none does. */
    void *follower;
};

/* What part `part` of the namespace's blocks is. For good; where its identity names no encoding
 * that this daemon knows, or another version of it or other sizes, the blocks are bytes as any. */
static inline const struct form *ns_form(const struct ns *ns, uint32_t part)
{
    assert(part < ns->identity.parts);
    return &ns->part_forms[part];
}

static inline uint64_t ns_part_bytes(const struct ns *ns, uint32_t part)
{
    return ns->identity.layers[part] * ns->identity.layer_bytes;
}

#define NS_CANONICAL_MAX 4000u
/* Writes the canonical form. Returns its length, or -ENOSPC. */
int ns_identity_encode(const struct ns_identity *identity, uint8_t *out, size_t cap);
/* SHA-256 of a canonical form. 0 or -ENOMEM. */
int ns_fingerprint(const uint8_t *canonical, size_t n, uint8_t out[UCM_FINGERPRINT_BYTES]);

struct index;

/* 0 or -errno. There are never more than max_ns namespaces, and than max_blocks blocks of one part,
 * or fewer of more parts: max_blocks * INDEX_BLOCK_BYTES. */
int index_new(uint64_t max_blocks, uint32_t max_ns, struct index **out);
void index_free(struct index *ix); /* NULL-safe */

/* Counts namespaces as LIMIT_NAMESPACES from now on, which is before the first one. Borrowed. */
void index_limits(struct index *ix, struct limits *l);
/* Finds the namespace with this identity, or makes it, which the owner (NULL: nobody) has then. 0,
 * or -code with *e: BUSY when the index, the tenant or the owner has as many as it may have, and
 * all of them have blocks or references; of the others the least recently used one is freed. */
int index_ns_open(struct index *ix, const struct ns_identity *identity, struct limit_owner *owner,
                  struct ns **out, struct ucm_error *e);
/* The same for a namespace of an earlier run, by bytes of unknown origin: its fingerprint, and n
 * bytes that should be its canonical form. The tenant's bound does not count. -code INVALID: they
 * are no identity that namespace.open would take, or have another fingerprint. */
int index_ns_restore(struct index *ix, const uint8_t fingerprint[UCM_FINGERPRINT_BYTES],
                     const uint8_t *canonical, size_t n, struct ns **out, struct ucm_error *e);
/* All tenants, which the index owns, as namespaces refer to theirs. */
struct tenant_set *index_tenants(struct index *ix);
/* A namespace lives while it has references or blocks, and may be freed after that. */
void index_ns_ref(struct index *ix, struct ns *ns);
void index_ns_unref(struct index *ix, struct ns *ns);
/* ns is encoded: it holds blocks of `base` in another form, and keeps base alive. */
void index_ns_derive(struct index *ix, struct ns *ns, struct ns *base);
struct ns *index_ns_find(struct index *ix,
                         const uint8_t fingerprint[UCM_FINGERPRINT_BYTES]); /* or NULL */
/* For walks: a namespace has the same place, below index_ns_places, for as long as it lives.
 * index_ns_at returns NULL for a place without one. */
struct ns *index_ns_at(struct index *ix, uint32_t place);
uint32_t index_ns_places(const struct index *ix);

/* ---- blocks of a namespace ---- */

block_ref index_find(const struct index *ix, const struct ns *ns, const uint8_t *key);
/* out[i]: the block of keys + i * key_bytes, or 0. With stop_at_gap the search may end soon after a
 * key that is not there, and leaves 0 for the rest. */
void index_find_many(const struct index *ix, const struct ns *ns, const uint8_t *keys, uint32_t n,
                     bool stop_at_gap, block_ref *out);
/* A new block, all zero but key and ns. The key must not be there. 0: the index is full, or there
 * is no memory. */
block_ref index_insert(struct index *ix, struct ns *ns, const uint8_t *key);
/* The block must have no lease and no user, and be out of the policy. */
void index_remove(struct index *ix, block_ref ref);

/* A block_ref is a chunk's number above INDEX_CELL_BITS bits of position in it. */
#define INDEX_CELL_BITS 15
#define INDEX_CELLS (1u << INDEX_CELL_BITS)
/* What finding a block or a namespace needs: the head of struct index, whose rest is the module's
 * own. */
struct index_head {
    struct index_chunk {
        uint8_t *base;
        uint32_t record_bytes;
    } * chunk;          /* by number */
    uint32_t chunks;    /* numbers in use so far */
    uint32_t ns_mask;   /* places, less 1 */
    struct ns **ns;     /* by place */
    uint64_t bytes_max; /* of what blocks count as (ns.index_bytes) */
};

/* Where the block's record lies; nothing is read of it. */
static inline struct block *index_cell(const struct index *ix, block_ref ref)
{
    const struct index_head *head = (const struct index_head *)(const void *)ix;
    const struct index_chunk *in = &head->chunk[ref >> INDEX_CELL_BITS];

    assert(ref >> INDEX_CELL_BITS < head->chunks && in->base);
    return (struct block *)(void *)(in->base +
                                    (size_t)(ref & (INDEX_CELLS - 1)) * in->record_bytes);
}

static inline struct block *index_block(const struct index *ix, block_ref ref)
{
    struct block *b = index_cell(ix, ref);

    assert(b->ns != 0);
    return b;
}
static inline uint32_t index_ns_place(const struct index *ix, const struct ns *ns)
{
    return (ns->id - 1) & ((const struct index_head *)(const void *)ix)->ns_mask;
}

/* By id; NULL: there is none. */
static inline struct ns *index_ns(const struct index *ix, uint32_t id)
{
    const struct index_head *head = (const struct index_head *)(const void *)ix;
    struct ns *ns = head->ns[(id - 1) & head->ns_mask];

    return ns && ns->id == id ? ns : NULL;
}

/* For a number whose block may have been removed: NULL, or the block that has the number now. */
struct block *index_peek(struct index *ix, block_ref ref);

/* A list of blocks. A block is in one at most. */
struct block_list {
    block_ref front, back;
    uint64_t n;
};
/* Next after `before`; 0: at the front. */
static inline void block_list_insert(struct index *ix, struct block_list *l, block_ref ref,
                                     block_ref before)
{
    struct block *b = index_block(ix, ref);
    block_ref *forth = before ? &index_block(ix, before)->list_next : &l->front;
    block_ref *back = *forth ? &index_block(ix, *forth)->list_prev : &l->back;

    b->list_prev = before;
    b->list_next = *forth;
    *forth = *back = ref;
    l->n++;
}

static inline void block_list_remove(struct index *ix, struct block_list *l, struct block *b)
{
    *(b->list_prev ? &index_block(ix, b->list_prev)->list_next : &l->front) = b->list_next;
    *(b->list_next ? &index_block(ix, b->list_next)->list_prev : &l->back) = b->list_prev;
    b->list_prev = b->list_next = 0;
    l->n--;
}

static inline bool block_complete(const struct block *b, const struct ns *ns)
{
    return b->whole_parts == ns->identity.parts;
}

/* Also not marked for deletion: what a lookup may promise. */
static inline bool block_found(const struct block *b, const struct ns *ns)
{
    return block_complete(b, ns) && !(b->flags & BLOCK_DELETING);
}

static inline bool part_on_shared(const struct part *p)
{
    return p->shared == PART_SHARED_KNOWN || p->shared == PART_SHARED_UNVERIFIED;
}

/* Losing its slot loses nothing. An UNVERIFIED part may turn out not to be there. */
static inline bool part_clean(const struct part *p)
{
    return p->nvme == PART_NVME_READY || p->shared == PART_SHARED_KNOWN;
}

/* A page of a namespace's blocks: up to `limit` from cursor on (0: the start) into refs, their
 * number into *n. Returns the next cursor, 0 at the end. No block is met twice; blocks that come or
 * go between two calls may be missed. */
uint64_t index_scan(const struct index *ix, const struct ns *ns, uint64_t cursor, uint32_t limit,
                    block_ref *refs, uint32_t *n);

uint64_t index_bytes(const struct index *ix); /* memory */
uint64_t index_blocks(const struct index *ix);
/* How much there may be of what blocks count as (ns.index_bytes). */
static inline uint64_t index_bytes_max(const struct index *ix)
{
    return ((const struct index_head *)(const void *)ix)->bytes_max;
}
bool index_full(const struct index *ix, const struct ns *ns); /* for one more block of ns */
/* Do the tenant's blocks take more than an equal part of the index for each tenant that has some?
 */
bool index_over_part(const struct index *ix, const struct tenant *t);

#endif
