#include "daemon/format/block_header.h"

#include "daemon/format/bytes.h"
#include "daemon/format/checksum.h"

#include <errno.h>
#include <string.h>

#define AT_VERSION 4
#define AT_BYTES 8
#define AT_CHECKSUM 16
#define AT_PART 24
#define AT_IDENTITY 32
#define AT_SUM (BLOCK_FILE_HEADER_BYTES - 8)

static const uint8_t magic[4] = {'U', 'C', 'M', 'B'};

void block_file_encode(const struct block_file_header *in, uint8_t out[BLOCK_FILE_HEADER_BYTES])
{
    memset(out, 0, BLOCK_FILE_HEADER_BYTES);
    memcpy(out, magic, sizeof(magic));
    put32(out + AT_VERSION, in->encrypted ? BLOCK_FILE_ENCRYPTED_VERSION : BLOCK_FILE_VERSION);
    put64(out + AT_BYTES, in->payload_bytes);
    put64(out + AT_CHECKSUM, in->checksum);
    put32(out + AT_PART, in->part);
    memcpy(out + AT_IDENTITY, in->identity, BLOCK_FILE_IDENTITY_BYTES);
    put64(out + AT_SUM, checksum_of(out, AT_SUM));
}

void block_file_identity(const uint8_t in[BLOCK_FILE_HEADER_BYTES],
                         uint8_t identity[BLOCK_FILE_IDENTITY_BYTES])
{
    memcpy(identity, in + AT_IDENTITY, BLOCK_FILE_IDENTITY_BYTES);
}

int block_file_peek(const uint8_t in[BLOCK_FILE_HEADER_BYTES], struct block_file_header *out)
{
    uint32_t version = get32(in + AT_VERSION);

    if (memcmp(in, magic, sizeof(magic)) != 0)
        return -EILSEQ;
    if (version != BLOCK_FILE_VERSION && version != BLOCK_FILE_ENCRYPTED_VERSION)
        return -EPROTONOSUPPORT;
    if (get64(in + AT_SUM) != checksum_of(in, AT_SUM))
        return -EBADMSG;
    block_file_identity(in, out->identity);
    out->part = get32(in + AT_PART);
    out->payload_bytes = get64(in + AT_BYTES);
    out->checksum = get64(in + AT_CHECKSUM);
    out->encrypted = version == BLOCK_FILE_ENCRYPTED_VERSION;
    return 0;
}

int block_file_decode(const uint8_t in[BLOCK_FILE_HEADER_BYTES],
                      const struct block_file_header *wanted, uint64_t *checksum)
{
    struct block_file_header h;
    int rc = block_file_peek(in, &h);

    if (rc < 0)
        return rc;
    if (memcmp(h.identity, wanted->identity, BLOCK_FILE_IDENTITY_BYTES) != 0 ||
        h.part != wanted->part || h.payload_bytes != wanted->payload_bytes)
        return -ESTALE;
    *checksum = h.checksum;
    return 0;
}

bool block_file_is_encrypted(const uint8_t in[BLOCK_FILE_HEADER_BYTES])
{
    return get32(in + AT_VERSION) == BLOCK_FILE_ENCRYPTED_VERSION;
}

void block_file_encryption_encode(const struct block_file_encryption *in,
                                  uint8_t out[BLOCK_FILE_ENCRYPTION_BYTES])
{
    memset(out, 0, BLOCK_FILE_ENCRYPTION_BYTES);
    memcpy(out, in->key_id, sizeof(in->key_id));
    memcpy(out + 8, in->salt, sizeof(in->salt));
    memcpy(out + 32, in->tag, sizeof(in->tag));
}

void block_file_encryption_decode(const uint8_t in[BLOCK_FILE_ENCRYPTION_BYTES],
                                  struct block_file_encryption *out)
{
    memcpy(out->key_id, in, sizeof(out->key_id));
    memcpy(out->salt, in + 8, sizeof(out->salt));
    memcpy(out->tag, in + 32, sizeof(out->tag));
}
