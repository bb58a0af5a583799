#include "daemon/tier/nvme.h"

#include "daemon/base/log.h"
#include "daemon/config/config.h"
#include "daemon/config/unit.h"
#include "daemon/format/take.h"
#include "proto/errors.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MODULE "tier"
#define DEPTH_MAX 32768u /* of all files together: a ring's bound */

static_assert(CONFIG_MAX_PATHS <= NVME_LOC_FILES, "each file has a number in tier_place.loc");

/* ---- files ---- */

static void devices_close(struct tier *t)
{
    for (unsigned i = 0; i < t->files; i++) {
        if (t->devices[i].file.path)
            nvme_file_close(&t->devices[i].file);
        uv_mutex_destroy(&t->devices[i].sync_lock);
    }
}

static void device_init(struct tier *t, struct nvme_device *d)
{
    int rc = uv_mutex_init(&d->sync_lock);

    assert(rc == 0); /* a plaintext one needs nothing that could fail */
    (void)rc;
    d->tier = t;
    d->file.fd = -1;
    fair_queue_init(&d->reads, NVME_BURST_BYTES);
    list_init(&d->idle_reads);
    list_init(&d->unchecked);
    list_init(&d->unsynced);
    list_init(&d->syncing);
}

static void device_lose(struct nvme_device *d, const char *path, int rc, const char *text)
{
    /* first, as the path may be the file's own */
    log_error(MODULE, "file-lost", "path=%s: %s; going on without it%s", path, text,
              rc == -EROFS ? config_unit_hint() : "");
    if (d->file.path)
        nvme_file_close(&d->file);
    d->file.segments = 0;
    d->degraded = true;
    snprintf(d->reason, sizeof(d->reason), "left out until the next start: %s", text);
    d->tier->metrics->nvme_files_lost++;
}

/* Refuses a mistake of the configuration; leaves out a device that fails, or that is not there
 * while others are. */
static int devices_open(struct tier *t, const struct config *c, struct ucm_error *e)
{
    bool any = config_nvme_there(c);

    t->metrics->nvme_files_lost = 0;
    for (unsigned i = 0; i < t->files; i++) {
        const char *path = c->nvme_paths.item[i];
        struct ucm_error why = {0};
        int rc = nvme_file_open(path, c->nvme_state ? c->nvme_state : "", c->nvme_size,
                                c->nvme_segment, &t->devices[i].file, &why);

        if (take_failed(rc) || (rc == -ENOENT && any)) {
            device_lose(&t->devices[i], path, rc, why.text);
        } else if (rc < 0) {
            if (why.code == 0)
                ucm_error_set(&why, UCM_WIRE_IO, "%s: %s", path, strerror(-rc));
            *e = why;
            return rc;
        }
        t->metrics->nvme_damaged_pages += t->devices[i].file.damaged;
    }
    return 0;
}

/* Later than all epochs that the files know of, and than `last`. */
static int devices_start(struct tier *t, uint64_t last, uint64_t *epoch, struct ucm_error *e)
{
    for (unsigned i = 0; i < t->files; i++)
        if (t->devices[i].file.state.epoch > last)
            last = t->devices[i].file.state.epoch;
    if (last + 1 >= 1u << NVME_EPOCH_BITS) {
        ucm_error_set(e, UCM_WIRE_IO, "the files of nvme.paths are worn out: delete them");
        return -EOVERFLOW;
    }
    for (unsigned i = 0; i < t->files; i++) {
        struct nvme_device *d = &t->devices[i];
        int rc = d->file.fd < 0 ? 0 : nvme_file_start(&d->file, last + 1);

        if (rc < 0)
            device_lose(d, d->file.path, rc, strerror(-rc));
    }
    *epoch = last + 1;
    return 0;
}

/* When both state pages of a file are lost its segments give the epoch. There may have been a later
 * one, in which nothing was written but a namespace purged. */
static int epoch_check(struct tier *t, uint64_t *epoch, struct ucm_error *e)
{
    uint64_t named = ns_records_last_sequence(&t->ns_records) >> (64 - NVME_EPOCH_BITS);

    return named < *epoch ? 0 : devices_start(t, named, epoch, e);
}

static int segments_init(struct tier *t, uint64_t epoch)
{
    uint64_t counts[NVME_LOC_FILES];

    for (unsigned i = 0; i < t->files; i++)
        counts[i] = t->devices[i].file.segments;
    t->record_sequence = epoch << (64 - NVME_EPOCH_BITS);
    return segment_table_init(&t->segments, t->segment_bytes, t->record_sequence, counts, t->files);
}

