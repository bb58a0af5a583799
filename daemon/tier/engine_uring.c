#include "daemon/tier/engine.h"

#include "daemon/base/log.h"

#include <assert.h>
#include <errno.h>
#include <liburing.h>
#include <linux/ioprio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#define RING_SQ_MAX 4096u
#define RING_BUFFERS_MAX 16384u /* the kernel's bound */
#define RING_BUFFER_BYTES (1ull << 30)
#define PROBE_BYTES 4096u
#define PROBE_S 2
/* Completions handled in one iteration of the event loop, by their iovecs: a write of many small
 * parts is as much work as many reads, and requests wait while it is done. */
#define TURN_IOVECS 16u
#define SUBMIT_TRIES 3

struct buffer {
    char *base;
    uint64_t bytes; /* 0: not registered */
};

/* An operation goes queue -> sent -> kernel -> done. `queue` has no SQE yet: SQEs are filled and
 * submitted once an iteration of the event loop, right before it would sleep. `sent` has SQEs that
 * the kernel has not consumed, in their order. */
struct uring {
    struct io_uring ring;
    uv_poll_t poll;
    uv_prepare_t prepare;
    struct list queue, sent;
    unsigned under_way, in_kernel;
    unsigned handles; /* still open */
    bool failed, closing;
    bool refused; /* to register memory, which was logged */
    unsigned buffers_max;
    struct buffer *buffers;
};

static void op_finish(struct uring *e, struct engine_op *op, ssize_t result)
{
    if (--e->under_way == 0)
        uv_unref((uv_handle_t *)&e->poll);
    op->done_cb(op, result);
}

/* The ring takes nothing any more: what it has not taken is given back. SQEs that were filled stay
 * where they are; nothing is submitted again, so the kernel never looks at them. */
static void ring_give_up(struct uring *e, int rc)
{
    struct list rest;
    struct list *node;

    e->failed = true;
    log_error("tier", "io-uring-failed", "error=%s", strerror(-rc));
    list_init(&rest);
    while ((node = list_pop_front(&e->sent)) || (node = list_pop_front(&e->queue)))
        list_push_back(&rest, node);
    while ((node = list_pop_front(&rest)))
        op_finish(e, LIST_ENTRY(node, struct engine_op, link), -EIO);
}

static void sqe_fill(const struct uring *e, struct io_uring_sqe *sqe, struct engine_op *op)
{
    char *base = op->iov[0].iov_base;
    unsigned bytes = (unsigned)op->iov[0].iov_len;
    const struct buffer *b = op->buffer < e->buffers_max ? &e->buffers[op->buffer] : NULL;

    if (op->iovs > 1 && !op->write)
        io_uring_prep_readv(sqe, (int)op->file, op->iov, op->iovs, op->offset);
    else if (op->write)
        io_uring_prep_writev(sqe, (int)op->file, op->iov, op->iovs, op->offset);
    else if (b && b->bytes >= bytes && base >= b->base && base <= b->base + (b->bytes - bytes))
        io_uring_prep_read_fixed(sqe, (int)op->file, base, bytes, op->offset, (int)op->buffer);
    else
        io_uring_prep_read(sqe, (int)op->file, base, bytes, op->offset);
    sqe->flags |= IOSQE_FIXED_FILE;
    if (op->idle)
        sqe->ioprio = IOPRIO_PRIO_VALUE(IOPRIO_CLASS_IDLE, 0);
    if (op->write) /* finding its pages takes the kernel long: on a thread of its own */
        sqe->flags |= IOSQE_ASYNC;
    io_uring_sqe_set_data(sqe, op);
}

static void ring_fill(struct uring *e)
{
    while (!list_empty(&e->queue)) {
        struct io_uring_sqe *sqe = io_uring_get_sqe(&e->ring);
        struct list *node;

        if (!sqe)
            return;
        node = list_pop_front(&e->queue);
        sqe_fill(e, sqe, LIST_ENTRY(node, struct engine_op, link));
        list_push_back(&e->sent, node);
    }
}

