/* A namespace's identity as bytes: docs/protocol.md, "Fingerprint". */
#include "daemon/index/internal.h"

#include <errno.h>
#include <openssl/evp.h>
#include <string.h>

#define SHARD_BYTES_MAX (1u << 28)

static const char domain[16] = "ucm-namespace-1"; /* its NUL included */

/* ---- out ---- */

struct writer {
    uint8_t *p;
    size_t n, cap;
};

static void put(struct writer *w, const void *p, size_t n)
{
    if (n > 0 && w->n <= w->cap && n <= w->cap - w->n)
        memcpy(w->p + w->n, p, n);
    w->n += n;
}

static void put_number(struct writer *w, uint64_t v, size_t n)
{
    uint8_t le[8];

    for (size_t i = 0; i < n; i++)
        le[i] = (uint8_t)(v >> (8 * i));
    put(w, le, n);
}

static void put_bytes(struct writer *w, const void *p, size_t n)
{
    put_number(w, n, 4);
    put(w, p, n);
}

int ns_identity_encode(const struct ns_identity *id, uint8_t *out, size_t cap)
{
    const char *text[] = {id->tenant, id->model, id->revision, id->dtype, id->layout};
    const uint32_t number[] = {id->block_tokens, id->key_bytes, id->parts};
    struct writer w = {.p = out, .cap = cap};

    put(&w, domain, sizeof(domain));
    for (size_t i = 0; i < sizeof(text) / sizeof(text[0]); i++)
        put_bytes(&w, text[i], strlen(text[i]));
    for (size_t i = 0; i < sizeof(number) / sizeof(number[0]); i++)
        put_number(&w, number[i], 4);
    for (uint32_t i = 0; i < id->parts; i++)
        put_number(&w, id->shards[i], 4);
    put_number(&w, id->shard_bytes, 8);
    put_bytes(&w, id->salt, id->salt_bytes);
    return w.n <= w.cap ? (int)w.n : -ENOSPC;
}

int ns_fingerprint(const uint8_t *canonical, size_t n, uint8_t out[UCM_FINGERPRINT_BYTES])
{
    uint8_t digest[UCM_FINGERPRINT_BYTES];

    if (EVP_Digest(canonical, n, digest, NULL, EVP_sha256(), NULL) != 1)
        return -ENOMEM;
    memcpy(out, digest, sizeof(digest));
    return 0;
}

/* ---- in ---- */

struct reader {
    const uint8_t *p;
    size_t n;
    bool ok;
};

static const uint8_t *get(struct reader *r, size_t n)
{
    const uint8_t *p = r->p;

    r->ok = r->ok && n <= r->n;
    if (!r->ok)
        return NULL;
    r->p += n;
    r->n -= n;
    return p;
}

static uint64_t get_number(struct reader *r, size_t n)
{
    const uint8_t *p = get(r, n);
    uint64_t v = 0;

    for (size_t i = 0; p && i < n; i++)
        v |= (uint64_t)p[i] << (8 * i);
    return v;
}

static void get_text(struct reader *r, char out[UCM_MAX_NAME_BYTES + 1])
{
    size_t n = get_number(r, 4);
    const uint8_t *p = n <= UCM_MAX_NAME_BYTES ? get(r, n) : NULL;

    r->ok = r->ok && p && memchr(p, '\0', n) == NULL;
    if (!r->ok)
        return;
    memcpy(out, p, n);
    out[n] = '\0';
}

static void get_shards(struct reader *r, uint32_t *shards, uint32_t parts)
{
    for (uint32_t i = 0; i < parts && r->ok; i++) {
        shards[i] = (uint32_t)get_number(r, 4);
        r->ok = r->ok && shards[i] >= 1 && shards[i] <= UCM_MAX_SHARDS;
    }
}

int ns_identity_decode(const uint8_t *bytes, size_t n, struct ns_identity_memory *m,
                       struct ns_identity *out)
{
    struct reader r = {.p = bytes, .n = n, .ok = true};
    const uint8_t *start = get(&r, sizeof(domain));
    struct ns_identity id = {.tenant = m->text[0],
                             .model = m->text[1],
                             .revision = m->text[2],
                             .dtype = m->text[3],
                             .layout = m->text[4],
                             .shards = m->shards};

    if (!start || memcmp(start, domain, sizeof(domain)) != 0)
        return -EBADMSG;
    for (unsigned i = 0; i < 5; i++)
        get_text(&r, m->text[i]);
    id.block_tokens = (uint32_t)get_number(&r, 4);
    id.key_bytes = (uint32_t)get_number(&r, 4);
    id.parts = (uint32_t)get_number(&r, 4);
    if (!r.ok || id.parts < 1 || id.parts > UCM_MAX_PARTS || id.key_bytes < UCM_MIN_KEY_BYTES ||
        id.key_bytes > UCM_MAX_KEY_BYTES)
        return -EBADMSG;
    get_shards(&r, m->shards, id.parts);
    id.shard_bytes = get_number(&r, 8);
    id.salt_bytes = (uint32_t)get_number(&r, 4);
    id.salt = get(&r, id.salt_bytes);
    if (!r.ok || r.n > 0 || id.salt_bytes > UCM_MAX_SALT_BYTES || id.shard_bytes < 1 ||
        id.shard_bytes > SHARD_BYTES_MAX)
        return -EBADMSG;
    *out = id;
    return 0;
}
