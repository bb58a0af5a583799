/* DRAM over a planned restart: what lies in the arena's file is told to the next run, which takes
 * it over. The files are daemon/arena/persist.h's.
 *
 * Promise: a part of an earlier run is found only when its bytes agree with the checksum that the
 * earlier run had for them; in the background, the hottest first, while the daemon serves. What is
 * not certain is left out: a part, or the whole of it.
 * Thread: the loop only; the pool reads slots. */
#ifndef UCMD_CACHE_SNAPSHOT_H
#define UCMD_CACHE_SNAPSHOT_H

#include "daemon/arena/persist.h"
#include "daemon/cache/cache.h"

/* ---- at start ---- */

/* The arena's file for an arena of this size: the one of the run before when it left a manifest for
 * it (*warm), else a new one. 0 or -errno. */
int cache_snapshot_open(struct persist *k, uint64_t arena_bytes, uint64_t extent, bool *warm);
/* After cache_arena_attach, before arena_grow, when it is warm: the slots are taken, and their
 * parts found as their extents become ready. persist_take must come before the loop runs. 0 or
 * -ENOMEM, and then nothing is taken over. */
int cache_snapshot_load(struct cache *c, struct persist *k);
/* Parts are still to be taken over: `done` of `of` so far. */
bool cache_snapshot_loading(const struct cache *c, uint64_t *done, uint64_t *of);
/* No more than are being looked at: what is left is told to the next run. */
void cache_snapshot_load_stop(struct cache *c);

/* ---- at the end: nobody uses a slot, no operation of the tier is under way ---- */

/* Begins to compute the checksums that are not known. 0, or -errno: nothing can be kept. */
int cache_snapshot_start(struct cache *c, struct persist *k);
/* Time is up: what is not computed is not kept. */
void cache_snapshot_cut(struct cache *c);
/* Computes no more: cache_snapshot_finish may be called. */
bool cache_snapshot_ready(const struct cache *c);
/* Writes the manifest. Nothing of the arena may be changed afterwards. */
void cache_snapshot_finish(struct cache *c);

#endif
