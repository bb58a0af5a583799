#include "daemon/snapshot/format.h"

#include "daemon/format/bytes.h"
#include "daemon/format/checksum.h"
#include "daemon/index/index.h"

#include <errno.h>
#include <string.h>

#define MAGIC "UCMDKEPT"
#define HEAD_SUM (SNAPSHOT_HEAD_BYTES - 8)
#define STORED 1u
#define USES_MAX 7u

/* ---- namespaces and parts ---- */

size_t snapshot_ns_encode(uint8_t *p, const struct snapshot_ns *in)
{
    memcpy(p, in->fingerprint, UCM_FINGERPRINT_BYTES);
    put32(p + UCM_FINGERPRINT_BYTES, in->identity_bytes);
    put32(p + UCM_FINGERPRINT_BYTES + 4, 0);
    memcpy(p + UCM_FINGERPRINT_BYTES + 8, in->identity, in->identity_bytes);
    return snapshot_ns_bytes(in->identity_bytes);
}

size_t snapshot_ns_decode(const uint8_t *p, struct snapshot_ns *out)
{
    out->fingerprint = p;
    out->identity_bytes = get32(p + UCM_FINGERPRINT_BYTES);
    out->identity = p + UCM_FINGERPRINT_BYTES + 8;
    return snapshot_ns_bytes(out->identity_bytes);
}

void snapshot_part_encode(uint8_t *p, const struct snapshot_part *in)
{
    put32(p, in->ns);
    put32(p + 4, in->part);
    put32(p + 8, in->slab);
    put32(p + 12, in->slot);
    memcpy(p + 16, in->key, UCM_MAX_KEY_BYTES);
    snapshot_checksum_put(p, in->checksum);
    put32(p + 56, in->uses);
    put32(p + 60, in->stored ? STORED : 0);
}

void snapshot_part_decode(const uint8_t *p, struct snapshot_part *out)
{
    out->ns = get32(p);
    out->part = get32(p + 4);
    out->slab = get32(p + 8);
    out->slot = get32(p + 12);
    memcpy(out->key, p + 16, UCM_MAX_KEY_BYTES);
    out->checksum = get64(p + 48);
    out->uses = get32(p + 56);
    out->stored = get32(p + 60) & STORED;
}

void snapshot_checksum_put(uint8_t *part, uint64_t checksum)
{
    put64(part + 48, checksum);
}

/* ---- the head ---- */

void snapshot_complete(uint8_t *p, size_t n, const struct snapshot_head *h)
{
    memset(p, 0, SNAPSHOT_HEAD_BYTES);
    memcpy(p, MAGIC, 8);
    put32(p + 8, SNAPSHOT_FORMAT_VERSION);
    memcpy(p + 16, h->arena.boot, sizeof(h->arena.boot));
    put64(p + 32, h->arena.inode);
    put64(p + 40, h->arena.bytes);
    put64(p + 48, h->slab);
    put64(p + 56, n);
    put32(p + 64, h->namespaces);
    put64(p + 72, h->parts);
    put64(p + 80, checksum_of(p + SNAPSHOT_HEAD_BYTES, n - SNAPSHOT_HEAD_BYTES));
    memcpy(p + 88, h->program, sizeof(h->program));
    put64(p + HEAD_SUM, checksum_of(p, HEAD_SUM));
}

/* Walks the namespaces: only its own length says where one ends. */
static int namespaces_check(const uint8_t *p, size_t n, uint32_t namespaces, size_t *at)
{
    for (*at = SNAPSHOT_HEAD_BYTES; namespaces > 0; namespaces--) {
        struct snapshot_ns ns;

        if (n - *at < snapshot_ns_bytes(0))
            return -EBADMSG;
        snapshot_ns_decode(p + *at, &ns);
        if (ns.identity_bytes == 0 || ns.identity_bytes > NS_CANONICAL_MAX ||
            n - *at < snapshot_ns_bytes(ns.identity_bytes))
            return -EBADMSG;
        *at += snapshot_ns_bytes(ns.identity_bytes);
    }
    return 0;
}

static int parts_check(const uint8_t *p, const struct snapshot_head *h)
{
    struct snapshot_part part;

    for (uint64_t i = 0; i < h->parts; i++) {
        snapshot_part_decode(p + i * SNAPSHOT_PART_BYTES, &part);
        if (part.ns >= h->namespaces || part.part >= UCM_MAX_PARTS || part.uses > USES_MAX ||
            part.slab >= h->arena.bytes / h->slab)
            return -EBADMSG;
    }
    return 0;
}

int snapshot_check(const uint8_t *p, size_t n, const struct persist_identity *of, uint64_t slab,
                   struct snapshot_head *out, size_t *parts_at)
{
    struct snapshot_head h = {.slab = slab};
    uint64_t bytes;
    int rc;

    if (n < SNAPSHOT_HEAD_BYTES || memcmp(p, MAGIC, 8) != 0)
        return -EBADMSG;
    if (get32(p + 8) != SNAPSHOT_FORMAT_VERSION)
        return -EPROTONOSUPPORT;
    bytes = get64(p + 56);
    if (get64(p + HEAD_SUM) != checksum_of(p, HEAD_SUM) || bytes > n ||
        bytes < SNAPSHOT_HEAD_BYTES ||
        get64(p + 80) != checksum_of(p + SNAPSHOT_HEAD_BYTES, bytes - SNAPSHOT_HEAD_BYTES))
        return -EBADMSG;
    memcpy(h.arena.boot, p + 16, sizeof(h.arena.boot));
    h.arena.inode = get64(p + 32);
    h.arena.bytes = get64(p + 40);
    if (memcmp(h.arena.boot, of->boot, sizeof(of->boot)) != 0 || h.arena.inode != of->inode ||
        h.arena.bytes != of->bytes || get64(p + 48) != slab)
        return -ESTALE;
    h.namespaces = get32(p + 64);
    h.parts = get64(p + 72);
    memcpy(h.program, p + 88, sizeof(h.program) - 1);
    rc = namespaces_check(p, bytes, h.namespaces, parts_at);
    if (rc == 0 && (h.parts != (bytes - *parts_at) / SNAPSHOT_PART_BYTES ||
                    (bytes - *parts_at) % SNAPSHOT_PART_BYTES != 0))
        rc = -EBADMSG;
    if (rc == 0)
        rc = parts_check(p + *parts_at, &h);
    if (rc == 0)
        *out = h;
    return rc;
}
