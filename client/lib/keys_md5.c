/* The original connector computes its keys in Python, as MD5 over a string and a pickle. So this
 * writes the bytes of CPython's pickle.dumps(x, protocol=5) for a str and for (bytes, tuple of
 * ints), with frames and memo opcodes, and has libcrypto hash them. */
#include "client/lib/internal.h"

#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>

#define KEY_BYTES 16
#define MAX_TOKENS (1u << 20)
#define FRAME_HEADER 9 /* OP_FRAME and the length in 8 bytes */
#define FRAME_TARGET 65536
#define TOKEN_BYTES 7  /* the longest form of an unsigned 32-bit number */
#define FIXED_BYTES 64 /* more than everything but tokens and frame headers */

enum {
    OP_MARK = '(',
    OP_STOP = '.',
    OP_BININT = 'J',
    OP_BININT1 = 'K',
    OP_BININT2 = 'M',
    OP_SHORT_BINBYTES = 'C',
    OP_TUPLE = 't',
    OP_PROTO = 0x80,
    OP_TUPLE1 = 0x85,
    OP_TUPLE2 = 0x86,
    OP_LONG1 = 0x8a,
    OP_SHORT_BINUNICODE = 0x8c,
    OP_MEMOIZE = 0x94,
    OP_FRAME = 0x95,
};

struct pickle {
    uint8_t *p;
    size_t n;
    size_t frame; /* where the open frame begins; 0: none is open */
};

static void frame_close(struct pickle *k)
{
    size_t body;

    if (k->frame == 0)
        return;
    body = k->n - k->frame - FRAME_HEADER;
    k->p[k->frame] = OP_FRAME;
    for (unsigned i = 0; i < 8; i++)
        k->p[k->frame + 1 + i] = (uint8_t)((uint64_t)body >> (8 * i));
    k->frame = 0;
}

/* Before each value: ends a frame that has grown to its target. */
static void value_begin(struct pickle *k)
{
    if (k->frame != 0 && k->n - k->frame - FRAME_HEADER >= FRAME_TARGET)
        frame_close(k);
}

static void put(struct pickle *k, const void *bytes, size_t n)
{
    if (k->frame == 0) {
        k->frame = k->n;
        k->n += FRAME_HEADER;
    }
    memcpy(k->p + k->n, bytes, n);
    k->n += n;
}

static void put_op(struct pickle *k, uint8_t op)
{
    put(k, &op, 1);
}

static void put_int(struct pickle *k, uint32_t v)
{
    uint8_t b[TOKEN_BYTES] = {0, (uint8_t)v, (uint8_t)(v >> 8), (uint8_t)(v >> 16),
                              (uint8_t)(v >> 24)};

    value_begin(k);
    if (v <= 0xff) {
        b[0] = OP_BININT1;
        put(k, b, 2);
    } else if (v <= 0xffff) {
        b[0] = OP_BININT2;
        put(k, b, 3);
    } else if (v <= INT32_MAX) {
        b[0] = OP_BININT;
        put(k, b, 5);
    } else {
        memmove(b + 2, b + 1, 4);
        b[0] = OP_LONG1;
        b[1] = 5; /* a fifth byte, 0, keeps it positive */
        put(k, b, 7);
    }
}

static void put_short(struct pickle *k, uint8_t op, const void *bytes, size_t n)
{
    uint8_t head[2] = {op, (uint8_t)n};

    value_begin(k);
    put(k, head, sizeof head);
    put(k, bytes, n);
    put_op(k, OP_MEMOIZE);
}

static void put_tuple(struct pickle *k, const uint32_t *tokens, uint32_t n)
{
    value_begin(k);
    if (n > 3)
        put_op(k, OP_MARK);
    for (uint32_t i = 0; i < n; i++)
        put_int(k, tokens[i]);
    put_op(k, n > 3 ? OP_TUPLE : (uint8_t)(OP_TUPLE1 + n - 1));
    put_op(k, OP_MEMOIZE);
}

