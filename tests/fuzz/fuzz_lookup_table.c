/* Any bytes as a lookup table. Its header is refused, or a reader stays within the memory, whatever
 * the buckets hold. Input that begins with the right bytes gets a valid header, so that buckets are
 * reached. */
#include "proto/memory/lookup_table.h"
#include "tests/fuzz/fuzz.h"

#include <string.h>

#define BUCKETS_MAX 256u
#define KEYS 64u

static void look(const void *table, uint64_t bytes, uint32_t key_bytes, const uint8_t *keys)
{
    struct ucm_lookup_table_view v;
    uint8_t found[KEYS];
    uint32_t each = 0, prefix;

    if (!ucm_lookup_table_view_open(table, bytes, key_bytes, &v))
        return;
    must(v.mask < bytes / sizeof(struct ucm_lookup_table_bucket));
    prefix = ucm_lookup_table_find_many(&v, keys, KEYS, true, found);
    must(prefix <= KEYS);
    for (uint32_t i = 0; i < KEYS; i++)
        must(i < prefix ? found[i] >= 1 && found[i] <= 3 : found[i] == 0);
    must(ucm_lookup_table_find_many(&v, keys, KEYS, false, found) >= prefix);
    for (uint32_t i = 0; i < KEYS; i++) {
        must(found[i] <= 3);
        each += found[i] != 0;
    }
    must(each >= prefix);
}

/* The first byte says how many buckets, the second which header; then come the seed, and words that are repeated all over. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint32_t lengths[] = {16, 32, 20, 31};
    uint64_t buckets, bytes;
    uint32_t key_bytes;
    uint8_t *table, *keys;

    if (size < 16)
        return 0;
    buckets = UCM_LOOKUP_TABLE_MIN_BUCKETS << data[0] % 3;
    key_bytes = lengths[data[0] / 4 % 4];
    bytes = ucm_lookup_table_bytes(buckets);
    table = aligned_alloc(64, bytes);
    keys = malloc((size_t)KEYS * key_bytes);
    must(table && keys && buckets <= BUCKETS_MAX);
    for (uint64_t i = 0; i < bytes; i += size)
        memcpy(table + i, data, bytes - i < size ? bytes - i : size);
    for (size_t i = 0; i < (size_t)KEYS * key_bytes; i++)
        keys[i] = data[(i * 7 + i / key_bytes) % size];
    if (data[1] % 8 != 0) {
        struct ucm_lookup_table_header *h = (void *)table;

        memcpy(h->magic, UCM_LOOKUP_TABLE_MAGIC, sizeof(h->magic));
        h->version = UCM_LOOKUP_TABLE_VERSION;
        h->key_bytes = key_bytes;
        h->buckets = buckets;
    }
    look(table, bytes, key_bytes, keys);
    free(keys);
    free(table);
    return 0;
}
