#include "daemon/index/internal.h"

#include <endian.h>
#include <errno.h>
#include <stdlib.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

static_assert(sizeof(struct bucket) == 64, "a bucket is a cache line");
static_assert(HASH_SECRET_BYTES >= XXH3_SECRET_SIZE_MIN, "as XXH3 asks");

/* Blocks a bucket, on average: more cause a split, fewer a merge. Far apart, so that an insert and
 * a remove in turn do not split and merge in turn. */
#define LOAD_MAX 6u
#define LOAD_MIN 2u

/* Segments have 4, 4, 8, ... buckets, and SEGMENT_MAX after so many. */
#define DOUBLINGS 13u
static_assert(SEGMENT_MIN << DOUBLINGS == SEGMENT_MAX, "the doubling ends at the largest segment");
#define HASH_TAG_SHIFT 56
#define SEGMENT_PAGES_BYTES (64u << 10) /* segments of this length and more are from pages_new */

/* ---- hashes and keys ---- */

/* The low bits choose the bucket, the high byte is the entry's tag, and
 * never 0. */
uint64_t index_hash(const struct index *ix, const uint8_t *key, uint32_t key_bytes)
{
    uint64_t hash = XXH3_64bits_withSecret(key, key_bytes, ix->secret, HASH_SECRET_BYTES);

    return hash >> HASH_TAG_SHIFT ? hash : hash | UINT64_C(1) << HASH_TAG_SHIFT;
}

static inline uint64_t record_hash(const struct index *ix, const struct ns_table *t, block_ref ref)
{
    return index_hash(ix, index_cell(ix, ref)->key, t->key_bytes);
}

/* A key has 16 to 32 bytes, so its first 16 and its last 16 cover it. */
static inline bool key_equal(const uint8_t *a, const uint8_t *b, uint32_t key_bytes)
{
    uint64_t x[4], y[4];

    memcpy(x, a, 16);
    memcpy(x + 2, a + key_bytes - 16, 16);
    memcpy(y, b, 16);
    memcpy(y + 2, b + key_bytes - 16, 16);
    return ((x[0] ^ y[0]) | (x[1] ^ y[1]) | (x[2] ^ y[2]) | (x[3] ^ y[3])) == 0;
}

/* ---- buckets ---- */

/* A segment's buckets. */
static uint32_t segment_buckets(uint32_t segment)
{
    if (segment > DOUBLINGS)
        return SEGMENT_MAX;
    return segment == 0 ? SEGMENT_MIN : SEGMENT_MIN << (segment - 1);
}

/* The bucket of a hash, or of a bucket's number. */
static inline struct bucket *bucket_of(const struct ns_table *t, uint64_t hash)
{
    uint32_t bucket = (uint32_t)hash & t->mask, high;

    if (bucket >= t->buckets)
        bucket &= t->mask >> 1;
    if (bucket >= SEGMENT_MAX)
        return &t->segment[DOUBLINGS + bucket / SEGMENT_MAX][bucket % SEGMENT_MAX];
    if (bucket < SEGMENT_MIN)
        return &t->segment[0][bucket];
    high = 31u - (uint32_t)__builtin_clz(bucket);
    return &t->segment[high - 1][bucket - (1u << high)];
}

/* Bit i is set where entry i has the tag: eight tags at once, then four. */
static inline uint32_t entries_match(const struct bucket *b, uint64_t hash)
{
    const uint64_t low = UINT64_C(0x7f7f7f7f7f7f7f7f);
    uint64_t tags = UINT64_C(0x0101010101010101) * (hash >> HASH_TAG_SHIFT), first, x;
    uint32_t last, match;

    memcpy(&first, b->tag, sizeof(first));
    memcpy(&last, b->tag + sizeof(first), sizeof(last));
    x = le64toh(first) ^ tags;
    x = ~(((x & low) + low) | x | low);
    match = (uint32_t)(((x >> 7) * UINT64_C(0x0102040810204080)) >> 56);
    x = le32toh(last) ^ tags;
    x = ~(((x & low) + low) | x | low);
    return match | (uint32_t)(((x >> 7) * UINT64_C(0x0102040810204080)) >> 56) << 8;
}

static uint32_t entries_used(const struct bucket *b)
{
    uint32_t n = 0;

    while (n < BUCKET_ENTRIES && b->ref[n])
        n++;
    return n;
}

