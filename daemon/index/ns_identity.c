/* A namespace's identity as bytes: docs/protocol.md, "Fingerprint". */
#include "daemon/index/internal.h"

#include "daemon/format/bytes.h"

#include <errno.h>
#include <openssl/evp.h>
#include <string.h>

#define LAYER_BYTES_MAX (1u << 28)

static const char domain[16] = "ucm-namespace-1"; /* its NUL included */

#define TEXTS 5u /* tenant, model, revision, dtype, layout */

/* ---- out ---- */

static uint8_t *put_bytes(uint8_t *at, const void *p, uint32_t n)
{
    put32(at, n);
    if (n > 0)
        memcpy(at + 4, p, n);
    return at + 4 + n;
}

int ns_identity_encode(const struct ns_identity *id, uint8_t *out, size_t cap)
{
    const char *text[] = {id->tenant, id->model, id->revision, id->dtype, id->layout};
    const uint32_t number[] = {id->block_tokens, id->key_bytes, id->parts};
    size_t n = sizeof(domain) + sizeof(number) + 4 * (size_t)id->parts + 8 + 4 + id->salt_bytes;
    uint8_t *at = out;

    for (unsigned i = 0; i < TEXTS; i++)
        n += 4 + strlen(text[i]);
    if (n > cap)
        return -ENOSPC;
    memcpy(at, domain, sizeof(domain));
    at += sizeof(domain);
    for (unsigned i = 0; i < TEXTS; i++)
        at = put_bytes(at, text[i], (uint32_t)strlen(text[i]));
    for (unsigned i = 0; i < 3; i++, at += 4)
        put32(at, number[i]);
    for (uint32_t i = 0; i < id->parts; i++, at += 4)
        put32(at, id->layers[i]);
    put64(at, id->layer_bytes);
    (void)put_bytes(at + 8, id->salt, id->salt_bytes);
    return (int)n;
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

static uint32_t get_number(struct reader *r)
{
    const uint8_t *p = get(r, 4);

    return p ? get32(p) : 0;
}

static void get_text(struct reader *r, char out[UCM_MAX_NAME_BYTES + 1])
{
    uint32_t n = get_number(r);
    const uint8_t *p = n <= UCM_MAX_NAME_BYTES ? get(r, n) : NULL;

    r->ok = r->ok && p && memchr(p, '\0', n) == NULL;
    if (!r->ok)
        return;
    memcpy(out, p, n);
    out[n] = '\0';
}

int ns_identity_decode(const uint8_t *bytes, size_t n, struct ns_identity_memory *m,
                       struct ns_identity *out)
{
    struct reader r = {.p = bytes, .n = n, .ok = true};
    const uint8_t *start = get(&r, sizeof(domain)), *p;
    struct ns_identity id = {.tenant = m->text[0],
                             .model = m->text[1],
                             .revision = m->text[2],
                             .dtype = m->text[3],
                             .layout = m->text[4],
                             .layers = m->layers};

    if (!start || memcmp(start, domain, sizeof(domain)) != 0)
        return -EBADMSG;
    for (unsigned i = 0; i < TEXTS; i++)
        get_text(&r, m->text[i]);
    id.block_tokens = get_number(&r);
    id.key_bytes = get_number(&r);
    id.parts = get_number(&r);
    if (!r.ok || id.parts < 1 || id.parts > UCM_MAX_PARTS || id.key_bytes < UCM_MIN_KEY_BYTES ||
        id.key_bytes > UCM_MAX_KEY_BYTES)
        return -EBADMSG;
    for (uint32_t i = 0; i < id.parts; i++) {
        m->layers[i] = get_number(&r);
        r.ok = r.ok && m->layers[i] >= 1 && m->layers[i] <= UCM_MAX_LAYERS;
    }
    p = get(&r, 8);
    id.layer_bytes = p ? get64(p) : 0;
    id.salt_bytes = get_number(&r);
    id.salt = get(&r, id.salt_bytes);
    if (!r.ok || r.n > 0 || id.salt_bytes > UCM_MAX_SALT_BYTES || id.layer_bytes < 1 ||
        id.layer_bytes > LAYER_BYTES_MAX)
        return -EBADMSG;
    *out = id;
    return 0;
}
