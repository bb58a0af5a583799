/* Spans (base/span.h) name bytes in slots, for all code that touches them. The functions return 0,
 * or -EINVAL: the range is not the part's, its bytes don't lie in the slot, or the caller has no
 * right to them. That is a mistake of the daemon; it is counted (span_refused) and logged, and *out
 * is left alone.
 *
 * Thread: the event loop. */
#ifndef UCMD_CACHE_SPAN_H
#define UCMD_CACHE_SPAN_H

#include "daemon/base/span.h"
#include "daemon/cache/cache.h"

struct cache_copy;

/* All of a part in DRAM, to which the caller has a reference. */
int span_part(struct cache *c, block_ref ref, uint32_t part, struct span *out);
/* Layers that the caller has claimed. */
int span_pending_write(struct cache *c, const struct pending_write *f, uint32_t first, uint32_t n,
                       struct span *out);
/* Layers [first, first + n), counted in the part, of what `from` has. */
int span_cut(struct cache *c, const struct span *from, uint32_t first, uint32_t n,
             struct span *out);

/* ---- for the cache itself ---- */

/* A whole part of that form in a slot that is the caller's own, to be written. */
int span_slot(struct cache *c, slot_ref slot, const struct form *form, struct span *out);
/* The same, to be read. */
int span_kept(struct cache *c, slot_ref slot, const struct form *form, struct span *out);
/* A copy of a part that the caller has a reference to into such a slot, but for done_cb. */
int span_copy(struct cache *c, block_ref ref, uint32_t part, slot_ref to, struct cache_copy *out);
/* Some layers in a room for TIER_READ_LAYERS that begins at byte `at` of the slot. */
int span_stage(struct cache *c, slot_ref slot, uint64_t at, const struct form *form, uint32_t first,
               uint32_t n, struct span *out);

#endif