static void ring_submit(struct uring *e)
{
    unsigned tries = 0;

    for (ring_fill(e); !list_empty(&e->sent); ring_fill(e)) {
        int n = io_uring_submit(&e->ring);

        for (int i = 0; i < n; i++)
            list_pop_front(&e->sent);
        if (n > 0) {
            e->in_kernel += (unsigned)n;
            continue;
        }
        if (n == 0 || n == -EAGAIN || n == -EBUSY || n == -EINTR) {
            if (e->in_kernel > 0)
                return; /* a completion will wake the event loop, then again */
            if (++tries < SUBMIT_TRIES)
                continue;
        }
        ring_give_up(e, n == 0 ? -EAGAIN : n);
        return;
    }
}

static void prepare_cb(uv_prepare_t *handle)
{
    struct uring *e = handle->data;

    ring_submit(e);
    if (list_empty(&e->queue) && list_empty(&e->sent))
        uv_prepare_stop(&e->prepare);
}

/* An iteration's ration of completions; the poll is level-triggered, so the rest comes with the
 * next. */
static void poll_cb(uv_poll_t *handle, int status, int events)
{
    struct uring *e = handle->data;
    struct io_uring_cqe *cqe;

    (void)events;
    if (status < 0 && !e->failed)
        ring_give_up(e, status);
    for (unsigned work = 0;
         work < TURN_IOVECS && !e->closing && io_uring_peek_batch_cqe(&e->ring, &cqe, 1) == 1;) {
        struct engine_op *op = io_uring_cqe_get_data(cqe);

        op->result = cqe->res;
        io_uring_cqe_seen(&e->ring, cqe);
        e->in_kernel--;
        work += op->iovs;
        op_finish(e, op, op->result);
    }
}

/* A real read through the ring: a sandbox may allow the setup and refuse the rest. */
static int ring_probe(struct io_uring *ring, unsigned file)
{
    struct __kernel_timespec limit = {.tv_sec = PROBE_S};
    struct io_uring_sqe *sqe = io_uring_get_sqe(ring);
    struct io_uring_cqe *cqe;
    void *page = aligned_alloc(PROBE_BYTES, PROBE_BYTES);
    int rc;

    if (!page || !sqe) {
        free(page);
        return -ENOMEM;
    }
    io_uring_prep_read(sqe, (int)file, page, PROBE_BYTES, 0);
    sqe->flags |= IOSQE_FIXED_FILE;
    rc = io_uring_submit(ring);
    if (rc != 1) {
        free(page);
        return rc < 0 ? rc : -EIO;
    }
    rc = io_uring_wait_cqe_timeout(ring, &cqe, &limit);
    if (rc < 0)
        return rc; /* the page is lost on purpose: the kernel may still write to it */
    rc = cqe->res == (int)PROBE_BYTES ? 0 : cqe->res < 0 ? cqe->res : -EIO;
    io_uring_cqe_seen(ring, cqe);
    free(page);
    return rc;
}

static int ring_setup(struct io_uring *ring, unsigned depth)
{
    struct io_uring_params params = {
        .flags = IORING_SETUP_CQSIZE | IORING_SETUP_CLAMP | IORING_SETUP_COOP_TASKRUN,
        .cq_entries = 2 * depth,
    };
    unsigned entries = depth < RING_SQ_MAX ? depth : RING_SQ_MAX;
    int rc = io_uring_queue_init_params(entries, ring, &params);

    if (rc != -EINVAL)
        return rc;
    /* before Linux 5.19 */
    params = (struct io_uring_params){.flags = IORING_SETUP_CQSIZE | IORING_SETUP_CLAMP,
                                      .cq_entries = 2 * depth};
    return io_uring_queue_init_params(entries, ring, &params);
}

int uring_check(void)
{
    struct io_uring ring;
    int rc = ring_setup(&ring, 1);

    if (rc == 0)
        io_uring_queue_exit(&ring);
    return rc;
}

static void ring_buffers_init(struct uring *e)
{
    int rc = io_uring_register_buffers_sparse(&e->ring, RING_BUFFERS_MAX);

    if (rc == 0)
        e->buffers = calloc(RING_BUFFERS_MAX, sizeof(e->buffers[0]));
    e->buffers_max = e->buffers ? RING_BUFFERS_MAX : 0;
    if (e->buffers_max == 0)
        log_warn("tier", "buffers-not-registered", "error=%s", strerror(rc < 0 ? -rc : ENOMEM));
}

