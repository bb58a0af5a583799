#include "daemon/tier/nvme.h"

#include "daemon/base/kill_point.h"
#include "daemon/base/log.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#define MODULE "tier"
#define ATTEMPTS 3u        /* of an operation; the last one by the threads */
#define RING_FAULTS_MAX 3u /* in a row, then the ring is not used any more */

static uint64_t min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

bool nvme_ring_usable(const struct tier *t)
{
    return t->ring && !t->ring_off && !uring_failed(t->ring);
}

unsigned nvme_device_depth(const struct tier *t)
{
    return nvme_ring_usable(t) ? t->ring_depth : t->threads_depth;
}

static void op_start(struct nvme_op *op)
{
    struct tier *t = op->tier;

    if (op->attempts + 1 < ATTEMPTS && nvme_ring_usable(t))
        uring_start(t->ring, &op->e);
    else
        threads_start(t->loop, &op->e);
}

static void op_advance(struct nvme_op *op, uint64_t bytes)
{
    op->left -= bytes;
    op->e.offset += bytes;
    while (bytes > 0) {
        uint64_t n = min_u64(bytes, op->e.iov->iov_len);

        op->e.iov->iov_base = (char *)op->e.iov->iov_base + n;
        op->e.iov->iov_len -= n;
        bytes -= n;
        if (op->e.iov->iov_len == 0) {
            op->e.iov++;
            op->e.iovs--;
        }
    }
}

/* When the threads do again and again what the ring could not, the ring is at fault and not the
 * device. */
static void ring_fault_count(struct tier *t, const struct nvme_op *op)
{
    if (!op->ring_failed) {
        t->ring_faults = 0;
    } else if (!t->ring_off && ++t->ring_faults >= RING_FAULTS_MAX) {
        t->ring_off = true;
        log_error(MODULE, "io-uring-given-up", "faults=%u engine=threads", t->ring_faults);
    }
}

static void op_finish(struct nvme_op *op, int status)
{
    if (status == 0)
        ring_fault_count(op->tier, op);
    op->finish_cb(op, status);
}

static void op_done_cb(struct engine_op *e, ssize_t result)
{
    struct nvme_op *op = LIST_ENTRY(e, struct nvme_op, e);
    uint64_t whole = result > 0 ? min_u64((uint64_t)result, op->left) / NVME_PAGE * NVME_PAGE : 0;

    if (whole > 0) {
        op_advance(op, whole); /* each such round is a page nearer to the end */
        if (op->left > 0)
            op_start(op);
        else
            op_finish(op, 0);
        return;
    }
    op->ring_failed |= op->attempts + 1 < ATTEMPTS && nvme_ring_usable(op->tier);
    if (++op->attempts < ATTEMPTS)
        op_start(op);
    else
        op_finish(op, result < 0 ? (int)result : -EIO); /* 0: the file ends here */
}

void nvme_op_begin(struct nvme_op *op, unsigned file, uint64_t offset)
{
    op->e.file = file;
    op->e.fd = op->tier->devices[file].file.fd;
    op->e.offset = offset;
    op->e.done_cb = op_done_cb;
    op->left = 0;
    for (unsigned i = 0; i < op->e.iovs; i++)
        op->left += op->e.iov[i].iov_len;
    op->attempts = 0;
    op->ring_failed = false;
    if (op->e.write) {
        KILL_POINT("write-begin");
        /* a part of it reaches the disk: the header without its payload, or less */
        KILL_POINT_WITH("write-torn", if (pwritev(op->e.fd, op->e.iov, (int)op->e.iovs / 2,
                                                  (off_t)offset) < 0) abort());
    }
    op_start(op);
}

void nvme_op_log(const struct nvme_op *op, const char *event, int status)
{
    log_warn(MODULE, event, "path=%s offset=%" PRIu64 " error=%s",
             op->tier->devices[op->e.file].file.path, op->e.offset, strerror(-status));
}
