/* What would more DRAM bring? The hit rate of lookups that other sizes would give, estimated.
 *
 * A reference to a key is a hit in an LRU cache of so many bytes if less was referenced since the
 * key's last one: its reuse distance. Distances are taken of a sample of the keys, chosen by a
 * hash, and scaled up (SHARDS: Waldspurger, Park, Garthwaite, Ahmad, "Efficient MRC Construction
 * with SHARDS", USENIX FAST 2015).
 * One key in 16 is sampled at first, and fewer once the sample is full or takes more than 16,384
 * references a second. Once that has been over for a minute, a larger sample begins alongside it.
 * It takes over when it covers the longest distance in question, after an hour at the latest
 * (reuse.c, struct growth). Keys further back than the largest size leave it. References of an hour
 * ago count half.
 *
 * It models LRU, in which a looked-up key that is missing will be stored. The daemon's own policy
 * (docs/design/eviction.md) hits a little more often. `test_reuse -v` prints the error against an
 * exact stack.
 *
 * Memory: some 250 KiB. Loop only. */
#ifndef UCMD_TRACE_REUSE_H
#define UCMD_TRACE_REUSE_H

#include "proto/metrics/metrics.h"

struct reuse;

/* seed: chooses the sample, so that peers can't. 0 or -ENOMEM. */
int reuse_new(uint64_t seed, struct reuse **out);
void reuse_free(struct reuse *r); /* NULL-safe */
/* Today's sizes; 0: there is none. */
void reuse_sizes(struct reuse *r, const uint64_t bytes[REUSE_TIERS]);
/* A lookup named n keys of key_bytes (16 or more) in the namespace with this number; block_bytes:
 * what each takes. */
void reuse_lookup(struct reuse *r, uint32_t ns, const uint8_t *keys, uint32_t key_bytes, uint32_t n,
                  uint64_t block_bytes, uint64_t now_ms);
/* A size is 0 while there were too few references for an answer. */
void reuse_read(struct reuse *r, struct metrics_reuse *out);

#endif
