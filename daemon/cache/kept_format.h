/* The manifest of DRAM that is kept over a restart, as docs/storage-format.md has it.
 *
 * Promise: what kept_check lets through is whole, of this format, and of the arena that was named;
 * every number in it is within its bounds but for slots that overlap. No I/O. */
#ifndef UCMD_CACHE_KEPT_FORMAT_H
#define UCMD_CACHE_KEPT_FORMAT_H

#include "daemon/arena/keep.h"
#include "proto/limits.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KEPT_FORMAT_VERSION 1u
#define KEPT_HEAD_BYTES 4096u
#define KEPT_PART_BYTES 64u

struct kept_head {
    struct keep_identity arena;
    uint64_t extent, parts;
    uint32_t namespaces;
    char program[32]; /* that wrote it; for the log */
};

struct kept_ns {
    const uint8_t *fingerprint, *identity;
    uint32_t identity_bytes;
};

struct kept_part {
    uint32_t ns; /* place in the list of namespaces */
    uint32_t part, extent, slot;
    uint8_t key[UCM_MAX_KEY_BYTES];
    uint64_t checksum;
    uint32_t uses;
    bool stored; /* lay on NVMe as well */
};

static inline size_t kept_ns_bytes(uint32_t identity_bytes)
{
    return UCM_FINGERPRINT_BYTES + 8 + ((identity_bytes + 7u) & ~(size_t)7);
}

/* At p; returns kept_ns_bytes. */
size_t kept_ns_encode(uint8_t *p, const struct kept_ns *in);
void kept_part_encode(uint8_t *p, const struct kept_part *in);
void kept_part_decode(const uint8_t *p, struct kept_part *out);
void kept_checksum_put(uint8_t *part, uint64_t checksum);
/* The last step: p has KEPT_HEAD_BYTES of room for the head, then namespaces and parts. */
void kept_seal(uint8_t *p, size_t n, const struct kept_head *h);

/* Is this a manifest that may be used for the arena `of`? 0, or -EBADMSG (damaged),
 * -EPROTONOSUPPORT (another format), -ESTALE (of another arena). *parts_at: where they begin. */
int kept_check(const uint8_t *p, size_t n, const struct keep_identity *of, uint64_t extent,
               struct kept_head *out, size_t *parts_at);
/* The namespace at p of a manifest that was checked; returns its length. */
size_t kept_ns_decode(const uint8_t *p, struct kept_ns *out);

#endif
