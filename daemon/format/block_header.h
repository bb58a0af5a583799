/* Headers of block files on shared roots, as docs/design/storage-format.md, "Block files", defines
 * them. Pure functions, any thread.
 *
 * Promise: block_file_decode returns 0 only for the header of the wanted part: magic, version,
 * checksum of the header, identity (namespace, part and key) and length agree. The payload counts
 * if its checksum is the header's. Nothing else on a root is trusted.
 *
 * The file of an encrypted part has a second header of 64 bytes, the *encryption header*, after the
 * first. The checksum in the first header is then that of the encryption header, not of the
 * payload. The tag in the encryption header says whether the rest is what was encrypted. */
#ifndef UCMD_FORMAT_BLOCK_HEADER_H
#define UCMD_FORMAT_BLOCK_HEADER_H

#include <stdbool.h>
#include <stdint.h>

#define BLOCK_FILE_HEADER_BYTES 64u
#define BLOCK_FILE_VERSION 1u
#define BLOCK_FILE_ENCRYPTED_VERSION 2u
#define BLOCK_FILE_ENCRYPTION_BYTES 64u /* after the header of an encrypted file */
#define BLOCK_FILE_IDENTITY_BYTES 16u
#define BLOCK_FILE_BUCKETS 256u
#define BLOCK_FILE_KEY_ID_BYTES 8u

struct block_file_header {
    uint8_t identity[BLOCK_FILE_IDENTITY_BYTES];
    uint64_t payload_bytes;
    uint64_t checksum; /* XXH3-64 of the payload; encrypted: of the encryption header */
    uint32_t part;
    bool encrypted; /* then payload_bytes is that of encryption header and payload */
};

struct block_file_encryption {
    uint8_t key_id[BLOCK_FILE_KEY_ID_BYTES], salt[24], tag[16];
};
void block_file_encryption_encode(const struct block_file_encryption *in,
                                  uint8_t out[BLOCK_FILE_ENCRYPTION_BYTES]);
void block_file_encryption_decode(const uint8_t in[BLOCK_FILE_ENCRYPTION_BYTES],
                                  struct block_file_encryption *out);

void block_file_encode(const struct block_file_header *in, uint8_t out[BLOCK_FILE_HEADER_BYTES]);
/* The identity in the header, unchecked. */
void block_file_identity(const uint8_t in[BLOCK_FILE_HEADER_BYTES],
                         uint8_t identity[BLOCK_FILE_IDENTITY_BYTES]);
/* Whoever's it is. 0; -EILSEQ: no block file; -EPROTONOSUPPORT: of another version; -EBADMSG:
 * damaged. */
int block_file_peek(const uint8_t in[BLOCK_FILE_HEADER_BYTES], struct block_file_header *out);
/* wanted: all but checksum and `encrypted`. 0 and *checksum of the payload, or of the encryption
 * header; -EILSEQ: no block file; -EPROTONOSUPPORT: of another version; -EBADMSG: damaged; -ESTALE:
 * of another part. */
int block_file_decode(const uint8_t in[BLOCK_FILE_HEADER_BYTES],
                      const struct block_file_header *wanted, uint64_t *checksum);
/* For a header that passed its checks: whether an encryption header follows it. */
bool block_file_is_encrypted(const uint8_t in[BLOCK_FILE_HEADER_BYTES]);

#endif
