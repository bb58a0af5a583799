/* The bytes of the NVMe tier's files: docs/design/storage-format.md is their text. Pure functions
 * between structs and 4 KiB pages; no I/O, no state, any thread.
 *
 * Promise: decode says 0 only for a page whose magic, version and checksum agree and whose fields
 * are within their bounds; a page of zeros, of another file or half written never passes. */
#ifndef UCMD_FORMAT_NVME_FORMAT_H
#define UCMD_FORMAT_NVME_FORMAT_H

#include "proto/limits.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define NVME_PAGE 4096u
#define NVME_FORMAT_VERSION 1u
#define NVME_UUID_BYTES 16
#define NVME_TAG_BYTES 16
#define NVME_KEY_ID_BYTES 8
#define NVME_SALT_BYTES 24
#define NVME_SECRET_BYTES 16
#define NVME_EPOCH_BITS 24 /* of a sequence; the rest counts within the epoch */

/* What a directory of nvme.paths holds. */
#define NVME_CACHE_FILE "ucmd.cache"
#define NVME_NS_FILE "ucmd.namespaces"
#define NVME_INDEX_FILE "ucmd.index"

/* Places of a file's own pages; the first segment begins at data_offset of the superblock. */
#define NVME_SUPER_OFFSET 0u
#define NVME_STATE_OFFSET(copy) (NVME_PAGE * (1u + (copy))) /* copy: 0 or 1 */
#define NVME_QUARANTINE_OFFSET(copy) (NVME_PAGE * (3u + (copy)))
#define NVME_DATA_OFFSET (1u << 20)

#define NVME_SEGMENT_MIN (1ull << 20)
#define NVME_SEGMENT_MAX (1ull << 30)

/* Written once, when the file is made. */
struct nvme_super {
    uint8_t uuid[NVME_UUID_BYTES];
    uint64_t segment_bytes, data_offset;
};

/* Written at each open, to the older of its two copies. */
struct nvme_state {
    uint8_t uuid[NVME_UUID_BYTES];
    uint64_t epoch; /* how often the tier was opened; the upper NVME_EPOCH_BITS of every sequence */
    uint64_t segments; /* that fit into the file */
};

struct nvme_segment_header {
    uint8_t uuid[NVME_UUID_BYTES];
    uint32_t segment;  /* its number in the file */
    uint64_t sequence; /* grows over the whole tier */
    uint64_t stride;   /* bytes from record to record */
};

struct nvme_record_header {
    uint8_t uuid[NVME_UUID_BYTES];
    uint8_t fingerprint[UCM_FINGERPRINT_BYTES];
    uint8_t key[UCM_MAX_KEY_BYTES];
    uint32_t key_bytes, part;
    uint32_t segment, record; /* where it was meant to lie */
    uint64_t payload_bytes;
    uint64_t generation;  /* sequence of the segment when the record was written */
    uint64_t sequence;    /* of this write, over the whole tier */
    uint64_t checksum;    /* XXH3-64 of the payload without padding */
    uint64_t layer_bytes; /* of the fragments that have a checksum each; 0: none has */
    /* Their checksums, to be encoded; decode says NULL, and nvme_layer_sum has them. */
    const uint64_t *layer_sums;
    /* Encrypted: the payload is encrypted, in one fragment or a layer a fragment. Then checksum is
     * the first 8 bytes of the page's tag, and the fragments' tags take the place of their
     * checksums. */
    bool encrypted;
    uint8_t key_id[NVME_KEY_ID_BYTES], salt[NVME_SALT_BYTES];
};

/* Fragments that an encrypted record has tags for. */
#define NVME_FRAGMENTS_MAX 243u

#define NVME_LAYERS_MAX 493u
/* Whether fragments of that length may have checksums in a record of so many bytes. */
static inline bool nvme_layers_fit(uint64_t payload_bytes, uint64_t layer_bytes)
{
    return layer_bytes > 0 && layer_bytes < payload_bytes && payload_bytes % layer_bytes == 0 &&
           payload_bytes / layer_bytes <= NVME_LAYERS_MAX;
}

