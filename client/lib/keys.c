/* Chained block keys, hashed by libcrypto. The original connector computes its keys in Python, as
 * MD5 over a string and a pickle. So this hashes the bytes of CPython's pickle.dumps(x,
 * protocol=5), with frames and memo opcodes. x is a str, or (bytes, tuple of ints). */
#include "client/lib/internal.h"

#include <openssl/err.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "tokens and lengths are hashed as they lie in memory");

#define SHA256_BYTES 32
#define MD5_BYTES 16
#define MD5_TOKENS_MAX (1u << 20)
#define FRAME_TARGET 65536
#define FRAME_BYTES (FRAME_TARGET + 64) /* a frame ends before the value after its target */

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

struct hasher {
    EVP_MD *md;
    EVP_MD_CTX *ctx;
    bool failed;
    const char *meta; /* md5 */
    size_t n;         /* of the open frame */
    uint8_t frame[FRAME_BYTES];
};

static void hash(struct hasher *h, const void *bytes, size_t n)
{
    h->failed |= EVP_DigestUpdate(h->ctx, bytes, n) != 1;
}

static void hash_begin(struct hasher *h)
{
    h->failed |= EVP_DigestInit_ex(h->ctx, h->md, NULL) != 1;
}

static void hash_end(struct hasher *h, uint8_t *out)
{
    h->failed |= EVP_DigestFinal_ex(h->ctx, out, NULL) != 1;
}

/* ---- pickles ---- */

static void frame_close(struct hasher *h)
{
    uint8_t op = OP_FRAME;
    uint64_t length = h->n;

    hash(h, &op, sizeof op);
    hash(h, &length, sizeof length);
    hash(h, h->frame, h->n);
    h->n = 0;
}

/* Before each value: ends a frame that has grown to its target. */
static void value_begin(struct hasher *h)
{
    if (h->n >= FRAME_TARGET)
        frame_close(h);
}

static void put(struct hasher *h, const void *bytes, size_t n)
{
    memcpy(h->frame + h->n, bytes, n);
    h->n += n;
}

static void put_op(struct hasher *h, uint8_t op)
{
    put(h, &op, 1);
}

static void put_int(struct hasher *h, uint32_t v)
{
    uint8_t long1[] = {OP_LONG1, 5}, zero = 0; /* a fifth byte keeps it positive */

    value_begin(h);
    if (v <= 0xff) {
        put_op(h, OP_BININT1);
        put(h, &v, 1);
    } else if (v <= 0xffff) {
        put_op(h, OP_BININT2);
        put(h, &v, 2);
    } else if (v <= INT32_MAX) {
        put_op(h, OP_BININT);
        put(h, &v, 4);
    } else {
        put(h, long1, sizeof long1);
        put(h, &v, 4);
        put(h, &zero, 1);
    }
}

static void put_short(struct hasher *h, uint8_t op, const void *bytes, uint8_t n)
{
    value_begin(h);
    put_op(h, op);
    put_op(h, n);
    put(h, bytes, n);
    put_op(h, OP_MEMOIZE);
}

static void put_tuple(struct hasher *h, const uint32_t *tokens, uint32_t n)
{
    value_begin(h);
    if (n > 3)
        put_op(h, OP_MARK);
    for (uint32_t i = 0; i < n; i++)
        put_int(h, tokens[i]);
    put_op(h, n > 3 ? OP_TUPLE : (uint8_t)(OP_TUPLE1 + n - 1));
    put_op(h, OP_MEMOIZE);
}

static void pickle_begin(struct hasher *h)
{
    static const uint8_t proto[] = {OP_PROTO, 5};

    hash_begin(h);
    hash(h, h->meta, strlen(h->meta));
    hash(h, proto, sizeof proto);
}

static void pickle_end(struct hasher *h, uint8_t *out)
{
    put_op(h, OP_STOP);
    frame_close(h);
    hash_end(h, out);
}

static void md5_seed(struct hasher *h, uint8_t *out)
{
    static const char seed[] = "UCM_HASH_SEED";

    pickle_begin(h);
    put_short(h, OP_SHORT_BINUNICODE, seed, sizeof seed - 1);
    pickle_end(h, out);
}

/* ---- hash chains ---- */

/* The key of a block that follows `parent`. */
typedef void (*block_fn)(struct hasher *h, const uint8_t *parent, const uint32_t *tokens,
                         uint32_t n, uint8_t *out);

