/* The index: namespaces, and in each a table from key to block. What is cached where.
 *
 * A block is in the table from the first shard that is dumped for it until no tier holds it any
 * more. This room stores the state of blocks and parts; `cache` changes it (and nobody else).
 *
 * Promise: finding n keys costs about n cache misses, overlapped; no operation takes longer because
 * the table grows (linear hashing, one bucket split an insert; memory in chunks that never move).
 * Hashing is keyed anew in each process: a peer that chooses keys can't make chains long.
 * At most 128 bytes a block with one part, table included; and up to 8 MiB that a thread has made
 * ready ahead, so that growing costs no turn of the loop. Thread: the loop only. Pointers to blocks
 * and parts stay valid until index_remove. */
#ifndef UCMD_INDEX_INDEX_H
#define UCMD_INDEX_INDEX_H

#include "proto/limits.h"

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ucm_error;

/* ---- blocks ---- */

/* A block's number, stable while it is in the index; 0 is none. Process-wide: it names the
 * namespace too, so that a tier can keep it as the owner of a slot. */
typedef uint32_t block_ref;

enum part_dram {
    PART_DRAM_NONE = 0,
    PART_DRAM_FILLING,  /* a dump is writing it */
    PART_DRAM_FETCHING, /* a read is writing it */
    PART_DRAM_READY,
};

enum part_nvme {
    PART_NVME_NONE = 0,
    PART_NVME_WRITING,
    PART_NVME_READY,
};

/* What this host believes to lie on the shared tier, whose files may go at any time. */
enum part_share {
    PART_SHARE_NONE = 0,
    PART_SHARE_PRESUMED, /* a shared lookup did not ask for it, but for keys around it */
    PART_SHARE_WRITING,  /* this host is writing it */
    PART_SHARE_KNOWN,    /* a root said so, or this host read or wrote it */
};

struct part {
    union {
        uint64_t loc;    /* READY: where the tier has it; opaque */
        uint32_t number; /* WRITING: of the write */
    } nvme_at;           /* by `nvme`; read by part_loc and part_write */
    uint64_t checksum;   /* XXH3-64 of the payload of a copy on NVMe, or of bytes in DRAM that came
                          * with a snapshot; 0: not known */
    union {
        uint32_t slot;   /* READY: in the arena */
        uint32_t number; /* FILLING, FETCHING: of the fill or fetch */
    } dram_at;           /* by `dram`; read by part_slot, part_fill and part_fetch */
    uint16_t dram : 2;   /* enum part_dram */
    uint16_t nvme : 2;   /* enum part_nvme */
    uint16_t share : 2;  /* enum part_share */
    uint16_t root : 4;   /* share_root_id of what is PRESUMED or KNOWN; 0: not known */
    uint16_t users;      /* copies, reads and writes under way: the slot stays meanwhile */
};

static inline uint32_t part_slot(const struct part *p)
{
    assert(p->dram == PART_DRAM_READY);
    return p->dram_at.slot;
}

static inline uint32_t part_fill(const struct part *p)
{
    assert(p->dram == PART_DRAM_FILLING);
    return p->dram_at.number;
}

static inline uint32_t part_fetch(const struct part *p)
{
    assert(p->dram == PART_DRAM_FETCHING);
    return p->dram_at.number;
}

static inline uint64_t part_loc(const struct part *p)
{
    assert(p->nvme == PART_NVME_READY);
    return p->nvme_at.loc;
}

static inline uint32_t part_write(const struct part *p)
{
    assert(p->nvme == PART_NVME_WRITING);
    return p->nvme_at.number;
}

/* The copy on NVMe is the one at loc. */
static inline bool part_is_at(const struct part *p, uint64_t loc)
{
    return p->nvme == PART_NVME_READY && p->nvme_at.loc == loc;
}

/* As many users a part has by requests; the rest is for what the cache does by itself. */
#define PART_USERS_MAX (UINT16_MAX - 256)

