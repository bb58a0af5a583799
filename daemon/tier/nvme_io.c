#include "daemon/tier/nvme.h"

#include "daemon/base/kill_point.h"
#include "daemon/base/log.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>

#define MODULE "tier"

static_assert(sizeof(void *) >= sizeof(uint64_t), "scratch holds sequences");

static struct segment *io_segment(const struct tier_io *io)
{
    return io->scratch[NVME_IO_SEGMENT];
}

static uint32_t io_record(const struct tier_io *io)
{
    return (uint32_t)(uintptr_t)io->scratch[NVME_IO_RECORD];
}

static void io_record_set(struct tier_io *io, struct segment *s, uint32_t record)
{
    io->scratch[NVME_IO_SEGMENT] = s;
    io->scratch[NVME_IO_RECORD] = (void *)(uintptr_t)record;
}

static bool io_moved(const struct tier_io *io)
{
    return io->scratch[NVME_IO_MOVED] != NULL;
}

static void pump_reads(struct tier *t, struct nvme_device *d);
static void reads_end(struct tier *t, struct tier_io **ios, const uint64_t *sums, unsigned n);

/* ---- reads ---- */

static void read_queue(struct nvme_device *d, struct tier_io *io)
{
    unsigned priority = io->priority < NVME_PRIORITIES ? io->priority : NVME_PRIORITIES - 1;

    if (io->scratch[NVME_IO_IDLE])
        list_push_back(&d->idle_reads, &io->link);
    else
        fair_queue_push(&d->reads, &io->who, NVME_PRIORITIES - 1 - priority, &io->link, false);
    d->reads_waiting++;
}

int nvme_read(struct tier *t, struct tier_io *io, bool idle)
{
    struct nvme_device *d;
    struct segment *s;
    uint32_t record;

    if (segment_find(&t->segments, io->place.loc, io->bytes, &s, &record) < 0) {
        t->metrics->nvme_read_errors++;
        return -ESTALE;
    }
    if (io->op == TIER_READ_LAYERS && !nvme_sums_kept(io))
        return -ENODATA;
    if (t->reads_queued >= NVME_READS_QUEUED_MAX)
        return -EAGAIN;
    io->scratch[NVME_IO_ENCRYPTED] = NULL;
    if (io->place.encrypted && !io->check && nvme_key_awaited(t, io->name.fingerprint))
        return -EINPROGRESS;
    if (io->place.encrypted && nvme_encrypted_read_begin(io) < 0)
        return -EAGAIN;
    segment_read_begin(s);
    io_record_set(io, s, record);
    io->scratch[NVME_IO_IDLE] = idle ? io : NULL;
    if (io->op == TIER_READ_LAYERS)
        nvme_layers_begin(t, io);
    d = &t->devices[s->file];
    read_queue(d, io);
    if (io->small)
        d->narrow_writes = NVME_NARROW_WRITES;
    t->reads_queued++;
    pump_reads(t, d);
    return 0;
}

/* It stays in its queue: a read of layers has several operations. */
static struct tier_io *reads_first(struct nvme_device *d)
{
    struct list *node = fair_queue_first(&d->reads);

    return LIST_ENTRY(node ? node : d->idle_reads.next, struct tier_io, link);
}

static bool device_may_read(struct tier *t, const struct nvme_device *d)
{
    if (d->reads_waiting == 0 || d->in_flight >= nvme_device_depth(t))
        return false;
    return !fair_contended(&d->reads.fair, NVME_FAIR_WINDOW) || d->reading < NVME_FAIR_BYTES ||
           d->in_flight - d->writes < NVME_FAIR_READS;
}

/* Where the read's next operation goes, at most two pieces of memory, and from where in the record.
 * False: another one follows. */
static bool read_next(struct tier_io *io, struct iovec *to, unsigned *n, uint64_t *from)
{
    *n = 1;
    if (io->op == TIER_READ_LAYERS)
        return nvme_layers_next(io, to, from);
    if (nvme_encrypted(io)) {
        *n = nvme_encrypted_read_next(io, to);
        *from = 0;
        return true;
    }
    *to = (struct iovec){.iov_base = io->data, .iov_len = nvme_padded(io->bytes)};
    *from = NVME_PAGE;
    return true;
}

