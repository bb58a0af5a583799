/* What a site's own trace (`ucm-bench record`; the format is in docs/measuring.md) would hit, by size: the
 * reuse distance of each lookup's block, in tokens, on an exact LRU stack. A prefix ends at its first
 * miss, so a block of a chain hits where all before it do. Dumps are uses and no hits.
 * Threads: any, one at a time for each. */
#ifndef UCM_CTL_TRACE_HITS_H
#define UCM_CTL_TRACE_HITS_H

#include <stddef.h>
#include <stdint.h>

#define TRACE_WHY_BYTES 256

struct trace_hits {
    uint64_t lookups, blocks; /* blocks that they asked for, again and again */
    uint64_t tokens;          /* of all different blocks */
    uint64_t *distance;       /* of the blocks that were there before, ascending; owned */
    size_t n, cap;
};

/* block_tokens: of a block for which the file says nothing. 0, or -errno with a sentence. Free it in
 * either case. */
int trace_hits_read(const char *path, uint32_t block_tokens, struct trace_hits *out,
                    char why[TRACE_WHY_BYTES]);
void trace_hits_free(struct trace_hits *h);

/* Of 1000 blocks asked for, those that a cache of so many tokens has. */
uint32_t trace_hits_permille(const struct trace_hits *h, uint64_t tokens);
/* The tokens that give `percent` of the hits that an endless cache has; 0 without any. */
uint64_t trace_hits_tokens(const struct trace_hits *h, unsigned percent);

#endif
