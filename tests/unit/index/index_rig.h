/* What the index's tests share. */
#ifndef UCMD_TESTS_INDEX_RIG_H
#define UCMD_TESTS_INDEX_RIG_H

#include "daemon/index/internal.h"
#include "proto/errors.h"
#include "tests/unit/index/index_secret.h"
#include "tests/unit/random.h"

#include <criterion/criterion.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KEY 32

static const uint32_t layers[UCM_MAX_PARTS] = {32, 32, 32, 32};

static inline struct ns_identity identity(void)
{
    return (struct ns_identity){"t", "m", "r", "bf16", "nhd/1", 16, KEY, 1, layers, 4096, NULL, 0};
}

/* The index of a test: index_begin is for its suite, the others are for a test that wants another one. */
static struct index *ix;

static inline void index_end(void)
{
    index_free(ix);
    ix = NULL;
}

static inline void index_again(uint64_t max_blocks, uint32_t max_ns)
{
    index_end();
    cr_assert_eq(index_new(max_blocks, max_ns, &ix), 0);
    index_secret_fix(ix);
}

static inline void index_begin(void)
{
    index_again(2000000, 4096);
}

static inline struct ns *open_ns(const struct ns_identity *id)
{
    struct ucm_error e = {0};
    struct ns *ns = NULL;

    cr_assert_eq(index_ns_open(ix, id, NULL, &ns, &e), 0, "%s", e.text);
    return ns;
}

static inline void key_make(uint8_t *key, uint64_t number)
{
    memset(key, 0, UCM_MAX_KEY_BYTES);
    memcpy(key, &number, sizeof(number));
    memcpy(key + 8, &number, sizeof(number));
}

static inline block_ref add(struct ns *ns, uint64_t number)
{
    uint8_t key[UCM_MAX_KEY_BYTES];
    block_ref ref;

    key_make(key, number);
    ref = index_insert(ix, ns, key);
    cr_assert_neq(ref, 0);
    return ref;
}

static inline block_ref find(struct ns *ns, uint64_t number)
{
    uint8_t key[UCM_MAX_KEY_BYTES];

    key_make(key, number);
    return index_find(ix, ns, key);
}

static inline uint32_t number_of(const struct block *b)
{
    uint32_t number;

    memcpy(&number, b->key, sizeof(number));
    return number;
}

static inline uint32_t ns_count(void)
{
    uint32_t n = 0;

    for (uint32_t place = 0; place < index_ns_places(ix); place++)
        n += index_ns_at(ix, place) != NULL;
    return n;
}

#endif