/* match: of entries_match. */
static block_ref bucket_find(const struct index *ix, const struct ns_table *t,
                             const struct bucket *b, uint32_t match, const uint8_t *key)
{
    block_ref more = b->overflow;

    while (match || more) {
        block_ref ref = match ? b->ref[__builtin_ctz(match)] : more;
        const struct block *block = index_cell(ix, ref);

        if (key_equal(block->key, key, t->key_bytes))
            return ref;
        if (match)
            match &= match - 1;
        else
            more = block->hash_next;
    }
    return 0;
}

static void bucket_put(const struct index *ix, struct bucket *b, block_ref ref, uint64_t hash)
{
    struct block *block = index_cell(ix, ref);
    uint32_t n = entries_used(b);

    block->hash_next = 0;
    if (n < BUCKET_ENTRIES) {
        b->tag[n] = (uint8_t)(hash >> HASH_TAG_SHIFT);
        b->ref[n] = ref;
        return;
    }
    block->hash_next = b->overflow;
    b->overflow = ref;
}

static void bucket_prefetch(const struct index *ix, const struct bucket *b)
{
    for (uint32_t i = 0; i < BUCKET_ENTRIES && b->ref[i]; i++)
        __builtin_prefetch(index_cell(ix, b->ref[i]));
}

/* Empties `from` and puts each of its blocks into `zero` or `one`, by a bit of the hash. */
static void bucket_deal(const struct index *ix, const struct ns_table *t, struct bucket *from,
                        struct bucket *zero, struct bucket *one, uint32_t bit)
{
    struct bucket old = *from;
    block_ref ref = old.overflow;

    bucket_prefetch(ix, &old);
    memset(from, 0, sizeof(*from));
    for (uint32_t i = 0; i < BUCKET_ENTRIES && old.ref[i]; i++) {
        uint64_t hash = record_hash(ix, t, old.ref[i]);

        bucket_put(ix, hash & bit ? one : zero, old.ref[i], hash);
    }
    while (ref) {
        block_ref next = index_cell(ix, ref)->hash_next;
        uint64_t hash = record_hash(ix, t, ref);

        bucket_put(ix, hash & bit ? one : zero, ref, hash);
        ref = next;
    }
}

/* ---- growing and shrinking ---- */

static int segment_add(struct pages *pages, struct ns_table *t)
{
    uint32_t n = segment_buckets(t->segments), size_bytes = n * (uint32_t)sizeof(struct bucket);
    struct bucket *p;

    if (t->segments == t->segments_cap) {
        uint32_t cap = t->segments_cap ? t->segments_cap * 2 : 4;
        struct bucket **grown = realloc(t->segment, cap * sizeof(*grown));

        if (!grown)
            return -ENOMEM;
        t->size_bytes += (cap - t->segments_cap) * sizeof(*grown);
        t->segment = grown;
        t->segments_cap = cap;
    }
    if (size_bytes >= SEGMENT_PAGES_BYTES) {
        p = pages_new(pages, size_bytes);
    } else {
        p = aligned_alloc(sizeof(*p), size_bytes);
        if (p)
            memset(p, 0, size_bytes);
    }
    if (!p)
        return -ENOMEM;
    t->segment[t->segments++] = p;
    t->room += n;
    t->size_bytes += size_bytes;
    return 0;
}

static void segment_drop(struct ns_table *t)
{
    uint32_t n = segment_buckets(--t->segments), size_bytes = n * (uint32_t)sizeof(struct bucket);

    if (size_bytes >= SEGMENT_PAGES_BYTES)
        pages_free(t->segment[t->segments], size_bytes);
    else
        free(t->segment[t->segments]);
    t->room -= n;
    t->size_bytes -= size_bytes;
}

static int table_start(struct pages *pages, struct ns_table *t)
{
    if (segment_add(pages, t) != 0)
        return -ENOMEM;
    t->buckets = SEGMENT_MIN;
    t->mask = SEGMENT_MIN - 1;
    return 0;
}

/* A new bucket takes its blocks from an old one. Without memory the buckets get longer instead. */
static void table_split(struct index *ix, struct ns_table *t)
{
    uint32_t fresh = t->buckets, bit;
    struct bucket *old;

    if (fresh == t->room && segment_add(&ix->pages, t) != 0)
        return;
    t->buckets++;
    if (fresh > t->mask)
        t->mask = 2 * t->mask + 1;
    bit = (t->mask + 1) / 2;
    old = bucket_of(t, fresh - bit);
    bucket_deal(ix, t, old, old, bucket_of(t, fresh), bit);
}

