/* Encrypts and decrypts the fragments of one record or file: AES-256-GCM (NIST SP 800-38D) by
 * OpenSSL's EVP, keys by HKDF-SHA256 (RFC 5869). docs/design/encryption.md has the derivations and
 * why no nonce repeats.
 *
 * Promises:
 * - Every box has a key of its own: of the namespace's key, 192 random bits and the context. A
 *   fragment's nonce is its number, so one key never meets a nonce twice as long as the caller
 *   encrypts
 *   each number once.
 * - encryption_box_decrypt says 0 only for the bytes that encryption_box_encrypt was given, under
 *   this key, context, number and associated data.
 *
 * Threads: any, one at a time for a box. */
#ifndef UCMD_ENCRYPTION_BOX_H
#define UCMD_ENCRYPTION_BOX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ENCRYPTION_KEY_BYTES 32u
#define ENCRYPTION_TAG_BYTES 16u
#define ENCRYPTION_ID_BYTES 8u
#define ENCRYPTION_CONTEXT_MAX 256u

struct evp_cipher_ctx_st;
struct encryption_box {
    struct evp_cipher_ctx_st *ctx;
};

/* out: HKDF-SHA256 of key, salt and info, label first. 0 or -ENOMEM. */
int encryption_derive(const uint8_t key[ENCRYPTION_KEY_BYTES], const void *salt, size_t salt_bytes,
                      const char *label, const void *info, size_t info_bytes, uint8_t *out,
                      size_t out_bytes);
/* Random bytes of the kernel, which reseeds when a virtual machine was cloned. 0 or -errno. */
int encryption_random(void *out, size_t bytes);

/* context, at most ENCRYPTION_CONTEXT_MAX bytes: all that names the record, salt included.
 * encrypting: for encryption_box_encrypt, else for encryption_box_decrypt. 0, -ENOMEM; then
 * encryption_box_close. */
int encryption_box_begin(struct encryption_box *b, const uint8_t key[ENCRYPTION_KEY_BYTES],
                         const void *context, size_t context_bytes, bool encrypting);
/* NULL-safe for one of zeroes. */
void encryption_box_close(struct encryption_box *b);

struct encryption_aad {
    const void *bytes;
    size_t n;
};
/* in and out are the same memory or apart; bytes may be 0: then only the associated data is
 * encrypted. 0 or -ENOMEM. */
int encryption_box_encrypt(struct encryption_box *b, uint32_t number,
                           const struct encryption_aad *aad, unsigned n_aad, const void *in,
                           void *out, uint64_t bytes, uint8_t tag[ENCRYPTION_TAG_BYTES]);
/* 0; -EBADMSG: it is not what was encrypted, and what lies in `out` is nothing; -ENOMEM. */
int encryption_box_decrypt(struct encryption_box *b, uint32_t number,
                           const struct encryption_aad *aad, unsigned n_aad, const void *in,
                           void *out, uint64_t bytes, const uint8_t tag[ENCRYPTION_TAG_BYTES]);

/* Memory for what was encrypted, aligned to 4096: the next writes use it again. NULL: none. Any
 * thread. */
void *encryption_memory_take(uint64_t bytes);
void encryption_memory_give(void *memory, uint64_t bytes);
/* Gives back what is kept. */
void encryption_memory_drop(void);

#endif
