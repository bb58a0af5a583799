/* Checkpoints: what lies in which record, written next to each file so that the next start need not
 * read the records' headers. Segment by segment, the event loop describes some records an iteration
 * until the buffer is full, and the pool writes them. Spans of different segments need not be of
 * one moment: the next start believes a span only if the segment has not been opened again
 * since. */
#include "daemon/tier/nvme.h"

#include "daemon/base/kill_point.h"
#include "daemon/base/log.h"
#include "daemon/checkpoint/format.h"
#include "daemon/format/io.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MODULE "tier"
#define BUFFER_BYTES (1u << 20)
/* For describing, in one iteration of the event loop; a span is described as a whole. */
#define TURN_NS 20000u
#define SPAN_RECORDS 64u
#define TICK_MS 5000
#define DUE_BYTES (64ull << 20) /* written since the last one, and */
#define DUE_FACTOR 32           /* so many times the last one's size */

static void path_make(const struct nvme_checkpoint *k, const char *suffix, char out[PATH_BYTES])
{
    snprintf(out, PATH_BYTES, "%s/%s%s", k->tier->devices[k->file].file.directory, NVME_INDEX_FILE,
             suffix);
}

/* ---- describing: on the event loop ---- */

/* The records up to here are final: none of them is being written. */
static uint32_t records_settled(const struct segment *s, uint32_t from, uint32_t max)
{
    uint32_t end = s->state == SEGMENT_OPEN ? s->next : s->records;
    uint32_t to = from;

    while (to < end && to - from < max && (!s->states || s->states[to] != RECORD_WRITING))
        to++;
    return to;
}

/* Adds one span to the buffer; false when nothing of this segment is left to describe. */
static bool span_add(struct nvme_checkpoint *k, const struct segment *s)
{
    struct tier *t = k->tier;
    struct checkpoint_span r = {.segment = s->number,
                                .from = k->record,
                                .sequence = s->sequence,
                                .stride = (uint64_t)s->stride_pages * NVME_PAGE};
    uint8_t *p = k->buffer + k->n;

    if (s->records == 0 || k->record >= s->records || s->unknown || t->mover.segment == s)
        return false; /* the next start reads its headers */
    r.to = records_settled(s, k->record, SPAN_RECORDS);
    if (r.to == r.from)
        return false;
    memcpy(r.uuid, t->devices[s->file].file.uuid, sizeof(r.uuid));
    for (uint32_t i = r.from; s->states && i < r.to; i++) {
        struct nvme_record_header h;
        struct tier_described d;

        if (!nvme_describe(t, s, i, &d))
            continue;
        nvme_record_header_of(t, s, i, &d, &h);
        checkpoint_entry_encode(p, r.entries++, &h);
    }
    checkpoint_span_finish(p, &r);
    k->n += checkpoint_span_bytes(r.entries);
    k->record = r.to;
    return true;
}

/* Fills the buffer as far as time and space allow. False: more fits. */
static bool buffer_fill(struct nvme_checkpoint *k, uint64_t limit_ns)
{
    struct segment_file *f = &k->tier->segments.file[k->file];
    uint64_t end = uv_hrtime() + limit_ns;
    bool fits = true;

    while (fits && k->number < f->count && uv_hrtime() < end) {
        if (!span_add(k, &f->segments[k->number])) {
            k->number++;
            k->record = 0;
        }
        fits = k->n + checkpoint_span_bytes(SPAN_RECORDS) <= BUFFER_BYTES;
    }
    k->last = k->number == f->count;
    return k->last || !fits;
}

/* ---- writing: in the pool, or at the end on the event loop ---- */

/* Syncs the records first: what a checkpoint lists must be there after a power failure. After a
 * failed sync that can't be known any more. */
static int file_publish(struct nvme_checkpoint *k)
{
    struct nvme_device *d = &k->tier->devices[k->file];
    char from[PATH_BYTES], to[PATH_BYTES];
    int rc;

    path_make(k, k->suffix, from);
    path_make(k, "", to);
    KILL_POINT("checkpoint-written");
    rc = nvme_device_sync(d);
    if (rc == 0 && d->syncs_failed > 0)
        rc = -EIO;
    if (rc < 0)
        return rc;
    if (fsync(k->fd) < 0 || rename(from, to) < 0)
        return -errno;
    KILL_POINT("checkpoint-named");
    return io_directory_sync(d->file.directory);
}

static void buffer_write(struct nvme_checkpoint *k)
{
    char path[PATH_BYTES];

    if (k->fd < 0) {
        path_make(k, k->suffix, path);
        k->fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    }
    KILL_POINT("checkpoint-begin");
    k->status = k->fd < 0 ? -errno : io_write(k->fd, k->buffer, k->n, k->offset);
    k->offset += k->n;
    if (k->status == 0 && k->last)
        k->status = file_publish(k);
    if (k->fd >= 0 && (k->last || k->status < 0)) {
        close(k->fd);
        k->fd = -1;
    }
}

