/* A router takes over a block only where it knows the block's parent. The daemon's list has no order. */
#include "client/events/events.h"

#include "proto/limits.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define NONE UINT32_MAX

struct listed {
    struct batch_block block; /* points into `bytes` */
    uint32_t chain;           /* of its bucket */
    uint32_t below;           /* on the way down from its first parent */
    bool done;
    uint8_t bytes[]; /* key, parent, tokens, lora */
};

struct listing {
    struct listed **entries;
    uint32_t n, cap;
    uint32_t *bucket;
    uint32_t buckets; /* a power of two */
};

struct listing *listing_new(void)
{
    return calloc(1, sizeof(struct listing));
}

void listing_free(struct listing *l)
{
    if (!l)
        return;
    for (uint32_t i = 0; i < l->n; i++)
        free(l->entries[i]);
    free(l->entries);
    free(l->bucket);
    free(l);
}

static int grow(struct listing *l)
{
    uint32_t cap = l->cap ? 2 * l->cap : 1024;
    struct listed **entries;

    if (l->n < l->cap)
        return 0;
    entries = realloc(l->entries, cap * sizeof(struct listed *));
    if (!entries)
        return -1;
    l->entries = entries;
    l->cap = cap;
    return 0;
}

static struct listed *copy_of(const struct batch_block *b)
{
    size_t tokens = b->has_metadata ? 4 * (size_t)b->n_tokens : 0, lora = strlen(b->lora) + 1;
    struct listed *e = malloc(sizeof(*e) + b->key_bytes + b->parent_bytes + tokens + lora);
    uint8_t *at;

    if (!e)
        return NULL;
    *e = (struct listed){.block = *b};
    at = e->bytes;
    e->block.key = memcpy(at, b->key, b->key_bytes);
    at += b->key_bytes;
    if (b->parent_bytes > 0)
        e->block.parent = memcpy(at, b->parent, b->parent_bytes);
    at += b->parent_bytes;
    if (tokens > 0)
        e->block.tokens = memcpy(at, b->tokens, tokens);
    e->block.lora = memcpy(at + tokens, b->lora, lora);
    return e;
}

int listing_add(struct listing *l, const msgpack_object *o, const struct batch_block *common,
                const char *const media[4])
{
    struct batch_block b = *common;
    char lora[LORA_BYTES];
    uint64_t is = answer_u64(o, "is");
    struct listed *e;

    block_read(o, &b, lora);
    if (b.key == NULL || is < 1 || is > 3)
        return 0;
    b.medium = media[is];
    e = grow(l) == 0 ? copy_of(&b) : NULL;
    if (!e)
        return -1;
    l->entries[l->n++] = e;
    return 0;
}

/* ---- parents first ---- */

static uint32_t hash_of(const struct listing *l, const uint8_t *key, uint32_t n)
{
    return (uint32_t)XXH3_64bits(key, n) & (l->buckets - 1);
}

static uint32_t find(const struct listing *l, const uint8_t *key, uint32_t n)
{
    uint32_t at = l->bucket[hash_of(l, key, n)];

    while (at != NONE && memcmp(l->entries[at]->block.key, key, n) != 0)
        at = l->entries[at]->chain;
    return at;
}

/* Without memory for it the order stays the list's. */
static bool table_make(struct listing *l)
{
    l->buckets = 1024;
    while (l->buckets < l->n)
        l->buckets *= 2;
    l->bucket = malloc(l->buckets * sizeof(*l->bucket));
    if (!l->bucket)
        return false;
    memset(l->bucket, 0xff, l->buckets * sizeof(*l->bucket));
    for (uint32_t i = 0; i < l->n; i++) {
        uint32_t h = hash_of(l, l->entries[i]->block.key, l->entries[i]->block.key_bytes);

        l->entries[i]->chain = l->bucket[h];
        l->bucket[h] = i;
    }
    return true;
}

/* Walks from the block to its parents and returns the farthest one that nobody has been told of. It marks each on the way, so a
 * circle of parents ends. */
static uint32_t top_of(struct listing *l, uint32_t at)
{
    uint32_t below = NONE;

    while (at != NONE && !l->entries[at]->done) {
        const struct batch_block *b = &l->entries[at]->block;

        l->entries[at]->done = true;
        l->entries[at]->below = below;
        below = at;
        at = b->has_metadata && b->parent_bytes == b->key_bytes
                 ? find(l, b->parent, b->parent_bytes)
                 : NONE;
    }
    return below;
}

void listing_walk(struct listing *l, bool (*each_cb)(void *ctx, const struct batch_block *block),
                  void *ctx)
{
    bool ordered = table_make(l);

    for (uint32_t i = 0; i < l->n; i++) {
        uint32_t at = ordered ? top_of(l, i) : i;

        for (; at != NONE; at = ordered ? l->entries[at]->below : NONE)
            if (!each_cb(ctx, &l->entries[at]->block))
                return;
    }
}
