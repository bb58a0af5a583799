#include "client/events/events.h"

#include "proto/limits.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Blocks merged into one event, so that no subscriber gets a larger one than engines send. */
#define MERGED_MOST 256

/* Bytes that are packed; what finds no memory is remembered. */
struct packed {
    msgpack_sbuffer bytes;
    bool failed;
};

/* The event that further blocks may join. */
struct pending {
    enum { PENDING_NONE, PENDING_STORED, PENDING_REMOVED } what;
    char medium[32], lora[LORA_BYTES];
    bool has_metadata;
    uint8_t parent[UCM_MAX_KEY_BYTES], last[UCM_MAX_KEY_BYTES];
    uint32_t parent_bytes, key_bytes, block_tokens, n, n_tokens;
    struct packed hashes, tokens;
};

struct batch {
    struct batch_form form;
    struct packed events, whole;
    uint32_t n_events, n_blocks;
    struct pending pending;
};

static int write_cb(void *to, const char *bytes, size_t n)
{
    struct packed *p = to;

    p->failed = p->failed || msgpack_sbuffer_write(&p->bytes, bytes, n) != 0;
    return p->failed ? -1 : 0;
}

static void append(struct packed *to, const struct packed *from)
{
    to->failed = to->failed || from->failed;
    if (from->bytes.size > 0)
        write_cb(to, from->bytes.data, from->bytes.size);
}

static void empty(struct packed *p)
{
    msgpack_sbuffer_clear(&p->bytes);
    p->failed = false;
}

static void pack_text(msgpack_packer *pk, const char *text)
{
    msgpack_pack_str(pk, strlen(text));
    msgpack_pack_str_body(pk, text, strlen(text));
}

static void pack_text_or_nil(msgpack_packer *pk, const char *text)
{
    if (text[0] == '\0')
        msgpack_pack_nil(pk);
    else
        pack_text(pk, text);
}

/* vLLM: the number that a hash's last 8 bytes are, big-endian. */
static void pack_hash(const struct batch *b, msgpack_packer *pk, const uint8_t *key, uint32_t n)
{
    uint64_t number = 0;

    if (b->form.hash_bytes) {
        msgpack_pack_bin(pk, n);
        msgpack_pack_bin_body(pk, key, n);
        return;
    }
    for (uint32_t i = n - 8; i < n; i++)
        number = number << 8 | key[i];
    msgpack_pack_uint64(pk, number);
}

/* ---- the event that is being made ---- */

/* An event begins: its tag, then fields by name or by place. */
static void begin(const struct batch *b, msgpack_packer *pk, const char *tag, uint32_t fields)
{
    if (b->form.arrays) {
        msgpack_pack_array(pk, fields + 1);
    } else {
        msgpack_pack_map(pk, fields + 1);
        pack_text(pk, "type");
    }
    pack_text(pk, tag);
}

static void field(const struct batch *b, msgpack_packer *pk, const char *name)
{
    if (!b->form.arrays)
        pack_text(pk, name);
}

static void pack_list(struct batch *b, msgpack_packer *pk, const char *name, uint32_t n,
                      const struct packed *items)
{
    field(b, pk, name);
    msgpack_pack_array(pk, n);
    append(&b->events, items);
}

static void pack_stored(struct batch *b, msgpack_packer *pk)
{
    const struct pending *p = &b->pending;

    begin(b, pk, "BlockStored", 7);
    pack_list(b, pk, "block_hashes", p->n, &p->hashes);
    field(b, pk, "parent_block_hash");
    if (p->parent_bytes > 0)
        pack_hash(b, pk, p->parent, p->parent_bytes);
    else
        msgpack_pack_nil(pk);
    pack_list(b, pk, "token_ids", p->n_tokens, &p->tokens);
    field(b, pk, "block_size");
    msgpack_pack_uint32(pk, p->has_metadata ? p->block_tokens : 0);
    field(b, pk, "lora_id");
    msgpack_pack_nil(pk);
    field(b, pk, "medium");
    pack_text(pk, p->medium);
    field(b, pk, "lora_name");
    pack_text_or_nil(pk, p->lora);
}

static void pending_end(struct batch *b)
{
    struct pending *p = &b->pending;
    msgpack_packer pk;

    if (p->what == PENDING_NONE)
        return;
    msgpack_packer_init(&pk, &b->events, write_cb);
    if (p->what == PENDING_STORED) {
        pack_stored(b, &pk);
    } else {
        begin(b, &pk, "BlockRemoved", 2);
        pack_list(b, &pk, "block_hashes", p->n, &p->hashes);
        field(b, &pk, "medium");
        pack_text(&pk, p->medium);
    }
    b->n_events++;
    p->what = PENDING_NONE;
    p->n = p->n_tokens = 0;
    empty(&p->hashes);
    empty(&p->tokens);
}

