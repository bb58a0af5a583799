/* Seals and opens the fragments of one record or file: AES-256-GCM (NIST SP 800-38D) by OpenSSL's
 * EVP, keys by HKDF-SHA256 (RFC 5869). docs/design/encryption.md has the derivations and why no
 * nonce repeats.
 *
 * Promises:
 * - Every box has a key of its own: of the namespace's key, 192 random bits and the context. A
 *   fragment's nonce is its number, so one key never meets a nonce twice as long as the caller
 *   seals
 *   each number once.
 * - seal_box_open says 0 only for the bytes that seal_box_seal was given, under this key, context,
 *   number and associated data.
 *
 * Threads: any, one at a time for a box. */
#ifndef UCMD_SEAL_BOX_H
#define UCMD_SEAL_BOX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SEAL_KEY_BYTES 32u
#define SEAL_TAG_BYTES 16u
#define SEAL_ID_BYTES 8u
#define SEAL_CONTEXT_MAX 256u

struct evp_cipher_ctx_st;
struct seal_box {
    struct evp_cipher_ctx_st *ctx;
};

/* out: HKDF-SHA256 of key, salt and info, label first. 0 or -ENOMEM. */
int seal_derive(const uint8_t key[SEAL_KEY_BYTES], const void *salt, size_t salt_bytes,
                const char *label, const void *info, size_t info_bytes, uint8_t *out,
                size_t out_bytes);
/* From the kernel, which is told when a virtual machine was cloned. 0 or -errno. */
int seal_random(void *out, size_t bytes);

/* context, at most SEAL_CONTEXT_MAX bytes: all that names the record, salt included. sealing: for
 * seal_box_seal, else for seal_box_open. 0, -ENOMEM; then seal_box_close. */
int seal_box_begin(struct seal_box *b, const uint8_t key[SEAL_KEY_BYTES], const void *context,
                   size_t context_bytes, bool sealing);
/* NULL-safe for one of zeroes. */
void seal_box_close(struct seal_box *b);

struct seal_aad {
    const void *bytes;
    size_t n;
};
/* in and out are the same memory or apart; bytes may be 0: then only the associated data is sealed.
 * 0 or -ENOMEM. */
int seal_box_seal(struct seal_box *b, uint32_t number, const struct seal_aad *aad, unsigned n_aad,
                  const void *in, void *out, uint64_t bytes, uint8_t tag[SEAL_TAG_BYTES]);
/* 0; -EBADMSG: it is not what was sealed, and what lies in `out` is nothing; -ENOMEM. */
int seal_box_open(struct seal_box *b, uint32_t number, const struct seal_aad *aad, unsigned n_aad,
                  const void *in, void *out, uint64_t bytes, const uint8_t tag[SEAL_TAG_BYTES]);

/* Memory for what was sealed, aligned to 4096: the next writes use it again. NULL: none. Any
 * thread. */
void *seal_memory_take(uint64_t bytes);
void seal_memory_give(void *memory, uint64_t bytes);
/* Gives back what is kept. */
void seal_memory_drop(void);

#endif
