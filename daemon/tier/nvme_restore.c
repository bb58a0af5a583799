/* Recovery from checkpoints: the pool reads and checks a piece, the loop takes its parts over, half
 * a millisecond a turn. What a checkpoint does not cover is left to the scan of the records. */
#include "daemon/tier/nvme.h"

#include "daemon/base/config.h"
#include "daemon/base/log.h"
#include "daemon/format/checkpoint_format.h"

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
    uv_work_t work;
    unsigned file;
    int fd;
    uint64_t offset;
    uint8_t *buffer;
    size_t n, good; /* bytes read; of whole spans that passed */
    bool damaged, end;
    /* What of it is taken over. */
    size_t at;
    uint32_t entry;
    struct segment *segment; /* of the span at `at`; NULL: to be passed over */
    struct checkpoint_span span;
};

static void read_next(struct nvme_restore *r);

/* ---- in the pool ---- */

static void read_cb(uv_work_t *work)
{
    struct nvme_restore *r = work->data;
    struct checkpoint_span span;
    char path[PATH_BYTES];
    ssize_t got = 0;
    int rc = 0;

    if (r->fd < 0) {
        snprintf(path, sizeof(path), "%s/%s", r->tier->devices[r->file].folder, CONFIG_NVME_INDEX);
        r->fd = open(path, O_RDONLY | O_CLOEXEC);
        r->offset = 0;
    }
    r->n = r->good = 0;
    while (r->fd >= 0 && r->n < BUFFER_BYTES) {
        got = pread(r->fd, r->buffer + r->n, BUFFER_BYTES - r->n, (off_t)(r->offset + r->n));
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            break;
        r->n += (size_t)got;
    }
    while (r->good < r->n) {
        rc = checkpoint_span_decode(r->buffer + r->good, r->n - r->good, &span);
        if (rc < 0)
            break;
        r->good += checkpoint_span_bytes(span.entries);
    }
    /* a span that goes on behind a full buffer is read again from its start */
    r->damaged = rc == -EBADMSG || (rc == -EAGAIN && r->n < BUFFER_BYTES) || got < 0;
    r->end = r->damaged || r->n < BUFFER_BYTES;
    r->offset += r->good;
}

/* ---- on the loop ---- */

static void restore_free_cb(uv_handle_t *handle)
{
    struct nvme_restore *r = handle->data;

    if (r->fd >= 0)
        close(r->fd);
    free(r->buffer);
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
    r->tier->metrics->nvme_damaged_pages += r->damaged;
    if (r->damaged)
        log_warn(ROOM, "checkpoint-damaged", "path=%s offset=%" PRIu64 ": scanning instead",
                 r->tier->devices[r->file].folder, r->offset);
    if (r->fd >= 0)
        close(r->fd);
    r->fd = -1;
    r->file++;
}

/* The segment that a span tells of, if that is still as it was; spans follow one another. */
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

    if (checkpoint_entry_decode(r->buffer + r->at, r->entry, &h) && h.record >= r->span.from &&
        h.record < r->span.to && s->states[h.record] == RECORD_EMPTY &&
        nvme_stride(h.payload_bytes) <= r->span.stride)
        nvme_recover_record(r->tier, s, h.record, &h);
    r->entry++;
}

/* Some entries, or the next span; false at the end of the buffer. */
static bool slice_step(struct nvme_restore *r)
{
    if (r->at == r->good)
        return false;
    if (r->entry == 0) {
        int rc = checkpoint_span_decode(r->buffer + r->at, r->good - r->at, &r->span);

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
    if (r->end || r->tier->closing)
        file_end(r);
    read_next(r);
}

static void read_done_cb(uv_work_t *work, int status)
{
    struct nvme_restore *r = work->data;

    assert(status == 0); /* nobody cancels */
    (void)status;
    r->at = 0;
    r->entry = 0;
    (void)uv_idle_start(&r->idle, idle_cb); /* refuses a missing callback only */
}

static void read_next(struct nvme_restore *r)
{
    struct tier *t = r->tier;
    int rc;

    while (r->file < t->files && t->devices[r->file].file.fd < 0)
        r->file++;
    if (r->file == t->files || t->closing) {
        restore_end(r);
        return;
    }
    r->work.data = r;
    rc = uv_queue_work(t->loop, &r->work, read_cb, read_done_cb);
    assert(rc == 0); /* refuses a missing callback only */
    (void)rc;
}

/* Held until the end, so that a close waits for it. Without memory the records are scanned. */
void nvme_restore_start(struct tier *t)
{
    struct nvme_restore *r = calloc(1, sizeof(*r));

    if (r)
        r->buffer = malloc(BUFFER_BYTES);
    if (!r || !r->buffer || uv_idle_init(t->loop, &r->idle) != 0) {
        free(r ? r->buffer : NULL);
        free(r);
        nvme_recover_records(t);
        return;
    }
    r->tier = t;
    r->fd = -1;
    r->idle.data = r;
    t->restore = r;
    nvme_hold(t);
    read_next(r);
}
