/* Names of block files, and whose parts they are, as docs/design/storage-format.md, "Block files",
 * defines them; their headers are in daemon/format/block_header.h. Pure functions, any thread. */
#ifndef UCMD_SHARED_BLOCK_FILE_H
#define UCMD_SHARED_BLOCK_FILE_H

#include "daemon/format/block_header.h"
#include "proto/limits.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define BLOCK_FILE_NAMESPACE_BYTES 16u

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

#define BLOCK_FILE_SECRET_BYTES 16u

/* The fingerprint that the files of an encrypted namespace have in their names, so that they are
 * never taken for plaintext ones. secret: 16 bytes, or NULL: there is none.
 * Returns 0 or -ENOMEM. */
int block_file_encrypted_fingerprint(const uint8_t fingerprint[UCM_FINGERPRINT_BYTES],
                                     const uint8_t *secret, uint8_t out[UCM_FINGERPRINT_BYTES]);

/* The part's identity, whose first byte is its bucket, and its name. 0, or -EINVAL for an id that
 * no namespace has. */
int block_file_locate(const struct block_file_id *id, uint8_t identity[BLOCK_FILE_IDENTITY_BYTES],
                      char name[BLOCK_FILE_NAME_CAP]);
/* What the name of a block file says. */
struct block_file_name {
    uint8_t namespace[BLOCK_FILE_NAMESPACE_BYTES]; /* the first bytes of the fingerprint */
    uint8_t part;
    size_t key_chars; /* the name begins with so many digits of the key */
};
/* 0, or -EINVAL for another name, a temporary file's too. Only files with such a name, or with one
 * that block_file_temp_valid or block_file_tenant_parse accepts, are looked at or removed; none
 * leads out of the bucket. */
int block_file_name_parse(const char *name, struct block_file_name *out);
bool block_file_name_valid(const char *name);
bool block_file_temp_valid(const char *name);
/* ".tenant-<32 hex digits of the fingerprint>", in one bucket: its payload says whose the namespace
 * is (gc/notes.c). Such files are no block files, and not counted. */
#define BLOCK_FILE_TENANT_BUCKET 0u
void block_file_tenant_name(const uint8_t namespace[BLOCK_FILE_NAMESPACE_BYTES],
                            char out[BLOCK_FILE_NAME_CAP]);
/* True: it is such a name, of this namespace. */
bool block_file_tenant_parse(const char *name, uint8_t namespace[BLOCK_FILE_NAMESPACE_BYTES]);
/* The prefix of one process's temporary names: 16 hex digits, different each time, must follow. It
 * has as much of the host's name as fits, with characters other than letters, digits, '.' and '_'
 * replaced. */
void block_file_temp_prefix(const char *host, uint32_t pid, uint64_t started,
                            char out[BLOCK_FILE_TEMP_CAP]);

#endif
