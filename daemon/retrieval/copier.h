/* Copies within DRAM for the cache, by the threads that build summaries: after those who wait for a
 * selection, and in turns with builds. Thread: the event loop's. */
#ifndef UCMD_RETRIEVAL_COPIER_H
#define UCMD_RETRIEVAL_COPIER_H

struct cache_copy;

/* For cache_copier_attach; ctx: the struct summary_pool. */
void copier_copy(void *ctx, struct cache_copy *k);

#endif
