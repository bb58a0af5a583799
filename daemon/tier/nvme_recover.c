/* Recovery: finds what earlier runs have stored, while the tier serves.
 *
 * 1. It reads the header of every segment. Writes wait until all are known, because a segment that
 *    seems free may not be.
 * 2. It reads the checkpoints, and takes their parts over (daemon/checkpoint).
 * 3. It reads the headers of records that they do not cover, many at a time. A segment can be
 *    reclaimed as soon as its own records are known.
 * 4. It compares what it found twice (nvme_duplicates.c). */
#include "daemon/tier/nvme.h"

#include "daemon/base/kill_point.h"
#include "daemon/base/log.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define MODULE "tier"
#define PROGRESS_MS 5000
#define SEGMENT_HEADER UINT32_MAX /* nvme_op.record */
#define SCAN_UNDER_WAY 1          /* nvme_op.scanned */
#define SEGMENTS_TURN 4096u       /* passed by in an iteration of the event loop */

static void recover_pump(struct tier *t);
static void records_start(struct tier *t);

/* ---- the end ---- */

static void scans_free(struct nvme_recovery *r)
{
    free(r->ops);
    free(r->pages);
    r->ops = NULL;
    r->pages = NULL;
}

void nvme_recover_close(struct tier *t)
{
    nvme_duplicates_drop(t);
    nvme_restore_close(t);
    scans_free(&t->recovery);
}

static double seconds(const struct tier *t)
{
    return (double)(uv_now(t->loop) - t->recovery.start_ms) / 1000.0;
}

static void recover_end(struct tier *t)
{
    struct nvme_recovery *r = &t->recovery;

    r->state = RECOVERY_DONE;
    t->metrics->nvme_recovering = 0;
    scans_free(r);
    segment_restored(&t->segments);
    log_info(MODULE, "recovered",
             "parts=%" PRIu64 " segments=%" PRIu64 " refused=%" PRIu64 " seconds=%.3f",
             t->metrics->nvme_recovered_parts, r->segments, r->refused, seconds(t));
    if (r->plaintext > 0)
        log_warn(MODULE, "plaintext-left-out",
                 "parts=%" PRIu64
                 " reason=\"their tenants have keys, and encryption.read_plaintext is false: "
                 "somebody may have planted them\"",
                 r->plaintext);
    t->callbacks.recovered_cb(t->callbacks.ctx);
    nvme_writes_go_on(t);
}

static void recover_progress(struct tier *t)
{
    struct nvme_recovery *r = &t->recovery;

    if (uv_now(t->loop) < r->progress_ms)
        return;
    r->progress_ms = uv_now(t->loop) + PROGRESS_MS;
    log_info(MODULE, "recovering",
             "parts=%" PRIu64 " segments=%" PRIu64 " of=%" PRIu64 " seconds=%.1f",
             t->metrics->nvme_recovered_parts, r->segments_done, r->segments, seconds(t));
}

/* ---- what a header says ---- */

static bool file_has(const struct nvme_file *f, const uint8_t uuid[NVME_UUID_BYTES])
{
    return memcmp(f->uuid, uuid, sizeof(f->uuid)) == 0;
}

static void segment_seen(struct tier *t, struct segment *s, const uint8_t *page)
{
    const struct nvme_file *f = &t->devices[s->file].file;
    struct nvme_segment_header h;
    int rc = nvme_segment_header_decode(page, &h);

    KILL_POINT("recover-segment");
    if (rc == 0 && !file_has(f, h.uuid))
        return; /* of a cache that was here before: a device is not wiped */
    t->metrics->nvme_damaged_pages += rc == -EBADMSG || (rc == 0 && h.segment != s->number);
    if (rc < 0 || h.segment != s->number || h.sequence >= t->recovery.before)
        return; /* it holds nothing, or nothing that counts */
    rc = segment_adopt(&t->segments, s->file, s->number, h.sequence, h.stride, &s);
    if (rc == 0)
        t->recovery.segments++;
    else if (rc == -ENOMEM)
        segment_withhold(&t->segments, s);
    if (rc < 0)
        log_warn(MODULE, "segment-not-recovered", "path=%s segment=%u error=%s", f->path, s->number,
                 strerror(-rc));
}

