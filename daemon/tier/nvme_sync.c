/* Makes what was written durable: one fdatasync of a file at a time, in the pool, for all that wait
 * for it. A request that comes while one runs waits for the next, because its write may have ended
 * too late for this one. A record counts only with its segment's header, so it waits for that write
 * as well. An earlier run may have ended between a header and its payload, so what it wrote is
 * checked first (nvme_check.c). */
#include "daemon/tier/nvme.h"

#include "daemon/base/kill_point.h"

#include <errno.h>

static struct segment *io_segment(const struct tier_io *io)
{
    return io->scratch[0];
}

static bool io_purged(const struct tier *t, const struct tier_io *io)
{
    struct segment *s;
    uint32_t record;

    return segment_find(&t->segments, io->place.loc, io->bytes, &s, &record) == 0 &&
           ns_records_purged(&t->ns_records, io->name.fingerprint, s->record_sequences[record]);
}

static void sync_end(struct tier *t, struct tier_io *io, int status)
{
    list_remove(&io->link);
    if (status == 0 && io_purged(t, io))
        status = -ESTALE;
    segment_read_end(&t->segments, io_segment(io));
    if (status < 0 && status != -ESTALE)
        t->metrics->nvme_sync_errors++;
    io->done_cb(io, status);
    nvme_release(t);
}

/* ---- the file ---- */

static void sync_run(struct nvme_job *job)
{
    struct nvme_device *d = LIST_ENTRY(job, struct nvme_device, sync_job);

    KILL_POINT("sync-begin");
    d->sync_status = nvme_device_sync(d);
    d->ns_removed = ns_records_removed(&d->tier->ns_records, (unsigned)(d - d->tier->devices));
}

static void syncs_end(struct tier *t, struct nvme_device *d)
{
    while (!list_empty(&d->syncing)) {
        struct tier_io *io = LIST_ENTRY(d->syncing.next, struct tier_io, link);
        bool failed = io_segment(io)->header == SEGMENT_HEADER_FAILED; /* by what came in between */

        sync_end(t, io, d->sync_status == 0 && failed ? -EIO : d->sync_status);
    }
    d->sync_busy = false; /* not sooner: a callback may ask for the next, which is not this one */
    nvme_sync_pump(t, d);
    nvme_writes_go_on(t);
}

static void restored_cb(struct tier_ns_record *n, int status)
{
    struct nvme_device *d = LIST_ENTRY(n, struct nvme_device, ns_restore);

    d->sync_status = status;
    syncs_end(d->tier, d);
}

static void sync_done(struct nvme_job *job)
{
    struct nvme_device *d = LIST_ENTRY(job, struct nvme_device, sync_job);
    struct tier *t = job->tier;

    KILL_POINT("sync-done");
    t->metrics->nvme_syncs++;
    /* Another's failure may be about what these wait for. */
    if (!nvme_sync_trusted(t, d) && d->sync_status == 0)
        d->sync_status = -EIO;
    /* Without its namespaces a later start would not know whose the parts are. */
    d->ns_restore.done_cb = restored_cb;
    if (d->sync_status == 0 && d->ns_removed)
        nvme_ns_restore(t, &d->ns_restore);
    else
        syncs_end(t, d);
}

void nvme_sync_pump(struct tier *t, struct nvme_device *d)
{
    struct list *node, *next;

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
        nvme_job_start(t, &d->sync_job, sync_run, sync_done);
    }
    nvme_release(t);
}

/* ---- what an earlier run wrote ---- */

static void checks_pump(struct tier *t, struct nvme_device *d);

static void check_done_cb(struct tier *t, void *ctx, int status, bool bad_header)
{
    struct tier_io *asked = ctx;
    struct nvme_device *d = &t->devices[io_segment(asked)->file];

    (void)bad_header; /* repaired, or the status says so */
    d->sync_checks--;
    if (status < 0) {
        sync_end(t, asked, status);
    } else {
        list_push_back(&d->unsynced, &asked->link);
        nvme_sync_pump(t, d);
    }
    checks_pump(t, d);
}

static int check_start(struct tier *t, struct nvme_device *d, struct tier_io *asked)
{
    int rc = nvme_check(t, &(struct nvme_check){.owner = asked->name.owner,
                                                .part = asked->name.part,
                                                .bytes = asked->bytes,
                                                .place = asked->place,
                                                .headers = true,
                                                .done_cb = check_done_cb,
                                                .ctx = asked});

    d->sync_checks += rc == 0;
    return rc;
}

static void checks_pump(struct tier *t, struct nvme_device *d)
{
    struct list *node;

    while (d->sync_checks < NVME_SYNC_CHECKS && (node = list_pop_front(&d->unchecked)) != NULL) {
        struct tier_io *asked = LIST_ENTRY(node, struct tier_io, link);
        int rc = check_start(t, d, asked);

        if (rc < 0)
            sync_end(t, asked, rc);
    }
}

/* ---- a part ---- */

int nvme_sync_part(struct tier *t, struct tier_io *io)
{
    struct nvme_device *d;
    struct segment *s;
    uint32_t record;
    int rc = 0;

    if (segment_find(&t->segments, io->place.loc, io->bytes, &s, &record) < 0)
        return -ESTALE;
    if (s->header == SEGMENT_HEADER_FAILED)
        return -EIO;
    d = &t->devices[s->file];
    segment_read_begin(s); /* its place stays until the sync has ended */
    io->scratch[0] = s;
    list_init(&io->link);
    nvme_hold(t);
    if (s->sequence >= t->recovery.before) {
        list_push_back(&d->unsynced, &io->link);
        nvme_sync_pump(t, d);
    } else if (d->sync_checks == NVME_SYNC_CHECKS) {
        list_push_back(&d->unchecked, &io->link);
    } else {
        rc = check_start(t, d, io);
        rc = rc == -EAGAIN ? -EBUSY : rc; /* no completion of the caller's would end the wait */
    }
    if (rc < 0) {
        segment_read_end(&t->segments, s);
        nvme_release(t);
    }
    return rc;
}
