/* The health of the tier's files. A segment with bad blocks goes into quarantine; the list of these
 * is kept in the file. A file that failed takes no writes until a health check succeeds; the pauses
 * between checks grow. The check writes and syncs the page of the quarantine, so that a list that
 * could not be kept earlier is kept then. */
#include "daemon/tier/nvme.h"

#include "daemon/base/log.h"
#include "daemon/format/io.h"

#include <errno.h>
#include <inttypes.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define MODULE "tier"
#define WRITE_FAILURES_MAX 4u /* in a row, then the file is not written to */
#define CHECK_MIN_MS 1000u    /* between health checks of a file that failed */
#define CHECK_MAX_MS 300000u
#define LOOK_MS 5000u /* between looks at files, whether they are still there */

static unsigned device_number(const struct nvme_device *d)
{
    return (unsigned)(d - d->tier->devices);
}

/* ---- syncs ---- */

int nvme_device_sync(struct nvme_device *d)
{
    int rc;

    /* One at a time: the kernel reports a failure to only one of two. */
    uv_mutex_lock(&d->sync_lock);
    rc = fdatasync(d->file.fd) < 0 ? -errno : nvme_file_intact(&d->file);
    if (rc < 0) {
        atomic_store(&d->sync_error, rc);
        atomic_fetch_add(&d->syncs_failed, 1);
    }
    uv_mutex_unlock(&d->sync_lock);
    return rc;
}

/* ---- keeping the list: a page is written by the pool ---- */

static void store_run(struct nvme_job *job)
{
    struct nvme_device *d = LIST_ENTRY(job, struct nvme_device, health.job);
    alignas(NVME_PAGE) uint8_t page[NVME_PAGE];

    nvme_quarantine_encode(&d->health.stored, page);
    d->health.status =
        io_write(d->file.fd, page, NVME_PAGE, NVME_QUARANTINE_OFFSET(d->health.next));
    if (d->health.status == 0)
        d->health.status = nvme_device_sync(d);
}

static void store(struct nvme_device *d);
static void check_ended(struct nvme_device *d);

static void store_done(struct nvme_job *job)
{
    struct nvme_device *d = LIST_ENTRY(job, struct nvme_device, health.job);
    struct nvme_health *k = &d->health;

    k->busy = false;
    (void)nvme_sync_trusted(d->tier, d);
    if (k->status == 0)
        k->next = 1 - k->next;
    else if (!k->checking)
        log_error(MODULE, "quarantine-not-kept", "path=%s error=%s", d->file.path,
                  strerror(-k->status));
    if (k->checking && !d->tier->closing)
        check_ended(d);
    if (k->due) /* the list has changed meanwhile */
        store(d);
}

static void store(struct nvme_device *d)
{
    struct nvme_health *k = &d->health;

    k->due = k->busy;
    if (k->busy)
        return;
    k->busy = true;
    k->list.change++;
    k->stored = k->list;
    nvme_job_start(d->tier, &k->job, store_run, store_done);
}

/* ---- degraded, and back ---- */

static bool bound_passed(const struct nvme_device *d)
{
    const struct segment_file *s = &d->tier->segments.file[device_number(d)];
    uint64_t bound = (uint64_t)s->count * d->tier->quarantine_percent / 100;

    if (bound > NVME_QUARANTINE_MAX - 1)
        bound = NVME_QUARANTINE_MAX - 1; /* one more fits into the page */
    return s->quarantined > (bound > 1 ? bound : 1);
}

static void device_degrade(struct nvme_device *d, const char *why)
{
    if (d->degraded)
        return;
    d->degraded = true;
    snprintf(d->reason, sizeof(d->reason), "%s takes no writes: %s", d->file.path, why);
    segment_file_stop(&d->tier->segments, device_number(d));
    log_error(MODULE, "file-degraded", "path=%s: no more writes: %s", d->file.path, why);
}

/* No health check gives such a file back: an operator has to look at the disk. */
static void bound_check(struct nvme_device *d)
{
    if (bound_passed(d))
        device_degrade(d, "too many segments are in quarantine");
}

static void timer_cb(uv_timer_t *timer);

/* No timer runs while all files are well. */
static void timer_arm(struct tier *t)
{
    uint64_t now = uv_now(t->loop), next = UINT64_MAX;

    for (unsigned i = 0; i < t->files; i++) {
        const struct nvme_health *k = &t->devices[i].health;

        if (k->waiting && !k->checking && k->retry.until < next)
            next = k->retry.until;
    }
    if (next != UINT64_MAX) /* refuses a closing handle only */
        (void)uv_timer_start(&t->health_timer, timer_cb, next > now ? next - now : 0, 0);
}

static void check_later(struct nvme_device *d)
{
    d->health.waiting = true;
    (void)backoff_fail(&d->health.retry, uv_now(d->tier->loop));
    timer_arm(d->tier);
}

static void check_ended(struct nvme_device *d)
{
    struct tier *t = d->tier;

    d->health.checking = false;
    if (d->health.status < 0) {
        log_debug(MODULE, "health-check-failed", "path=%s error=%s", d->file.path,
                  nvme_file_trouble(d->health.status));
        check_later(d);
        return;
    }
    d->health.waiting = false;
    d->degraded = false;
    bound_check(d);
    if (d->degraded)
        return;
    d->write_failures = WRITE_FAILURES_MAX - 1; /* on trial: one more and it is out again */
    segment_file_start(&t->segments, device_number(d));
    t->metrics->nvme_files_lost -= d->lost;
    d->lost = false;
    t->metrics->nvme_returned++;
    log_warn(MODULE, "file-returned", "path=%s: takes writes again", d->file.path);
    nvme_writes_go_on(t);
}

