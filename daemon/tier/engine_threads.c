#include "daemon/tier/engine.h"

#include "daemon/base/poison.h"

#include <assert.h>
#include <errno.h>
#include <linux/ioprio.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PAGE_BYTES 4096u

/* The padding of a slot moves with its bytes, and nobody else may touch it. usable: of each iovec's
 * bytes those that were not poisoned. */
static void padding_open(const struct engine_op *op, uint64_t usable[ENGINE_IOVECS])
{
    for (unsigned i = 0; i < op->iovs; i++) {
        const struct iovec *v = &op->iov[i];

        usable[i] = poison_begins(v->iov_base, v->iov_len);
        if (v->iov_len - usable[i] < PAGE_BYTES)
            poison(v->iov_base, v->iov_len, v->iov_len);
    }
}

static void padding_close(const struct engine_op *op, const uint64_t usable[ENGINE_IOVECS])
{
    for (unsigned i = 0; i < op->iovs; i++)
        poison(op->iov[i].iov_base, op->iov[i].iov_len, usable[i]);
}

static void op_work_cb(uv_work_t *work)
{
    struct engine_op *op = work->data;
    uint64_t usable[ENGINE_IOVECS];
    off_t offset = (off_t)op->offset;
    long before = op->idle ? syscall(SYS_ioprio_get, IOPRIO_WHO_PROCESS, 0) : -1;

    if (before >= 0) /* where the scheduler knows no priorities nothing is lost */
        (void)syscall(SYS_ioprio_set, IOPRIO_WHO_PROCESS, 0,
                      IOPRIO_PRIO_VALUE(IOPRIO_CLASS_IDLE, 0));
    padding_open(op, usable);
    op->result = op->write ? pwritev(op->fd, op->iov, (int)op->iovs, offset)
                           : preadv(op->fd, op->iov, (int)op->iovs, offset);
    if (op->result < 0)
        op->result = -errno;
    padding_close(op, usable);
    if (before >= 0)
        (void)syscall(SYS_ioprio_set, IOPRIO_WHO_PROCESS, 0, (int)before);
}

static void op_done_cb(uv_work_t *work, int status)
{
    struct engine_op *op = work->data;

    assert(status == 0); /* nobody cancels */
    (void)status;
    op->done_cb(op, op->result);
}

void threads_start(uv_loop_t *loop, struct engine_op *op)
{
    int rc;

    op->work.data = op;
    rc = uv_queue_work(loop, &op->work, op_work_cb, op_done_cb);
    assert(rc == 0); /* refuses a missing callback only */
    (void)rc;
}