static bool joins(const struct pending *p, int what, const struct batch_block *k)
{
    if ((int)p->what != what || p->n >= MERGED_MOST || strcmp(p->medium, k->medium) != 0)
        return false;
    if (what == PENDING_REMOVED)
        return true;
    if (p->has_metadata != k->has_metadata || !k->has_metadata)
        return p->has_metadata == k->has_metadata;
    return p->block_tokens == k->block_tokens && strcmp(p->lora, k->lora) == 0 &&
           k->parent_bytes == p->key_bytes && memcmp(k->parent, p->last, p->key_bytes) == 0;
}

static void open_pending(struct pending *p, int what, const struct batch_block *k)
{
    p->what = what;
    snprintf(p->medium, sizeof(p->medium), "%s", k->medium);
    snprintf(p->lora, sizeof(p->lora), "%s", k->has_metadata ? k->lora : "");
    p->has_metadata = k->has_metadata;
    p->block_tokens = k->block_tokens;
    p->parent_bytes = what == PENDING_STORED && k->has_metadata ? k->parent_bytes : 0;
    if (p->parent_bytes > 0)
        memcpy(p->parent, k->parent, p->parent_bytes);
}

static void add(struct batch *b, int what, const struct batch_block *k)
{
    struct pending *p = &b->pending;
    msgpack_packer pk;

    if (!joins(p, what, k)) {
        pending_end(b);
        open_pending(p, what, k);
    }
    msgpack_packer_init(&pk, &p->hashes, write_cb);
    pack_hash(b, &pk, k->key, k->key_bytes);
    msgpack_packer_init(&pk, &p->tokens, write_cb);
    for (uint32_t i = 0; what == PENDING_STORED && k->has_metadata && i < k->n_tokens; i++) {
        const uint8_t *t = k->tokens + 4 * (size_t)i;

        msgpack_pack_uint32(&pk, (uint32_t)t[0] | (uint32_t)t[1] << 8 | (uint32_t)t[2] << 16 |
                                     (uint32_t)t[3] << 24);
        p->n_tokens++;
    }
    p->key_bytes = k->key_bytes;
    memcpy(p->last, k->key, k->key_bytes);
    p->n++;
    b->n_blocks++;
}

void batch_stored(struct batch *b, const struct batch_block *block)
{
    add(b, PENDING_STORED, block);
}

void batch_removed(struct batch *b, const struct batch_block *block)
{
    add(b, PENDING_REMOVED, block);
}

void batch_cleared(struct batch *b)
{
    msgpack_packer pk;

    pending_end(b);
    msgpack_packer_init(&pk, &b->events, write_cb);
    begin(b, &pk, "AllBlocksCleared", 0);
    b->n_events++;
    b->n_blocks++;
}

/* ---- the batch ---- */

struct batch *batch_new(const struct batch_form *form)
{
    struct batch *b = calloc(1, sizeof(*b));

    if (!b)
        return NULL;
    b->form = *form;
    msgpack_sbuffer_init(&b->events.bytes);
    msgpack_sbuffer_init(&b->whole.bytes);
    msgpack_sbuffer_init(&b->pending.hashes.bytes);
    msgpack_sbuffer_init(&b->pending.tokens.bytes);
    return b;
}

void batch_free(struct batch *b)
{
    if (!b)
        return;
    msgpack_sbuffer_destroy(&b->events.bytes);
    msgpack_sbuffer_destroy(&b->whole.bytes);
    msgpack_sbuffer_destroy(&b->pending.hashes.bytes);
    msgpack_sbuffer_destroy(&b->pending.tokens.bytes);
    free(b);
}

uint32_t batch_blocks(const struct batch *b)
{
    return b->n_blocks;
}

const void *batch_end(struct batch *b, size_t *n, bool *failed)
{
    struct timespec now;
    msgpack_packer pk;

    pending_end(b);
    empty(&b->whole);
    clock_gettime(CLOCK_REALTIME, &now);
    msgpack_packer_init(&pk, &b->whole, write_cb);
    msgpack_pack_array(&pk, 3);
    msgpack_pack_double(&pk, (double)now.tv_sec + 1e-9 * (double)now.tv_nsec);
    msgpack_pack_array(&pk, b->n_events);
    append(&b->whole, &b->events);
    msgpack_pack_uint32(&pk, b->form.rank);
    *failed = b->whole.failed;
    *n = b->n_events > 0 && !*failed ? b->whole.bytes.size : 0;
    b->n_events = b->n_blocks = 0;
    empty(&b->events);
    return *n > 0 ? b->whole.bytes.data : NULL;
}
