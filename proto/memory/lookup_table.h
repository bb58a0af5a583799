/* The lookup table that the daemon shares with the workers of a namespace: which of its blocks
 * are complete, and in which tier. The daemon writes it, in a memfd; workers map it read-only and
 * look keys up without asking. docs/design/mappings.md, "Lookup tables", describes it.
 *
 * A bucket is a cache line: how far after it entries lie that belong into it, and 7 entries, each
 * one atomic word. A key's entry is in its own bucket or, if that was full, in one of the 15 after
 * it: so many that a table of 100 million entries has room for each until 3 of 5 are taken. It
 * never moves, and changes by single stores. So at every moment, also when the daemon dies during a
 * change, a reader finds each entry that stays, and no half of one. What a reader
 * concludes is advisory all the same: the block may be evicted at the next moment.
 *
 * Nothing in the table leads a reader out of it: it masks each position by its own copy of the
 * size.
 *
 * Threads: one writes; readers anywhere. Stores are releases and loads acquires, so a reader that
 * sees a store sees those before it. */
#ifndef UCM_PROTO_LOOKUP_TABLE_H
#define UCM_PROTO_LOOKUP_TABLE_H

#include "proto/limits.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define UCM_LOOKUP_TABLE_MAGIC "UCMLTAB1"
#define UCM_LOOKUP_TABLE_VERSION 2u
#define UCM_LOOKUP_TABLE_HEADER_BYTES 4096u /* the buckets begin here */
#define UCM_LOOKUP_TABLE_ENTRIES 7u         /* of a bucket */
#define UCM_LOOKUP_TABLE_PROBES 16u         /* buckets in which a key's entry may lie */
#define UCM_LOOKUP_TABLE_MIN_BUCKETS 64u
#define UCM_LOOKUP_TABLE_MAX_BUCKETS (1u << 30)

/* The daemon beats once a second. A reader that finds the beat this much behind takes the daemon
 * for dead or stuck. */
#define UCM_LOOKUP_TABLE_BEAT_MS 1000u
#define UCM_LOOKUP_TABLE_STALE_MS 5000u

enum ucm_lookup_table_state {
    UCM_LOOKUP_TABLE_FILLING = 0,    /* not all blocks are in it yet */
    UCM_LOOKUP_TABLE_LIVE = 1,       /* it follows the cache */
    UCM_LOOKUP_TABLE_SUPERSEDED = 2, /* there is another one: ask for it */
    UCM_LOOKUP_TABLE_ENDED = 3,      /* the daemon stopped, or ended it */
};

struct ucm_lookup_table_header {
    uint8_t magic[8];
    uint32_t version;
    uint32_t key_bytes;
    uint64_t buckets;          /* a power of 2 */
    uint64_t seed;             /* of the hash */
    _Atomic uint64_t state;    /* enum ucm_lookup_table_state */
    _Atomic uint64_t left_out; /* at most so many blocks have no entry, as their buckets are full */
    _Atomic uint64_t beat_ms;  /* CLOCK_MONOTONIC of the daemon when it beat last */
};

/* An entry: the tier (enum ucm_lookup_status) in bits 0 and 1, a generation in bits 2 to 15, and
 * the 48 high bits of the key's hash. The generation is that of the block's latest entry into the
 * table, so one that came back has another. */
#define UCM_LOOKUP_TABLE_TIER_MASK UINT64_C(3)
#define UCM_LOOKUP_TABLE_GENERATION_SHIFT 2
#define UCM_LOOKUP_TABLE_GENERATION_MASK UINT64_C(0xfffc)
#define UCM_LOOKUP_TABLE_PRINT_MASK (~UINT64_C(0xffff))

/* Byte i of the tags is 0 while entry i is empty, else 0x80 and bits 57 to 63 of its hash. The low
 * half of byte 7 counts entries whose own bucket is this one, but that lie in later buckets; once
 * it is 15 it stays. The high half is the distance in buckets of the furthest of them since the
 * count was 0. */
struct ucm_lookup_table_bucket {
    _Atomic uint64_t tags;
    _Atomic uint64_t entry[UCM_LOOKUP_TABLE_ENTRIES];
};
#define UCM_LOOKUP_TABLE_AWAY_SHIFT 56
#define UCM_LOOKUP_TABLE_AWAY_MAX 15u
#define UCM_LOOKUP_TABLE_FAR_SHIFT 60

_Static_assert(UCM_LOOKUP_TABLE_PROBES - 1 <= UINT64_MAX >> UCM_LOOKUP_TABLE_FAR_SHIFT,
               "the furthest one has 4 bits");
_Static_assert(sizeof(struct ucm_lookup_table_bucket) == 64, "a bucket is a cache line");
_Static_assert(sizeof(struct ucm_lookup_table_header) <= UCM_LOOKUP_TABLE_HEADER_BYTES,
               "the header has a page");

static inline uint64_t ucm_lookup_table_bytes(uint64_t buckets)
{
    return UCM_LOOKUP_TABLE_HEADER_BYTES + buckets * sizeof(struct ucm_lookup_table_bucket);
}