/* Segments that are not to be written to. Written to the older of its two copies. */
#define NVME_QUARANTINE_MAX 1000u
struct nvme_quarantine {
    uint8_t uuid[NVME_UUID_BYTES];
    uint64_t change; /* grows with each that is written */
    uint32_t count;
    uint32_t segment[NVME_QUARANTINE_MAX];
};

/* One page of the file of names: a namespace's identity. */
#define NVME_IDENTITY_BYTES 4000u
struct nvme_ns_record {
    uint8_t fingerprint[UCM_FINGERPRINT_BYTES];
    uint64_t from_sequence; /* records with a lower sequence are forgotten */
    uint32_t identity_bytes;
    uint8_t identity[NVME_IDENTITY_BYTES];
    uint8_t secret[NVME_SECRET_BYTES]; /* of the namespace's keys; zeros: it has none */
};

static inline bool nvme_ns_has_secret(const struct nvme_ns_record *r)
{
    static const uint8_t none[NVME_SECRET_BYTES];

    return memcmp(r->secret, none, sizeof(none)) != 0;
}

void nvme_super_encode(const struct nvme_super *in, uint8_t page[NVME_PAGE]);
void nvme_state_encode(const struct nvme_state *in, uint8_t page[NVME_PAGE]);
void nvme_segment_header_encode(const struct nvme_segment_header *in, uint8_t page[NVME_PAGE]);
void nvme_record_header_encode(const struct nvme_record_header *in, uint8_t page[NVME_PAGE]);
void nvme_quarantine_encode(const struct nvme_quarantine *in, uint8_t page[NVME_PAGE]);
void nvme_ns_record_encode(const struct nvme_ns_record *in, uint8_t page[NVME_PAGE]);

/* 0; -EILSEQ: not such a page; -EPROTONOSUPPORT: of another format version; -EBADMSG: torn or
 * damaged. *out is untouched on failure. */
int nvme_super_decode(const uint8_t page[NVME_PAGE], struct nvme_super *out);
int nvme_state_decode(const uint8_t page[NVME_PAGE], struct nvme_state *out);
int nvme_segment_header_decode(const uint8_t page[NVME_PAGE], struct nvme_segment_header *out);
int nvme_record_header_decode(const uint8_t page[NVME_PAGE], struct nvme_record_header *out);
/* The checksum of a fragment, from a page that passed and has them. */
uint64_t nvme_layer_sum(const uint8_t page[NVME_PAGE], uint32_t layer);
void nvme_layer_sum_set(uint8_t page[NVME_PAGE], uint32_t layer, uint64_t sum);

/* ---- encrypted records ---- */

/* All of the page of an encrypted header but what follows here; nvme_encrypted_finish ends it. */
void nvme_encrypted_encode(const struct nvme_record_header *in, uint8_t page[NVME_PAGE]);
/* The tag of fragment i, below NVME_FRAGMENTS_MAX. */
uint8_t *nvme_encrypted_tag(uint8_t page[NVME_PAGE], uint32_t fragment);
/* What the page's own tag covers: two ranges, around it. */
struct nvme_encrypted_range {
    const uint8_t *bytes;
    size_t n;
};
void nvme_encrypted_ranges(const uint8_t page[NVME_PAGE], struct nvme_encrypted_range out[2]);
/* The page's own tag; zeros in a page that was encoded and not finished. */
uint8_t *nvme_encrypted_page_tag(uint8_t page[NVME_PAGE]);
/* The tag is there: adds the page's checksum, and returns what the header's `checksum` is from now
 * on. */
uint64_t nvme_encrypted_finish(uint8_t page[NVME_PAGE]);
/* Bytes that say what the record is, wherever it lies: out, at least NVME_ENCRYPTED_CONTEXT;
 * returns how many. */
#define NVME_ENCRYPTED_CONTEXT 128u
size_t nvme_encrypted_context(const struct nvme_record_header *in,
                              uint8_t out[NVME_ENCRYPTED_CONTEXT]);
