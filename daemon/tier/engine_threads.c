#include "daemon/tier/engine.h"

#include <assert.h>
#include <errno.h>
#include <linux/ioprio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

struct engine {
    uv_loop_t *loop;
    unsigned files;
    int fds[];
};

static int threads_open(uv_loop_t *loop, const int *fds, unsigned files, unsigned depth,
                        struct engine **out)
{
    struct engine *e = malloc(sizeof(*e) + files * sizeof(e->fds[0]));

    (void)depth; /* libuv's pool is as wide as it is; its queue is the caller's bound */
    if (!e)
        return -ENOMEM;
    e->loop = loop;
    e->files = files;
    memcpy(e->fds, fds, files * sizeof(fds[0]));
    *out = e;
    return 0;
}

static void threads_close(struct engine *e)
{
    free(e);
}

static void threads_buffer_add(struct engine *e, uint32_t buffer, void *base, uint64_t bytes)
{
    (void)e, (void)buffer, (void)base, (void)bytes;
}

static void op_work_cb(uv_work_t *work)
{
    struct engine_op *op = work->data;
    const struct engine *e = op->engine;
    int fd = e->fds[op->file];
    off_t offset = (off_t)op->offset;

    long before = op->idle ? syscall(SYS_ioprio_get, IOPRIO_WHO_PROCESS, 0) : -1;

    if (before >= 0) /* where the scheduler knows no priorities nothing is lost */
        (void)syscall(SYS_ioprio_set, IOPRIO_WHO_PROCESS, 0,
                      IOPRIO_PRIO_VALUE(IOPRIO_CLASS_IDLE, 0));
    op->result = op->write ? pwritev(fd, op->iov, (int)op->iovs, offset)
                           : preadv(fd, op->iov, (int)op->iovs, offset);
    if (op->result < 0)
        op->result = -errno;
    if (before >= 0)
        (void)syscall(SYS_ioprio_set, IOPRIO_WHO_PROCESS, 0, (int)before);
}

static void op_done_cb(uv_work_t *work, int status)
{
    struct engine_op *op = work->data;

    assert(status == 0); /* nobody cancels */
    (void)status;
    op->done(op, op->result);
}

static void threads_start(struct engine *e, struct engine_op *op)
{
    int rc;

    assert(op->file < e->files);
    op->engine = e;
    op->work.data = op;
    rc = uv_queue_work(e->loop, &op->work, op_work_cb, op_done_cb);
    assert(rc == 0); /* refuses a missing callback only */
    (void)rc;
}

static bool threads_failed(const struct engine *e)
{
    (void)e;
    return false;
}

const struct engine_ops engine_threads = {
    .name = "threads",
    .open = threads_open,
    .close = threads_close,
    .buffer_add = threads_buffer_add,
    .start = threads_start,
    .failed = threads_failed,
};
