/* Inside the index: memory of records, the table of a namespace. Nobody else includes this.
 *
 * Files from the lowest to the highest, each of which calls those before it: pages.c, ns_table.c,
 * blocks.c, ns_identity.c and ns_form.c, namespace.c, index.c; and policy.c, which sees blocks as
 * anybody does. */
#ifndef UCMD_INDEX_INTERNAL_H
#define UCMD_INDEX_INTERNAL_H

#include "daemon/base/list.h"
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
/* Zeroed memory, straight from the kernel; NULL without memory. A piece of PAGES_HUGE is aligned to
 * that, and one huge page if the thread has touched one in time; else the kernel brings small ones.
 */
void *pages_new(struct pages *s, size_t size_bytes);
void pages_free(void *p, size_t size_bytes);

/* ---- memory of records of one size, in the cells of chunks that never move ---- */

/* Chunk 0 does not exist. */
#define RECORD_CHUNKS (1u << (32 - INDEX_CELL_BITS))

struct record_chunk {
    struct list link; /* in its class's open, or records.free, or in none */
    uint32_t size_bytes, records;
    uint32_t fresh;     /* cells from here on were never in use */
    uint32_t used;      /* cells in use */
    uint32_t free_cell; /* 1 + the first free cell before `fresh`, chained by hash_next */
    uint32_t parts;
};

struct record_class {
    struct list open; /* chunks with a free cell */
    uint32_t chunks;
    uint32_t empty; /* chunks without a cell in use: 1 stays, more are freed */
};

struct records {
    struct record_chunk *chunk; /* by number, as index_head.chunk */
    struct list free;           /* numbers without a chunk */
    uint64_t size_bytes;
    struct record_class class[UCM_MAX_PARTS + 1]; /* by parts */
};

/* Bytes of the record of a block with so many parts. */
uint32_t record_bytes(uint32_t parts);
int records_init(struct index *ix); /* 0 or -ENOMEM */
void records_close(struct index *ix);

/* ---- the table of a namespace: linear hashing over buckets of one cache line ---- */

#define BUCKET_ENTRIES 12

/* Entries are filled from the front; an empty one has tag 0 and ref 0. Blocks that find no entry
 * hang from overflow, chained by hash_next; there are some only while every entry is taken. */
struct bucket {
    uint8_t tag[BUCKET_ENTRIES];
    block_ref overflow;
    block_ref ref[BUCKET_ENTRIES];
};

/* The first segment has 4 buckets. Each later one is as long as all before it, up to 2 MiB. */
#define SEGMENT_MIN 4u
#define SEGMENT_MAX (PAGES_HUGE / (uint32_t)sizeof(struct bucket))

struct ns_table {
    struct bucket **segment;
    uint32_t segments, segments_cap;
    uint32_t room;    /* buckets that the segments hold */
    uint32_t buckets; /* in use; 0 until the first insert */
    uint32_t mask;    /* buckets rounded up to a power of 2, less 1 */
    uint32_t key_bytes;
    uint64_t blocks;
    uint64_t size_bytes;
};

#define HASH_SECRET_BYTES 192

struct ns_set {
    struct ns **chain; /* hash table by fingerprint, with as many chains as there are places */
    uint32_t count, max;
    uint32_t last_id;
    uint64_t clock; /* of ns.used */
    uint64_t bytes; /* of namespaces, without their tables */
};

struct index {
    /* First. By number RECORD_CHUNKS chunks, 0 included, of which the kernel backs those in use.
     * Apart from what struct records knows besides, so that it stays in the first-level cache. */
    struct index_head head;
    struct records records;
    struct pages pages;
    struct ns_set ns;
    struct tenant_set tenants;
    struct limits *limits; /* or NULL */
    uint64_t blocks;
    uint64_t counted; /* bytes of blocks, by ns.index_bytes */
    uint32_t holders; /* tenants that have blocks */
    uint8_t secret[HASH_SECRET_BYTES];
};

uint64_t index_hash(const struct index *ix, const uint8_t *key, uint32_t key_bytes);

void ns_table_close(struct ns_table *t);
/* The record's key is set. 0 or -ENOMEM. */
int ns_table_insert(struct index *ix, struct ns_table *t, block_ref ref);
void ns_table_remove(struct index *ix, struct ns_table *t, block_ref ref);

/* ---- namespaces ---- */

/* Memory for the result of ns_identity_decode. */
struct ns_identity_memory {
    char text[5][UCM_MAX_NAME_BYTES + 1];
    uint32_t layers[UCM_MAX_PARTS];
};
/* Reads bytes of unknown origin. 0, or -EBADMSG: they are no identity that namespace.open would
 * take. *out points into *memory and, for the salt, into `bytes`. */
int ns_identity_decode(const uint8_t *bytes, size_t n, struct ns_identity_memory *memory,
                       struct ns_identity *out);

/* The forms of a namespace's parts, as its identity has them, in memory of so many bytes that is
 * aligned for any type. */
size_t ns_forms_bytes(const struct ns_identity *identity);
const struct form *ns_forms_fill(void *memory, const struct ns_identity *identity);

int ns_set_init(struct index *ix, uint32_t max); /* 0 or -ENOMEM */
/* Tenants are left alone. */
void ns_set_close(struct index *ix);
uint64_t ns_set_bytes(const struct index *ix);

#endif