/* XXH3-64 of the key with that seed. */
uint64_t ucm_lookup_table_hash(const uint8_t *key, uint32_t key_bytes, uint64_t seed);

/* The model check of tests/unit/proto/test_lookup_table_model.c replaces these. */
#ifndef UCM_LOOKUP_TABLE_LOAD
#define UCM_LOOKUP_TABLE_LOAD(p) atomic_load_explicit(p, memory_order_acquire)
#define UCM_LOOKUP_TABLE_STORE(p, value) atomic_store_explicit(p, value, memory_order_release)
#endif

/* ---- reading ---- */

/* What a reader keeps of a header that it has checked. */
struct ucm_lookup_table_view {
    const struct ucm_lookup_table_header *header;
    const struct ucm_lookup_table_bucket *bucket;
    uint64_t mask; /* buckets - 1 */
    uint64_t seed;
    uint32_t key_bytes;
};

/* Copies and checks the header of a mapping of `bytes` bytes. False: it is no table of keys of
 * key_bytes that fits there. */
bool ucm_lookup_table_view_open(const void *mapping, uint64_t bytes, uint32_t key_bytes,
                                struct ucm_lookup_table_view *out);

static inline uint64_t ucm_lookup_table_tag(uint64_t hash)
{
    return 0x80 | hash >> 57;
}

/* Has bit 7 of byte i for each entry i with that tag, and perhaps for others after the first. */
static inline uint64_t ucm_lookup_table_candidates(uint64_t tags, uint64_t tag)
{
    uint64_t x = (tags ^ tag * UINT64_C(0x0101010101010101)) | UINT64_C(0xff)
                                                                   << UCM_LOOKUP_TABLE_AWAY_SHIFT;

    return (x - UINT64_C(0x0101010101010101)) & ~x & UINT64_C(0x8080808080808080);
}

/* The number of the bucket's entry with that hash, and the entry; UCM_LOOKUP_TABLE_ENTRIES: it has
 * none. */
static inline uint32_t ucm_lookup_table_in(const struct ucm_lookup_table_bucket *b, uint64_t tags,
                                           uint64_t hash, uint64_t *entry)
{
    for (uint64_t c = ucm_lookup_table_candidates(tags, ucm_lookup_table_tag(hash)); c;
         c &= c - 1) {
        uint32_t i = (uint32_t)__builtin_ctzll(c) / 8;

        *entry = UCM_LOOKUP_TABLE_LOAD(&b->entry[i]);
        if (((*entry ^ hash) & UCM_LOOKUP_TABLE_PRINT_MASK) == 0)
            return i;
    }
    return UCM_LOOKUP_TABLE_ENTRIES;
}

/* The entry of a key with that hash; 0: none. */
static inline uint64_t ucm_lookup_table_find(const struct ucm_lookup_table_view *v, uint64_t hash)
{
    const struct ucm_lookup_table_bucket *b = &v->bucket[hash & v->mask];
    uint64_t tags = UCM_LOOKUP_TABLE_LOAD(&b->tags), far = tags >> UCM_LOOKUP_TABLE_FAR_SHIFT,
             entry = 0;

    for (uint64_t probe = 1; ucm_lookup_table_in(b, tags, hash, &entry) == UCM_LOOKUP_TABLE_ENTRIES;
         probe++) {
        if (probe > far)
            return 0;
        b = &v->bucket[(hash + probe) & v->mask];
        tags = UCM_LOOKUP_TABLE_LOAD(&b->tags);
    }
    return entry;
}

/* found[i]: the tier of keys + i * key_bytes as enum ucm_lookup_status, 0 for none. stop_at_gap:
 * looks no further than the first that has none, and leaves what is after it 0. Returns how many
 * were found. */
uint32_t ucm_lookup_table_find_many(const struct ucm_lookup_table_view *v, const uint8_t *keys,
                                    uint32_t n, bool stop_at_gap, uint8_t *found);

/* ---- writing ---- */

static inline void ucm_lookup_table_tag_set(struct ucm_lookup_table_bucket *b, uint32_t i,
                                            uint64_t tag)
{
    uint64_t tags = UCM_LOOKUP_TABLE_LOAD(&b->tags);

    UCM_LOOKUP_TABLE_STORE(&b->tags, (tags & ~(UINT64_C(0xff) << 8 * i)) | tag << 8 * i);
}

/* One more of the bucket's entries lies so far after it. */
static inline void ucm_lookup_table_away(struct ucm_lookup_table_bucket *own, uint64_t distance)
{
    uint64_t tags = UCM_LOOKUP_TABLE_LOAD(&own->tags), far = tags >> UCM_LOOKUP_TABLE_FAR_SHIFT;

    if ((tags >> UCM_LOOKUP_TABLE_AWAY_SHIFT & UCM_LOOKUP_TABLE_AWAY_MAX) <
        UCM_LOOKUP_TABLE_AWAY_MAX)
        tags += UINT64_C(1) << UCM_LOOKUP_TABLE_AWAY_SHIFT;
    if (distance > far)
        tags += (distance - far) << UCM_LOOKUP_TABLE_FAR_SHIFT;
    UCM_LOOKUP_TABLE_STORE(&own->tags, tags);
}