/* ---- engines ---- */

static unsigned clamp(unsigned v, unsigned min, unsigned max)
{
    return v < min ? min : v > max ? max : v;
}

static int engines_open(struct tier *t, const struct config *c, struct ucm_error *e)
{
    int fds[NVME_LOC_FILES];
    int rc;

    for (unsigned i = 0; i < t->files; i++)
        fds[i] = t->devices[i].file.fd;
    t->ring_depth = clamp(c->nvme_queue_depth, 1, (DEPTH_MAX - NVME_SCANS) / t->files - 1);
    t->threads_depth = clamp(2 * c->nvme_threads / t->files, 1, t->ring_depth);
    t->writes_max = clamp(t->ring_depth / 4, 1, NVME_WRITES_MAX);
    if (c->nvme_io == CONFIG_IO_THREADS)
        return 0;
    rc = uring_open(t->loop, fds, t->files, (t->ring_depth + 1) * t->files + NVME_SCANS, &t->ring);
    if (rc == 0)
        return 0;
    if (c->nvme_io == CONFIG_IO_URING && rc != -ENODEV) {
        ucm_error_set(e, UCM_WIRE_IO,
                      "io_uring is refused here (%s): allow it, or set nvme.io to auto or threads",
                      strerror(-rc));
        return rc;
    }
    log_warn(MODULE, "io-uring-refused", "error=%s engine=threads", strerror(-rc));
    return 0;
}

/* ---- operations ---- */

static int ops_init(struct tier *t)
{
    size_t reads = (size_t)t->ring_depth * t->files, writes = (size_t)t->writes_max * t->files;

    t->read_ops = calloc(reads, sizeof(t->read_ops[0]));
    t->write_ops = calloc(writes, sizeof(t->write_ops[0]));
    t->headers = aligned_alloc(NVME_PAGE, writes * NVME_HEADERS_BYTES);
    if (!t->read_ops || !t->write_ops || !t->headers)
        return -ENOMEM;
    for (size_t i = 0; i < reads; i++) {
        t->read_ops[i].tier = t;
        t->read_ops[i].finish_cb = nvme_read_finish;
        list_push_back(&t->read_pool, &t->read_ops[i].link);
    }
    for (size_t i = 0; i < writes; i++) {
        struct nvme_op *op = &t->write_ops[i];

        op->tier = t;
        op->finish_cb = nvme_write_finish;
        op->e.write = true;
        op->headers = t->headers + i * NVME_HEADERS_BYTES;
        list_push_back(&t->write_pool, &op->link);
    }
    return 0;
}

/* ---- opening and closing ---- */

static bool nvme_wanted(const struct config *c)
{
    return c->nvme_paths.n > 0;
}

static int nvme_config_check(const struct config *c, struct config_error *e)
{
    for (size_t i = 0; i < c->nvme_paths.n; i++) {
        struct ucm_error why = {0};
        int rc = nvme_file_check(c->nvme_paths.item[i], c->nvme_segment, &why);

        if (rc < 0 && rc != -ENOENT && !take_failed(rc)) /* these are left out */
            return config_fail(c, e, "nvme.paths", "nvme.paths: %s", why.text);
    }
    if (c->nvme_io == CONFIG_IO_URING && uring_check() < 0)
        return config_fail(c, e, "nvme.io",
                           "nvme.io: io_uring is refused here (%s); allow it, or write auto or "
                           "threads",
                           strerror(-uring_check()));
    return 0;
}

/* The order is that of need: what was gathered, segments to be emptied, and then the writes that go
 * there. */
static void iteration_cb(struct tier *t, unsigned due)
{
    if (due & NVME_TURN_GATHERED)
        nvme_iteration_want(t, 0); /* the first iteration without a push flushes */
    else
        checksum_flush(&t->checksums);
    if (due & NVME_TURN_MOVE)
        nvme_move_go_on(t);
    if (due & NVME_TURN_BEGUN)
        nvme_move_check(t);
    nvme_pump_writes(t);
    for (unsigned i = 0; (due & NVME_TURN_SYNCS) && i < t->files; i++)
        nvme_sync_pump(t, &t->devices[i]);
    if (due & NVME_TURN_RECOVERY)
        nvme_recover_go_on(t);
    if (due & NVME_TURN_CHECKPOINT)
        nvme_checkpoint_go_on(t);
}

static void tier_free(struct tier *t);

