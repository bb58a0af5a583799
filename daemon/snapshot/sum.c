#include "daemon/snapshot/sum.h"

#include "daemon/format/checksum.h"

#include <assert.h>

static void work_cb(uv_work_t *work)
{
    struct sums_piece *w = work->data;

    for (uint32_t i = 0; i < w->n; i++)
        if (w->part[i].data)
            w->part[i].checksum = checksum_of(w->part[i].data, w->part[i].bytes);
}

static void work_done_cb(uv_work_t *work, int status)
{
    struct sums_piece *w = work->data;
    struct sums *s = w->sums;

    assert(status == 0); /* nobody cancels */
    (void)status;
    w->busy = false;
    for (uint32_t i = 0; i < w->n; i++)
        s->done_cb(s->ctx, w->first + i, &w->part[i]);
    (void)sums_pump(s);
    if (s->piece_cb)
        s->piece_cb(s->ctx);
}

static bool piece_start(struct sums *s, struct sums_piece *w)
{
    uint64_t bytes = 0;
    int rc;

    w->work.data = w;
    w->sums = s;
    w->first = s->at;
    w->n = 0;
    while (s->at < s->n && w->n < SUMS_PIECE_PARTS && bytes < SUMS_PIECE_BYTES &&
           s->part_cb(s->ctx, s->at, &w->part[w->n])) {
        bytes += w->part[w->n].data ? w->part[w->n].bytes : 0;
        w->n++;
        s->at++;
    }
    if (w->n == 0)
        return false;
    w->busy = true;
    rc = uv_queue_work(s->loop, &w->work, work_cb, work_done_cb);
    assert(rc == 0); /* refuses a missing callback only */
    (void)rc;
    return true;
}

bool sums_pump(struct sums *s)
{
    for (unsigned i = 0; i < s->pieces; i++)
        if (!s->piece[i].busy && !piece_start(s, &s->piece[i]))
            break;
    return sums_busy(s);
}

bool sums_busy(const struct sums *s)
{
    for (unsigned i = 0; i < s->pieces; i++)
        if (s->piece[i].busy)
            return true;
    return false;
}
