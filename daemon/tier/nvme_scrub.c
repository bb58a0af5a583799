/* The scrub: reads what lies in sealed segments, slowly and behind all other work, and verifies
 * header and payload, so that a block that has gone bad is found before somebody needs it.
 *
 * One piece at a time is read, by the pool, with the lowest I/O priority, into the one buffer. What
 * a record should hold the index tells, not the record. */
#include "daemon/tier/nvme.h"

#include "daemon/base/log.h"
#include "daemon/format/io.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/ioprio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <xxhash.h>
#if defined(__x86_64__)
#include <xxh_x86dispatch.h> /* the widest vectors that this CPU has */
#endif

#define ROOM "tier"
#define PIECE_BYTES (1u << 20)
#define FIRST_MS 60000u   /* after the start, at most: whoever starts has other work to do */
#define BUSY_MS 20u       /* to the next look at a busy device, */
#define BUSY_MAX_MS 1000u /* which is read from all the same after this long */
#define RECOVERING_MS 1000u
#define BURST_NS 100000000u /* time that was not used is not saved up */
#define STEPS_TURN 8192u    /* of the cursor in a turn of the loop */
#define UNREADABLE_MAX 4u   /* records in a row, then the device is at fault and not they */

struct nvme_scrub {
    struct tier *tier;
    uv_timer_t timer;
    uv_work_t work;
    uint64_t rate, interval_ms;
    uint8_t *buffer;
    XXH3_state_t *hash;
    /* The pass. */
    uint64_t begun_ms, due_ns, busy_since_ms;
    unsigned file, unreadable;
    uint32_t number, record;
    /* The record that is being read. */
    struct segment *segment; /* NULL: none is */
    uint64_t owner, offset, end, done;
    struct tier_described want;
    struct nvme_record_header header; /* as it should be */
    uint64_t sum;
    bool again, header_bad, repairing;
    int status;
    int fd;
    size_t piece;
};

static void timer_cb(uv_timer_t *timer);

static void step_in(struct nvme_scrub *k, uint64_t ms)
{
    (void)uv_timer_start(&k->timer, timer_cb, ms, 0); /* refuses a closing handle only */
}

/* ---- in the pool ---- */

static bool header_right(const struct nvme_scrub *k)
{
    const struct nvme_record_header *w = &k->header;
    struct nvme_record_header h;

    return nvme_record_header_decode(k->buffer, &h) == 0 &&
           memcmp(h.uuid, w->uuid, sizeof(h.uuid)) == 0 && h.segment == w->segment &&
           h.record == w->record && h.generation == w->generation && h.sequence == w->sequence &&
           h.payload_bytes == w->payload_bytes && h.checksum == w->checksum && h.part == w->part &&
           h.key_bytes == w->key_bytes && memcmp(h.key, w->key, h.key_bytes) == 0 &&
           memcmp(h.fingerprint, w->fingerprint, sizeof(h.fingerprint)) == 0;
}

static void work_cb(uv_work_t *work)
{
    struct nvme_scrub *k = work->data;
    long before = syscall(SYS_ioprio_get, IOPRIO_WHO_PROCESS, 0);
    uint64_t payload = NVME_PAGE + k->want.bytes, from = k->done == 0 ? NVME_PAGE : 0, to;

    /* where the scheduler knows no priorities nothing is lost */
    (void)syscall(SYS_ioprio_set, IOPRIO_WHO_PROCESS, 0, IOPRIO_PRIO_VALUE(IOPRIO_CLASS_IDLE, 0));
    k->status = io_read(k->fd, k->buffer, k->piece, k->offset + k->done);
    if (k->status == -ENODATA)
        k->status = -EIO;
    if (before >= 0)
        (void)syscall(SYS_ioprio_set, IOPRIO_WHO_PROCESS, 0, (int)before);
    if (k->status < 0)
        return;
    if (k->done == 0) {
        k->header_bad = !header_right(k);
        (void)XXH3_64bits_reset(k->hash);
    }
    to = payload - k->done < k->piece ? payload - k->done : k->piece;
    (void)XXH3_64bits_update(k->hash, k->buffer + from, to - from);
    k->done += k->piece;
    if (k->done == k->end)
        k->sum = XXH3_64bits_digest(k->hash);
}

/* ---- what was found ---- */

static void record_bad(struct nvme_scrub *k, const char *what)
{
    struct tier *t = k->tier;
    struct segment *s = k->segment;

    t->metrics->nvme_scrub_bad++;
    log_error(ROOM, "scrub-found", "path=%s offset=%" PRIu64 " bytes=%" PRIu64 ": %s",
              t->devices[s->file].file.path, k->offset, k->want.bytes, what);
    nvme_quarantine_add(t, s, k->record);
}

/* The part's bytes are gone: it is a miss from now on. */
static void record_lost(struct nvme_scrub *k)
{
    const struct segment *s = k->segment;

    k->tier->callbacks.lost(k->tier->callbacks.ctx, k->owner,
                            segment_loc(&k->tier->segments, s, k->record));
}

static void go_on(struct nvme_scrub *k, bool record_done)
{
    struct tier *t = k->tier;
    uint64_t now = uv_hrtime();

    if (record_done) {
        segment_read_end(&t->segments, k->segment);
        k->segment = NULL;
        k->record++;
    }
    if (!t->closing)
        step_in(k, k->due_ns > now ? (k->due_ns - now) / 1000000 : 0);
}

