#include "proto/memory/lookup_table.h"

#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

bool ucm_lookup_table_view_open(const void *mapping, uint64_t bytes, uint32_t key_bytes,
                                struct ucm_lookup_table_view *out)
{
    const struct ucm_lookup_table_header *shared = mapping;
    struct ucm_lookup_table_header h;

    if (bytes < UCM_LOOKUP_TABLE_HEADER_BYTES)
        return false;
    memcpy(&h, shared, sizeof(h)); /* it may change; the copy does not */
    if (memcmp(h.magic, UCM_LOOKUP_TABLE_MAGIC, sizeof(h.magic)) != 0 ||
        h.version != UCM_LOOKUP_TABLE_VERSION || h.key_bytes != key_bytes ||
        h.buckets < UCM_LOOKUP_TABLE_MIN_BUCKETS || h.buckets > UCM_LOOKUP_TABLE_MAX_BUCKETS ||
        (h.buckets & (h.buckets - 1)) != 0 || ucm_lookup_table_bytes(h.buckets) != bytes)
        return false;
    *out = (struct ucm_lookup_table_view){
        .header = shared,
        .bucket = (const struct ucm_lookup_table_bucket *)((const uint8_t *)mapping +
                                                           UCM_LOOKUP_TABLE_HEADER_BYTES),
        .mask = h.buckets - 1,
        .seed = h.seed,
        .key_bytes = key_bytes,
    };
    return true;
}

/* Keys whose buckets come from memory while those before are looked at. */
#define GROUP 32u

uint64_t ucm_lookup_table_hash(const uint8_t *key, uint32_t key_bytes, uint64_t seed)
{
    return XXH3_64bits_withSeed(key, key_bytes, seed);
}

/* These two are inlined with each length of keys that engines use. */
static inline __attribute__((always_inline)) void group_begin(const struct ucm_lookup_table_view *v,
                                                              uint32_t key_bytes,
                                                              const uint8_t *keys, uint32_t n,
                                                              uint64_t hash[GROUP])
{
    for (uint32_t i = 0; i < n; i++) {
        hash[i] = XXH3_64bits_withSeed(keys + (size_t)i * key_bytes, key_bytes, v->seed);
        __builtin_prefetch(&v->bucket[hash[i] & v->mask]);
    }
}

static inline __attribute__((always_inline)) uint32_t find_many(struct ucm_lookup_table_view v,
                                                                uint32_t key_bytes,
                                                                const uint8_t *keys, uint32_t n,
                                                                bool stop_at_gap, uint8_t *found)
{
    uint64_t hash[2][GROUP];
    uint32_t hits = 0, now = 0, m = n < GROUP ? n : GROUP;

    group_begin(&v, key_bytes, keys, m, hash[0]);
    while (m > 0) {
        uint32_t next = n - m < GROUP ? n - m : GROUP;

        keys += (size_t)m * key_bytes;
        group_begin(&v, key_bytes, keys, next, hash[!now]);
        for (uint32_t i = 0; i < m; i++) {
            found[i] =
                (uint8_t)(ucm_lookup_table_find(&v, hash[now][i]) & UCM_LOOKUP_TABLE_TIER_MASK);
            hits += found[i] != 0;
            if (stop_at_gap && found[i] == 0) {
                memset(found + i, 0, n - i);
                return hits;
            }
        }
        found += m;
        n -= m;
        m = next;
        now = !now;
    }
    return hits;
}

uint32_t ucm_lookup_table_find_many(const struct ucm_lookup_table_view *v, const uint8_t *keys,
                                    uint32_t n, bool stop_at_gap, uint8_t *found)
{
    switch (v->key_bytes) {
    case 16:
        return find_many(*v, 16, keys, n, stop_at_gap, found);
    case 32:
        return find_many(*v, 32, keys, n, stop_at_gap, found);
    default:
        return find_many(*v, v->key_bytes, keys, n, stop_at_gap, found);
    }
}