static bool record_is_ours(const struct tier *t, const struct segment *s, uint32_t record,
                           const struct nvme_record_header *h)
{
    return nvme_record_belongs(h, t->devices[s->file].file.uuid, s->number, record, s->sequence) &&
           h->sequence < t->recovery.before &&
           nvme_stride(h->payload_bytes) <= (uint64_t)s->stride_pages * NVME_PAGE;
}

/* The next start may be able to read it. */
static void segment_not_read(struct tier *t, struct segment *s)
{
    segment_withhold(&t->segments, s);
    log_warn(MODULE, "segment-not-read", "path=%s segment=%u: left as it is until the next start",
             t->devices[s->file].file.path, s->number);
}

/* Records are written front to back: between those of this opening there is no other. What lies
 * there instead is damaged, or the disk has lost a write. */
static void segment_known(struct tier *t, struct segment *s)
{
    for (uint32_t i = s->covered; i < s->seen_to; i++)
        t->metrics->nvme_damaged_pages += s->states[i] == RECORD_EMPTY;
    t->devices[s->file].went_on |= s->seen_to > s->covered;
    t->recovery.segments_done++;
    t->metrics->nvme_recovering = t->recovery.segments - t->recovery.segments_done;
    if (s->unknown)
        segment_not_read(t, s);
    segment_read_end(&t->segments, s);
    nvme_writes_go_on(t);
}

static void record_seen(struct tier *t, struct segment *s, uint32_t record, const uint8_t *page)
{
    struct nvme_record_header h;
    int rc = nvme_record_header_decode(page, &h);
    bool ours = rc == 0 && record_is_ours(t, s, record, &h);
    bool meant = rc == 0 && h.generation == s->sequence &&
                 file_has(&t->devices[s->file].file, h.uuid); /* for this opening */

    if ((meant || rc == -EBADMSG) && record >= s->seen_to)
        s->seen_to = record + 1;
    if (ours)
        nvme_record_found(t, s, record, &h);
    /* not wanted, or emptied by a repair of the file */
    if (s->states[record] == RECORD_EMPTY && (ours || nvme_page_blank(page)))
        s->states[record] = RECORD_DEAD;
}

/* page: NULL when it could not be read. */
static void record_scanned(struct tier *t, struct segment *s, uint32_t record, const uint8_t *page)
{
    s->scans--;
    s->unknown |= !page;
    if (page)
        record_seen(t, s, record, page);
    if (s->scans == 0)
        segment_known(t, s);
}

/* ---- reading ---- */

static void scan_take(struct nvme_op *op)
{
    struct tier *t = op->tier;
    struct segment *s = op->segment;
    int status = op->scanned;

    if (op->record != SEGMENT_HEADER)
        record_scanned(t, s, op->record, status == 0 ? op->headers : NULL);
    else if (status == 0)
        segment_seen(t, s, op->headers);
    else
        segment_not_read(t, s);
}

/* What is read is taken over in the order of the cursor. A full index gives up what it found first:
 * of a segment that was written first. */
static void scan_finish(struct nvme_op *op, int status)
{
    struct tier *t = op->tier;
    struct list *reading = &t->recovery.reading;

    op->scanned = status;
    t->metrics->nvme_read_errors += status < 0;
    nvme_hold(t);
    while (!list_empty(reading)) {
        op = LIST_ENTRY(reading->next, struct nvme_op, link);
        if (op->scanned == SCAN_UNDER_WAY)
            break;
        list_remove(&op->link);
        if (!t->closing)
            scan_take(op);
        list_push_back(&t->recovery.pool, &op->link);
        nvme_release(t); /* the operation's */
    }
    if (!t->closing)
        recover_pump(t);
    nvme_release(t); /* this function's */
}

static void scan_start(struct tier *t, struct segment *s, uint32_t record)
{
    struct nvme_op *op = LIST_ENTRY(list_pop_front(&t->recovery.pool), struct nvme_op, link);

    op->segment = s;
    op->record = record;
    op->scanned = SCAN_UNDER_WAY;
    op->iov[0] = (struct iovec){.iov_base = op->headers, .iov_len = NVME_PAGE};
    op->e.iov = op->iov;
    op->e.iovs = 1;
    list_push_back(&t->recovery.reading, &op->link);
    nvme_hold(t);
    nvme_op_begin(op, s->file,
                  record == SEGMENT_HEADER ? segment_offset(&t->segments, s)
                                           : segment_record_offset(&t->segments, s, record));
}

/* ---- in which order ---- */