static void timer_cb(uv_timer_t *timer)
{
    struct tier *t = timer->data;

    for (unsigned i = 0; i < t->files && !t->closing; i++) {
        struct nvme_health *k = &t->devices[i].health;

        if (!k->waiting || k->checking || !backoff_ready(&k->retry, uv_now(t->loop)))
            continue;
        k->checking = true;
        store(&t->devices[i]);
    }
    timer_arm(t);
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
    device_degrade(d, nvme_file_trouble(status));
    check_later(d);
}

void nvme_write_worked(struct tier *t, unsigned file)
{
    t->devices[file].write_failures = 0;
    backoff_reset(&t->devices[file].health.retry);
}

bool nvme_sync_trusted(struct tier *t, struct nvme_device *d)
{
    uint32_t failed = atomic_load(&d->syncs_failed);

    if (failed == d->syncs_failed_seen)
        return true;
    d->syncs_failed_seen = failed;
    log_error("tier", "sync-failed", "path=%s error=%s: what it holds may not survive",
              d->file.path, nvme_file_trouble(d->sync_error));
    segment_file_distrust(&t->segments, (uint32_t)(d - t->devices));
    nvme_write_failed(t, (unsigned)(d - t->devices), d->sync_error);
    return false;
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

/* A crash may have cut off a write that no checkpoint covers: wrong bytes there say nothing about
 * the disk. One of these writes may also have been the first of a segment's new opening. It then
 * overwrote records that the checkpoint lists for the old one. */
static bool perhaps_torn(const struct tier *t, const struct segment *s, uint32_t record)
{
    return s->sequence < t->recovery.before &&
           (record >= s->covered || t->devices[s->file].went_on || nvme_recovering(t));
}

void nvme_quarantine_add(struct tier *t, struct segment *s, uint32_t record)
{
    struct nvme_device *d = &t->devices[s->file];
    struct nvme_quarantine *list = &d->health.list;

    if (perhaps_torn(t, s, record) || !segment_quarantine(&t->segments, s))
        return;
    log_error(MODULE, "segment-quarantined", "path=%s segment=%" PRIu32 " record=%" PRIu32,
              d->file.path, s->number, record);
    if (list->count < NVME_QUARANTINE_MAX)
        list->segment[list->count++] = s->number;
    figures_update(t);
    bound_check(d);
    store(d);
}

/* Reads the list, and takes the segments in it out of use. */
static void list_load(struct nvme_device *d)
{
    struct segment_table *t = &d->tier->segments;
    struct segment_file *s = &t->file[device_number(d)];
    struct nvme_quarantine *list = &d->health.list;

    if (d->file.fd >= 0)
        d->health.next = nvme_quarantine_read(d->file.fd, d->file.uuid, list).next;
    memcpy(list->uuid, d->file.uuid, sizeof(list->uuid));
    for (uint32_t i = 0; i < list->count; i++)
        if (list->segment[i] < s->count)
            (void)segment_quarantine(t, &s->segments[list->segment[i]]);
    if (s->quarantined == 0)
        return;
    log_warn(MODULE, "quarantine", "path=%s segments=%" PRIu32, d->file.path, s->quarantined);
    bound_check(d);
}

/* ---- files that are removed or cut while nobody writes durably ---- */

static void look_run(struct nvme_job *job)
{
    struct tier *t = job->tier;

    t->look.ns_removed = false;
    for (unsigned i = 0; i < t->files; i++) {
        struct nvme_device *d = &t->devices[i];

        d->looked = d->file.fd < 0 ? 0 : nvme_file_intact(&d->file);
        t->look.ns_removed |= d->file.fd >= 0 && ns_records_removed(&t->ns_records, i);
    }
}

static void look_restored_cb(struct tier_ns_record *n, int status)
{
    (void)status; /* ns_records_trouble has it */
    LIST_ENTRY(n, struct nvme_look, restore)->busy = false;
}

static void look_done(struct nvme_job *job)
{
    struct tier *t = job->tier;

    t->look.busy = false;
    for (unsigned i = 0; i < t->files && !t->closing; i++) {
        struct nvme_device *d = &t->devices[i];

        if ((d->looked == -ENOENT || d->looked == -ENXIO) && !d->degraded)
            nvme_write_failed(t, i, d->looked);
    }
    if (!t->look.ns_removed || t->closing)
        return;
    t->look.busy = true;
    t->look.restore.done_cb = look_restored_cb;
    nvme_ns_restore(t, &t->look.restore);
}

static void look_cb(uv_timer_t *timer)
{
    struct tier *t = timer->data;

    if (t->look.busy || t->closing)
        return;
    t->look.busy = true;
    nvme_job_start(t, &t->look.job, look_run, look_done);
}

void nvme_health_init(struct tier *t)
{
    for (unsigned i = 0; i < t->files; i++) {
        backoff_init(&t->devices[i].health.retry, CHECK_MIN_MS, CHECK_MAX_MS, 0);
        list_load(&t->devices[i]);
    }
    figures_update(t);
    (void)uv_timer_start(&t->look_timer, look_cb, LOOK_MS,
                         LOOK_MS); /* can't fail: it has a callback */
}
