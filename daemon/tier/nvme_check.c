/* Checks a record for the tier's own sake: before what an earlier run wrote is called durable, in
 * the scrub, and where recovery has found a part twice.
 *
 * The payload is read as any other is and compared with its checksum. Then the two headers that a
 * later start finds the part by, the record's and its segment's, are compared with what the index
 * knows. This run needs neither, so a bad one would be noticed by the next start only. One that
 * differs is written again in its place: it says of this opening of the segment what it always
 * said, and a write that is cut off leaves damage where damage was. */
#include "daemon/tier/nvme.h"

#include "daemon/base/log.h"
#include "daemon/format/io.h"

#include <errno.h>
#include <inttypes.h>
#include <stdalign.h>
#include <stdlib.h>
#include <string.h>

enum { OF_SEGMENT, OF_RECORD, HEADERS };

struct check {
    struct nvme_job job;
    struct tier_io io;
    struct nvme_check asked;
    struct segment *segment; /* held as if read, while headers are compared */
    uint32_t record;
    bool may_write;
    struct nvme_segment_header segment_header; /* as they should be */
    struct nvme_record_header record_header;
    uint64_t offset[HEADERS];
    bool bad[HEADERS];
    int fd, status;
};

static void check_end(struct check *c, int status)
{
    struct tier *t = c->job.tier;

    t->checks--;
    c->asked.done_cb(t, c->asked.ctx, status, c->bad[OF_SEGMENT] || c->bad[OF_RECORD]);
    free(c);
    nvme_release(t);
}

/* ---- the headers: in the pool ---- */

/* Read again once it was written: the place may be beyond repair. */
static int header_repair(struct check *c, int which, const uint8_t *want)
{
    alignas(NVME_PAGE) uint8_t found[NVME_PAGE];
    uint64_t offset = c->offset[which];

    for (;;) {
        int rc = io_read(c->fd, found, NVME_PAGE, offset);

        if (rc == 0 && memcmp(found, want, NVME_PAGE) == 0)
            return 0;
        if (c->bad[which])
            return rc < 0 ? rc : -EIO;
        c->bad[which] = true;
        rc = c->may_write ? io_write(c->fd, want, NVME_PAGE, offset) : -EROFS;
        if (rc < 0)
            return rc;
    }
}

/* The record's header is as it should be, whatever checksums of layers it has: the page passes, so
 * they are what was written. */
static bool record_header_right(const struct check *c)
{
    alignas(NVME_PAGE) uint8_t found[NVME_PAGE], want[NVME_PAGE];
    struct nvme_record_header h, header = c->record_header;
    uint64_t sums[NVME_LAYERS_MAX];

    if (io_read(c->fd, found, NVME_PAGE, c->offset[OF_RECORD]) < 0 ||
        nvme_record_header_decode(found, &h) < 0 || h.payload_bytes != header.payload_bytes)
        return false;
    /* The read that has just ended has opened it: this is the same page, as its tag says. */
    if (header.encrypted)
        return h.encrypted && h.checksum == header.checksum;
    for (uint32_t i = 0; h.layer_bytes > 0 && i < h.payload_bytes / h.layer_bytes; i++)
        sums[i] = nvme_layer_sum(found, i);
    header.layer_bytes = h.layer_bytes;
    header.layer_sums = sums;
    nvme_record_header_encode(&header, want);
    return memcmp(found, want, NVME_PAGE) == 0;
}

static void headers_run(struct nvme_job *job)
{
    struct check *c = LIST_ENTRY(job, struct check, job);
    alignas(NVME_PAGE) uint8_t want[NVME_PAGE];

    nvme_segment_header_encode(&c->segment_header, want);
    c->status = header_repair(c, OF_SEGMENT, want);
    if (c->status < 0)
        return;
    if (record_header_right(c))
        return;
    if (c->record_header.encrypted) { /* what it held is not known: it can't be made again */
        c->bad[OF_RECORD] = true;
        c->status = -EIO;
        return;
    }
    nvme_record_header_encode(&c->record_header, want);
    c->status = header_repair(c, OF_RECORD, want);
}

/* ---- the headers: on the event loop ---- */

static void headers_done(struct nvme_job *job)
{
    struct check *c = LIST_ENTRY(job, struct check, job);
    struct tier *t = job->tier;
    const char *path = t->devices[c->segment->file].file.path;

    for (int i = 0; i < HEADERS; i++) {
        if (!c->bad[i])
            continue;
        t->metrics->nvme_bad_headers++;
        log_error("tier", "header-damaged", "path=%s offset=%" PRIu64 ": %s%s", path, c->offset[i],
                  c->status < 0 ? "not repaired: " : "written again",
                  c->status < 0 ? strerror(-c->status) : "");
        nvme_quarantine_add(t, c->segment, c->record);
    }
    segment_read_end(&t->segments, c->segment);
    check_end(c, c->status);
}

/* False: there is nothing to compare them with, or they never counted. */
static bool headers_start(struct check *c)
{
    struct tier *t = c->job.tier;
    struct tier_described d;
    struct segment *s;

    if (t->closing ||
        segment_find(&t->segments, c->io.place.loc, c->io.bytes, &s, &c->record) < 0 ||
        s->header != SEGMENT_HEADER_WRITTEN || !nvme_describe(t, s, c->record, &d))
        return false;
    c->segment = s;
    c->fd = t->devices[s->file].file.fd;
    c->may_write = !t->devices[s->file].degraded;
    nvme_segment_header_of(t, s, &c->segment_header);
    nvme_record_header_of(t, s, c->record, &d, &c->record_header);
    c->offset[OF_SEGMENT] = segment_offset(&t->segments, s);
    c->offset[OF_RECORD] = segment_record_offset(&t->segments, s, c->record);
    segment_read_begin(s);
    nvme_job_start(t, &c->job, headers_run, headers_done);
    return true;
}

/* ---- the payload ---- */

static void read_done_cb(struct tier_io *io, int status)
{
    struct check *c = LIST_ENTRY(io, struct check, io);

    free(io->data);
    io->data = NULL;
    if (status < 0 || !c->asked.headers || !headers_start(c))
        check_end(c, status);
}

int nvme_check(struct tier *t, const struct nvme_check *asked)
{
    struct check *c = calloc(1, sizeof(*c));
    int rc = -ENOMEM;

    if (!c)
        return rc;
    c->job.tier = t;
    c->asked = *asked;
    c->io = (struct tier_io){.op = TIER_READ,
                             .data = aligned_alloc(NVME_PAGE, nvme_padded(asked->bytes)),
                             .bytes = asked->bytes,
                             .buffer = UINT32_MAX,
                             .check = true,
                             .name = {.owner = asked->owner, .part = asked->part},
                             .place = asked->place,
                             .done_cb = read_done_cb};
    if (c->io.data)
        rc = nvme_read(t, &c->io, asked->idle);
    if (rc < 0) {
        free(c->io.data);
        free(c);
        return rc;
    }
    t->checks++;
    nvme_hold(t);
    return 0;
}