/* ---- one file after the other ---- */

/* After a failed sync no checkpoint of the file is published, so none is written. */
static bool file_next(struct nvme_checkpoint *k)
{
    while (k->file < k->tier->files &&
           (k->tier->devices[k->file].file.fd < 0 || k->tier->devices[k->file].syncs_failed > 0))
        k->file++;
    k->number = k->record = 0;
    k->offset = 0;
    return k->file < k->tier->files;
}

static bool file_ended(struct nvme_checkpoint *k)
{
    k->tier->metrics->nvme_checkpoint_bytes += k->status < 0 ? 0 : k->n;
    if (k->status < 0)
        log_warn(MODULE, "checkpoint-failed", "path=%s error=%s",
                 k->tier->devices[k->file].file.directory, strerror(-k->status));
    else if (!k->last)
        return false;
    else
        k->size += k->offset;
    k->file++;
    return true;
}

static bool begin(struct nvme_checkpoint *k, struct tier *t, const char *suffix)
{
    *k = (struct nvme_checkpoint){
        .tier = t, .suffix = suffix, .fd = -1, .mark = t->metrics->nvme_written_bytes};
    k->buffer = malloc(BUFFER_BYTES);
    return k->buffer && file_next(k);
}

static void end(struct nvme_checkpoint *k)
{
    if (k->fd >= 0)
        close(k->fd);
    k->fd = -1;
    free(k->buffer);
    k->buffer = NULL;
}

/* ---- while the tier serves ---- */

static void write_run(struct nvme_job *job)
{
    buffer_write(LIST_ENTRY(job, struct nvme_checkpoint, job));
}

static void write_done(struct nvme_job *job)
{
    struct nvme_checkpoint *k = LIST_ENTRY(job, struct nvme_checkpoint, job);
    struct tier *t = k->tier;

    (void)nvme_sync_trusted(t, &t->devices[k->file]);
    if (t->closing)
        return;
    k->n = 0;
    if (!file_ended(k) || file_next(k)) {
        nvme_iteration_want(t, NVME_TURN_CHECKPOINT);
        return;
    }
    end(k);
    t->checkpoint_mark = k->mark;
    t->checkpoint_size = k->size;
    t->metrics->nvme_checkpoints++;
    log_debug(MODULE, "checkpoint", "bytes=%" PRIu64, k->size);
}

void nvme_checkpoint_go_on(struct tier *t)
{
    if (t->closing)
        return;
    if (buffer_fill(&t->checkpoint, TURN_NS))
        nvme_job_start(t, &t->checkpoint.job, write_run, write_done);
    else
        nvme_iteration_want(t, NVME_TURN_CHECKPOINT);
}

static void timer_cb(uv_timer_t *timer)
{
    struct tier *t = timer->data;
    uint64_t written = t->metrics->nvme_written_bytes - t->checkpoint_mark;

    if (t->closing || written < DUE_BYTES || written < DUE_FACTOR * t->checkpoint_size)
        return; /* the next write starts the timer again */
    if (t->checkpoint.buffer || nvme_recovering(t))
        nvme_checkpoint_later(t);
    else if (begin(&t->checkpoint, t, ".tmp"))
        nvme_iteration_want(t, NVME_TURN_CHECKPOINT);
    else
        end(&t->checkpoint);
}

/* No timer runs while nothing is written: an idle daemon sleeps. */
void nvme_checkpoint_later(struct tier *t)
{
    uv_timer_t *timer = &t->checkpoint_timer;

    if (!uv_is_active((uv_handle_t *)timer))
        (void)uv_timer_start(timer, timer_cb, TICK_MS, 0); /* refuses a closing handle only */
}

void nvme_checkpoint_close(struct tier *t)
{
    if (t->checkpoint.buffer)
        end(&t->checkpoint);
}

/* ---- before an orderly stop ---- */

/* All of it in one go. One that the pool is writing meanwhile has another name. */
void nvme_checkpoint_last(struct tier *t)
{
    struct nvme_checkpoint k;

    if (nvme_recovering(t))
        return; /* the one from before stays valid for what it lists */
    if (begin(&k, t, ".last")) {
        do {
            k.n = 0;
            (void)buffer_fill(&k, UINT64_C(1) << 40);
            buffer_write(&k);
        } while (!file_ended(&k) || file_next(&k));
        t->metrics->nvme_checkpoints++;
        log_info(MODULE, "checkpoint", "bytes=%" PRIu64, k.size);
    }
    end(&k);
}