static void pump_reads(struct tier *t, struct nvme_device *d)
{
    while (device_may_read(t, d)) {
        struct nvme_op *op = LIST_ENTRY(list_pop_front(&t->read_pool), struct nvme_op, link);
        struct tier_io *io = reads_first(d);
        struct segment *s = io_segment(io);
        uint64_t from;

        if (read_next(io, op->iov, &op->e.iovs, &from)) {
            list_remove(&io->link);
            d->reads_waiting--;
            t->reads_queued--;
        }
        op->bytes = op->iov[op->e.iovs - 1].iov_len;
        if (!io->scratch[NVME_IO_IDLE])
            fair_queue_charge(&d->reads, &io->who, op->bytes, &io->got);
        d->reading += op->bytes;
        d->in_flight++;
        op->ios[0] = io;
        op->e.iov = op->iov;
        op->e.buffer = io->buffer;
        op->e.idle = io->scratch[NVME_IO_IDLE] != NULL;
        nvme_op_begin(op, s->file, segment_record_offset(&t->segments, s, io_record(io)) + from);
    }
}

static void read_failed(struct tier *t, struct tier_io *io, int status)
{
    nvme_encrypted_drop(t, io);
    segment_read_end(&t->segments, io_segment(io));
    io->done_cb(io, status);
}

static void read_arrived(struct tier *t, struct tier_io *io, int status)
{
    bool encrypted = nvme_encrypted(io);
    uint64_t sum;

    if (status == 0 && encrypted)
        status = nvme_encrypted_arrived(t, io);
    if (status == -EBADMSG && encrypted && io->op == TIER_READ) {
        sum = ~io->place.checksum;
        reads_end(t, &io, &sum, 1);
    } else if (status < 0) {
        read_failed(t, io, status);
    } else if (!encrypted && nvme_sum_bytes(io) <= CHECKSUM_SMALL) {
        sum = nvme_sum(io);
        reads_end(t, &io, &sum, 1);
    } else {
        checksum_push(&t->checksums, io, true);
    }
}

void nvme_read_finish(struct nvme_op *op, int status)
{
    struct tier *t = op->tier;
    struct tier_io *io = op->ios[0];
    struct nvme_device *d = &t->devices[op->e.file];

    nvme_hold(t);
    d->in_flight--;
    d->reading -= op->bytes;
    list_push_front(&t->read_pool, &op->link);
    if (status < 0) {
        nvme_op_log(op, "read-failed", status);
        t->metrics->nvme_read_errors++;
    }
    if (io->op != TIER_READ_LAYERS || nvme_layers_arrived(t, io, &status))
        read_arrived(t, io, status);
    pump_reads(t, d);
    nvme_pump_writes(t);
    nvme_release(t);
}

static int read_verify(struct tier *t, struct tier_io *io, uint64_t sum)
{
    struct segment *s = io_segment(io);

    if (sum == io->place.checksum) {
        s->used[io_record(io)] |= !io->check;
        t->metrics->nvme_reads += !io->scratch[NVME_IO_IDLE];
        t->metrics->nvme_read_bytes += io->scratch[NVME_IO_IDLE] ? 0 : io->bytes;
        return 0;
    }
    t->metrics->nvme_corrupt++;
    log_error(MODULE, "checksum-mismatch", "path=%s offset=%" PRIu64 " bytes=%" PRIu64 " part=%u",
              t->devices[s->file].file.path, segment_record_offset(&t->segments, s, io_record(io)),
              io->bytes, io->name.part);
    nvme_quarantine_add(t, s, io_record(io));
    return -EBADMSG;
}

/* ---- writes ---- */

int nvme_write(struct tier *t, struct tier_io *io)
{
    uint64_t bytes = nvme_padded(io->bytes);
    int rc;

    assert(io->name.key_bytes <= UCM_MAX_KEY_BYTES);
    if (!segment_writable(&t->segments))
        return -EROFS;
    if (io->bytes > NVME_SEGMENT_MAX || nvme_records(t->segment_bytes, nvme_stride(io->bytes)) == 0)
        return -EFBIG;
    if (t->backlog_bytes > 0 && t->backlog_bytes + bytes > t->backlog_max) {
        t->metrics->nvme_write_waits++;
        return -EAGAIN;
    }
    /* Numbered now and not when it is written: a purge knows by it what came before. */
    io->scratch[NVME_IO_SEQUENCE] = (void *)(uintptr_t)t->record_sequence++;
    io->scratch[NVME_IO_MOVED] = NULL;
    rc = io->encryption ? nvme_encrypted_write_begin(t, io) : 0;
    if (rc < 0)
        return rc;
    t->backlog_bytes += bytes;
    t->writes_queued++;
    if (!io->encryption)
        nvme_sums_reserve(io);
    if (io->bytes <= CHECKSUM_SMALL && !io->encryption) {
        io->place.checksum = nvme_sum(io);
        list_push_back(&t->summed, &io->link);
        nvme_iteration_want(t, 0);
    } else if (io->encryption) {
        nvme_encrypted_push(t, io);
    } else {
        checksum_push(&t->checksums, io, false);
        nvme_iteration_want(t, NVME_TURN_GATHERED);
    }
    return 0;
}

