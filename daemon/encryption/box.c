#include "daemon/encryption/box.h"

#include "daemon/format/bytes.h"

#include <assert.h>
#include <errno.h>
#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/kdf.h>
#include <openssl/params.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define NONCE_BYTES 12u
#define LABEL_MAX 32u
#define FRAGMENT_BYTES (1u << 30) /* of one call of EVP, whose lengths are int */

/* Fetched once: OpenSSL looks an algorithm up under locks. They stay until the process ends. */
static pthread_once_t fetched = PTHREAD_ONCE_INIT;
static EVP_CIPHER *gcm;
static EVP_KDF *hkdf;

static void fetch(void)
{
    gcm = EVP_CIPHER_fetch(NULL, "AES-256-GCM", NULL);
    hkdf = EVP_KDF_fetch(NULL, "HKDF", NULL);
}

int encryption_derive(const uint8_t key[ENCRYPTION_KEY_BYTES], const void *salt, size_t salt_bytes,
                      const char *label, const void *info, size_t info_bytes, uint8_t *out,
                      size_t out_bytes)
{
    uint8_t text[LABEL_MAX + ENCRYPTION_CONTEXT_MAX];
    size_t n = strlen(label) + 1;
    EVP_KDF_CTX *ctx;
    OSSL_PARAM p[5], *at = p;
    int ok;

    assert(n <= LABEL_MAX && info_bytes <= ENCRYPTION_CONTEXT_MAX);
    memcpy(text, label, n);
    if (info_bytes > 0)
        memcpy(text + n, info, info_bytes);
    (void)pthread_once(&fetched, fetch);
    ctx = hkdf ? EVP_KDF_CTX_new(hkdf) : NULL;
    if (!ctx)
        return -ENOMEM;
    *at++ = OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST, (char *)"SHA256", 0);
    *at++ =
        OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_KEY, (void *)key, ENCRYPTION_KEY_BYTES);
    if (salt_bytes > 0)
        *at++ = OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_SALT, (void *)salt, salt_bytes);
    *at++ = OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_INFO, text, n + info_bytes);
    *at = OSSL_PARAM_construct_end();
    ok = EVP_KDF_derive(ctx, out, out_bytes, p);
    EVP_KDF_CTX_free(ctx);
    return ok == 1 ? 0 : -ENOMEM;
}

int encryption_random(void *out, size_t bytes)
{
    uint8_t *at = out;

    while (bytes > 0) {
        ssize_t n = getrandom(at, bytes, 0);

        if (n < 0 && errno != EINTR)
            return -errno;
        at += n > 0 ? n : 0;
        bytes -= n > 0 ? (size_t)n : 0;
    }
    return 0;
}

int encryption_box_begin(struct encryption_box *b, const uint8_t key[ENCRYPTION_KEY_BYTES],
                         const void *context, size_t context_bytes, bool encrypting)
{
    uint8_t own[ENCRYPTION_KEY_BYTES];
    int rc;

    assert(context_bytes <= ENCRYPTION_CONTEXT_MAX);
    b->ctx = NULL;
    rc = encryption_derive(key, NULL, 0, "ucmd record 1", context, context_bytes, own, sizeof(own));
    if (rc < 0)
        return rc;
    b->ctx = gcm ? EVP_CIPHER_CTX_new() : NULL;
    if (!b->ctx || EVP_CipherInit_ex2(b->ctx, gcm, own, NULL, encrypting, NULL) != 1)
        rc = -ENOMEM;
    OPENSSL_cleanse(own, sizeof(own));
    return rc;
}

void encryption_box_close(struct encryption_box *b)
{
    EVP_CIPHER_CTX_free(b->ctx); /* cleanses the key schedule */
    b->ctx = NULL;
}

static bool update(struct encryption_box *b, const uint8_t *in, uint8_t *out, uint64_t bytes)
{
    int done;

    while (bytes > 0) {
        uint64_t n = bytes < FRAGMENT_BYTES ? bytes : FRAGMENT_BYTES;

        if (EVP_CipherUpdate(b->ctx, out, &done, in, (int)n) != 1)
            return false;
        in += n;
        if (out)
            out += n;
        bytes -= n;
    }
    return true;
}

