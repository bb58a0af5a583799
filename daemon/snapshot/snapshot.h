/* The snapshot: the list of parts in DRAM, with slots and checksums, that an orderly stop leaves in
 * the persistent arena (persist.h) for the next start.
 *
 * Promise: a part of an earlier run is found only when its bytes agree with the checksum that the
 * earlier run had for them. The pool compares them, hottest first, while the daemon serves. What is
 * not certain is left out: a part, or the whole snapshot.
 *
 * Thread: the event loop only; the pool reads slots. Where a function takes NULL, that is a daemon
 * without arena.persist_dir. */
#ifndef UCMD_SNAPSHOT_SNAPSHOT_H
#define UCMD_SNAPSHOT_SNAPSHOT_H

#include "daemon/snapshot/persist.h"

#include <stdbool.h>
#include <stdint.h>

struct snapshot;

/* What it is of; all of it is borrowed. */
struct snapshot_modules {
    struct uv_loop_s *loop;
    struct cache *cache;
    struct index *index;
    struct policy *policy;
    struct arena *arena;
    struct metrics *metrics;
};

/* ---- at the start ---- */

/* Takes the directory, and decides what the arena's file is, for an arena of this size: the one of
 * the run before when that left a snapshot which fits, else a new one. 0, or -errno with a sentence
 * in `why`, which may be empty. */
int snapshot_open(const char *directory, uint64_t arena_bytes, uint64_t slab, struct snapshot **out,
                  char why[PERSIST_WHY_BYTES]);
int snapshot_fd(const struct snapshot *s); /* of the arena's file */
/* After cache_arena_attach and before arena_grow: takes the slots of the run before, if it left
 * any. Their parts follow as slabs become ready. snapshot_take must come before the event loop
 * runs. */
void snapshot_load(struct snapshot *s, const struct snapshot_modules *modules);
/* As persist_take. NULL: 0. */
int snapshot_take(struct snapshot *s);
/* A slab may have become ready. NULL-safe. */
void snapshot_grew(struct snapshot *s);
/* Parts are still to be loaded: `done` of `of` so far. NULL: false. */
bool snapshot_loading(const struct snapshot *s, uint64_t *done, uint64_t *of);
/* The next start will not find the arena's file: somebody removed it. NULL: false. */
bool snapshot_removed(const struct snapshot *s);
/* Ends the load. The next snapshot lists what was not loaded. NULL-safe. */
void snapshot_load_stop(struct snapshot *s);

/* ---- at the end: nobody uses a slot, no operation of the tier is under way ---- */

/* Lists the parts and begins to compute the checksums that are missing. 0, or -errno: there will be
 * no snapshot. */
int snapshot_start(struct snapshot *s);
/* Time is up: the snapshot leaves out parts without a checksum. */
void snapshot_cut(struct snapshot *s);
/* snapshot_finish may be called. */
bool snapshot_ready(const struct snapshot *s);
/* Completes the snapshot. Nothing in the arena may change from now on. */
void snapshot_finish(struct snapshot *s);
/* After the arena was unmapped. NULL-safe. */
void snapshot_close(struct snapshot *s);

#endif