/* The segment at the cursor, the files taking turns; NULL at the end. */
static struct segment *cursor_segment(struct tier *t)
{
    struct nvme_recovery *r = &t->recovery;

    while (r->number < r->numbers) {
        if (r->file == t->files) {
            r->file = 0;
            r->number++;
        } else if (r->number < t->segments.file[r->file].count) {
            return &t->segments.file[r->file].segments[r->number];
        } else {
            r->file++;
        }
    }
    return NULL;
}

static void cursor_reset(struct nvme_recovery *r)
{
    r->file = 0;
    r->number = 0;
    r->record = 0;
}

static void headers_pump(struct tier *t)
{
    struct nvme_recovery *r = &t->recovery;
    struct segment *s;

    while (!list_empty(&r->pool) && (s = cursor_segment(t))) {
        r->file++;
        scan_start(t, s, SEGMENT_HEADER);
    }
    if (!list_empty(&r->reading) || cursor_segment(t))
        return;
    r->state = RECOVERY_CHECKPOINT;
    t->metrics->nvme_recovering = r->segments;
    nvme_writes_go_on(t);
    if (!nvme_restore_start(t))
        records_start(t);
}

static void records_pump(struct tier *t)
{
    struct nvme_recovery *r = &t->recovery;
    struct segment *s;
    unsigned passed = 0;

    while (!list_empty(&r->pool) && (s = cursor_segment(t))) {
        if (passed++ == SEGMENTS_TURN) {
            nvme_iteration_want(t, NVME_TURN_RECOVERY);
            return;
        }
        if (!nvme_to_recover(t, s) || r->record == s->records) {
            r->file++;
            r->record = 0;
            continue;
        }
        if (r->record == 0) {
            s->scans = s->records - s->covered;
            r->record = s->covered;
        }
        if (r->record < s->records)
            scan_start(t, s, r->record++);
        else
            segment_known(t, s);
    }
    if (list_empty(&r->reading) && !cursor_segment(t))
        r->state = RECOVERY_DUPLICATES;
}

static void recover_pump(struct tier *t)
{
    if (t->recovery.state == RECOVERY_DONE)
        return;
    recover_progress(t);
    if (t->recovery.state == RECOVERY_HEADERS)
        headers_pump(t);
    if (t->recovery.state == RECOVERY_RECORDS)
        records_pump(t);
    if (t->recovery.state == RECOVERY_DUPLICATES && !nvme_duplicates_go_on(t))
        recover_end(t);
}

void nvme_recover_go_on(struct tier *t)
{
    if (t->closing)
        return;
    if (t->recovery.state != RECOVERY_CHECKPOINT)
        recover_pump(t);
    else if (!nvme_restore_go_on(t))
        records_start(t);
}

static void records_start(struct tier *t)
{
    t->recovery.state = RECOVERY_RECORDS;
    cursor_reset(&t->recovery);
    log_debug(MODULE, "checkpoint-read", "parts=%" PRIu64 " seconds=%.3f",
              t->metrics->nvme_recovered_parts, seconds(t));
    recover_pump(t);
}

/* ---- the start ---- */

int nvme_recover_open(struct tier *t)
{
    struct nvme_recovery *r = &t->recovery;
    unsigned depth = nvme_ring_usable(t) ? NVME_SCANS : t->threads_depth;

    r->before = t->segments.sequence;
    r->ops = calloc(depth, sizeof(r->ops[0]));
    r->pages = aligned_alloc(NVME_PAGE, (size_t)depth * NVME_PAGE);
    if (!r->ops || !r->pages)
        return -ENOMEM;
    for (unsigned i = 0; i < depth; i++) {
        r->ops[i].tier = t;
        r->ops[i].finish_cb = scan_finish;
        r->ops[i].e.buffer = UINT32_MAX;
        r->ops[i].headers = r->pages + (size_t)i * NVME_PAGE;
        list_push_back(&r->pool, &r->ops[i].link);
    }
    for (unsigned i = 0; i < t->files; i++)
        if (t->segments.file[i].count > r->numbers)
            r->numbers = t->segments.file[i].count;
    return 0;
}

void nvme_recover_start(struct tier *t)
{
    struct nvme_recovery *r = &t->recovery;

    if (!t->callbacks.restore_cb)
        return;
    r->state = RECOVERY_HEADERS;
    r->start_ms = uv_now(t->loop);
    r->progress_ms = r->start_ms + PROGRESS_MS;
    recover_pump(t);
}