struct block {
    uint8_t key[UCM_MAX_KEY_BYTES];    /* the namespace's key_bytes, the rest 0 */
    uint32_t hash_next;                /* index's own */
    uint32_t policy_prev, policy_next; /* policy's own; cache's of what is not in it */
    uint32_t policy_data;              /* policy's own */
    uint32_t ns;                       /* id of its namespace */
    uint32_t leases;     /* leases and running requests: while > 0 the block stays in some tier */
    uint16_t ready;      /* parts that are whole (in some tier); complete when == ns->parts */
    uint16_t dram_parts; /* parts with PART_DRAM_READY */
    uint16_t here;       /* parts with anything in DRAM or on NVMe, or on its way there */
    uint16_t flags;      /* BLOCK_* */
    struct part part[];  /* ns->parts of them */
};

enum {
    BLOCK_PINNED = 1,        /* by an operator: never evicted from the cache */
    BLOCK_IN_POLICY = 2,     /* linked in the DRAM policy */
    BLOCK_DOOMED = 4,        /* evicted while in use: not found any more, gone with its last user */
    BLOCK_QUEUED = 8,        /* waits to be written to the tier */
    BLOCK_SHARE_QUEUED = 16, /* waits to be written to a root of the shared tier */
    BLOCK_SHARED_ONLY = 32,  /* no part is here: in the cache's list of such */
    BLOCK_BELOW = 64,        /* some part is here, none in DRAM: likewise */
};

/* ---- namespaces ---- */

/* Everything that tells interchangeable bytes from others. Strings and salt belong to the caller
 * (copied by index_ns_open). shards has `parts` entries. */
struct ns_identity {
    const char *tenant, *model, *revision, *dtype, *layout;
    uint32_t block_tokens, key_bytes, parts;
    const uint32_t *shards;
    uint64_t shard_bytes;
    const uint8_t *salt;
    uint32_t salt_bytes;
};

/* Does the tier know the namespace, so that its blocks are found after a restart? */
enum ns_record { NS_RECORD_NONE, NS_RECORD_PENDING, NS_RECORD_WRITTEN, NS_RECORD_FAILED };

struct ns {
    uint32_t id; /* from 1; not used again for another namespace for a long while */
    uint8_t fingerprint[UCM_FINGERPRINT_BYTES];
    struct ns_identity identity;
    uint64_t blocks; /* in the table, complete or not */
    uint32_t uses;   /* index_ns_use: not freed before their end */
    uint64_t used;   /* when last; index's own, as is the next */
    struct ns *chain;
    /* For accounting by `cache`: bytes of this namespace in each tier. */
    uint64_t dram_bytes, nvme_bytes, share_bytes;
    uint32_t purges;        /* under way; cache's own */
    uint8_t record;         /* enum ns_record; likewise */
    uint64_t record_from;   /* NS_RECORD_FAILED: what of it counts, once it is kept; likewise */
    struct ns_table *table; /* index's own */
};

static inline uint64_t ns_part_bytes(const struct ns *ns, uint32_t part)
{
    return ns->identity.shards[part] * ns->identity.shard_bytes;
}

/* SHA-256 over the identity in the canonical form of docs/protocol.md, "Fingerprint". 0 or -ENOMEM.
 */
int ns_fingerprint(const struct ns_identity *identity, uint8_t out[UCM_FINGERPRINT_BYTES]);

/* That canonical form, by which a tier keeps a namespace over restarts. */
#define NS_CANONICAL_MAX 4000u
/* Its length, or -ENOSPC. */
int ns_identity_encode(const struct ns_identity *identity, uint8_t *out, size_t cap);
/* What decode's result points into. */
struct ns_identity_memory {
    char text[5][UCM_MAX_NAME_BYTES + 1];
    uint32_t shards[UCM_MAX_PARTS];
};
/* Bytes of unknown origin: 0, or -EBADMSG when they are no identity that namespace.open would take.
 * *out points into *memory and, for the salt, into `bytes`. */
