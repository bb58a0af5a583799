/* Recovery's second step: reads the checkpoints, and takes their parts over, half a millisecond a
 * iteration of the event loop. The pool reads and checks a piece, the event loop takes what is in
 * it. */
#include "daemon/base/log.h"
#include "daemon/checkpoint/format.h"
#include "daemon/checkpoint/read.h"
#include "daemon/tier/nvme.h"

#include <assert.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MODULE "tier"
#define CHECKPOINT_BUFFER (4u << 20)
#define TURN_NS 500000u
#define ENTRIES_TURN 64u /* between two looks at the clock */

/* The checkpoint that recovery reads. */
struct nvme_restore {
    struct nvme_job job;
    unsigned file;
    struct checkpoint_reader reader;
    /* What of its buffer is taken over. */
    size_t at;
    uint32_t entry;
    struct segment *segment; /* of the span at `at`; NULL: to be skipped */
    struct checkpoint_span span;
};

void nvme_restore_close(struct tier *t)
{
    struct nvme_restore *r = t->recovery.restore;

    if (!r)
        return;
    if (r->reader.buffer && r->reader.fd >= 0)
        close(r->reader.fd);
    free(r->reader.buffer);
    free(r);
    t->recovery.restore = NULL;
}

static void checkpoint_read_run(struct nvme_job *job)
{
    struct nvme_restore *r = LIST_ENTRY(job, struct nvme_restore, job);
    char path[PATH_BYTES];

    if (r->reader.fd < 0) {
        snprintf(path, sizeof(path), "%s/" NVME_INDEX_FILE,
                 job->tier->devices[r->file].file.directory);
        r->reader.fd = open(path, O_RDONLY | O_CLOEXEC);
        r->reader.offset = 0;
    }
    if (r->reader.fd >= 0)
        checkpoint_read(&r->reader);
}

static void checkpoint_end(struct tier *t, struct nvme_restore *r)
{
    t->metrics->nvme_damaged_pages += r->reader.damaged;
    if (r->reader.damaged)
        log_warn(MODULE, "checkpoint-damaged", "path=%s offset=%" PRIu64 ": scanning instead",
                 t->devices[r->file].file.directory, r->reader.offset);
    if (r->reader.fd >= 0)
        close(r->reader.fd);
    r->reader = (struct checkpoint_reader){
        .fd = -1, .buffer = r->reader.buffer, .capacity = CHECKPOINT_BUFFER};
    r->file++;
}

/* The segment of a span, if it has not been opened again and the span follows the one before. */
static struct segment *span_segment(struct tier *t, const struct nvme_restore *r)
{
    const struct checkpoint_span *c = &r->span;
    struct segment *s;

    if (memcmp(c->uuid, t->devices[r->file].file.uuid, sizeof(c->uuid)) != 0 ||
        c->segment >= t->segments.file[r->file].count)
        return NULL;
    s = &t->segments.file[r->file].segments[c->segment];
    /* it was in use, and its header is not there */
    t->metrics->nvme_damaged_pages += s->state == SEGMENT_FREE && c->from == 0 && c->entries > 0;
    t->devices[r->file].went_on |= nvme_to_recover(t, s) && s->sequence > c->sequence;
    if (!nvme_to_recover(t, s) || s->sequence != c->sequence ||
        (uint64_t)s->stride_pages * NVME_PAGE != c->stride || s->covered != c->from ||
        c->to > s->records)
        return NULL;
    return s;
}

static void entry_take(struct tier *t, struct nvme_restore *r)
{
    struct segment *s = r->segment;
    struct nvme_record_header h;

    if (checkpoint_entry_decode(r->reader.buffer + r->at, r->entry, &h) &&
        h.record >= r->span.from && h.record < r->span.to && s->states[h.record] == RECORD_EMPTY &&
        nvme_stride(h.payload_bytes) <= r->span.stride)
        nvme_record_found(t, s, h.record, &h);
    r->entry++;
}

/* Some entries, or the next span; false at the end of the buffer. */
static bool entries_take(struct tier *t, struct nvme_restore *r)
{
    if (r->at == r->reader.good)
        return false;
    if (r->entry == 0) {
        int rc = checkpoint_span_decode(r->reader.buffer + r->at, r->reader.good - r->at, &r->span);

        assert(rc == 0); /* it passed in the pool */
        (void)rc;
        r->segment = span_segment(t, r);
    }
    for (unsigned i = 0; r->segment && i < ENTRIES_TURN && r->entry < r->span.entries; i++)
        entry_take(t, r);
    if (r->segment && r->entry < r->span.entries)
        return true;
    if (r->segment)
        r->segment->covered = r->span.to;
    r->at += checkpoint_span_bytes(r->span.entries);
    r->entry = 0;
    return true;
}

static void checkpoint_read_done(struct nvme_job *job)
{
    struct nvme_restore *r = LIST_ENTRY(job, struct nvme_restore, job);

    r->at = 0;
    r->entry = 0;
    nvme_iteration_want(job->tier, NVME_TURN_RECOVERY);
}

/* A piece is read. False: there is no other. */
static bool checkpoint_next(struct tier *t)
{
    struct nvme_restore *r = t->recovery.restore;

    while (r->file < t->files && t->devices[r->file].file.fd < 0)
        r->file++;
    if (r->file < t->files) {
        nvme_job_start(t, &r->job, checkpoint_read_run, checkpoint_read_done);
        return true;
    }
    nvme_restore_close(t);
    return false;
}

bool nvme_restore_start(struct tier *t)
{
    struct nvme_restore *r = calloc(1, sizeof(*r));

    if (!r)
        return false;
    t->recovery.restore = r;
    r->reader = (struct checkpoint_reader){
        .fd = -1, .buffer = malloc(CHECKPOINT_BUFFER), .capacity = CHECKPOINT_BUFFER};
    return r->reader.buffer && checkpoint_next(t);
}

bool nvme_restore_go_on(struct tier *t)
{
    struct nvme_restore *r = t->recovery.restore;
    uint64_t end = uv_hrtime() + TURN_NS;
    bool more = true;

    while (more && uv_hrtime() < end)
        more = entries_take(t, r);
    if (more) {
        nvme_iteration_want(t, NVME_TURN_RECOVERY);
        return true;
    }
    if (r->reader.end || r->reader.fd < 0)
        checkpoint_end(t, r);
    return checkpoint_next(t);
}