static void table_merge(const struct index *ix, struct ns_table *t)
{
    uint32_t last = t->buckets - 1, bit = (t->mask + 1) / 2;
    struct bucket *into = bucket_of(t, last - bit);

    bucket_deal(ix, t, bucket_of(t, last), into, into, bit);
    t->buckets--;
    if (last == bit)
        t->mask >>= 1;
    if (last == t->room - segment_buckets(t->segments - 1))
        segment_drop(t);
}

void ns_table_close(struct ns_table *t)
{
    while (t->segments > 0)
        segment_drop(t);
    free(t->segment);
}

/* ---- one block ---- */

block_ref index_find(const struct index *ix, const struct ns *ns, const uint8_t *key)
{
    const struct ns_table *t = ns->table;
    const struct bucket *b;
    uint64_t hash;

    if (t->blocks == 0)
        return 0;
    hash = index_hash(ix, key, t->key_bytes);
    b = bucket_of(t, hash);
    return bucket_find(ix, t, b, entries_match(b, hash), key);
}

int ns_table_insert(struct index *ix, struct ns_table *t, block_ref ref)
{
    const uint8_t *key = index_cell(ix, ref)->key;
    uint64_t hash = index_hash(ix, key, t->key_bytes);
    struct bucket *b;

    if (t->buckets == 0 && table_start(&ix->pages, t) != 0)
        return -ENOMEM;
    b = bucket_of(t, hash);
    assert(bucket_find(ix, t, b, entries_match(b, hash), key) == 0);
    bucket_put(ix, b, ref, hash);
    t->blocks++;
    if (t->blocks > (uint64_t)t->buckets * LOAD_MAX)
        table_split(ix, t);
    return 0;
}

/* The first block of the overflow fills the gap, or else the last entry. */
static void entry_clear(const struct index *ix, const struct ns_table *t, struct bucket *b,
                        uint32_t entry)
{
    uint32_t last = entries_used(b) - 1;
    block_ref ref = b->overflow;

    if (ref) {
        struct block *block = index_cell(ix, ref);

        b->overflow = block->hash_next;
        block->hash_next = 0;
        b->tag[entry] = (uint8_t)(record_hash(ix, t, ref) >> HASH_TAG_SHIFT);
        b->ref[entry] = ref;
        return;
    }
    b->tag[entry] = b->tag[last];
    b->ref[entry] = b->ref[last];
    b->tag[last] = 0;
    b->ref[last] = 0;
}

void ns_table_remove(struct index *ix, struct ns_table *t, block_ref ref)
{
    struct bucket *b = bucket_of(t, record_hash(ix, t, ref));
    block_ref *link = &b->overflow;
    uint32_t entry = 0;

    while (entry < BUCKET_ENTRIES && b->ref[entry] != ref)
        entry++;
    if (entry < BUCKET_ENTRIES) {
        entry_clear(ix, t, b, entry);
    } else {
        while (*link != ref) {
            assert(*link != 0);
            link = &index_cell(ix, *link)->hash_next;
        }
        *link = index_cell(ix, ref)->hash_next;
    }
    t->blocks--;
    if (t->buckets > SEGMENT_MIN && t->blocks < (uint64_t)t->buckets * LOAD_MIN)
        table_merge(ix, t);
}

/* ---- many blocks ---- */

/* A key goes through three stages, AHEAD keys apart: prefetch its bucket, prefetch its record,
 * compare. So 2 * AHEAD cache misses are under way at any time. */
#define AHEAD 16u
#define RING (2 * AHEAD)

struct search {
    const struct bucket *bucket;
    uint64_t hash;
    const struct block *block; /* first record with the tag, or NULL */
    block_ref ref;
    uint32_t others; /* further entries with the tag */
};