/* All but the tag. */
static bool run(struct encryption_box *b, uint32_t number, const struct encryption_aad *aad,
                unsigned n_aad, const void *in, void *out, uint64_t bytes)
{
    uint8_t nonce[NONCE_BYTES] = {0};

    put32(nonce, number);
    if (EVP_CipherInit_ex2(b->ctx, NULL, NULL, nonce, -1, NULL) != 1)
        return false;
    for (unsigned i = 0; i < n_aad; i++)
        if (!update(b, aad[i].bytes, NULL, aad[i].n))
            return false;
    return update(b, in, out, bytes);
}

int encryption_box_encrypt(struct encryption_box *b, uint32_t number,
                           const struct encryption_aad *aad, unsigned n_aad, const void *in,
                           void *out, uint64_t bytes, uint8_t tag[ENCRYPTION_TAG_BYTES])
{
    uint8_t rest[ENCRYPTION_TAG_BYTES];
    int n;

    if (!run(b, number, aad, n_aad, in, out, bytes) || EVP_CipherFinal_ex(b->ctx, rest, &n) != 1 ||
        EVP_CIPHER_CTX_ctrl(b->ctx, EVP_CTRL_AEAD_GET_TAG, ENCRYPTION_TAG_BYTES, tag) != 1)
        return -ENOMEM;
    return 0;
}

int encryption_box_decrypt(struct encryption_box *b, uint32_t number,
                           const struct encryption_aad *aad, unsigned n_aad, const void *in,
                           void *out, uint64_t bytes, const uint8_t tag[ENCRYPTION_TAG_BYTES])
{
    uint8_t rest[ENCRYPTION_TAG_BYTES];
    int n;

    if (!run(b, number, aad, n_aad, in, out, bytes) ||
        EVP_CIPHER_CTX_ctrl(b->ctx, EVP_CTRL_AEAD_SET_TAG, ENCRYPTION_TAG_BYTES, (void *)tag) != 1)
        return -ENOMEM;
    return EVP_CipherFinal_ex(b->ctx, rest, &n) == 1 ? 0 : -EBADMSG;
}

/* ---- memory for what was encrypted ---- */

#define KEPT 64u
#define KEPT_BYTES (64ull << 20)

static struct {
    pthread_mutex_t lock;
    struct {
        void *memory;
        uint64_t bytes;
    } free[KEPT];
    unsigned n;
    uint64_t bytes;
} kept = {.lock = PTHREAD_MUTEX_INITIALIZER};

void *encryption_memory_take(uint64_t bytes)
{
    void *memory = NULL;

    (void)pthread_mutex_lock(&kept.lock);
    for (unsigned i = kept.n; i > 0 && !memory; i--) {
        if (kept.free[i - 1].bytes != bytes)
            continue;
        memory = kept.free[i - 1].memory;
        kept.free[i - 1] = kept.free[--kept.n];
        kept.bytes -= bytes;
    }
    (void)pthread_mutex_unlock(&kept.lock);
    return memory ? memory : aligned_alloc(4096, bytes);
}

void encryption_memory_give(void *memory, uint64_t bytes)
{
    if (!memory)
        return;
    (void)pthread_mutex_lock(&kept.lock);
    /* Sizes that nobody asks for any more go first. */
    while (kept.n > 0 && (kept.n == KEPT || kept.bytes + bytes > KEPT_BYTES)) {
        free(kept.free[0].memory);
        kept.bytes -= kept.free[0].bytes;
        memmove(&kept.free[0], &kept.free[1], --kept.n * sizeof(kept.free[0]));
    }
    if (bytes <= KEPT_BYTES) {
        kept.free[kept.n].memory = memory;
        kept.free[kept.n++].bytes = bytes;
        kept.bytes += bytes;
        memory = NULL;
    }
    (void)pthread_mutex_unlock(&kept.lock);
    free(memory);
}

void encryption_memory_drop(void)
{
    (void)pthread_mutex_lock(&kept.lock);
    while (kept.n > 0)
        free(kept.free[--kept.n].memory);
    kept.bytes = 0;
    (void)pthread_mutex_unlock(&kept.lock);
}
