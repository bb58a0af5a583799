#include "daemon/format/nvme_format.h"

#include "daemon/format/bytes.h"
#include "daemon/format/checksum.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define MAGIC_MARK "UCMDBLNK"
#define MAGIC_SUPER "UCMDNVME"
#define MAGIC_STATE "UCMDSTAT"
#define MAGIC_SEGMENT "UCMG"
#define MAGIC_RECORD "UCMS"
#define MAGIC_ENCRYPTED "UCME"
#define MAGIC_NAME "UCMN"
#define MAGIC_QUARANTINE "UCMQ"

void nvme_uuid_text(const uint8_t uuid[NVME_UUID_BYTES], char out[NVME_UUID_TEXT])
{
    for (unsigned i = 0; i < NVME_UUID_BYTES; i++)
        snprintf(out + 2 * (size_t)i, 3, "%02x", uuid[i]);
}

/* Every page: magic, version, fields, zeros, and in its last 8 bytes the XXH3-64 of all before. */
#define CHECKSUM_AT (NVME_PAGE - 8)

#define LAYER_BYTES_AT 136
#define LAYER_SUMS_AT 144
_Static_assert(LAYER_SUMS_AT + 8 * NVME_LAYERS_MAX == CHECKSUM_AT,
               "checksums fill a header's page");

/* Fields of an encrypted header; those up to 128 are a record's. */
#define KEY_ID_AT 128
#define SALT_AT 144
#define PAGE_TAG_AT 168
#define TAGS_AT 192
_Static_assert(SALT_AT + NVME_SALT_BYTES == PAGE_TAG_AT &&
                   PAGE_TAG_AT + NVME_TAG_BYTES <= TAGS_AT &&
                   TAGS_AT + NVME_TAG_BYTES * NVME_FRAGMENTS_MAX <= CHECKSUM_AT,
               "tags fit into a header's page");

#define SECRET_AT (72 + NVME_IDENTITY_BYTES)
_Static_assert(SECRET_AT + NVME_SECRET_BYTES == CHECKSUM_AT, "the secret fills a namespace's page");

/* magic of 4 or 8 bytes at 0, version right after it, the file's UUID at 16 in all of them */
static void page_begin(uint8_t *page, const char *magic, const uint8_t *uuid)
{
    size_t n = strlen(magic);

    memset(page, 0, NVME_PAGE);
    memcpy(page, magic, n);
    put32(page + n, NVME_FORMAT_VERSION);
    memcpy(page + 16, uuid, NVME_UUID_BYTES);
}

static void page_end(uint8_t *page)
{
    put64(page + CHECKSUM_AT, checksum_of(page, CHECKSUM_AT));
}

static int page_check(const uint8_t *page, const char *magic)
{
    size_t n = strlen(magic);

    if (memcmp(page, magic, n) != 0)
        return -EILSEQ;
    if (get32(page + n) != NVME_FORMAT_VERSION)
        return -EPROTONOSUPPORT;
    if (get64(page + CHECKSUM_AT) != checksum_of(page, CHECKSUM_AT))
        return -EBADMSG;
    return 0;
}

void nvme_mark_encode(uint8_t page[NVME_PAGE])
{
    static const uint8_t nobody[NVME_UUID_BYTES];

    page_begin(page, MAGIC_MARK, nobody);
    page_end(page);
}

int nvme_mark_decode(const uint8_t page[NVME_PAGE])
{
    return page_check(page, MAGIC_MARK);
}

uint32_t nvme_super_version(const uint8_t page[NVME_PAGE])
{
    return get32(page + strlen(MAGIC_SUPER));
}

void nvme_super_encode(const struct nvme_super *in, uint8_t page[NVME_PAGE])
{
    page_begin(page, MAGIC_SUPER, in->uuid);
    put64(page + 32, in->segment_bytes);
    put64(page + 40, in->data_offset);
    page_end(page);
}

int nvme_super_decode(const uint8_t page[NVME_PAGE], struct nvme_super *out)
{
    uint64_t segment_bytes = get64(page + 32), data_offset = get64(page + 40);
    int rc = page_check(page, MAGIC_SUPER);

    if (rc < 0)
        return rc;
    if (segment_bytes < NVME_SEGMENT_MIN || segment_bytes > NVME_SEGMENT_MAX ||
        segment_bytes % NVME_PAGE != 0 || data_offset != NVME_DATA_OFFSET)
        return -EBADMSG;
    memcpy(out->uuid, page + 16, NVME_UUID_BYTES);
    out->segment_bytes = segment_bytes;
    out->data_offset = data_offset;
    return 0;
}

void nvme_state_encode(const struct nvme_state *in, uint8_t page[NVME_PAGE])
{
    page_begin(page, MAGIC_STATE, in->uuid);
    put64(page + 32, in->epoch);
    put64(page + 40, in->segments);
    page_end(page);
}

