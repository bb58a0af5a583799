/* The headers that a later start finds a part by, its record's and its segment's: are they still what
 * was written? This run needs neither, so that one goes bad is felt by the next start, which finds
 * nothing there but by a checkpoint. What this run knows of the part makes both again.
 *
 * In place: the two pages say of this opening of the segment, which is held meanwhile, what they
 * always said, and a write that is cut off leaves damage where damage was. */
#include "daemon/tier/nvme.h"

#include "daemon/base/log.h"
#include "daemon/format/io.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ROOM "tier"

enum { OF_SEGMENT, OF_RECORD, HEADERS };

struct repair {
    uv_work_t work;
    struct tier *tier;
    struct segment *segment; /* held as if read */
    uint32_t record;
    bool may_write;
    uint8_t *pages; /* HEADERS as they should be, and behind them one as it is */
    uint64_t offset[HEADERS];
    bool bad[HEADERS];
    int fd, status;
    void (*done)(void *ctx, int status);
    void *ctx;
};

void nvme_record_header_of(const struct tier *t, const struct segment *s, uint32_t record,
                           const struct tier_described *d, struct nvme_record_header *out)
{
    *out = (struct nvme_record_header){
        .key_bytes = d->name.key_bytes,
        .part = d->name.part,
        .segment = s->number,
        .record = record,
        .payload_bytes = d->bytes,
        .generation = s->sequence,
        .sequence = s->sequences[record],
        .checksum = d->checksum,
    };
    memcpy(out->uuid, t->devices[s->file].file.uuid, sizeof(out->uuid));
    memcpy(out->fingerprint, d->name.fingerprint, sizeof(out->fingerprint));
    memcpy(out->key, d->name.key, d->name.key_bytes);
}

void nvme_segment_header_of(const struct tier *t, const struct segment *s,
                            struct nvme_segment_header *out)
{
    *out = (struct nvme_segment_header){
        .segment = s->number,
        .sequence = s->sequence,
        .stride = (uint64_t)s->stride_pages * NVME_PAGE,
    };
    memcpy(out->uuid, t->devices[s->file].file.uuid, sizeof(out->uuid));
}

/* ---- in the pool ---- */

/* Read again once it was written: the place may be beyond repairing. */
static int header_repair(struct repair *m, int which)
{
    const uint8_t *want = m->pages + (size_t)which * NVME_PAGE;
    uint8_t *found = m->pages + (size_t)HEADERS * NVME_PAGE;
    uint64_t offset = m->offset[which];

    for (;;) {
        int rc = io_read(m->fd, found, NVME_PAGE, offset);

        if (rc == 0 && memcmp(found, want, NVME_PAGE) == 0)
            return 0;
        if (m->bad[which])
            return rc < 0 ? rc : -EIO;
        m->bad[which] = true;
        rc = m->may_write ? io_write(m->fd, want, NVME_PAGE, offset) : -EROFS;
        if (rc < 0)
            return rc;
    }
}

static void work_cb(uv_work_t *work)
{
    struct repair *m = work->data;

    for (int i = 0; i < HEADERS && m->status == 0; i++)
        m->status = header_repair(m, i);
}

/* ---- on the loop ---- */

static void tell(const struct repair *m)
{
    struct tier *t = m->tier;
    const char *path = t->devices[m->segment->file].file.path;

    for (int i = 0; i < HEADERS; i++) {
        if (!m->bad[i])
            continue;
        t->metrics->nvme_bad_headers++;
        if (m->status < 0)
            log_error(ROOM, "header-damaged", "path=%s offset=%" PRIu64 " error=%s: not repaired",
                      path, m->offset[i], strerror(-m->status));
        else
            log_error(ROOM, "header-damaged", "path=%s offset=%" PRIu64 ": written anew", path,
                      m->offset[i]);
        nvme_quarantine_add(t, m->segment, m->record);
    }
}

static void repair_free(struct repair *m)
{
    free(m->pages);
    free(m);
}

static void work_done_cb(uv_work_t *work, int status)
{
    struct repair *m = work->data;
    struct tier *t = m->tier;

    assert(status == 0); /* nobody cancels */
    (void)status;
    tell(m);
    segment_read_end(&t->segments, m->segment);
    m->done(m->ctx, m->status);
    repair_free(m);
    nvme_release(t);
}

static void pages_make(struct repair *m, const struct tier_described *d)
{
    const struct tier *t = m->tier;
    struct nvme_segment_header segment;
    struct nvme_record_header record;

    nvme_segment_header_of(t, m->segment, &segment);
    nvme_segment_header_encode(&segment, m->pages + (size_t)OF_SEGMENT * NVME_PAGE);
    nvme_record_header_of(t, m->segment, m->record, d, &record);
    nvme_record_header_encode(&record, m->pages + (size_t)OF_RECORD * NVME_PAGE);
    m->offset[OF_SEGMENT] = segment_offset(&t->segments, m->segment);
    m->offset[OF_RECORD] = segment_record_offset(&t->segments, m->segment, m->record);
}

int nvme_repair(struct tier *t, struct segment *s, uint32_t record,
                void (*done)(void *ctx, int status), void *ctx)
{
    struct tier_described d = {0};
    struct repair *m;
    int rc;

    assert(s->states[record] == RECORD_LIVE);
    if (s->header != SEGMENT_HEADER_WRITTEN || !t->callbacks.describe ||
        !t->callbacks.describe(t->callbacks.ctx, s->owners[record], &d))
        return -ENOENT;
    m = calloc(1, sizeof(*m));
    if (m)
        m->pages = aligned_alloc(NVME_PAGE, (size_t)(HEADERS + 1) * NVME_PAGE);
    if (!m || !m->pages) {
        free(m);
        return -ENOMEM;
    }
    m->work.data = m;
    m->tier = t;
    m->segment = s;
    m->record = record;
    m->fd = t->devices[s->file].file.fd;
    m->may_write = !t->devices[s->file].degraded;
    m->done = done;
    m->ctx = ctx;
    pages_make(m, &d);
    segment_read_begin(s);
    nvme_hold(t);
    rc = uv_queue_work(t->loop, &m->work, work_cb, work_done_cb);
    assert(rc == 0); /* refuses a missing callback only */
    (void)rc;
    return 0;
}