static void pickle_begin(struct pickle *k)
{
    k->p[0] = OP_PROTO;
    k->p[1] = 5;
    k->n = 2;
    k->frame = 0;
}

static void pickle_end(struct pickle *k)
{
    put_op(k, OP_STOP);
    frame_close(k);
}

struct md5 {
    EVP_MD *md;
    EVP_MD_CTX *ctx;
    const char *meta;
};

static bool hash(const struct md5 *h, const struct pickle *k, uint8_t out[KEY_BYTES])
{
    return EVP_DigestInit_ex(h->ctx, h->md, NULL) &&
           EVP_DigestUpdate(h->ctx, h->meta, strlen(h->meta)) &&
           EVP_DigestUpdate(h->ctx, k->p, k->n) && EVP_DigestFinal_ex(h->ctx, out, NULL);
}

static bool hash_seed(const struct md5 *h, struct pickle *k, uint8_t out[KEY_BYTES])
{
    static const char seed[] = "UCM_HASH_SEED";

    pickle_begin(k);
    put_short(k, OP_SHORT_BINUNICODE, seed, sizeof seed - 1);
    pickle_end(k);
    return hash(h, k, out);
}

static bool hash_block(const struct md5 *h, struct pickle *k, const uint8_t parent[KEY_BYTES],
                       const uint32_t *tokens, uint32_t n, uint8_t out[KEY_BYTES])
{
    pickle_begin(k);
    value_begin(k);
    put_short(k, OP_SHORT_BINBYTES, parent, KEY_BYTES);
    put_tuple(k, tokens, n);
    put_op(k, OP_TUPLE2);
    put_op(k, OP_MEMOIZE);
    pickle_end(k);
    return hash(h, k, out);
}

static bool hash_chain(const struct md5 *h, struct pickle *k, const uint8_t *parent,
                       const uint32_t *tokens, uint32_t block_tokens, uint32_t n_blocks,
                       uint8_t *out)
{
    uint8_t before[KEY_BYTES];

    if (parent)
        memcpy(before, parent, sizeof before);
    else if (!hash_seed(h, k, before))
        return false;
    for (uint32_t i = 0; i < n_blocks; i++) {
        if (!hash_block(h, k, before, tokens + (size_t)i * block_tokens, block_tokens, before))
            return false;
        memcpy(out + (size_t)i * KEY_BYTES, before, sizeof before);
    }
    return true;
}

int ucm_keys_md5(const char *meta, const uint8_t parent[16], const uint32_t *tokens,
                 uint32_t block_tokens, uint32_t n_blocks, uint8_t *out)
{
    size_t room = FIXED_BYTES + TOKEN_BYTES * (size_t)block_tokens;
    struct pickle k = {0};
    struct md5 h = {.meta = meta};
    int r = 0;

    if (!meta || !tokens || !out || block_tokens == 0 || block_tokens > MAX_TOKENS)
        return client_fail(UCM_EINVALID,
                           "meta, tokens or out is NULL, or block_tokens is not 1 to %u",
                           MAX_TOKENS);
    h.md = EVP_MD_fetch(NULL, "MD5", NULL);
    if (!h.md)
        return client_fail(UCM_EUNSUPPORTED, "this machine's libcrypto offers no MD5");
    h.ctx = EVP_MD_CTX_new();
    k.p = malloc(room + (room / FRAME_TARGET + 2) * FRAME_HEADER);
    if (!h.ctx || !k.p)
        r = client_fail(UCM_ENOMEMORY, "no memory for the keys");
    else if (!hash_chain(&h, &k, parent, tokens, block_tokens, n_blocks, out))
        r = client_fail(UCM_ENOMEMORY, "MD5 failed in libcrypto");
    free(k.p);
    EVP_MD_CTX_free(h.ctx);
    EVP_MD_free(h.md);
    return r;
}