int nvme_state_decode(const uint8_t page[NVME_PAGE], struct nvme_state *out)
{
    int rc = page_check(page, MAGIC_STATE);

    if (rc < 0)
        return rc;
    if (get64(page + 32) >> NVME_EPOCH_BITS != 0 || get64(page + 40) > NVME_LOC_PAGES)
        return -EBADMSG;
    memcpy(out->uuid, page + 16, NVME_UUID_BYTES);
    out->epoch = get64(page + 32);
    out->segments = get64(page + 40);
    return 0;
}

void nvme_segment_header_encode(const struct nvme_segment_header *in, uint8_t page[NVME_PAGE])
{
    page_begin(page, MAGIC_SEGMENT, in->uuid);
    put32(page + 8, in->segment);
    put64(page + 32, in->sequence);
    put64(page + 40, in->stride);
    page_end(page);
}

int nvme_segment_header_decode(const uint8_t page[NVME_PAGE], struct nvme_segment_header *out)
{
    uint64_t stride = get64(page + 40);
    int rc = page_check(page, MAGIC_SEGMENT);

    if (rc < 0)
        return rc;
    if (stride < 2 * NVME_PAGE || stride > NVME_SEGMENT_MAX || stride % NVME_PAGE != 0)
        return -EBADMSG;
    memcpy(out->uuid, page + 16, NVME_UUID_BYTES);
    out->segment = get32(page + 8);
    out->sequence = get64(page + 32);
    out->stride = stride;
    return 0;
}

void nvme_layer_sum_set(uint8_t page[NVME_PAGE], uint32_t layer, uint64_t sum)
{
    put64(page + LAYER_SUMS_AT + (size_t)8 * layer, sum);
}

/* The fields that plaintext and encrypted records have in one place. */
static void record_begin(const struct nvme_record_header *in, const char *magic, uint8_t *page)
{
    page_begin(page, magic, in->uuid);
    put32(page + 8, in->segment);
    put32(page + 12, in->record);
    memcpy(page + 32, in->fingerprint, UCM_FINGERPRINT_BYTES);
    memcpy(page + 64, in->key, UCM_MAX_KEY_BYTES);
    put32(page + 96, in->key_bytes);
    put32(page + 100, in->part);
    put64(page + 104, in->payload_bytes);
    put64(page + 112, in->generation);
    put64(page + 120, in->sequence);
    put64(page + LAYER_BYTES_AT, in->layer_bytes);
}

void nvme_record_header_encode(const struct nvme_record_header *in, uint8_t page[NVME_PAGE])
{
    record_begin(in, MAGIC_RECORD, page);
    put64(page + 128, in->checksum);
    for (uint64_t i = 0; in->layer_bytes > 0 && i < in->payload_bytes / in->layer_bytes; i++)
        nvme_layer_sum_set(page, (uint32_t)i, in->layer_sums[i]);
    page_end(page);
}

int nvme_record_header_decode(const uint8_t page[NVME_PAGE], struct nvme_record_header *out)
{
    uint32_t key_bytes = get32(page + 96);
    uint64_t payload_bytes = get64(page + 104), layer_bytes = get64(page + LAYER_BYTES_AT);
    bool encrypted = memcmp(page, MAGIC_ENCRYPTED, 4) == 0;
    int rc = page_check(page, encrypted ? MAGIC_ENCRYPTED : MAGIC_RECORD);

    if (rc < 0)
        return rc;
    if (key_bytes < UCM_MIN_KEY_BYTES || key_bytes > UCM_MAX_KEY_BYTES || payload_bytes == 0 ||
        payload_bytes > NVME_SEGMENT_MAX || get32(page + 100) >= UCM_MAX_PARTS ||
        (layer_bytes != 0 && !nvme_layers_fit(payload_bytes, layer_bytes)) ||
        (encrypted && layer_bytes != 0 && payload_bytes / layer_bytes > NVME_FRAGMENTS_MAX))
        return -EBADMSG;
    memset(out, 0, sizeof(*out));
    memcpy(out->uuid, page + 16, NVME_UUID_BYTES);
    memcpy(out->fingerprint, page + 32, UCM_FINGERPRINT_BYTES);
    memcpy(out->key, page + 64, UCM_MAX_KEY_BYTES);
    out->key_bytes = key_bytes;
    out->part = get32(page + 100);
    out->segment = get32(page + 8);
    out->record = get32(page + 12);
    out->payload_bytes = payload_bytes;
    out->generation = get64(page + 112);
    out->sequence = get64(page + 120);
    out->checksum = get64(page + (encrypted ? PAGE_TAG_AT : 128));
    out->layer_bytes = layer_bytes;
    out->layer_sums = NULL;
    out->encrypted = encrypted;
    if (!encrypted)
        return 0;
    memcpy(out->key_id, page + KEY_ID_AT, NVME_KEY_ID_BYTES);
    memcpy(out->salt, page + SALT_AT, NVME_SALT_BYTES);
    return 0;
}

