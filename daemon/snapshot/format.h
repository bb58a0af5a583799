/* The format of the snapshot, the list of parts in DRAM (docs/design/storage-format.md).
 *
 * Promise: a snapshot that passes snapshot_check is whole, of this format, and of the arena that
 * the caller named; every number in it is within its bounds. Slots may overlap. No I/O. */
#ifndef UCMD_SNAPSHOT_FORMAT_H
#define UCMD_SNAPSHOT_FORMAT_H

#include "daemon/snapshot/persist.h"
#include "proto/limits.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SNAPSHOT_FORMAT_VERSION 1u
#define SNAPSHOT_HEAD_BYTES 4096u
#define SNAPSHOT_PART_BYTES 64u

struct snapshot_head {
    struct persist_identity arena;
    uint64_t slab, parts;
    uint32_t namespaces;
    char program[32]; /* that wrote it; for the log */
};

struct snapshot_ns {
    const uint8_t *fingerprint, *identity;
    uint32_t identity_bytes;
};

struct snapshot_part {
    uint32_t ns; /* place in the list of namespaces */
    uint32_t part, slab, slot;
    uint8_t key[UCM_MAX_KEY_BYTES];
    uint64_t checksum;
    uint32_t uses;
    bool stored; /* lay on NVMe as well */
};

static inline size_t snapshot_ns_bytes(uint32_t identity_bytes)
{
    return UCM_FINGERPRINT_BYTES + 8 + ((identity_bytes + 7u) & ~(size_t)7);
}

/* At p; returns snapshot_ns_bytes. */
size_t snapshot_ns_encode(uint8_t *p, const struct snapshot_ns *in);
void snapshot_part_encode(uint8_t *p, const struct snapshot_part *in);
void snapshot_part_decode(const uint8_t *p, struct snapshot_part *out);
void snapshot_checksum_put(uint8_t *part, uint64_t checksum);
/* The last step: p begins with SNAPSHOT_HEAD_BYTES for the head, then namespaces and parts. */
void snapshot_complete(uint8_t *p, size_t n, const struct snapshot_head *h);

/* Is this a snapshot that may be used for the arena `of`? 0, or -EBADMSG (damaged),
 * -EPROTONOSUPPORT (another format), -ESTALE (of another arena). *parts_at: where they begin. */
int snapshot_check(const uint8_t *p, size_t n, const struct persist_identity *of, uint64_t slab,
                   struct snapshot_head *out, size_t *parts_at);
/* The namespace at p of a snapshot that was checked; returns its length. */
size_t snapshot_ns_decode(const uint8_t *p, struct snapshot_ns *out);

#endif
