#include "daemon/index/internal.h"

#include <errno.h>
#include <openssl/evp.h>
#include <stdlib.h>

static const char domain[16] = "ucm-namespace-1"; /* its NUL included */

static bool put(EVP_MD_CTX *md, const void *p, size_t n)
{
    return EVP_DigestUpdate(md, p, n) == 1;
}

static bool put_number(EVP_MD_CTX *md, uint64_t v, size_t n)
{
    uint8_t le[8];

    for (size_t i = 0; i < n; i++)
        le[i] = (uint8_t)(v >> (8 * i));
    return put(md, le, n);
}

static bool put_bytes(EVP_MD_CTX *md, const void *p, size_t n)
{
    return put_number(md, n, 4) && put(md, p, n);
}

static bool put_identity(EVP_MD_CTX *md, const struct ns_identity *id)
{
    const char *text[] = {id->tenant, id->model, id->revision, id->dtype, id->layout};
    const uint32_t number[] = {id->block_tokens, id->key_bytes, id->parts};
    bool ok = put(md, domain, sizeof(domain));

    for (size_t i = 0; ok && i < sizeof(text) / sizeof(text[0]); i++)
        ok = put_bytes(md, text[i], strlen(text[i]));
    for (size_t i = 0; ok && i < sizeof(number) / sizeof(number[0]); i++)
        ok = put_number(md, number[i], 4);
    for (uint32_t i = 0; ok && i < id->parts; i++)
        ok = put_number(md, id->shards[i], 4);
    return ok && put_number(md, id->shard_bytes, 8) && put_bytes(md, id->salt, id->salt_bytes);
}

int ns_fingerprint(const struct ns_identity *identity, uint8_t out[UCM_FINGERPRINT_BYTES])
{
    uint8_t digest[UCM_FINGERPRINT_BYTES];
    EVP_MD_CTX *md = EVP_MD_CTX_new();
    bool ok = md && EVP_DigestInit_ex(md, EVP_sha256(), NULL) == 1 && put_identity(md, identity) &&
              EVP_DigestFinal_ex(md, digest, NULL) == 1;

    EVP_MD_CTX_free(md);
    if (!ok)
        return -ENOMEM;
    memcpy(out, digest, sizeof(digest));
    return 0;
}

/* ---- one allocation a namespace: itself, its table, the numbers, the salt and the strings ---- */

struct ns_memory {
    struct ns ns;
    struct ns_table table;
    uint32_t shards[];
};

static const char *copy_text(uint8_t **at, const char *text)
{
    size_t n = strlen(text) + 1;
    char *copy = memcpy(*at, text, n);

    *at += n;
    return copy;
}

struct ns *ns_new(const struct ns_identity *from, uint32_t id, const uint8_t *fingerprint,
                  uint64_t *size_bytes)
{
    size_t text = strlen(from->tenant) + strlen(from->model) + strlen(from->revision) +
                  strlen(from->dtype) + strlen(from->layout) + 5;
    size_t n = sizeof(struct ns_memory) + from->parts * sizeof(uint32_t) + from->salt_bytes + text;
    struct ns_memory *m = calloc(1, n);
    struct ns_identity *to;
    uint8_t *at;

    if (!m)
        return NULL;
    m->table.key_bytes = from->key_bytes;
    m->ns.id = id;
    m->ns.table = &m->table;
    memcpy(m->ns.fingerprint, fingerprint, sizeof(m->ns.fingerprint));
    to = &m->ns.identity;
    *to = *from;
    memcpy(m->shards, from->shards, from->parts * sizeof(uint32_t));
    to->shards = m->shards;
    at = (uint8_t *)(m->shards + from->parts);
    to->salt = at;
    if (from->salt_bytes > 0)
        memcpy(at, from->salt, from->salt_bytes);
    at += from->salt_bytes;
    to->tenant = copy_text(&at, from->tenant);
    to->model = copy_text(&at, from->model);
    to->revision = copy_text(&at, from->revision);
    to->dtype = copy_text(&at, from->dtype);
    to->layout = copy_text(&at, from->layout);
    *size_bytes = n;
    return &m->ns;
}

void ns_free(struct ns *ns)
{
    ns_table_close(ns->table);
    free(ns); /* the first member of its struct ns_memory */
}