int ns_identity_decode(const uint8_t *bytes, size_t n, struct ns_identity_memory *memory,
                       struct ns_identity *out);

struct index;

/* max_blocks, max_ns: hard bounds. 0 or -ENOMEMORY as -ENOMEM. */
int index_new(uint64_t max_blocks, uint32_t max_ns, struct index **out);
void index_free(struct index *ix); /* NULL-safe; everything in it */

/* The namespace with this identity, new or old. 0, or -code with *e (BUSY at a bound). At a bound a
 * new one takes the place of the one that was used least recently among those that have no blocks
 * and are not in use. So a namespace lives as long as it has blocks or uses, and perhaps longer. */
int index_ns_open(struct index *ix, const struct ns_identity *identity, struct ns **out,
                  struct ucm_error *e);
/* As index_ns_open for what an earlier run has left: the tenant's bound does not count. */
int index_ns_restore(struct index *ix, const struct ns_identity *identity, struct ns **out,
                     struct ucm_error *e);
/* How many namespaces a tenant may have; max_ns when never called. */
void index_ns_limit(struct index *ix, uint32_t tenant_max);
void index_ns_use(struct index *ix, struct ns *ns);
void index_ns_unuse(struct index *ix, struct ns *ns);
/* NULL when there is none. */
struct ns *index_ns_find(struct index *ix, const uint8_t fingerprint[UCM_FINGERPRINT_BYTES]);
struct ns *index_ns(struct index *ix, uint32_t id); /* NULL when there is none */
uint32_t index_ns_count(const struct index *ix);
/* Every namespace has a place below index_ns_places for as long as it lives. NULL: it is empty. */
uint32_t index_ns_place(const struct index *ix, const struct ns *ns);
struct ns *index_ns_at(struct index *ix, uint32_t place);
uint32_t index_ns_places(const struct index *ix);

/* ---- blocks of a namespace ---- */

block_ref index_find(struct index *ix, struct ns *ns, const uint8_t *key);
/* out[i]: the block of keys + i * key_bytes, or 0. Memory latency overlapped over the batch. With
 * stop_at_gap the search may end (leaving 0) soon after a key that is not there. */
void index_find_many(struct index *ix, struct ns *ns, const uint8_t *keys, uint32_t n,
                     bool stop_at_gap, block_ref *out);
/* A new block, all zero but key and ns; the key must not be there. 0 at max_blocks or without
 * memory. */
block_ref index_insert(struct index *ix, struct ns *ns, const uint8_t *key);
/* The block must have no lease, no user, and be out of the policy. */
void index_remove(struct index *ix, block_ref ref);

struct block *index_block(struct index *ix, block_ref ref);
/* The same for a number that was kept while its block may have been removed: NULL then, or
 * whichever block has the number now. */
struct block *index_peek(struct index *ix, block_ref ref);
static inline bool block_complete(const struct block *b, const struct ns *ns)
{
    return b->ready == ns->identity.parts;
}

static inline bool part_on_share(const struct part *p)
{
    return p->share == PART_SHARE_KNOWN || p->share == PART_SHARE_PRESUMED;
}

/* Walks a namespace in a stable but arbitrary order for ls and verify: calls visit for up to
 * `limit` blocks from cursor on (0: the start), returns the next cursor, 0 at the end. Blocks that
 * come or go in between may be missed or met once; none is met twice. visit may not insert or
 * remove. */
uint64_t index_scan(struct index *ix, struct ns *ns, uint64_t cursor, uint32_t limit,
                    void (*visit)(void *ctx, block_ref ref, struct block *b), void *ctx);

uint64_t index_bytes(const struct index *ix);  /* memory held */
uint64_t index_blocks(const struct index *ix); /* blocks held */
bool index_full(const struct index *ix);       /* as many as it may hold */

#endif
