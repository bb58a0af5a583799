/* Headers and names of block files, as docs/storage-format.md, "Block files", defines them. Pure
 * functions, any thread.
 *
 * Promise: block_file_decode returns 0 only for the header of the wanted part: magic, version,
 * checksum of the header, identity (namespace, part and key) and length agree. The payload counts if
 * its checksum is the header's. Nothing else on a root is trusted.
 *
 * The file of an encrypted part has a second header of 64 bytes behind the first, the *seal*, and its checksum is the seal's. The tag in
 * there says whether the rest is what was sealed. */
#ifndef UCMD_SHARE_BLOCK_FILE_H
#define UCMD_SHARE_BLOCK_FILE_H

#include "proto/limits.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define BLOCK_FILE_HEADER_BYTES 64u
#define BLOCK_FILE_VERSION 1u
#define BLOCK_FILE_SEALED_VERSION 2u
#define BLOCK_FILE_SEAL_BYTES 64u /* behind the header of a sealed file */
#define BLOCK_FILE_IDENTITY_BYTES 16u
#define BLOCK_FILE_NAMESPACE_BYTES 16u
#define BLOCK_FILE_BUCKETS 256u

/* "<key, 64 hex digits at most>-<32 hex digits of the fingerprint>-<part, 2 hex digits>" */
#define BLOCK_FILE_NAME_CAP (2 * UCM_MAX_KEY_BYTES + 1 + 32 + 1 + 2 + 1)
/* ".tmp-<host, 32 bytes at most>-<8 hex>-<16 hex>-<16 hex>" */
#define BLOCK_FILE_TEMP_PREFIX ".tmp-"

#define BLOCK_FILE_TEMP_CAP (5 + 32 + 1 + 8 + 1 + 16 + 1 + 16 + 1)

/* Which part of which block of which namespace. */
struct block_file_id {
    uint8_t fingerprint[UCM_FINGERPRINT_BYTES];
    uint8_t key[UCM_MAX_KEY_BYTES];
    uint32_t key_bytes, part;
};

struct block_file_header {
    uint8_t identity[BLOCK_FILE_IDENTITY_BYTES];
    uint64_t payload_bytes;
    uint64_t checksum; /* XXH3-64 of the payload; sealed: of the seal */
    uint32_t part;
    bool sealed; /* then payload_bytes is that of seal and payload */
};

#define BLOCK_FILE_SEED_BYTES 16u

struct block_file_seal {
    uint8_t key_id[8], salt[24], tag[16];
};
void block_file_seal_encode(const struct block_file_seal *in, uint8_t out[BLOCK_FILE_SEAL_BYTES]);
void block_file_seal_decode(const uint8_t in[BLOCK_FILE_SEAL_BYTES], struct block_file_seal *out);
/* The fingerprint that the files of an encrypted namespace have in their names, so that they are never taken for plain ones. seed: 16
 * bytes, or NULL: there is none.
 * Returns 0 or -ENOMEM. */
int block_file_sealed_fingerprint(const uint8_t fingerprint[UCM_FINGERPRINT_BYTES],
                                  const uint8_t *seed, uint8_t out[UCM_FINGERPRINT_BYTES]);

/* The part's identity, whose first byte is its bucket, and its name. 0, or -EINVAL for an id that no
 * namespace has. */
int block_file_locate(const struct block_file_id *id, uint8_t identity[BLOCK_FILE_IDENTITY_BYTES],
                      char name[BLOCK_FILE_NAME_CAP]);
/* What the name of a block file says. */
struct block_file_name {
    uint8_t namespace[BLOCK_FILE_NAMESPACE_BYTES]; /* the first bytes of the fingerprint */
    uint8_t part;
    size_t key_chars; /* the name begins with so many digits of the key */
};
/* 0, or -EINVAL for another name, a temporary file's too. Only files with such a name, or with one
 * that block_file_temp_valid or block_file_tenant_parse accepts, are looked at or removed; none leads out of the bucket. */
int block_file_name_parse(const char *name, struct block_file_name *out);
bool block_file_name_valid(const char *name);
bool block_file_temp_valid(const char *name);
/* ".tenant-<32 hex digits of the fingerprint>", in one bucket: its payload says whose the namespace is (share_tenant.c). Such files
 * are no block files, and not counted. */
#define BLOCK_FILE_TENANT_BUCKET 0u
void block_file_tenant_name(const uint8_t namespace[BLOCK_FILE_NAMESPACE_BYTES],
                            char out[BLOCK_FILE_NAME_CAP]);
/* True: it is such a name, of this namespace. */
bool block_file_tenant_parse(const char *name, uint8_t namespace[BLOCK_FILE_NAMESPACE_BYTES]);
/* What begins the temporary names of one process: 16 hex digits, different each time, must follow.
 * Of the host's name as much as fits; other characters than letters, digits, '.' and '_' are
 * replaced. */
void block_file_temp_prefix(const char *host, uint32_t pid, uint64_t started,
                            char out[BLOCK_FILE_TEMP_CAP]);

void block_file_encode(const struct block_file_header *in, uint8_t out[BLOCK_FILE_HEADER_BYTES]);
/* The identity in the header, unchecked. */
void block_file_identity(const uint8_t in[BLOCK_FILE_HEADER_BYTES],
                         uint8_t identity[BLOCK_FILE_IDENTITY_BYTES]);
/* wanted: all but checksum and `sealed`. 0 and *checksum of the payload, or of the seal; -EILSEQ: no block file;
 * -EPROTONOSUPPORT: of another version; -EBADMSG: damaged; -ESTALE: of another part. */
int block_file_decode(const uint8_t in[BLOCK_FILE_HEADER_BYTES],
                      const struct block_file_header *wanted, uint64_t *checksum);
/* Of a header that passed: a seal follows it. */
bool block_file_is_sealed(const uint8_t in[BLOCK_FILE_HEADER_BYTES]);

#endif