/* One less. */
static inline void ucm_lookup_table_back(struct ucm_lookup_table_bucket *own)
{
    uint64_t tags = UCM_LOOKUP_TABLE_LOAD(&own->tags);
    uint64_t away = tags >> UCM_LOOKUP_TABLE_AWAY_SHIFT & UCM_LOOKUP_TABLE_AWAY_MAX;

    if (away == UCM_LOOKUP_TABLE_AWAY_MAX)
        return;
    tags -= UINT64_C(1) << UCM_LOOKUP_TABLE_AWAY_SHIFT;
    if (away == 1)
        tags &= ~(UINT64_MAX << UCM_LOOKUP_TABLE_FAR_SHIFT);
    UCM_LOOKUP_TABLE_STORE(&own->tags, tags);
}

/* How far after its own bucket the one lies that has the entry, and the entry's number;
 * UCM_LOOKUP_TABLE_PROBES: none has. */
static inline uint32_t ucm_lookup_table_place(const struct ucm_lookup_table_bucket *buckets,
                                              uint64_t mask, uint64_t hash, uint32_t *i)
{
    uint64_t far = UCM_LOOKUP_TABLE_LOAD(&buckets[hash & mask].tags) >> UCM_LOOKUP_TABLE_FAR_SHIFT,
             entry;

    for (uint32_t probe = 0; probe <= far; probe++) {
        const struct ucm_lookup_table_bucket *b = &buckets[(hash + probe) & mask];

        *i = ucm_lookup_table_in(b, UCM_LOOKUP_TABLE_LOAD(&b->tags), hash, &entry);
        if (*i < UCM_LOOKUP_TABLE_ENTRIES)
            return probe;
    }
    return UCM_LOOKUP_TABLE_PROBES;
}

/* The same of an empty entry. */
static inline uint32_t ucm_lookup_table_room(const struct ucm_lookup_table_bucket *buckets,
                                             uint64_t mask, uint64_t hash, uint32_t *i)
{
    uint32_t probe;

    for (probe = 0; probe < UCM_LOOKUP_TABLE_PROBES; probe++) {
        uint64_t tags = UCM_LOOKUP_TABLE_LOAD(&buckets[(hash + probe) & mask].tags);

        for (*i = 0; *i < UCM_LOOKUP_TABLE_ENTRIES && tags >> (8 * *i + 7) & 1;)
            ++*i;
        if (*i < UCM_LOOKUP_TABLE_ENTRIES)
            break;
    }
    return probe;
}

enum ucm_lookup_table_change {
    UCM_LOOKUP_TABLE_SAME,
    UCM_LOOKUP_TABLE_ADDED,
    UCM_LOOKUP_TABLE_REMOVED,
    UCM_LOOKUP_TABLE_FULL
};

/* The block has that tier now; 0: it is not found any more. FULL: it should have an entry, and has
 * none. SAME: the number of entries did not change. */
static inline enum ucm_lookup_table_change
ucm_lookup_table_set(struct ucm_lookup_table_bucket *buckets, uint64_t mask, uint64_t hash,
                     uint64_t tier, uint64_t generation)
{
    struct ucm_lookup_table_bucket *own = &buckets[hash & mask], *b;
    uint32_t i, probe = ucm_lookup_table_place(buckets, mask, hash, &i);

    b = &buckets[(hash + probe) & mask];
    if (probe < UCM_LOOKUP_TABLE_PROBES && tier != 0) {
        UCM_LOOKUP_TABLE_STORE(&b->entry[i],
                               (UCM_LOOKUP_TABLE_LOAD(&b->entry[i]) & ~UCM_LOOKUP_TABLE_TIER_MASK) |
                                   tier);
        return UCM_LOOKUP_TABLE_SAME;
    }
    if (probe < UCM_LOOKUP_TABLE_PROBES) { /* readers look further until it has gone */
        ucm_lookup_table_tag_set(b, i, 0);
        if (probe > 0)
            ucm_lookup_table_back(own);
        return UCM_LOOKUP_TABLE_REMOVED;
    }
    if (tier == 0)
        return UCM_LOOKUP_TABLE_SAME;
    probe = ucm_lookup_table_room(buckets, mask, hash, &i);
    if (probe == UCM_LOOKUP_TABLE_PROBES)
        return UCM_LOOKUP_TABLE_FULL;
    b = &buckets[(hash + probe) & mask];
    if (probe > 0) /* and look further before it comes */
        ucm_lookup_table_away(own, probe);
    UCM_LOOKUP_TABLE_STORE(&b->entry[i], (hash & UCM_LOOKUP_TABLE_PRINT_MASK) |
                                             (generation << UCM_LOOKUP_TABLE_GENERATION_SHIFT &
                                              UCM_LOOKUP_TABLE_GENERATION_MASK) |
                                             tier);
    ucm_lookup_table_tag_set(b, i, ucm_lookup_table_tag(hash)); /* its entry is there */
    return UCM_LOOKUP_TABLE_ADDED;
}

#endif
