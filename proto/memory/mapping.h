/* The table of sequence numbers that the daemon and a worker with a mapping share. The daemon
 * writes it, in a memfd of the tenant's own; workers map it read-only. docs/design/mappings.md,
 * "Shared mappings", describes it.
 *
 * Each slot of the tenant's slabs has a sequence number. An even one other than 0 names bytes that
 * do not change while it stands; an odd one says that they may change. The daemon makes it odd
 * before it lets anything write into the slot, and gives each value once. So a reader that finds
 * its place's sequence number before and after the copy has that place's bytes, whatever the daemon
 * did meanwhile; otherwise it has a miss.
 *
 * Threads: the daemon's loop writes; readers anywhere. */
#ifndef UCM_PROTO_MAPPING_H
#define UCM_PROTO_MAPPING_H

#include "proto/limits.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define UCM_MAPPING_MAGIC "UCMMAPP1"
#define UCM_MAPPING_VERSION 1u
#define UCM_MAPPING_ALIGN 4096u        /* slots begin at multiples of this */
#define UCM_MAPPING_HEADER_BYTES 4096u /* the sequence numbers begin here */

struct ucm_mapping_header {
    uint8_t magic[8];
    uint32_t version;
    uint32_t slot_align; /* UCM_MAPPING_ALIGN */
    uint64_t slab_bytes;
    uint32_t slabs;          /* that there may be */
    uint32_t slots_per_slab; /* slab_bytes / slot_align: entries of a slab */
    _Atomic uint64_t epoch;  /* counts slabs that the tenant was asked to release */
};

/* The sequence number of slot `slot` of slab `slab` is entry slab * slots_per_slab + slot. */
static inline uint64_t ucm_mapping_table_bytes(uint32_t slabs, uint32_t slots_per_slab)
{
    return UCM_MAPPING_HEADER_BYTES + (uint64_t)slabs * slots_per_slab * sizeof(_Atomic uint64_t);
}

/* The number of that entry. */
static inline uint64_t ucm_mapping_entry(uint32_t slots_per_slab, uint32_t slab, uint32_t slot)
{
    return (uint64_t)slab * slots_per_slab + slot;
}

/* gcc warns that ThreadSanitizer knows no fences. These order accesses of different processes. */
#if defined(__SANITIZE_THREAD__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wtsan"
#endif

/* A reader copies between these two, and has the bytes of the place told with this sequence number
 * if both return true. It has checked the place against its own copy of the header. */
static inline bool ucm_mapping_begin(const _Atomic uint64_t *seq, uint64_t told)
{
    return told != 0 && !(told & 1) && atomic_load_explicit(seq, memory_order_acquire) == told;
}

static inline bool ucm_mapping_end(const _Atomic uint64_t *seq, uint64_t told)
{
    atomic_thread_fence(memory_order_acquire);
    return atomic_load_explicit(seq, memory_order_relaxed) == told;
}

/* The daemon: before anybody is asked to write into the slot. */
static inline void ucm_mapping_retract(_Atomic uint64_t *seq)
{
    uint64_t was = atomic_load_explicit(seq, memory_order_relaxed);

    if (!(was & 1))
        atomic_store_explicit(seq, was + 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
}

#if defined(__SANITIZE_THREAD__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

/* When all of its bytes are there. next: even, and larger than any before in any table. */
static inline void ucm_mapping_publish(_Atomic uint64_t *seq, uint64_t next)
{
    atomic_store_explicit(seq, next, memory_order_release);
}

/* One of mapping.ref's places, little-endian. */
struct ucm_wire_place {
    uint32_t slab; /* UCM_PLACE_NONE: not in the mapping */
    uint32_t slot; /* it begins at slot * slot_bytes of its slab */
    uint64_t seq;
};
#define UCM_PLACE_NONE UINT32_MAX

_Static_assert(sizeof(struct ucm_wire_place) == UCM_PLACE_BYTES, "as on the wire");

#endif
