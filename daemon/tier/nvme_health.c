/* The health of the tier's files. A segment with bad blocks goes into quarantine; the list of these
 * is kept in the file. A file that failed takes no writes until a health check succeeds; the pauses
 * between checks grow. The check writes and syncs the page of the quarantine, so that a list that
 * could not be kept earlier is kept then. */
#include "daemon/tier/nvme.h"

#include "daemon/base/log.h"
#include "daemon/format/io.h"
#include "proto/backoff.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ROOM "tier"
#define WRITE_FAILURES_MAX 4u /* in a row, then the file takes no more writes */
#define CHECK_MIN_MS 1000u    /* between health checks of a file that failed */
#define CHECK_MAX_MS 300000u

struct health_file {
    struct tier *tier;
    struct nvme_device *device;
    struct nvme_quarantine list;
    uint8_t *page;
    unsigned next; /* copy to write next */
    bool busy, due;
    bool waiting, checking; /* for the next health check; one is under way */
    struct backoff retry;   /* reset by a write that succeeds */
    int status;
    struct nvme_job job;
};

struct nvme_health {
    struct tier *tier;
    uv_timer_t timer;
    unsigned percent;
    uint8_t *pages;
    struct health_file *file;
};

/* ---- keeping the list: a page is written by the pool ---- */

static void store_run(struct nvme_job *job)
{
    struct health_file *f = LIST_ENTRY(job, struct health_file, job);

    f->status = io_write(f->device->file.fd, f->page, NVME_PAGE, NVME_QUARANTINE_OFFSET(f->next));
    if (f->status == 0)
        f->status = nvme_device_sync(f->device);
}

static void store(struct health_file *f);
static void check_ended(struct health_file *f);

static void store_done(struct nvme_job *job)
{
    struct health_file *f = LIST_ENTRY(job, struct health_file, job);
    struct tier *t = f->tier;

    f->busy = false;
    (void)nvme_sync_trusted(t, f->device);
    if (f->status == 0)
        f->next = 1 - f->next;
    else if (!f->checking)
        log_error(ROOM, "quarantine-not-kept", "path=%s error=%s", f->device->file.path,
                  strerror(-f->status));
    if (f->checking && !t->closing)
        check_ended(f);
    if (f->due) /* the list has changed meanwhile */
        store(f);
}

static void store(struct health_file *f)
{
    f->due = f->busy;
    if (f->busy)
        return;
    f->busy = true;
    f->list.change++;
    nvme_quarantine_encode(&f->list, f->page);
    nvme_job_start(f->tier, &f->job, store_run, store_done);
}

static void list_load(struct health_file *f)
{
    const struct nvme_file *file = &f->device->file;

    if (file->fd >= 0)
        f->next = nvme_quarantine_read(file->fd, file->uuid, &f->list).next;
    memcpy(f->list.uuid, file->uuid, sizeof(f->list.uuid));
}

/* ---- degraded, and back ---- */

static bool bound_passed(const struct tier *t, const struct nvme_device *d)
{
    const struct segment_file *s = &t->segments.file[d - t->devices];
    uint64_t bound = (uint64_t)s->count * t->health->percent / 100;

    if (bound > NVME_QUARANTINE_MAX - 1)
        bound = NVME_QUARANTINE_MAX - 1; /* the page has room for one more */
    return s->quarantined > (bound > 1 ? bound : 1);
}

static struct health_file *health_file(struct tier *t, const struct nvme_device *d)
{
    return &t->health->file[d - t->devices];
}

static void device_degrade(struct tier *t, struct nvme_device *d, const char *why)
{
    if (d->degraded)
        return;
    d->degraded = true;
    snprintf(d->reason, sizeof(d->reason), "file %u takes no writes: %s",
             (unsigned)(d - t->devices), why);
    segment_file_stop(&t->segments, (uint32_t)(d - t->devices));
    log_error(ROOM, "file-degraded", "path=%s: no more writes: %s", d->file.path, why);
}

static void timer_cb(uv_timer_t *timer);
static void bound_check(struct tier *t, struct nvme_device *d);

/* No timer runs while all files are well. */
static void timer_arm(struct nvme_health *k)
{
    uint64_t now = uv_now(k->tier->loop), next = UINT64_MAX;

    for (unsigned i = 0; i < k->tier->files; i++)
        if (k->file[i].waiting && !k->file[i].checking && k->file[i].retry.until < next)
            next = k->file[i].retry.until;
    if (next != UINT64_MAX) /* refuses a closing handle only */
        (void)uv_timer_start(&k->timer, timer_cb, next > now ? next - now : 0, 0);
}

static void check_later(struct health_file *f)
{
    f->waiting = true;
    (void)backoff_fail(&f->retry, uv_now(f->tier->loop));
    timer_arm(f->tier->health);
}

static void check_ended(struct health_file *f)
{
    struct tier *t = f->tier;
    struct nvme_device *d = f->device;

    f->checking = false;
    if (f->status < 0) {
        log_debug(ROOM, "health-check-failed", "path=%s error=%s", d->file.path,
                  nvme_file_trouble(f->status));
        check_later(f);
        return;
    }
    f->waiting = false;
    d->degraded = false;
    bound_check(t, d);
    if (d->degraded)
        return;
    d->write_failures = WRITE_FAILURES_MAX - 1; /* on trial: one more and it is out again */
    segment_file_start(&t->segments, (uint32_t)(d - t->devices));
    t->metrics->nvme_files_lost -= d->lost;
    d->lost = false;
    t->metrics->nvme_returned++;
    log_warn(ROOM, "file-returned", "path=%s: takes writes again", d->file.path);
    nvme_writes_go_on(t);
}

