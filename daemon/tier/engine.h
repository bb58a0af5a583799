/* Moves bytes between memory and files, through io_uring or through libuv's threads, which call
 * preadv and pwritev. Knows nothing of segments and checksums.
 *
 * Promises:
 * - An operation that was started ends exactly once: `done_cb` runs on the event loop, never from
 *   inside start. `result` is what preadv or pwritev would return, or -errno. The caller continues
 *   a short transfer.
 * - While operations are under way the event loop stays alive.
 * - A ring that can't go on ends what it holds with -EIO and says `failed` from then on. What the
 *   kernel already has still completes.
 *
 * Threads: every function on the event loop. The caller bounds how many operations are under
 * way. */
#ifndef UCMD_TIER_ENGINE_H
#define UCMD_TIER_ENGINE_H

#include "daemon/base/list.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <uv.h>

#define ENGINE_IOVECS 17u

/* The caller's memory, which it leaves alone from start to done. */
struct engine_op {
    bool write;
    bool idle;       /* of a read: with the I/O priority "idle" */
    int fd;          /* for the threads */
    uint32_t file;   /* for the ring: its number in the list given to uring_open */
    uint32_t buffer; /* of a read: registered buffer of its one iovec */
    uint64_t offset;
    struct iovec *iov;
    unsigned iovs; /* ENGINE_IOVECS at most */
    void (*done_cb)(struct engine_op *op, ssize_t result);
    /* The engine's own. */
    struct list link;
    ssize_t result;
    uv_work_t work;
};

struct uring;

/* fds: -1 where there is no file. depth: operations under way at most. Blocks for a probing read. 0
 * or -errno. */
int uring_open(uv_loop_t *loop, const int *fds, unsigned files, unsigned depth, struct uring **out);
/* Nothing may be under way. Ends on the event loop; NULL-safe. */
void uring_close(struct uring *e);
void uring_buffer_add(struct uring *e, uint32_t buffer, void *base, uint64_t bytes);
void uring_start(struct uring *e, struct engine_op *op);
bool uring_failed(const struct uring *e);

void threads_start(uv_loop_t *loop, struct engine_op *op);

/* Whether the kernel lets this process use io_uring. 0 or -errno. */
int uring_check(void);

#endif