/* ---- encrypted records ---- */

void nvme_encrypted_encode(const struct nvme_record_header *in, uint8_t page[NVME_PAGE])
{
    record_begin(in, MAGIC_ENCRYPTED, page);
    memcpy(page + KEY_ID_AT, in->key_id, NVME_KEY_ID_BYTES);
    memcpy(page + SALT_AT, in->salt, NVME_SALT_BYTES);
}

uint8_t *nvme_encrypted_tag(uint8_t page[NVME_PAGE], uint32_t fragment)
{
    return page + TAGS_AT + (size_t)NVME_TAG_BYTES * fragment;
}

uint8_t *nvme_encrypted_page_tag(uint8_t page[NVME_PAGE])
{
    return page + PAGE_TAG_AT;
}

void nvme_encrypted_ranges(const uint8_t page[NVME_PAGE], struct nvme_encrypted_range out[2])
{
    const size_t behind = PAGE_TAG_AT + NVME_TAG_BYTES;

    out[0] = (struct nvme_encrypted_range){page, PAGE_TAG_AT};
    out[1] = (struct nvme_encrypted_range){page + behind, CHECKSUM_AT - behind};
}

uint64_t nvme_encrypted_finish(uint8_t page[NVME_PAGE])
{
    page_end(page);
    return get64(page + PAGE_TAG_AT);
}

size_t nvme_encrypted_context(const struct nvme_record_header *in,
                              uint8_t out[NVME_ENCRYPTED_CONTEXT])
{
    uint8_t *at = out;

    memcpy(at, in->salt, NVME_SALT_BYTES);
    memcpy(at + 24, in->fingerprint, UCM_FINGERPRINT_BYTES);
    memcpy(at + 56, in->key, UCM_MAX_KEY_BYTES);
    put32(at + 88, in->key_bytes);
    put32(at + 92, in->part);
    put64(at + 96, in->payload_bytes);
    put64(at + 104, in->layer_bytes);
    put64(at + 112, in->sequence);
    return 120;
}

uint64_t nvme_layer_sum(const uint8_t page[NVME_PAGE], uint32_t layer)
{
    return get64(page + LAYER_SUMS_AT + (size_t)8 * layer);
}

void nvme_quarantine_encode(const struct nvme_quarantine *in, uint8_t page[NVME_PAGE])
{
    page_begin(page, MAGIC_QUARANTINE, in->uuid);
    put32(page + 8, in->count);
    put64(page + 32, in->change);
    for (uint32_t i = 0; i < in->count; i++)
        put32(page + 40 + (size_t)4 * i, in->segment[i]);
    page_end(page);
}

int nvme_quarantine_decode(const uint8_t page[NVME_PAGE], struct nvme_quarantine *out)
{
    uint32_t count = get32(page + 8);
    int rc = page_check(page, MAGIC_QUARANTINE);

    if (rc < 0)
        return rc;
    if (count > NVME_QUARANTINE_MAX)
        return -EBADMSG;
    memcpy(out->uuid, page + 16, NVME_UUID_BYTES);
    out->change = get64(page + 32);
    out->count = count;
    for (uint32_t i = 0; i < count; i++)
        out->segment[i] = get32(page + 40 + (size_t)4 * i);
    return 0;
}

void nvme_ns_record_encode(const struct nvme_ns_record *in, uint8_t page[NVME_PAGE])
{
    static const uint8_t no_file[NVME_UUID_BYTES];

    page_begin(page, MAGIC_NAME, no_file);
    put32(page + 8, in->identity_bytes);
    memcpy(page + 32, in->fingerprint, UCM_FINGERPRINT_BYTES);
    put64(page + 64, in->from_sequence);
    memcpy(page + 72, in->identity, in->identity_bytes);
    memcpy(page + SECRET_AT, in->secret, NVME_SECRET_BYTES);
    page_end(page);
}

int nvme_ns_record_decode(const uint8_t page[NVME_PAGE], struct nvme_ns_record *out)
{
    uint32_t bytes = get32(page + 8);
    int rc = page_check(page, MAGIC_NAME);

    if (rc < 0)
        return rc;
    if (bytes < 1 || bytes > NVME_IDENTITY_BYTES)
        return -EBADMSG;
    memcpy(out->fingerprint, page + 32, UCM_FINGERPRINT_BYTES);
    out->from_sequence = get64(page + 64);
    out->identity_bytes = bytes;
    memcpy(out->identity, page + 72, bytes);
    memcpy(out->secret, page + SECRET_AT, NVME_SECRET_BYTES);
    return 0;
}