/* In how many fragments the payload is encrypted; 1: as a whole. */
static inline uint32_t nvme_encrypted_fragments(const struct nvme_record_header *h)
{
    return h->layer_bytes > 0 ? (uint32_t)(h->payload_bytes / h->layer_bytes) : 1;
}

int nvme_quarantine_decode(const uint8_t page[NVME_PAGE], struct nvme_quarantine *out);
int nvme_ns_record_decode(const uint8_t page[NVME_PAGE], struct nvme_ns_record *out);

/* In hexadecimal: the name of a device's directory in nvme.state. */
#define NVME_UUID_TEXT (2 * NVME_UUID_BYTES + 1)
void nvme_uuid_text(const uint8_t uuid[NVME_UUID_BYTES], char out[NVME_UUID_TEXT]);

/* Nothing but zeros: never written. */
static inline bool nvme_page_blank(const uint8_t page[NVME_PAGE])
{
    return page[0] == 0 && memcmp(page, page + 1, NVME_PAGE - 1) == 0;
}

/* Whether the header is that of record number `record` of an opening of a segment. */
static inline bool nvme_record_belongs(const struct nvme_record_header *h,
                                       const uint8_t uuid[NVME_UUID_BYTES], uint32_t segment,
                                       uint32_t record, uint64_t generation)
{
    return memcmp(h->uuid, uuid, NVME_UUID_BYTES) == 0 && h->segment == segment &&
           h->record == record && h->generation == generation;
}

/* What `ucmctl format` writes to the first page of a file or device that may be made ours. */
void nvme_mark_encode(uint8_t page[NVME_PAGE]);
/* 0: it is one. */
int nvme_mark_decode(const uint8_t page[NVME_PAGE]);

/* The version that a page of the superblock's magic claims; for messages. */
uint32_t nvme_super_version(const uint8_t page[NVME_PAGE]);

/* Length of a file that may have size_bytes: whole segments after the file's own pages. */
static inline uint64_t nvme_file_bytes(uint64_t size_bytes, uint64_t segment_bytes)
{
    return size_bytes - (size_bytes - NVME_DATA_OFFSET) % segment_bytes;
}

static inline uint64_t nvme_padded(uint64_t bytes)
{
    return (bytes + NVME_PAGE - 1) & ~(uint64_t)(NVME_PAGE - 1);
}

/* Bytes from record to record for payloads of `bytes`. */
static inline uint64_t nvme_stride(uint64_t bytes)
{
    return NVME_PAGE + nvme_padded(bytes);
}

static inline uint64_t nvme_records(uint64_t segment_bytes, uint64_t stride)
{
    return (segment_bytes - NVME_PAGE) / stride;
}

/* Offset of a record's header from the start of its segment. */
static inline uint64_t nvme_record_offset(uint64_t stride, uint64_t record)
{
    return NVME_PAGE + record * stride;
}

/* ---- tier_place.loc: file 8 bits, page of the record's header in the file 32 bits, generation 24
 * ---- */

#define NVME_LOC_FILES 256u
#define NVME_LOC_PAGES (1ull << 32)

/* The segment's sequence in 24 bits: two openings of a segment differ in them unless they are a
 * multiple of 2^24 openings apart, or, in different epochs, collide by chance. */
static inline uint32_t nvme_generation(uint64_t sequence)
{
    return (uint32_t)(sequence ^ (sequence >> 40) * 0x9e3779b1u) & 0xffffffu;
}

static inline uint64_t nvme_loc(uint32_t file, uint64_t page, uint64_t sequence)
{
    return (uint64_t)file << 56 | page << 24 | nvme_generation(sequence);
}

static inline uint32_t nvme_loc_file(uint64_t loc)
{
    return (uint32_t)(loc >> 56);
}

static inline uint64_t nvme_loc_page(uint64_t loc)
{
    return loc >> 24 & (NVME_LOC_PAGES - 1);
}

static inline uint32_t nvme_loc_generation(uint64_t loc)
{
    return (uint32_t)loc & 0xffffffu;
}

#endif
