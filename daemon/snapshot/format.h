/* The format of the snapshot `ucmd.kept`, the list of parts in DRAM. Numbers are unsigned and
 * little-endian; a checksum is XXH3-64 with seed 0; bytes without a meaning are zero. The file may
 * be longer than the snapshot.
 *
 * The head is one page:
 *
 *   at 0     magic "UCMDKEPT"
 *   at 8     u32 format version, 1
 *   at 16    16 bytes of /proc/sys/kernel/random/boot_id, binary: this boot's
 *   at 32    u64 inode of ucmd.arena
 *   at 40    u64 bytes of the arena: the file's length, and arena.size in whole slabs
 *   at 48    u64 bytes of a slab
 *   at 56    u64 bytes of the snapshot, head included
 *   at 64    u32 number of namespaces
 *   at 72    u64 number of parts
 *   at 80    u64 checksum of everything after the head
 *   at 88    32 bytes: the program that wrote it, as text
 *   at 4088  u64 checksum of bytes 0 to 4087
 *
 * The namespaces follow: fingerprint (32 bytes), u32 length of the identity (1 to 4000), 4 zeros,
 * identity, zeros up to a multiple of 8. Then follow the parts, those to keep longest first:
 *
 *   at 0     u32 position of the namespace in the list, from 0
 *   at 4     u32 part, below 256
 *   at 8     u32 slab
 *   at 12    u32 slot in the slab
 *   at 16    32 bytes: key, then zeros
 *   at 48    u64 checksum of the payload
 *   at 56    u32 uses that the eviction policy counted, at most 7
 *   at 60    u32 bit 0: NVMe has the part, too
 *
 * The payload lies at slab * bytes of a slab + slot * stride of `ucmd.arena`; the stride is the
 * part's length padded to 4096. All slots of a slab have one stride.
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