void index_find_many(const struct index *ix, const struct ns *ns, const uint8_t *keys, uint32_t n,
                     bool stop_at_gap, block_ref *out)
{
    const struct ns_table *t = ns->table;
    const uint8_t *key = keys; /* of `done` */
    struct search ring[RING], *p;
    uint32_t done = 0;

    for (uint32_t i = 0; t->blocks > 0 && done < n; i++) {
        if (i >= RING) {
            p = &ring[i % RING];
            if (p->block && key_equal(p->block->key, key, t->key_bytes))
                out[done] = p->ref;
            else if (p->others || p->bucket->overflow)
                out[done] = bucket_find(ix, t, p->bucket, p->others, key);
            else
                out[done] = 0;
            key += t->key_bytes;
            if (out[done++] == 0 && stop_at_gap)
                break;
        }
        if (i >= AHEAD && i - AHEAD < n) {
            uint32_t match;

            p = &ring[(i - AHEAD) % RING];
            match = entries_match(p->bucket, p->hash);
            p->others = match & (match - 1);
            p->block = NULL;
            if (match) {
                p->ref = p->bucket->ref[__builtin_ctz(match)];
                p->block = index_cell(ix, p->ref);
                __builtin_prefetch(p->block);
                __builtin_prefetch(&p->block->whole_parts); /* the caller looks at it next */
            }
        }
        if (i < n) {
            p = &ring[i % RING];
            p->hash = index_hash(ix, keys + (size_t)i * t->key_bytes, t->key_bytes);
            p->bucket = bucket_of(t, p->hash);
            __builtin_prefetch(p->bucket);
        }
    }
    memset(out + done, 0, (n - done) * sizeof(*out));
}

/* ---- scanning ---- */

/* A scan goes in the order of reversed hashes, which splits and merges do not change: a bucket's
 * hashes have their low bits in common, so their reverses lie next to each other. */
static uint64_t reversed(uint64_t v)
{
    v = ((v >> 1) & UINT64_C(0x5555555555555555)) | ((v & UINT64_C(0x5555555555555555)) << 1);
    v = ((v >> 2) & UINT64_C(0x3333333333333333)) | ((v & UINT64_C(0x3333333333333333)) << 2);
    v = ((v >> 4) & UINT64_C(0x0f0f0f0f0f0f0f0f)) | ((v & UINT64_C(0x0f0f0f0f0f0f0f0f)) << 4);
    return __builtin_bswap64(v);
}

/* So many of a bucket's blocks are sorted in one go: as many as most buckets have. */
#define SORTED_MAX 16u

/* The blocks of the bucket with the lowest positions from `from` on, in their order, at most
 * `max`. */
static uint32_t bucket_sort(const struct index *ix, const struct ns_table *t,
                            const struct bucket *b, uint64_t from, uint32_t max, block_ref *refs,
                            uint64_t *positions)
{
    uint32_t used = entries_used(b), n = 0;
    block_ref ref = used > 0 ? b->ref[0] : 0;

    bucket_prefetch(ix, b);
    for (uint32_t i = 1; ref != 0; i++) {
        uint64_t at = reversed(record_hash(ix, t, ref));

        if (at >= from && (n < max || at < positions[n - 1])) {
            uint32_t k = n < max ? n++ : n - 1;

            for (; k > 0 && positions[k - 1] > at; k--) {
                positions[k] = positions[k - 1];
                refs[k] = refs[k - 1];
            }
            positions[k] = at;
            refs[k] = ref;
        }
        if (i < used)
            ref = b->ref[i];
        else
            ref = i == used ? b->overflow : index_cell(ix, ref)->hash_next;
    }
    return n;
}

/* The position after the last one that the bucket's hashes may have; 0 for the last bucket. */
static uint64_t bucket_end(const struct ns_table *t, uint32_t bucket)
{
    uint32_t bits = (uint32_t)__builtin_popcount(t->mask), half = (t->mask >> 1) + 1;

    if (bucket < half && bucket + half >= t->buckets)
        bits--; /* not split yet */
    return reversed(bucket) + (UINT64_C(1) << (64 - bits));
}

uint64_t index_scan(const struct index *ix, const struct ns *ns, uint64_t cursor, uint32_t limit,
                    block_ref *refs, uint32_t *n)
{
    const struct ns_table *t = ns->table;

    *n = 0;
    while (*n < limit && t->blocks > 0) {
        uint32_t max = limit - *n < SORTED_MAX ? limit - *n : SORTED_MAX;
        uint32_t bucket = (uint32_t)reversed(cursor) & t->mask;
        uint64_t positions[SORTED_MAX];
        uint32_t found =
            bucket_sort(ix, t, bucket_of(t, bucket), cursor, max, refs + *n, positions);

        if (bucket >= t->buckets)
            bucket &= t->mask >> 1;
        *n += found;
        cursor = found == max ? positions[found - 1] + 1 : bucket_end(t, bucket);
        if (cursor == 0)
            return 0;
    }
    return t->blocks > 0 ? cursor : 0;
}
