#include "client/lib/internal.h"

#include <openssl/evp.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "tokens are hashed as they lie in memory");

#define KEY_BYTES 32

static int hash_block(EVP_MD_CTX *ctx, const EVP_MD *md, const uint8_t *parent,
                      const uint32_t *tokens, uint32_t n, uint8_t *out)
{
    static const char domain[] = "ucm-block-1"; /* with its NUL */

    return EVP_DigestInit_ex(ctx, md, NULL) && EVP_DigestUpdate(ctx, domain, sizeof domain) &&
           EVP_DigestUpdate(ctx, parent, KEY_BYTES) &&
           EVP_DigestUpdate(ctx, tokens, (size_t)n * sizeof *tokens) &&
           EVP_DigestFinal_ex(ctx, out, NULL);
}

int ucm_keys_sha256(const uint8_t parent[32], const uint32_t *tokens, uint32_t block_tokens,
                    uint32_t n_blocks, uint8_t *out)
{
    uint8_t before[KEY_BYTES] = {0};
    EVP_MD_CTX *ctx;
    EVP_MD *md;
    int r = 0;

    if (!tokens || !out || block_tokens == 0)
        return client_fail(UCM_EINVALID, "tokens or out is NULL, or block_tokens is 0");
    if (parent)
        memcpy(before, parent, sizeof before);
    md = EVP_MD_fetch(NULL, "SHA256", NULL);
    ctx = EVP_MD_CTX_new();
    if (!md || !ctx)
        r = client_fail(UCM_ENOMEMORY, "no memory for SHA-256");
    for (uint32_t i = 0; i < n_blocks && r == 0; i++) {
        if (!hash_block(ctx, md, before, tokens + (size_t)i * block_tokens, block_tokens,
                        out + (size_t)i * KEY_BYTES))
            r = client_fail(UCM_ENOMEMORY, "SHA-256 failed in libcrypto");
        memcpy(before, out + (size_t)i * KEY_BYTES, sizeof before);
    }
    EVP_MD_CTX_free(ctx);
    EVP_MD_free(md);
    return r;
}