static struct tier *tier_new(uv_loop_t *loop, const struct config *c,
                             const struct tier_callbacks *callbacks, struct metrics *metrics)
{
    struct tier *t = calloc(1, sizeof(*t));

    if (!t)
        return NULL;
    t->devices = calloc(c->nvme_paths.n, sizeof(t->devices[0]));
    if (!t->devices) {
        free(t);
        return NULL;
    }
    t->loop = loop;
    t->callbacks = *callbacks;
    t->metrics = metrics;
    t->iteration.run_cb = iteration_cb;
    t->free_cb = tier_free;
    t->files = (unsigned)c->nvme_paths.n;
    t->segment_bytes = c->nvme_segment;
    t->backlog_max = c->nvme_write_queue_size;
    t->known_most = NVME_KNOWN_BYTES;
    t->mover.tier = t;
    t->mover.percent = c->nvme_rewrite;
    t->quarantine_percent = c->nvme_quarantine;
    list_init(&t->summed);
    list_init(&t->to_encrypt);
    list_init(&t->read_pool);
    list_init(&t->write_pool);
    fair_queue_init(&t->ns_writer.queue, NVME_PAGE);
    list_init(&t->recovery.pool);
    list_init(&t->recovery.reading);
    list_init(&t->recovery.duplicates);
    list_init(&t->mover.moved);
    for (unsigned i = 0; i < t->files; i++)
        device_init(t, &t->devices[i]);
    return t;
}

static void tier_delete(struct tier *t)
{
    free(t->devices);
    free(t);
}

static void handle_closed_cb(uv_handle_t *handle)
{
    struct tier *t = handle->data;

    if (--t->handles == 0)
        tier_delete(t);
}

#define HANDLES 5

static void handles_list(struct tier *t, uv_handle_t *out[HANDLES])
{
    out[0] = (uv_handle_t *)&t->iteration.idle;
    out[1] = (uv_handle_t *)&t->health_timer;
    out[2] = (uv_handle_t *)&t->scrub_timer;
    out[3] = (uv_handle_t *)&t->checkpoint_timer;
    out[4] = (uv_handle_t *)&t->look_timer;
}

static void handles_open(struct tier *t)
{
    uv_handle_t *all[HANDLES];

    (void)uv_idle_init(t->loop, &t->iteration.idle); /* none of them can fail */
    (void)uv_timer_init(t->loop, &t->health_timer);
    (void)uv_timer_init(t->loop, &t->scrub_timer);
    (void)uv_timer_init(t->loop, &t->checkpoint_timer);
    (void)uv_timer_init(t->loop, &t->look_timer);
    handles_list(t, all);
    for (unsigned i = 0; i < HANDLES; i++)
        all[i]->data = t;
    for (unsigned i = 1; i < HANDLES; i++)
        uv_unref(all[i]); /* no timer keeps the event loop alive */
    t->handles = HANDLES;
}

/* Also of a tier that was opened in part. */
static void tier_free(struct tier *t)
{
    uv_handle_t *all[HANDLES];

    uring_close(t->ring);
    nvme_recover_close(t);
    nvme_checkpoint_close(t);
    checksum_pool_close(&t->checksums);
    free(t->read_ops);
    free(t->write_ops);
    free(t->headers);
    nvme_known_close(t);
    segment_table_close(&t->segments);
    ns_records_close(&t->ns_records);
    devices_close(t);
    if (t->handles == 0) {
        tier_delete(t);
        return;
    }
    handles_list(t, all);
    for (unsigned i = 0; i < HANDLES; i++)
        uv_close(all[i], handle_closed_cb);
}

/* All that may fail. */
static int parts_open(struct tier *t, const struct config *c, struct ucm_error *e)
{
    uint64_t epoch;
    int rc = devices_open(t, c, e);

    if (rc == 0)
        rc = devices_start(t, 0, &epoch, e);
    if (rc == 0)
        rc = nvme_ns_records_open(t);
    if (rc == 0)
        rc = epoch_check(t, &epoch, e);
    if (rc == 0)
        rc = segments_init(t, epoch);
    if (rc == 0)
        rc = engines_open(t, c, e);
    if (rc == 0)
        rc = checksum_pool_init(&t->checksums, t->loop, c->nvme_threads, nvme_sum, nvme_sum_bytes,
                                nvme_checksum_done, t);
    if (rc == 0)
        rc = ops_init(t);
    return rc == 0 ? nvme_recover_open(t) : rc;
}

