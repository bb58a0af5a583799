/* How bytes get between memory and files: one ring, or threads that call preadv and pwritev. Knows
 * nothing of segments and checksums.
 *
 * Promise: an operation that was started ends exactly once with `done`, on the loop and never from
 * inside start; `result` is what preadv or pwritev would return, with -errno for failure; short
 * transfers are told, not repaired. While operations are under way the loop stays alive.
 * An engine that finds itself unable to go on ends what it holds with -EIO, and `failed` says so
 * from then on; what the kernel already had still completes. Threads: every function on the loop.
 * The caller bounds how many operations are under way. */
#ifndef UCMD_TIER_ENGINE_H
#define UCMD_TIER_ENGINE_H

#include "daemon/base/list.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <uv.h>

/* Memory of the caller, untouched by it from start to done. */
struct engine_op {
    bool write;
    bool idle;       /* of a read: with the I/O priority "idle" */
    uint32_t file;   /* number in the list given to open */
    uint32_t buffer; /* of a read: registered buffer of its one iovec */
    uint64_t offset;
    struct iovec *iov;
    unsigned iovs;
    void (*done)(struct engine_op *op, ssize_t result);
    /* The engine's own. */
    struct list link;
    void *engine;
    ssize_t result;
    uv_work_t work;
};

struct engine;

struct engine_ops {
    const char *name;
    /* fds: -1 where there is no file. depth: operations under way at most. Blocks for a probing
     * read. 0 or -errno. */
    int (*open)(uv_loop_t *loop, const int *fds, unsigned files, unsigned depth,
                struct engine **out);
    /* Nothing may be under way. Ends on the loop; NULL-safe. */
    void (*close)(struct engine *e);
    void (*buffer_add)(struct engine *e, uint32_t buffer, void *base, uint64_t bytes);
    void (*start)(struct engine *e, struct engine_op *op);
    bool (*failed)(const struct engine *e);
};

extern const struct engine_ops engine_uring;
extern const struct engine_ops engine_threads;

/* Whether the kernel lets this process use io_uring. 0 or -errno. */
int engine_uring_check(void);

#endif