static void timer_cb(uv_timer_t *timer)
{
    struct nvme_health *k = timer->data;
    uint64_t now = uv_now(k->tier->loop);

    for (unsigned i = 0; i < k->tier->files && !k->tier->closing; i++) {
        struct health_file *f = &k->file[i];

        if (!f->waiting || f->checking || !backoff_ready(&f->retry, now))
            continue;
        f->checking = true;
        store(f);
    }
    timer_arm(k);
}

void nvme_write_failed(struct tier *t, unsigned file, int status)
{
    struct nvme_device *d = &t->devices[file];
    bool gone = status == -ENOENT || status == -ENXIO;

    d->write_failures++;
    if (d->degraded ||
        (!gone && status != -EROFS && status != -ENOSPC && d->write_failures < WRITE_FAILURES_MAX))
        return;
    d->lost = gone;
    t->metrics->nvme_files_lost += gone;
    device_degrade(t, d, nvme_file_trouble(status));
    check_later(health_file(t, d));
}

void nvme_write_worked(struct tier *t, unsigned file)
{
    t->devices[file].write_failures = 0;
    backoff_reset(&t->health->file[file].retry);
}

/* ---- quarantine ---- */

static void figures_update(struct tier *t)
{
    uint64_t n = 0;

    for (unsigned i = 0; i < t->files; i++)
        n += t->segments.file[i].quarantined;
    t->metrics->nvme_quarantined_bytes = n * t->segment_bytes;
    t->metrics->nvme_bytes_capacity = t->segments.capacity_bytes;
}

/* No health check gives such a file back: an operator has to look at the disk. */
static void bound_check(struct tier *t, struct nvme_device *d)
{
    if (bound_passed(t, d))
        device_degrade(t, d, "too many segments are in quarantine");
}

/* A crash may have cut off a write that no checkpoint covers: wrong bytes there say nothing about
 * the disk. One of these writes may also have been the first of a segment's new opening, and have
 * overwritten records that the checkpoint lists for the old one. */
static bool perhaps_torn(const struct tier *t, const struct segment *s, uint32_t record)
{
    return s->sequence < t->recovery.before &&
           (record >= s->covered || t->devices[s->file].went_on || nvme_recovering(t));
}

void nvme_quarantine_add(struct tier *t, struct segment *s, uint32_t record)
{
    struct nvme_device *d = &t->devices[s->file];
    struct health_file *f = health_file(t, d);

    if (perhaps_torn(t, s, record) || !segment_quarantine(&t->segments, s))
        return;
    log_error(ROOM, "segment-quarantined", "path=%s segment=%" PRIu32 " record=%" PRIu32,
              d->file.path, s->number, record);
    if (f->list.count < NVME_QUARANTINE_MAX)
        f->list.segment[f->list.count++] = s->number;
    figures_update(t);
    bound_check(t, d);
    store(f);
}

static void list_apply(struct health_file *f)
{
    struct segment_file *s = &f->tier->segments.file[f->device - f->tier->devices];

    for (uint32_t i = 0; i < f->list.count; i++)
        if (f->list.segment[i] < s->count)
            (void)segment_quarantine(&f->tier->segments, &s->segments[f->list.segment[i]]);
    if (s->quarantined == 0)
        return;
    log_warn(ROOM, "quarantine", "path=%s segments=%" PRIu32, f->device->file.path, s->quarantined);
    bound_check(f->tier, f->device);
}

/* ---- life ---- */

static void health_free(struct nvme_health *k)
{
    free(k->pages);
    free(k->file);
    free(k);
}

int nvme_health_open(struct tier *t, unsigned percent)
{
    struct nvme_health *k = calloc(1, sizeof(*k));

    if (!k)
        return -ENOMEM;
    k->tier = t;
    k->percent = percent;
    k->pages = aligned_alloc(NVME_PAGE, (size_t)t->files * NVME_PAGE);
    k->file = calloc(t->files, sizeof(k->file[0]));
    if (!k->pages || !k->file || uv_timer_init(t->loop, &k->timer) < 0) {
        health_free(k);
        return -ENOMEM;
    }
    k->timer.data = k;
    uv_unref((uv_handle_t *)&k->timer);
    t->health = k;
    for (unsigned i = 0; i < t->files; i++) {
        struct health_file *f = &k->file[i];

        f->tier = t;
        f->device = &t->devices[i];
        f->page = k->pages + (size_t)i * NVME_PAGE;
        backoff_init(&f->retry, CHECK_MIN_MS, CHECK_MAX_MS, 0);
        list_load(f);
        list_apply(f);
    }
    figures_update(t);
    return 0;
}

static void closed_cb(uv_handle_t *handle)
{
    health_free(handle->data);
}

void nvme_health_close(struct tier *t)
{
    if (t->health)
        uv_close((uv_handle_t *)&t->health->timer, closed_cb);
}
