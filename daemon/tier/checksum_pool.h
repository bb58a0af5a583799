/* Checksums of parts in libuv's thread pool. For small parts the way to a thread and back takes
 * longer than the sum: their owner computes it on the event loop.
 *
 * Promises:
 * - Every operation that was pushed comes back once through `done_cb`, on the event loop.
 * - Urgent ones (reads) start before others (writes).
 * - Others are summed in batches, so that several share a wake-up. A batch starts when it is full,
 *   or at checksum_flush, which must follow the last push.
 *
 * Threads: push and done on the event loop; between them a thread of the pool reads io->data. */
#ifndef UCMD_TIER_CHECKSUM_POOL_H
#define UCMD_TIER_CHECKSUM_POOL_H

#include "daemon/tier/tier.h"

#include <uv.h>

#define CHECKSUM_SMALL (16u << 10)
#define CHECKSUM_BATCH 32
#define CHECKSUM_BATCH_BYTES (2u << 20)

/* What is computed of an operation, in a thread, and how many bytes that takes. */
typedef uint64_t checksum_count(const struct tier_io *io);

/* A batch is ready: all urgent, or none. May close the pool when it was the last. */
typedef void (*checksum_done_cb)(void *ctx, struct tier_io **ios, const uint64_t *sums, unsigned n);

struct checksum_pool {
    uv_loop_t *loop;
    checksum_count *sum, *bytes;
    checksum_done_cb done_cb;
    void *ctx;
    struct list urgent, later; /* of tier_io.link */
    unsigned later_n;          /* in `later`, and their bytes */
    uint64_t later_bytes;
    bool flush;       /* start what is in `later` now */
    struct list idle; /* free batches */
    struct checksum_batch *batches;
};

/* threads: pieces of work under way at most. 0 or -ENOMEM. */
int checksum_pool_init(struct checksum_pool *p, uv_loop_t *loop, unsigned threads,
                       checksum_count *sum, checksum_count *bytes, checksum_done_cb done_cb,
                       void *ctx);
/* Nothing may be under way. */
void checksum_pool_close(struct checksum_pool *p);
void checksum_push(struct checksum_pool *p, struct tier_io *io, bool urgent);
/* No more pushes that are not urgent come soon. */
void checksum_flush(struct checksum_pool *p);

#endif