int nvme_write_moved(struct tier *t, struct tier_io *io, uint64_t sequence)
{
    int rc;

    io->scratch[NVME_IO_SEQUENCE] = (void *)(uintptr_t)sequence;
    io->scratch[NVME_IO_MOVED] = io;
    rc = io->encryption ? nvme_encrypted_write_begin(t, io) : 0;
    if (rc < 0)
        return rc;
    /* Not counted in the backlog: a caller that waits for that sees its own writes end only. */
    t->writes_queued++;
    io->place.encrypted = io->encryption;
    if (io->encryption)
        checksum_push(&t->checksums, io, true); /* again, and with the current key */
    else
        list_push_front(&t->summed,
                        &io->link); /* writes that wait for its segment wait behind it */
    return 0;
}

static void summed_fail(struct tier *t, struct tier_io *io, int status)
{
    list_remove(&io->link);
    t->writes_queued--;
    t->backlog_bytes -= io_moved(io) ? 0 : nvme_padded(io->bytes);
    t->metrics->nvme_write_dropped += !io_moved(io);
    nvme_sums_drop(io);
    nvme_encrypted_drop(t, io);
    io->done_cb(io, status);
}

static void write_take(struct tier *t, struct tier_io *io, uint64_t sum)
{
    if (!nvme_encrypted(io))
        io->place.checksum = sum;
    if (io_moved(io))
        list_push_front(&t->summed, &io->link);
    else
        list_push_back(&t->summed, &io->link);
    if (nvme_encrypted_status(io) < 0)
        summed_fail(t, io, nvme_encrypted_status(io));
}

static void reads_end(struct tier *t, struct tier_io **ios, const uint64_t *sums, unsigned n)
{
    for (unsigned i = 0; i < n; i++) {
        int status = ios[i]->op == TIER_READ_LAYERS ? nvme_layers_verify(t, ios[i], sums[i])
                                                    : read_verify(t, ios[i], sums[i]);

        nvme_encrypted_drop(t, ios[i]);
        segment_read_end(&t->segments, io_segment(ios[i]));
        ios[i]->done_cb(ios[i], status);
    }
}

void nvme_checksum_done(void *ctx, struct tier_io **ios, const uint64_t *sums, unsigned n)
{
    struct tier *t = ctx;

    nvme_hold(t);
    /* What is moved is as urgent as a read. */
    for (unsigned i = 0; i < n; i++) {
        if (ios[i]->op == TIER_WRITE)
            write_take(t, ios[i], sums[i]);
        else
            reads_end(t, &ios[i], &sums[i], 1);
    }
    nvme_pump_writes(t);
    nvme_release(t);
}

static struct tier_io *summed_first(const struct tier *t)
{
    return list_empty(&t->summed) ? NULL : LIST_ENTRY(t->summed.next, struct tier_io, link);
}

static bool device_may_write(struct tier *t, const struct nvme_device *d)
{
    unsigned max = t->writes_max;

    if (d->narrow_writes > 0 && max > NVME_NARROW_WRITES_MAX)
        max = NVME_NARROW_WRITES_MAX;
    return d->writes == 0 ||
           (d->reads_waiting == 0 && d->writes < max && d->in_flight < nvme_device_depth(t));
}

static int space_make(struct tier *t)
{
    uint64_t dropped;
    int rc = segment_reclaim(&t->segments, &t->callbacks, NVME_ITERATION_DROPS - t->iteration.drops,
                             &dropped);

    nvme_iteration_dropped(t, dropped);
    if (rc == -EAGAIN)
        nvme_iteration_want(t, 0);
    t->metrics->nvme_reclaimed_segments += rc == 0;
    t->metrics->nvme_bytes_used = t->segments.used_bytes;
    return rc;
}

