/* The scrub: checks closed segments, slowly and after all other work, so that a bad block is found
 * before it is needed. One record at a time; what it should hold the index says, not the record. */
#include "daemon/tier/nvme.h"

#include "daemon/base/log.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <string.h>

#define MODULE "tier"
#define FIRST_MS 60000u   /* after the start, at most: the start has other work */
#define BUSY_MS 20u       /* to the next look at a busy device, */
#define BUSY_MAX_MS 1000u /* which is read from all the same after this long */
#define RECOVERING_MS 1000u
#define BURST_NS 100000000u /* time that was not used is not saved up */
#define STEPS_TURN 8192u    /* of the cursor in an iteration of the event loop */
#define UNREADABLE_MAX 4u   /* records in a row, then the device is at fault and not they */

static void timer_cb(uv_timer_t *timer);

static void wake_in(struct nvme_scrub *k, uint64_t ms)
{
    (void)uv_timer_start(&k->tier->scrub_timer, timer_cb, ms,
                         0); /* refuses a closing handle only */
}

/* ---- what was found ---- */

/* Where the payload is gone the part is a miss from now on. */
static void record_bad(struct nvme_scrub *k, const char *what, bool lost)
{
    const struct tier_place *place = &k->check.place;
    struct tier *t = k->tier;
    struct segment *s;
    uint32_t record;

    if (segment_find(&t->segments, place->loc, k->want.bytes, &s, &record) < 0)
        return; /* forgotten meanwhile */
    t->metrics->nvme_scrub_bad++;
    log_error(MODULE, "scrub-found", "path=%s offset=%" PRIu64 " bytes=%" PRIu64 ": %s",
              t->devices[s->file].file.path, segment_record_offset(&t->segments, s, record),
              k->want.bytes, what);
    nvme_quarantine_add(t, s, record);
    if (lost)
        t->callbacks.lost_cb(t->callbacks.ctx, k->check.owner, place->loc);
}

static void record_report(struct nvme_scrub *k, int status, bool bad_header)
{
    bool unreadable =
        status < 0 && status != -EBADMSG && status != -ENOKEY && status != -ESTALE && !bad_header;

    k->unreadable = unreadable ? k->unreadable + 1 : 0;
    if (k->unreadable == UNREADABLE_MAX)
        log_error(MODULE, "scrub-stopped", "path=%s: %u parts in a row can't be read: %s",
                  k->tier->devices[k->file].file.path, UNREADABLE_MAX, strerror(-status));
    if (bad_header)
        record_bad(k, "a header is damaged; the payload is sound", false);
    else if (status == -EBADMSG)
        record_bad(k, "the checksum does not agree", true);
    else if (unreadable)
        record_bad(k, strerror(-status), true);
}

static void check_done_cb(struct tier *t, void *ctx, int status, bool bad_header)
{
    struct nvme_scrub *k = ctx;
    uint64_t now = uv_hrtime();

    if (t->closing)
        return;
    record_report(k, status, bad_header);
    k->record++;
    wake_in(k, k->due_ns > now ? (k->due_ns - now) / 1000000 : 0);
}

/* ---- the pass ---- */

static void pass_begin(struct nvme_scrub *k)
{
    k->begun_ms = uv_now(k->tier->loop);
    k->file = k->unreadable = 0;
    k->number = k->record = 0;
    k->due_ns = 0;
    k->tier->metrics->nvme_scrub_segments = 0;
}

static void pass_end(struct nvme_scrub *k)
{
    uint64_t took = uv_now(k->tier->loop) - k->begun_ms;

    k->tier->metrics->nvme_scrub_passes++;
    log_debug(MODULE, "scrubbed", "seconds=%.1f", (double)took / 1000.0);
    k->file = UINT_MAX;
    wake_in(k, took < k->interval_ms ? k->interval_ms - took : 0);
}

static bool record_wanted(struct nvme_scrub *k, struct segment *s)
{
    struct tier *t = k->tier;

    if (!nvme_describe(t, s, k->record, &k->want))
        return false;
    k->check = (struct nvme_check){
        .owner = s->owners[k->record],
        .part = k->want.name.part,
        .bytes = k->want.bytes,
        .place = {segment_loc(&t->segments, s, k->record), k->want.checksum, k->want.encrypted},
        .headers = true,
        .idle = true,
        .done_cb = check_done_cb,
        .ctx = k,
    };
    return true;
}

/* The next live record. 0; -EAGAIN: not found yet; -ENOENT: the pass is over. */
static int cursor_next(struct nvme_scrub *k)
{
    struct segment_table *t = &k->tier->segments;

    for (unsigned i = 0; i < STEPS_TURN; i++) {
        struct segment_file *f = &t->file[k->file];
        struct segment *s = &f->segments[k->number];

        if (k->number == f->count || k->unreadable >= UNREADABLE_MAX) {
            k->number = k->record = k->unreadable = 0;
            if (++k->file == t->files)
                return -ENOENT;
        } else if (s->state != SEGMENT_CLOSED || k->record >= s->records) {
            k->number++;
            k->record = 0;
            k->tier->metrics->nvme_scrub_segments++;
        } else if (record_wanted(k, s)) {
            return 0;
        } else {
            k->record++;
        }
    }
    return -EAGAIN;
}

static bool device_busy(struct nvme_scrub *k)
{
    const struct nvme_device *d = &k->tier->devices[k->file];
    uint64_t now = uv_now(k->tier->loop);

    if (d->in_flight == 0 && d->reads_waiting == 0) {
        k->busy_since_ms = 0;
        return false;
    }
    if (k->busy_since_ms == 0)
        k->busy_since_ms = now;
    if (now - k->busy_since_ms < BUSY_MAX_MS)
        return true;
    k->busy_since_ms = now;
    return false;
}

static void check_start(struct nvme_scrub *k)
{
    uint64_t now = uv_hrtime();

    if (k->due_ns + BURST_NS < now)
        k->due_ns = now;
    k->due_ns += (uint64_t)((double)nvme_stride(k->want.bytes) * 1e9 / (double)k->rate);
    if (nvme_check(k->tier, &k->check) < 0)
        wake_in(k, BUSY_MS); /* no memory, or a full queue */
}

static void timer_cb(uv_timer_t *timer)
{
    struct tier *t = timer->data;
    struct nvme_scrub *k = &t->scrub;
    int rc;

    if (t->closing)
        return; /* the index may be gone */
    if (nvme_recovering(t)) {
        wake_in(k, RECOVERING_MS);
        return;
    }
    if (k->file == UINT_MAX)
        pass_begin(k);
    rc = cursor_next(k);
    if (rc == -ENOENT)
        pass_end(k);
    else if (rc == -EAGAIN)
        wake_in(k, 1);
    else if (device_busy(k))
        wake_in(k, BUSY_MS);
    else
        check_start(k);
}

void nvme_scrub_start(struct tier *t, uint64_t rate, uint64_t interval_ms)
{
    struct nvme_scrub *k = &t->scrub;

    if (rate == 0)
        return;
    *k = (struct nvme_scrub){.tier = t, .rate = rate, .interval_ms = interval_ms, .file = UINT_MAX};
    wake_in(k, interval_ms < FIRST_MS ? interval_ms : FIRST_MS);
}
