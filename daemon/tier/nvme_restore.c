/* Recovery from checkpoints: the pool reads and checks a piece, the loop takes its parts over, half
 * a millisecond a turn. The scan of the records finds what a checkpoint does not cover. */
#include "daemon/tier/nvme.h"

#include "daemon/base/log.h"
#include "daemon/format/checkpoint_format.h"
#include "daemon/format/nvme_read.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ROOM "tier"
#define BUFFER_BYTES (4u << 20)
#define SLICE_NS 500000u
#define ENTRIES_TURN 64u /* between two looks at the clock */

struct nvme_restore {
    struct tier *tier;
    uv_idle_t idle;
    struct nvme_job job;
    unsigned file;
    struct checkpoint_reader reader;
    /* What of it is taken over. */
    size_t at;
    uint32_t entry;
    struct segment *segment; /* of the span at `at`; NULL: to be skipped */
    struct checkpoint_span span;
};

static void read_next(struct nvme_restore *r);

/* ---- in the pool ---- */

static void read_run(struct nvme_job *job)
{
    struct nvme_restore *r = LIST_ENTRY(job, struct nvme_restore, job);
    char path[PATH_BYTES];

    if (r->reader.fd < 0) {
        snprintf(path, sizeof(path), "%s/" NVME_INDEX_FILE, r->tier->devices[r->file].folder);
        r->reader.fd = open(path, O_RDONLY | O_CLOEXEC);
        r->reader.offset = 0;
    }
    if (r->reader.fd >= 0)
        checkpoint_read(&r->reader);
}

/* ---- on the loop ---- */

static void restore_free_cb(uv_handle_t *handle)
{
    struct nvme_restore *r = handle->data;

    if (r->reader.fd >= 0)
        close(r->reader.fd);
    free(r->reader.buffer);
    free(r);
}

static void restore_end(struct nvme_restore *r)
{
    struct tier *t = r->tier;

    t->restore = NULL;
    uv_close((uv_handle_t *)&r->idle, restore_free_cb);
    if (!t->closing)
        nvme_recover_records(t);
    nvme_release(t);
}

static void file_end(struct nvme_restore *r)
{
    r->tier->metrics->nvme_damaged_pages += r->reader.damaged;
    if (r->reader.damaged)
        log_warn(ROOM, "checkpoint-damaged", "path=%s offset=%" PRIu64 ": scanning instead",
                 r->tier->devices[r->file].folder, r->reader.offset);
    if (r->reader.fd >= 0)
        close(r->reader.fd);
    r->reader =
        (struct checkpoint_reader){.fd = -1, .buffer = r->reader.buffer, .capacity = BUFFER_BYTES};
    r->file++;
}

/* The segment of a span, if it has not been opened again and the span follows the one before. */
static struct segment *span_segment(struct nvme_restore *r)
{
    const struct checkpoint_span *c = &r->span;
    struct tier *t = r->tier;
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

static void entry_take(struct nvme_restore *r)
{
    struct segment *s = r->segment;
    struct nvme_record_header h;

    if (checkpoint_entry_decode(r->reader.buffer + r->at, r->entry, &h) &&
        h.record >= r->span.from && h.record < r->span.to && s->states[h.record] == RECORD_EMPTY &&
        nvme_stride(h.payload_bytes) <= r->span.stride)
        nvme_recover_record(r->tier, s, h.record, &h);
    r->entry++;
}

/* Some entries, or the next span; false at the end of the buffer. */
static bool slice_step(struct nvme_restore *r)
{
    if (r->at == r->reader.good)
        return false;
    if (r->entry == 0) {
        int rc = checkpoint_span_decode(r->reader.buffer + r->at, r->reader.good - r->at, &r->span);

        assert(rc == 0); /* it passed in the pool */
        (void)rc;
        r->segment = span_segment(r);
    }
    for (unsigned i = 0; r->segment && i < ENTRIES_TURN && r->entry < r->span.entries; i++)
        entry_take(r);
    if (r->segment && r->entry < r->span.entries)
        return true;
    if (r->segment)
        r->segment->covered = r->span.to;
    r->at += checkpoint_span_bytes(r->span.entries);
    r->entry = 0;
    return true;
}

static void idle_cb(uv_idle_t *idle)
{
    struct nvme_restore *r = idle->data;
    uint64_t end = uv_hrtime() + SLICE_NS;
    bool more = !r->tier->closing;

    while (more && uv_hrtime() < end)
        more = slice_step(r);
    if (more)
        return;
    uv_idle_stop(idle);
    if (r->reader.end || r->reader.fd < 0 || r->tier->closing)
        file_end(r);
    read_next(r);
}

static void read_done(struct nvme_job *job)
{
    struct nvme_restore *r = LIST_ENTRY(job, struct nvme_restore, job);

    r->at = 0;
    r->entry = 0;
    (void)uv_idle_start(&r->idle, idle_cb); /* refuses a missing callback only */
}

static void read_next(struct nvme_restore *r)
{
    struct tier *t = r->tier;

    while (r->file < t->files && t->devices[r->file].file.fd < 0)
        r->file++;
    if (r->file == t->files || t->closing) {
        restore_end(r);
        return;
    }
    nvme_job_start(t, &r->job, read_run, read_done);
}

/* Held until the end, so that a close waits for it. Without memory the records are scanned. */
void nvme_restore_start(struct tier *t)
{
    struct nvme_restore *r = calloc(1, sizeof(*r));

    if (r)
        r->reader.buffer = malloc(BUFFER_BYTES);
    if (!r || !r->reader.buffer || uv_idle_init(t->loop, &r->idle) != 0) {
        free(r ? r->reader.buffer : NULL);
        free(r);
        nvme_recover_records(t);
        return;
    }
    r->tier = t;
    r->reader.fd = -1;
    r->reader.capacity = BUFFER_BYTES;
    r->idle.data = r;
    t->restore = r;
    nvme_hold(t);
    read_next(r);
}
