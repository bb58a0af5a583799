/* The snapshot: the list of parts in DRAM, with slots and checksums, that an orderly stop leaves in
 * the persistent arena (daemon/arena/persist.h) for the next start.
 *
 * Promise: a part of an earlier run is found only when its bytes agree with the checksum that the
 * earlier run had for them. The pool compares them, hottest first, while the daemon serves. What is
 * not certain is left out: a part, or the whole snapshot.
 *
 * Thread: the loop only; the pool reads slots. */
#ifndef UCMD_CACHE_SNAPSHOT_H
#define UCMD_CACHE_SNAPSHOT_H

#include <stdbool.h>
#include <stdint.h>

struct cache;
struct persist;

/* ---- at the start ---- */

/* Decides what the arena's file is, for an arena of this size: the one of the run before when that
 * left a snapshot which fits (*warm), else a new one. 0 or -errno. */
int cache_snapshot_open(struct persist *k, uint64_t arena_bytes, uint64_t extent, bool *warm);
/* When it is warm, after cache_arena_attach and before arena_grow: takes the slots. Their parts
 * follow as extents become ready. persist_take must come before the loop runs. 0; or -errno, and
 * nothing is loaded. */
int cache_snapshot_load(struct cache *c, struct persist *k);
/* Parts are still to be loaded: `done` of `of` so far. */
bool cache_snapshot_loading(const struct cache *c, uint64_t *done, uint64_t *of);
/* Ends the load. The next snapshot lists what was not loaded. */
void cache_snapshot_load_stop(struct cache *c);

/* ---- at the end: nobody uses a slot, no operation of the tier is under way ---- */

/* Lists the parts and begins to compute the checksums that are missing. 0, or -errno: there will be
 * no snapshot. */
int cache_snapshot_start(struct cache *c, struct persist *k);
/* Time is up: the snapshot leaves out parts without a checksum. */
void cache_snapshot_cut(struct cache *c);
/* cache_snapshot_finish may be called. */
bool cache_snapshot_ready(const struct cache *c);
/* Completes the snapshot. Nothing in the arena may change from now on. */
void cache_snapshot_finish(struct cache *c);

#endif
