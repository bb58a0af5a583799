/* Inside the index: slabs of records, the table of a namespace. Nobody else includes this. */
#ifndef UCMD_INDEX_INTERNAL_H
#define UCMD_INDEX_INTERNAL_H

#include "daemon/index/index.h"

#include <assert.h>
#include <pthread.h>
#include <string.h>

/* ---- pages ---- */

#define PAGES_HUGE (2u << 20)

#define PAGES_AHEAD 4u

struct pages {
    pthread_t thread; /* from the first piece of PAGES_HUGE on */
    bool threaded;
    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t taken;
    uint8_t *ahead[PAGES_AHEAD]; /* touched already */
    unsigned n;
    bool stop;
};

void pages_init(struct pages *s);
void pages_close(struct pages *s);
/* Zeroed memory, found zero by the kernel at first touch and not by a loop here. Pieces of
 * PAGES_HUGE are aligned to it and are a huge page where one has been made ready in time, else
 * small ones. NULL without memory. */
void *pages_new(struct pages *s, size_t size_bytes);
void pages_free(void *p, size_t size_bytes);

/* ---- slabs: records of one size in chunks that never move ---- */

/* A block_ref is a chunk's number above SLAB_CELL_BITS bits of position. Chunk 0 does not exist. */
#define SLAB_CELL_BITS 15
#define SLAB_CELLS (1u << SLAB_CELL_BITS)
#define SLAB_CHUNKS (1u << (32 - SLAB_CELL_BITS))

/* What finding a record needs; kept apart from the rest so that it stays in the first-level cache.
 */
struct slab_place {
    uint8_t *base;
    uint32_t record_bytes;
};

struct slab_chunk {
    uint32_t size_bytes, records;
    uint32_t fresh;      /* records before this one have been in use */
    uint32_t used;       /* records in use; 0 and size_bytes 0: the number is free */
    uint32_t free_cell;  /* first free record + 1, chained by hash_next */
    uint32_t prev, next; /* chunks of the class with room */
    uint32_t parts;
};

struct slab_class {
    uint32_t open;   /* first chunk with room, 0: none */
    uint32_t chunks; /* in all */
    uint32_t empty;  /* of them without a record in use: at most 1 is kept */
};

struct slab {
    struct pages *pages;      /* borrowed */
    struct slab_place *place; /* by chunk number */
    struct slab_chunk *chunk;
    uint32_t chunks, chunks_cap; /* numbers given out, 0 included */
    uint32_t free_chunk;         /* numbers without memory, chained by next */
    uint64_t size_bytes;
    struct slab_class class[UCM_MAX_PARTS + 1];
};

void slab_init(struct slab *s, struct pages *pages);
void slab_close(struct slab *s);
/* A record of this many parts, all zero; 0 without memory. */
block_ref slab_take(struct slab *s, uint32_t parts);
void slab_give(struct slab *s, block_ref ref);

static inline struct block *slab_block(const struct slab *s, block_ref ref)
{
    const struct slab_place *at = &s->place[ref >> SLAB_CELL_BITS];

    return (struct block *)(void *)(at->base + (size_t)(ref & (SLAB_CELLS - 1)) * at->record_bytes);
}

/* ---- the table of a namespace: linear hashing over buckets of one cache line ---- */

#define BUCKET_ENTRIES 12

/* Slots are filled from the front; tag 0 and ref 0 are an empty slot. What does not fit hangs from
 * overflow, chained by hash_next, and only while every slot is taken. */
struct bucket {
    uint8_t tag[BUCKET_ENTRIES];
    block_ref overflow;
    block_ref ref[BUCKET_ENTRIES];
};

/* Segments grow from 4 buckets, each as long as all before it, up to 2 MiB. */
#define SEGMENT_MIN 4u
#define SEGMENT_MAX (PAGES_HUGE / (uint32_t)sizeof(struct bucket))

struct ns_table {
    struct bucket **segment;
    uint32_t segments, segments_cap;
    uint32_t buckets; /* 0 until the first insert */
    uint32_t mask;    /* buckets rounded up to a power of 2, less 1 */
    uint32_t key_bytes;
    uint64_t blocks;
    uint64_t size_bytes;
};

#define HASH_SECRET_BYTES 192

struct ns_set {
    struct ns **at;    /* by place: (id - 1) mod max */
    uint32_t *round;   /* how often the place was used before */
    struct ns **chain; /* by fingerprint, mask + 1 of them */
    uint32_t mask, count, max, tenant_max;
    uint64_t clock; /* of ns.used */
    uint64_t bytes; /* of namespaces, without their tables */
};

struct index {
    struct pages pages;
    struct slab slab;
    struct ns_set ns;
    uint64_t blocks, blocks_max;
    uint8_t secret[HASH_SECRET_BYTES];
};

uint64_t index_hash(const struct index *ix, const uint8_t *key, uint32_t key_bytes);

void ns_table_close(struct ns_table *t);
block_ref ns_table_find(const struct index *ix, const struct ns_table *t, const uint8_t *key);
void ns_table_find_many(const struct index *ix, const struct ns_table *t, const uint8_t *keys,
                        uint32_t n, bool stop_at_gap, block_ref *out);
/* Links a record whose key is set. 0 or -ENOMEM. */
int ns_table_insert(struct index *ix, struct ns_table *t, block_ref ref);
void ns_table_remove(struct index *ix, struct ns_table *t, block_ref ref);

/* Blocks in the order of their reversed hashes, which splitting and merging of buckets leave alone.
 * Up to SCAN_BATCH of those from position `from` on, all of one bucket; *next is where to go on, 0
 * at the end. Returns how many. */
#define SCAN_BATCH 32
uint32_t ns_table_scan(const struct index *ix, const struct ns_table *t, uint64_t from,
                       block_ref out[SCAN_BATCH], uint64_t position[SCAN_BATCH], uint64_t *next);

/* The bucket that a hash belongs to: for tests that make buckets overflow. */
uint32_t ns_table_bucket(const struct ns_table *t, uint64_t hash);

/* ---- namespaces ---- */

/* SHA-256 of a canonical identity. 0 or -ENOMEM. */
int ns_canonical_fingerprint(const uint8_t *bytes, size_t n, uint8_t out[UCM_FINGERPRINT_BYTES]);

int ns_set_init(struct ns_set *set, uint32_t max);
void ns_set_close(struct ns_set *set);
uint64_t ns_set_bytes(const struct ns_set *set);

#endif