static void md5_block(struct hasher *h, const uint8_t *parent, const uint32_t *tokens, uint32_t n,
                      uint8_t *out)
{
    pickle_begin(h);
    put_short(h, OP_SHORT_BINBYTES, parent, MD5_BYTES);
    put_tuple(h, tokens, n);
    put_op(h, OP_TUPLE2);
    put_op(h, OP_MEMOIZE);
    pickle_end(h, out);
}

static void sha256_block(struct hasher *h, const uint8_t *parent, const uint32_t *tokens,
                         uint32_t n, uint8_t *out)
{
    static const char domain[] = "ucm-block-1"; /* with its NUL */

    hash_begin(h);
    hash(h, domain, sizeof domain);
    hash(h, parent, SHA256_BYTES);
    hash(h, tokens, (size_t)n * sizeof *tokens);
    hash_end(h, out);
}

static void chain(struct hasher *h, block_fn block, const uint8_t *parent, size_t key_bytes,
                  const uint32_t *tokens, uint32_t block_tokens, uint32_t n_blocks, uint8_t *out)
{
    for (uint32_t i = 0; i < n_blocks && !h->failed; i++) {
        block(h, parent, tokens + (size_t)i * block_tokens, block_tokens, out);
        parent = out;
        out += key_bytes;
    }
}

/* What libcrypto says: an algorithm may be missing, or switched off. */
static int refused(const char *algorithm)
{
    unsigned long code = ERR_peek_last_error();
    const char *reason = ERR_reason_error_string(code);

    if (ERR_GET_REASON(code) == ERR_R_MALLOC_FAILURE)
        return client_fail(UCM_ENOMEMORY, "no memory for the keys");
    return client_fail(UCM_EUNSUPPORTED, "this machine's libcrypto refuses %s: %s", algorithm,
                       reason ? reason : "it gives no reason");
}

static int hasher_open(struct hasher **out, const char *algorithm)
{
    struct hasher *h = malloc(sizeof *h);

    if (!h)
        return client_fail(UCM_ENOMEMORY, "no memory for the keys");
    ERR_set_mark(); /* the caller's errors stay as they are */
    h->md = EVP_MD_fetch(NULL, algorithm, NULL);
    h->ctx = EVP_MD_CTX_new();
    h->failed = !h->md || !h->ctx;
    h->n = 0;
    *out = h;
    return 0;
}

static int hasher_close(struct hasher *h, const char *algorithm)
{
    int r = h->failed ? refused(algorithm) : 0;

    ERR_pop_to_mark();
    EVP_MD_CTX_free(h->ctx);
    EVP_MD_free(h->md);
    free(h);
    return r;
}

int ucm_keys_sha256(const uint8_t parent[32], const uint32_t *tokens, uint32_t block_tokens,
                    uint32_t n_blocks, uint8_t *out)
{
    static const uint8_t none[SHA256_BYTES];
    struct hasher *h;
    int r;

    if (!tokens || !out || block_tokens == 0)
        return client_fail(UCM_EINVALID, "tokens or out is NULL, or block_tokens is 0");
    r = hasher_open(&h, "SHA256");
    if (r)
        return r;
    chain(h, sha256_block, parent ? parent : none, SHA256_BYTES, tokens, block_tokens, n_blocks,
          out);
    return hasher_close(h, "SHA256");
}

int ucm_keys_md5(const char *meta, const uint8_t parent[16], const uint32_t *tokens,
                 uint32_t block_tokens, uint32_t n_blocks, uint8_t *out)
{
    uint8_t seed[MD5_BYTES];
    struct hasher *h;
    int r;

    if (!meta || !tokens || !out || block_tokens == 0 || block_tokens > MD5_TOKENS_MAX)
        return client_fail(UCM_EINVALID,
                           "meta, tokens or out is NULL, or block_tokens is not 1 to %u",
                           MD5_TOKENS_MAX);
    r = hasher_open(&h, "MD5");
    if (r)
        return r;
    h->meta = meta;
    if (!parent && !h->failed)
        md5_seed(h, seed);
    chain(h, md5_block, parent ? parent : seed, MD5_BYTES, tokens, block_tokens, n_blocks, out);
    return hasher_close(h, "MD5");
}
