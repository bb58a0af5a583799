#include "daemon/tier/checksum_pool.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

struct checksum_batch {
    struct list link;
    uv_work_t work;
    struct checksum_pool *pool;
    unsigned n;
    struct tier_io *ios[CHECKSUM_BATCH];
    uint64_t sums[CHECKSUM_BATCH];
};

static void batch_work_cb(uv_work_t *work)
{
    struct checksum_batch *b = work->data;

    for (unsigned i = 0; i < b->n; i++)
        b->sums[i] = b->pool->sum(b->ios[i]);
}

static void pool_dispatch(struct checksum_pool *p);

static void batch_done_cb(uv_work_t *work, int status)
{
    struct checksum_batch *b = work->data;
    struct checksum_pool *p = b->pool;
    struct tier_io *ios[CHECKSUM_BATCH];
    uint64_t sums[CHECKSUM_BATCH];
    unsigned n = b->n;

    assert(status == 0); /* nobody cancels */
    (void)status;
    for (unsigned i = 0; i < n; i++) {
        ios[i] = b->ios[i];
        sums[i] = b->sums[i];
    }
    list_push_back(&p->idle, &b->link);
    pool_dispatch(p);
    p->done_cb(p->ctx, ios, sums, n);
}

static void batch_fill(struct checksum_batch *b, struct list *from)
{
    uint64_t bytes = 0;
    struct list *node;

    b->n = 0;
    while (b->n < CHECKSUM_BATCH && bytes < CHECKSUM_BATCH_BYTES &&
           (node = list_pop_front(from)) != NULL) {
        b->ios[b->n] = LIST_ENTRY(node, struct tier_io, link);
        bytes += b->pool->bytes(b->ios[b->n++]);
    }
}

static bool later_due(const struct checksum_pool *p)
{
    return p->later_n > 0 &&
           (p->flush || p->later_n >= CHECKSUM_BATCH || p->later_bytes >= CHECKSUM_BATCH_BYTES);
}

static void batch_fill_later(struct checksum_batch *b)
{
    struct checksum_pool *p = b->pool;

    batch_fill(b, &p->later);
    p->later_n -= b->n;
    p->flush = p->flush && p->later_n > 0;
    for (unsigned i = 0; i < b->n; i++)
        p->later_bytes -= p->bytes(b->ios[i]);
}

static void pool_dispatch(struct checksum_pool *p)
{
    while (!list_empty(&p->idle) && (!list_empty(&p->urgent) || later_due(p))) {
        struct checksum_batch *b =
            LIST_ENTRY(list_pop_front(&p->idle), struct checksum_batch, link);
        int rc;

        if (!list_empty(&p->urgent))
            batch_fill(b, &p->urgent);
        else
            batch_fill_later(b);
        b->work.data = b;
        rc = uv_queue_work(p->loop, &b->work, batch_work_cb, batch_done_cb);
        assert(rc == 0); /* refuses a missing callback only */
        (void)rc;
    }
}

int checksum_pool_init(struct checksum_pool *p, uv_loop_t *loop, unsigned threads,
                       checksum_count *sum, checksum_count *bytes, checksum_done_cb done_cb,
                       void *ctx)
{
    struct checksum_batch *batches = calloc(threads, sizeof(*batches));

    if (!batches)
        return -ENOMEM;
    *p = (struct checksum_pool){.loop = loop,
                                .sum = sum,
                                .bytes = bytes,
                                .done_cb = done_cb,
                                .ctx = ctx,
                                .batches = batches};
    list_init(&p->urgent);
    list_init(&p->later);
    list_init(&p->idle);
    for (unsigned i = 0; i < threads; i++) {
        batches[i].pool = p;
        list_push_back(&p->idle, &batches[i].link);
    }
    return 0;
}

void checksum_pool_close(struct checksum_pool *p)
{
    assert(!p->batches || (list_empty(&p->urgent) && list_empty(&p->later)));
    free(p->batches);
    p->batches = NULL;
}

void checksum_push(struct checksum_pool *p, struct tier_io *io, bool urgent)
{
    list_push_back(urgent ? &p->urgent : &p->later, &io->link);
    if (!urgent) {
        p->later_n++;
        p->later_bytes += p->bytes(io);
    }
    pool_dispatch(p);
}

void checksum_flush(struct checksum_pool *p)
{
    p->flush = p->later_n > 0;
    pool_dispatch(p);
}