/* The file that the next write goes to, by turns, leaving it `keep` free segments. -EAGAIN: wait
 * for something to end; -ENOSPC, -EROFS: there is none. */
static int device_choose(struct tier *t, uint64_t stride, uint32_t keep, unsigned *out)
{
    bool wait = false;

    if (!segment_writable(&t->segments))
        return -EROFS;
    for (unsigned i = 0; i < t->files; i++) {
        unsigned file = (t->next_file + i) % t->files;

        if (!segment_has_space(&t->segments, file, stride, keep))
            continue;
        if (device_may_write(t, &t->devices[file])) {
            t->next_file = (file + 1) % t->files;
            *out = file;
            return 0;
        }
        wait = true;
    }
    return wait ? -EAGAIN : -ENOSPC;
}

/* As device_choose, reclaiming once if need be. Space may appear once a write has ended, or a
 * segment that is being emptied is free. A part that is moved makes no space for itself: others
 * would be evicted for it. */
static int space_find(struct tier *t, const struct tier_io *io, bool *full, unsigned *file)
{
    uint64_t stride = nvme_stride(io->bytes);
    bool moving = t->mover.segment, moved = io_moved(io);
    int rc = moved && t->closing ? -ECANCELED : device_choose(t, stride, moving && !moved, file);

    if (rc != -ENOSPC || *full || moved)
        return rc;
    if (moving) {
        t->stalled = true;
        return -EAGAIN;
    }
    rc = space_make(t);
    if (rc == 0)
        return device_choose(t, stride, 0, file);
    if (rc == -EAGAIN)
        return rc;
    if (t->writes_in_flight > 0 || nvme_recovering(t)) {
        t->stalled = true;
        return -EAGAIN;
    }
    *full = true;
    return rc;
}

/* Adds the first summed write to op; its record has been reserved. */
static void merge_add(struct nvme_op *op, uint32_t record)
{
    struct tier *t = op->tier;
    struct tier_io *io = LIST_ENTRY(list_pop_front(&t->summed), struct tier_io, link);
    uint8_t *page = op->headers + (size_t)NVME_PAGE * (1 + op->n);
    struct tier_described d = {
        .name = io->name, .bytes = io->bytes, .checksum = io->place.checksum};
    struct nvme_record_header header;

    segment_sequence_set(op->segment, record, (uintptr_t)io->scratch[NVME_IO_SEQUENCE]);
    nvme_record_header_of(t, op->segment, record, &d, &header);
    header.layer_sums = io->scratch[NVME_IO_SUMS];
    header.layer_bytes = header.layer_sums ? io->layer_bytes : 0;
    if (nvme_encrypted(io))
        nvme_encrypted_header(io, &header, page);
    else
        nvme_record_header_encode(&header, page);
    segment_tag_set(op->segment, record, nvme_encrypted(io) ? segment_tag(header.key_id) : 0);
    nvme_sums_drop(io);
    op->e.iov[op->e.iovs++] = (struct iovec){.iov_base = page, .iov_len = NVME_PAGE};
    op->e.iov[op->e.iovs++] =
        (struct iovec){.iov_base = nvme_encrypted_data(io), .iov_len = nvme_padded(io->bytes)};
    io_record_set(io, op->segment, record);
    op->ios[op->n++] = io;
    t->writes_queued--;
}

/* A segment's header travels in front of its first record. */
static void merge_segment_header(struct nvme_op *op)
{
    struct nvme_segment_header header;

    nvme_segment_header_of(op->tier, op->segment, &header);
    nvme_segment_header_encode(&header, op->headers);
    op->e.iov[op->e.iovs++] = (struct iovec){.iov_base = op->headers, .iov_len = NVME_PAGE};
}

