/* Making what was written durable: fdatasync of a file for all who wait for it, one at a time in
 * the pool. Who comes while one runs waits for the next, because its write may have ended too late
 * for this one. A slot counts only with its segment's header, so it waits for that write as well.
 */
#include "daemon/tier/nvme.h"

#include "daemon/base/kill_point.h"
#include "daemon/base/log.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <unistd.h>

static struct segment *io_segment(const struct tier_io *io)
{
    return io->scratch[0];
}

/* A later start would pass it over. */
static bool io_purged(const struct tier *t, const struct tier_io *io)
{
    const struct nvme_name *name = names_find(&t->names, io->name.fingerprint);
    struct segment *s;
    uint32_t slot;

    return name && segment_find(&t->segments, io->place.loc, io->bytes, &s, &slot) == 0 &&
           s->sequences[slot] < name->from_sequence;
}

static void sync_end(struct tier *t, struct tier_io *io, int status)
{
    list_remove(&io->link);
    if (status == 0 && io_purged(t, io))
        status = -ESTALE;
    segment_read_end(&t->segments, io_segment(io));
    if (status < 0 && status != -ESTALE)
        t->metrics->nvme_sync_errors++;
    io->done(io, status);
    nvme_release(t);
}

static void sync_work_cb(uv_work_t *work)
{
    struct nvme_device *d = work->data;

    KILL_POINT("sync-begin");
    d->sync_status = fdatasync(d->file.fd) < 0 ? -errno : 0;
}

static void sync_done_cb(uv_work_t *work, int status)
{
    struct nvme_device *d = work->data;
    struct tier *t = d->tier;

    assert(status == 0); /* nobody cancels */
    (void)status;
    KILL_POINT("sync-done");
    nvme_hold(t);
    d->sync_busy = false;
    t->metrics->nvme_syncs++;
    if (d->sync_status < 0) {
        log_error("tier", "sync-failed", "path=%s error=%s", d->file.path,
                  strerror(-d->sync_status));
        nvme_write_failed(t, (unsigned)(d - t->devices), d->sync_status);
    }
    while (!list_empty(&d->syncing))
        sync_end(t, LIST_ENTRY(d->syncing.next, struct tier_io, link), d->sync_status);
    nvme_sync_pump(t, d);
    nvme_writes_go_on(t);
    nvme_release(t);
}

void nvme_sync_pump(struct tier *t, struct nvme_device *d)
{
    struct list *node, *next;
    int rc;

    if (d->sync_busy)
        return;
    nvme_hold(t);
    for (node = d->unsynced.next; node != &d->unsynced; node = next) {
        struct tier_io *io = LIST_ENTRY(node, struct tier_io, link);

        next = node->next;
        if (io_segment(io)->header == SEGMENT_HEADER_WRITTEN) {
            list_remove(node);
            list_push_back(&d->syncing, node);
        } else if (io_segment(io)->header == SEGMENT_HEADER_FAILED) {
            sync_end(t, io, -EIO);
        }
    }
    if (!list_empty(&d->syncing)) {
        d->sync_busy = true;
        d->sync_work.data = d;
        rc = uv_queue_work(t->loop, &d->sync_work, sync_work_cb, sync_done_cb);
        assert(rc == 0); /* refuses a missing callback only */
        (void)rc;
    }
    nvme_release(t);
}

int nvme_sync_part(struct tier *t, struct tier_io *io)
{
    struct nvme_device *d;
    struct segment *s;
    uint32_t slot;

    if (segment_find(&t->segments, io->place.loc, io->bytes, &s, &slot) < 0)
        return -ESTALE;
    if (s->header == SEGMENT_HEADER_FAILED)
        return -EIO;
    d = &t->devices[s->file];
    segment_read_begin(s); /* its place stays until we know */
    io->scratch[0] = s;
    nvme_hold(t);
    list_push_back(&d->unsynced, &io->link);
    nvme_sync_pump(t, d);
    return 0;
}
