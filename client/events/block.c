/* A block of an answer. */
#include "client/events/events.h"

#include "proto/limits.h"

static bool bin_read(const msgpack_object *o, const char *name, const uint8_t **p, uint32_t *n)
{
    const msgpack_object *bin = answer_get(o, name);

    if (!bin || bin->type != MSGPACK_OBJECT_BIN)
        return false;
    *p = (const uint8_t *)bin->via.bin.ptr;
    *n = bin->via.bin.size;
    return true;
}

void block_read(const msgpack_object *o, struct batch_block *b, char lora[LORA_BYTES])
{
    uint32_t n = 0, bytes = 0;

    b->lora = answer_text(o, "lora", lora, LORA_BYTES);
    if (!bin_read(o, "key", &b->key, &n) || n != b->key_bytes || n < 8 || n > UCM_MAX_KEY_BYTES)
        b->key = NULL;
    b->has_metadata = bin_read(o, "parent", &b->parent, &b->parent_bytes) &&
                      bin_read(o, "tokens", &b->tokens, &bytes) &&
                      (b->parent_bytes == 0 || b->parent_bytes == b->key_bytes);
    b->parent_bytes = b->has_metadata ? b->parent_bytes : 0;
    b->n_tokens = b->has_metadata ? bytes / 4 : 0;
}