/* Takes the first summed write and those after it that can lie right after it. */
static int write_start(struct tier *t, unsigned file, uint64_t stride)
{
    struct nvme_op *op = LIST_ENTRY(t->write_pool.next, struct nvme_op, link);
    struct nvme_device *d = &t->devices[file];
    uint64_t merge_bytes = d->narrow_writes > 0 ? NVME_NARROW_MERGE_BYTES : NVME_MERGE_BYTES;
    struct tier_io *next = summed_first(t);
    uint64_t offset, bytes = stride;
    uint32_t record;
    int rc =
        segment_reserve(&t->segments, file, stride, next->name.owner, &op->segment, &op->record);

    if (rc < 0)
        return rc;
    list_remove(&op->link);
    op->n = 0;
    op->e.iov = op->iov; /* a former round may have moved it */
    op->e.iovs = 0;
    record = op->record;
    offset = record == 0 ? segment_offset(&t->segments, op->segment)
                         : segment_record_offset(&t->segments, op->segment, record);
    if (record == 0)
        merge_segment_header(op);
    merge_add(op, record);
    while (op->n < NVME_MERGE_IOS && (next = summed_first(t)) && bytes + stride <= merge_bytes &&
           nvme_stride(next->bytes) == stride && io_moved(next) == io_moved(op->ios[0]) &&
           segment_has_next(op->segment, record, stride)) {
        /* can't fail: the segment is open and its next record is this one */
        rc = segment_reserve(&t->segments, file, stride, next->name.owner, &op->segment, &record);
        assert(rc == 0);
        merge_add(op, record);
        bytes += stride;
    }
    d->in_flight++;
    d->writes++;
    d->narrow_writes -= d->narrow_writes > 0;
    t->writes_in_flight++;
    nvme_iteration_spend(t, op->n, op->record == 0);
    nvme_op_begin(op, file, offset);
    return 0;
}

static void pump_summed(struct tier *t)
{
    struct tier_io *io;
    bool full = false;

    if (t->recovery.state == RECOVERY_HEADERS)
        return; /* the free segments are not known yet */
    while ((io = summed_first(t)) && (!t->stalled || io_moved(io))) {
        unsigned file;
        int rc = nvme_iteration_may_write(t) ? space_find(t, io, &full, &file) : -EAGAIN;

        if (rc == 0)
            rc = write_start(t, file, nvme_stride(io->bytes));
        if (rc == -EAGAIN)
            return;
        if (rc < 0)
            summed_fail(t, io, rc);
    }
}

void nvme_pump_writes(struct tier *t)
{
    pump_summed(t);
    nvme_encrypted_pump(t);
}

static void write_settle(struct tier *t, const struct nvme_op *op, struct tier_io *io, bool ok)
{
    io->place.loc = ok ? segment_loc(&t->segments, op->segment, io_record(io)) : io->place.loc;
    segment_written(&t->segments, op->segment, io_record(io), ok);
    t->backlog_bytes -= io_moved(io) ? 0 : nvme_padded(io->bytes);
    t->metrics->nvme_write_errors += !ok;
    if (!ok)
        return;
    t->metrics->nvme_written_bytes += nvme_stride(io->bytes);
    if (!io_moved(io)) {
        t->metrics->nvme_writes++;
        t->metrics->nvme_stored_bytes += io->bytes;
    }
}

void nvme_write_finish(struct nvme_op *op, int status)
{
    struct tier *t = op->tier;
    struct nvme_device *d = &t->devices[op->e.file];
    struct tier_io *ios[NVME_MERGE_IOS];
    int statuses[NVME_MERGE_IOS];
    unsigned n = op->n;

    KILL_POINT("write-done");
    nvme_hold(t);
    if (status == 0) {
        nvme_write_worked(t, op->e.file);
    } else {
        nvme_op_log(op, "write-failed", status);
        nvme_write_failed(t, op->e.file, status);
    }
    for (unsigned i = 0; i < n; i++) {
        ios[i] = op->ios[i];
        statuses[i] = status < 0 ? status : nvme_encrypted_status(ios[i]);
        write_settle(t, op, ios[i], statuses[i] == 0);
        nvme_encrypted_drop(t, ios[i]);
    }
    if (op->record == 0) {
        if (op->segment->header == SEGMENT_HEADER_NOT_YET) /* else a sync failed meanwhile */
            op->segment->header = status == 0 ? SEGMENT_HEADER_WRITTEN : SEGMENT_HEADER_FAILED;
        t->metrics->nvme_written_bytes += status == 0 ? NVME_PAGE : 0;
    }
    t->metrics->nvme_bytes_used = t->segments.used_bytes;
    d->in_flight--;
    d->writes--;
    t->writes_in_flight--;
    t->stalled = false;
    list_push_front(&t->write_pool, &op->link);
    /* Before anything can be reclaimed: the owner must know of its live record. */
    for (unsigned i = 0; i < n; i++)
        ios[i]->done_cb(ios[i], statuses[i]);
    KILL_POINT("write-reported");
    nvme_checkpoint_later(t);
    nvme_iteration_want(t, NVME_TURN_SYNCS);
    pump_reads(t, d);
    nvme_pump_writes(t);
    nvme_release(t);
}