static void repaired_cb(void *ctx, int status)
{
    struct nvme_scrub *k = ctx;

    (void)status; /* told, and tried again by the next pass */
    k->repairing = false;
    go_on(k, true);
}

/* Whether this record is done with, as soon as nothing in it is being repaired. */
static bool record_judge(struct nvme_scrub *k)
{
    struct tier *t = k->tier;
    const struct segment *s = k->segment;

    if (s->states[k->record] != RECORD_LIVE)
        return true; /* forgotten meanwhile: nobody's bytes */
    if (k->status < 0 && !k->again) {
        k->again = true;
        k->done = 0;
        return false;
    }
    if (k->status < 0) {
        t->metrics->nvme_read_errors++;
        if (++k->unreadable == UNREADABLE_MAX)
            log_error(ROOM, "scrub-stopped", "path=%s: %u parts in a row can't be read: %s",
                      t->devices[s->file].file.path, UNREADABLE_MAX, strerror(-k->status));
        record_bad(k, strerror(-k->status));
        record_lost(k);
        return true;
    }
    k->unreadable = 0;
    if (k->done < k->end)
        return false;
    if (k->sum != k->want.checksum) {
        t->metrics->nvme_corrupt++;
        record_bad(k, "the checksum does not agree");
        record_lost(k);
    } else if (k->header_bad) {
        record_bad(k, "the header is damaged; the payload is sound");
        k->repairing = nvme_repair(t, k->segment, k->record, repaired_cb, k) == 0;
    }
    return true;
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
    log_debug(ROOM, "scrubbed", "seconds=%.1f", (double)took / 1000.0);
    k->file = UINT_MAX;
    step_in(k, took < k->interval_ms ? k->interval_ms - took : 0);
}

static bool record_wanted(struct nvme_scrub *k, struct segment *s)
{
    struct tier *t = k->tier;

    if (s->states[k->record] != RECORD_LIVE ||
        !t->callbacks.describe(t->callbacks.ctx, s->owners[k->record], &k->want))
        return false;
    k->owner = s->owners[k->record];
    nvme_record_header_of(t, s, k->record, &k->want, &k->header);
    k->segment = s;
    k->offset = segment_record_offset(&t->segments, s, k->record);
    k->end = nvme_stride(k->want.bytes);
    k->done = 0;
    k->again = false;
    k->fd = t->devices[s->file].file.fd;
    segment_read_begin(s);
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
        } else if (s->state != SEGMENT_SEALED || k->record >= s->records) {
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

static void work_done_cb(uv_work_t *work, int status)
{
    struct nvme_scrub *k = work->data;
    struct tier *t = k->tier;
    bool record_done;

    assert(status == 0); /* nobody cancels */
    (void)status;
    if (k->status == 0)
        t->metrics->nvme_scrub_bytes += k->piece;
    record_done = t->closing || record_judge(k);
    if (!k->repairing)
        go_on(k, record_done);
    nvme_release(t);
}

static void piece_start(struct nvme_scrub *k)
{
    uint64_t now = uv_hrtime(), left = k->end - k->done;
    int rc;

    k->piece = left < PIECE_BYTES ? left : PIECE_BYTES;
    if (k->due_ns + BURST_NS < now)
        k->due_ns = now;
    k->due_ns += (uint64_t)((double)k->piece * 1e9 / (double)k->rate);
    k->work.data = k;
    nvme_hold(k->tier);
    rc = uv_queue_work(k->tier->loop, &k->work, work_cb, work_done_cb);
    assert(rc == 0); /* refuses a missing callback only */
    (void)rc;
}

static void timer_cb(uv_timer_t *timer)
{
    struct nvme_scrub *k = timer->data;
    int rc = 0;

    if (k->tier->closing)
        return; /* who could tell what lies there may be gone */
    if (nvme_recovering(k->tier)) {
        step_in(k, RECOVERING_MS);
        return;
    }
    if (k->file == UINT_MAX)
        pass_begin(k);
    if (!k->segment)
        rc = cursor_next(k);
    if (rc == -ENOENT)
        pass_end(k);
    else if (rc == -EAGAIN)
        step_in(k, 1);
    else if (device_busy(k))
        step_in(k, BUSY_MS);
    else
        piece_start(k);
}

/* ---- life ---- */

static void scrub_free(struct nvme_scrub *k)
{
    XXH3_freeState(k->hash);
    free(k->buffer);
    free(k);
}

int nvme_scrub_open(struct tier *t, uint64_t rate, uint64_t interval_ms)
{
    struct nvme_scrub *k;

    if (rate == 0 || !t->callbacks.describe || !t->callbacks.lost)
        return 0;
    k = calloc(1, sizeof(*k));
    if (!k)
        return -ENOMEM;
    k->tier = t;
    k->rate = rate;
    k->interval_ms = interval_ms;
    k->file = UINT_MAX;
    k->buffer = aligned_alloc(NVME_PAGE, PIECE_BYTES);
    k->hash = XXH3_createState();
    if (!k->buffer || !k->hash || uv_timer_init(t->loop, &k->timer) < 0) {
        scrub_free(k);
        return -ENOMEM;
    }
    k->timer.data = k;
    uv_unref((uv_handle_t *)&k->timer);
    t->scrub = k;
    step_in(k, interval_ms < FIRST_MS ? interval_ms : FIRST_MS);
    return 0;
}

static void closed_cb(uv_handle_t *handle)
{
    scrub_free(handle->data);
}

void nvme_scrub_close(struct tier *t)
{
    if (t->scrub)
        uv_close((uv_handle_t *)&t->scrub->timer, closed_cb);
}
