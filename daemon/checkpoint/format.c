#include "daemon/checkpoint/format.h"

#include "daemon/format/bytes.h"
#include "daemon/format/checksum.h"

#include <errno.h>
#include <string.h>

#define MAGIC "UCMI"
/* Besides key_bytes, which is 32 at most; daemons that do not know them leave the entry out. */
#define ENCRYPTED (1u << 31)
#define TAG_SHIFT 8 /* 16 bits of key_id */

static uint8_t *entry_at(uint8_t *p, uint32_t i)
{
    return p + CHECKPOINT_HEAD_BYTES + (size_t)i * CHECKPOINT_ENTRY_BYTES;
}

void checkpoint_entry_encode(uint8_t *p, uint32_t i, const struct nvme_record_header *in)
{
    uint32_t tag = in->key_id[0] | (uint32_t)in->key_id[1] << 8;
    uint8_t *e = entry_at(p, i);

    put32(e, in->record);
    put32(e + 4, (uint32_t)in->payload_bytes);
    put64(e + 8, in->sequence);
    put64(e + 16, in->checksum);
    put32(e + 24, in->key_bytes | (in->encrypted ? ENCRYPTED | tag << TAG_SHIFT : 0));
    put32(e + 28, in->part);
    memcpy(e + 32, in->key, UCM_MAX_KEY_BYTES);
    memcpy(e + 64, in->fingerprint, UCM_FINGERPRINT_BYTES);
}

bool checkpoint_entry_decode(const uint8_t *p, uint32_t i, struct nvme_record_header *out)
{
    const uint8_t *e = entry_at((uint8_t *)p, i);

    memset(out, 0, sizeof(*out));
    out->record = get32(e);
    out->payload_bytes = get32(e + 4);
    out->sequence = get64(e + 8);
    out->checksum = get64(e + 16);
    out->key_bytes = get32(e + 24);
    out->encrypted = out->key_bytes & ENCRYPTED;
    if (out->encrypted) {
        out->key_id[0] = (uint8_t)(out->key_bytes >> TAG_SHIFT);
        out->key_id[1] = (uint8_t)(out->key_bytes >> (TAG_SHIFT + 8));
        out->key_bytes &= 0xff;
    }
    out->part = get32(e + 28);
    memcpy(out->key, e + 32, UCM_MAX_KEY_BYTES);
    memcpy(out->fingerprint, e + 64, UCM_FINGERPRINT_BYTES);
    return out->payload_bytes > 0 && out->key_bytes >= UCM_MIN_KEY_BYTES &&
           out->key_bytes <= UCM_MAX_KEY_BYTES && out->part < UCM_MAX_PARTS;
}

void checkpoint_span_finish(uint8_t *p, const struct checkpoint_span *r)
{
    uint8_t *tail = entry_at(p, r->entries);

    memcpy(p, MAGIC, 4);
    put32(p + 4, NVME_FORMAT_VERSION);
    put32(p + 8, r->segment);
    put32(p + 12, r->from);
    memcpy(p + 16, r->uuid, NVME_UUID_BYTES);
    put64(p + 32, r->sequence);
    put32(p + 40, (uint32_t)(r->stride / NVME_PAGE));
    put32(p + 44, r->to);
    put32(p + 48, r->entries);
    put32(p + 52, 0);
    put64(tail, checksum_of(p, (uint64_t)(tail - p)));
}

int checkpoint_span_decode(const uint8_t *p, size_t n, struct checkpoint_span *out)
{
    struct checkpoint_span r;
    const uint8_t *tail;

    if (n < CHECKPOINT_HEAD_BYTES)
        return -EAGAIN;
    r.segment = get32(p + 8);
    r.from = get32(p + 12);
    memcpy(r.uuid, p + 16, NVME_UUID_BYTES);
    r.sequence = get64(p + 32);
    r.stride = (uint64_t)get32(p + 40) * NVME_PAGE;
    r.to = get32(p + 44);
    r.entries = get32(p + 48);
    if (memcmp(p, MAGIC, 4) != 0 || get32(p + 4) != NVME_FORMAT_VERSION || r.from > r.to ||
        r.entries > r.to - r.from || r.entries > CHECKPOINT_RECORDS)
        return -EBADMSG;
    if (n < checkpoint_span_bytes(r.entries))
        return -EAGAIN;
    tail = entry_at((uint8_t *)p, r.entries);
    if (get64(tail) != checksum_of(p, (uint64_t)(tail - p)))
        return -EBADMSG;
    *out = r;
    return 0;
}