static int nvme_open(struct uv_loop_s *loop, const struct config *config,
                     const struct tier_callbacks *callbacks, struct metrics *metrics,
                     struct tier **out, struct ucm_error *e)
{
    struct tier *t = tier_new(loop, config, callbacks, metrics);
    int rc;

    if (!t)
        return -ENOMEM;
    metrics->nvme_bytes_used = 0;
    rc = parts_open(t, config, e);
    if (rc < 0) {
        tier_free(t);
        if (rc == -ENOMEM)
            ucm_error_set(e, UCM_WIRE_NO_MEMORY, "no memory for the nvme tier");
        return rc;
    }
    handles_open(t);
    nvme_health_init(t);
    nvme_scrub_start(t, config->nvme_scrub, config->nvme_scrub_interval_ms);
    nvme_recover_start(t);
    *out = t;
    return 0;
}

static void nvme_close(struct tier *t)
{
    if (!t)
        return;
    assert((t->backlog_bytes == 0 && t->reads_queued == 0) || t->mover.segment ||
           nvme_recovering(t) || t->checks > 0);
    nvme_hold(t);
    t->closing = true;
    nvme_release(t);
}

static void nvme_buffer_add(struct tier *t, uint32_t buffer, void *base, uint64_t bytes)
{
    if (t->ring)
        uring_buffer_add(t->ring, buffer, base, bytes);
}

static int nvme_submit(struct tier *t, struct tier_io *io)
{
    assert((uintptr_t)io->data % NVME_PAGE == 0);
    if (io->bytes == 0)
        return -EINVAL;
    if (io->op == TIER_SYNC)
        return nvme_sync_part(t, io);
    io->scratch[NVME_IO_SUMS] = NULL;
    io->scratch[NVME_IO_ENCRYPTED] = NULL;
    return io->op == TIER_WRITE ? nvme_write(t, io) : nvme_read(t, io, false);
}

static void nvme_stats(struct tier *t, struct tier_stats *out)
{
    *out = (struct tier_stats){
        .capacity_bytes = t->segments.capacity_bytes,
        .used_bytes = t->segments.used_bytes,
        .queued = t->reads_queued + t->writes_queued,
        .recovering = nvme_recovering(t),
        .segments = (uint32_t)t->recovery.segments,
        .segments_recovered = (uint32_t)t->recovery.segments_done,
    };
    for (unsigned i = 0; i < t->files; i++) {
        const struct nvme_device *d = &t->devices[i];

        out->in_flight += d->in_flight;
        if (d->degraded && !out->degraded) {
            out->degraded = true;
            snprintf(out->reason, sizeof(out->reason), "%s", d->reason);
        }
    }
    out->degraded |= ns_records_trouble(&t->ns_records, out->records, sizeof(out->records));
    snprintf(out->engine, sizeof(out->engine), "%s", nvme_ring_usable(t) ? "io_uring" : "threads");
}

static uint64_t nvme_sequence(struct tier *t, uint64_t loc)
{
    struct segment *s;
    uint32_t record;

    return segment_find(&t->segments, loc, 0, &s, &record) < 0 ? 0 : s->record_sequences[record];
}

static void nvme_encrypted_by(const struct tier *t, const uint8_t *key_id, uint64_t *parts,
                              uint64_t *bytes)
{
    const struct segment_keyed *k = &t->segments.keyed[key_id ? segment_tag(key_id) : 0];

    *parts = k->records;
    *bytes = k->bytes;
}

static int nvme_sync(struct tier *t)
{
    int rc = 0;

    for (unsigned i = 0; i < t->files; i++) {
        struct nvme_device *d = &t->devices[i];
        int one = d->file.fd < 0 ? 0 : nvme_device_sync(d);

        if (d->syncs_failed > 0) /* also earlier: what that lost is not found again */
            one = -EIO;
        rc = rc == 0 ? one : rc;
    }
    if (!t->ns_writer.busy && ns_records_restore(&t->ns_records) < 0)
        rc = rc == 0 ? -EIO : rc;
    nvme_checkpoint_last(t);
    return rc;
}

const struct tier_ops tier_nvme = {
    .name = "nvme",
    .wanted = nvme_wanted,
    .check = nvme_config_check,
    .open = nvme_open,
    .close = nvme_close,
    .buffer_add = nvme_buffer_add,
    .submit = nvme_submit,
    .forget = nvme_forget,
    .stats = nvme_stats,
    .encrypted = nvme_encrypted_by,
    .sequence = nvme_sequence,
    .ns_record = nvme_ns_write,
    .sync = nvme_sync,
};
