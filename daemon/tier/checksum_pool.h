/* XXH3-64 of parts, in libuv's thread pool. Of small ones the sum takes less time than the way to
 * a thread and back: whoever has them asks checksum_of on the loop.
 *
 * Promise: every operation that was pushed comes back once through `done`, on the loop; urgent ones
 * (reads) before others (writes) as far as they have not begun. Under load a piece of work takes
 * several operations, so that a wake-up is shared; others wait for one that is whole, or for
 * checksum_flush, which must follow.
 * Threads: push and done on the loop; between them a thread of the pool reads io->data. */
#ifndef UCMD_TIER_CHECKSUM_POOL_H
#define UCMD_TIER_CHECKSUM_POOL_H

#include "daemon/format/checksum.h"
#include "daemon/tier/tier.h"

#include <uv.h>

#define CHECKSUM_SMALL (16u << 10)
#define CHECKSUM_BATCH 32
#define CHECKSUM_BATCH_BYTES (2u << 20)

struct checksum_batch;

/* A batch is ready: all urgent, or none. The pool isn't touched after it: the last one may close
 * it. */
typedef void (*checksum_done_cb)(void *ctx, struct tier_io **ios, const uint64_t *sums, unsigned n);

struct checksum_pool {
    uv_loop_t *loop;
    checksum_done_cb done;
    void *ctx;
    struct list urgent, later; /* of tier_io.link */
    unsigned later_n;          /* in `later`, and their bytes */
    uint64_t later_bytes;
    bool flush;       /* what is in `later` now does not wait for more */
    struct list idle; /* batches that nobody works on */
    struct checksum_batch *batches;
};

/* threads: pieces of work under way at most. 0 or -ENOMEM. */
int checksum_pool_init(struct checksum_pool *p, uv_loop_t *loop, unsigned threads,
                       checksum_done_cb done, void *ctx);
/* Nothing may be under way. */
void checksum_pool_close(struct checksum_pool *p);
void checksum_push(struct checksum_pool *p, struct tier_io *io, bool urgent);
/* No more of those that are not urgent come soon. */
void checksum_flush(struct checksum_pool *p);

#endif