static int handles_init(struct uring *e, uv_loop_t *loop)
{
    int rc = uv_poll_init(loop, &e->poll, e->ring.ring_fd);

    if (rc < 0)
        return rc;
    e->poll.data = e->prepare.data = e;
    e->handles = 2;
    (void)uv_prepare_init(loop, &e->prepare); /* can't fail */
    uv_unref((uv_handle_t *)&e->prepare);
    uv_unref((uv_handle_t *)&e->poll);
    return 0;
}

static void engine_closed_cb(uv_handle_t *handle)
{
    struct uring *e = handle->data;

    if (--e->handles > 0)
        return;
    free(e->buffers);
    free(e);
}

void uring_close(struct uring *e)
{
    if (!e)
        return;
    assert(e->under_way == 0);
    e->closing = true;
    uv_close((uv_handle_t *)&e->prepare, engine_closed_cb);
    uv_close((uv_handle_t *)&e->poll, engine_closed_cb);
    io_uring_queue_exit(&e->ring);
}

int uring_open(uv_loop_t *loop, const int *fds, unsigned files, unsigned depth, struct uring **out)
{
    struct uring *e = calloc(1, sizeof(*e));
    unsigned first = 0;
    int rc;

    if (!e)
        return -ENOMEM;
    list_init(&e->queue);
    list_init(&e->sent);
    while (first < files && fds[first] < 0)
        first++;
    rc = first < files ? ring_setup(&e->ring, depth) : -ENODEV;
    if (rc < 0)
        goto err_after_alloc;
    rc = io_uring_register_files(&e->ring, fds, files);
    if (rc == 0)
        rc = ring_probe(&e->ring, first);
    if (rc < 0)
        goto err_after_ring;
    ring_buffers_init(e);
    rc = handles_init(e, loop);
    if (rc < 0)
        goto err_after_buffers;
    rc = uv_poll_start(&e->poll, UV_READABLE, poll_cb);
    if (rc < 0) {
        uring_close(e);
        return rc;
    }
    *out = e;
    return 0;

err_after_buffers:
    free(e->buffers);
err_after_ring:
    io_uring_queue_exit(&e->ring);
err_after_alloc:
    free(e);
    return rc;
}

/* The first time only: all slabs have the same reason. */
static void register_refused(struct uring *e, int error)
{
    struct rlimit limit = {.rlim_cur = RLIM_INFINITY};

    if (e->refused)
        return;
    e->refused = true;
    if (error == ENOMEM && getrlimit(RLIMIT_MEMLOCK, &limit) == 0 &&
        limit.rlim_cur != RLIM_INFINITY)
        log_warn("tier", "buffers-not-registered",
                 "reason=\"this process may lock %llu KiB of memory only, so reads cost a few "
                 "percent more; set LimitMEMLOCK=infinity (ulimit -l unlimited)\"",
                 (unsigned long long)limit.rlim_cur >> 10);
    else
        log_warn("tier", "buffers-not-registered", "error=%s", strerror(error));
}

/* Pins the memory. Where that is refused (RLIMIT_MEMLOCK, memory of another driver) reads of this
 * buffer go unregistered, a few per cent dearer. */
void uring_buffer_add(struct uring *e, uint32_t buffer, void *base, uint64_t bytes)
{
    struct iovec iov = {.iov_base = base, .iov_len = bytes};
    int rc;

    if (buffer >= e->buffers_max || bytes > RING_BUFFER_BYTES || e->failed)
        return;
    rc = io_uring_register_buffers_update_tag(&e->ring, buffer, &iov, NULL, 1);
    if (rc != 1) {
        register_refused(e, rc < 0 ? -rc : EIO);
        return;
    }
    e->buffers[buffer] = (struct buffer){.base = base, .bytes = bytes};
}

void uring_start(struct uring *e, struct engine_op *op)
{
    assert(!e->failed);
    if (e->under_way++ == 0)
        uv_ref((uv_handle_t *)&e->poll);
    if (list_empty(&e->queue) && list_empty(&e->sent))
        (void)uv_prepare_start(&e->prepare, prepare_cb); /* refuses a missing callback only */
    list_push_back(&e->queue, &op->link);
}

bool uring_failed(const struct uring *e)
{
    return e->failed;
}
