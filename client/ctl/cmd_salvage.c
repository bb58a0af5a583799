/* verify --offline --salvage: repairs the files so that the next start finds nothing damaged. Only
 * what did not pass is written over; no sound part is lost. */
#include "client/ctl/offline.h"
#include "daemon/format/io.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const uint8_t zeros[NVME_PAGE];

/* Whether it worked; otherwise the first failure is remembered. */
static bool worked(struct offline *o, int rc)
{
    if (rc < 0 && o->error == 0)
        o->error = rc;
    return rc >= 0;
}

static int errno_of(int rc)
{
    return rc < 0 ? -errno : rc;
}

static bool page_put(struct offline *o, const uint8_t *page, uint64_t at)
{
    return worked(o, io_write(o->fd, page, NVME_PAGE, at));
}

/* ---- records and segments ---- */

void salvage_record(struct offline *o, uint64_t at)
{
    if (o->salvage && at + NVME_PAGE <= o->size && page_put(o, zeros, at))
        o->dropped++;
}

/* The header of record `record` of segment `number` at `at`, of whatever opening. */
static bool record_find(const struct offline *o, uint32_t number, uint32_t record, uint64_t at,
                        struct nvme_record_header *out)
{
    uint8_t page[NVME_PAGE];

    return io_read(o->fd, page, NVME_PAGE, at) == 0 && nvme_record_header_decode(page, out) == 0 &&
           nvme_record_belongs(out, o->super.uuid, number, record, out->generation);
}

/* From record to record: where record 1 of the same opening begins; without one, after record 0.
 * */
static uint64_t stride_find(const struct offline *o, uint32_t number,
                            const struct nvme_record_header *first)
{
    uint64_t base = offline_segment_at(o, number) + NVME_PAGE;
    uint64_t shortest = nvme_stride(first->payload_bytes), end = o->super.segment_bytes;
    struct nvme_record_header h;

    for (uint64_t s = shortest; s + 2 * NVME_PAGE <= end && s <= 2 * shortest; s += NVME_PAGE)
        if (record_find(o, number, 1, base + s, &h) && h.generation == first->generation)
            return s;
    return shortest;
}

bool salvage_segment(struct offline *o, uint32_t number, struct nvme_segment_header *out)
{
    uint64_t base = offline_segment_at(o, number);
    struct nvme_record_header first;
    uint8_t page[NVME_PAGE];

    if (!o->salvage || base + NVME_PAGE > o->size)
        return false;
    if (!record_find(o, number, 0, base + NVME_PAGE, &first) ||
        first.payload_bytes > o->super.segment_bytes - 2 * NVME_PAGE) {
        o->emptied += page_put(o, zeros, base);
        return false;
    }
    *out = (struct nvme_segment_header){
        .segment = number, .sequence = first.generation, .stride = stride_find(o, number, &first)};
    memcpy(out->uuid, o->super.uuid, sizeof(out->uuid));
    nvme_segment_header_encode(out, page);
    if (!page_put(o, page, base))
        return false;
    o->rebuilt++;
    return true;
}

/* ---- pages of the file itself ---- */

static void salvage_state(struct offline *o)
{
    struct nvme_state s = o->state;
    uint8_t page[NVME_PAGE];

    if (s.segments == 0)
        s.segments = (o->size - o->super.data_offset) / o->super.segment_bytes;
    memcpy(s.uuid, o->super.uuid, sizeof(s.uuid));
    nvme_state_encode(&s, page);
    for (unsigned copy = 0; copy < 2; copy++)
        if (!(o->states.good & 1u << copy))
            o->pages_written += page_put(o, page, NVME_STATE_OFFSET(copy));
}

/* A damaged copy is emptied; to lift the quarantine, both are. */
static void salvage_quarantine(struct offline *o)
{
    unsigned bad = o->quarantines.damaged | o->quarantines.unreadable;
    bool lifted = o->lift && o->quarantined > 0;

    for (unsigned copy = 0; copy < 2; copy++) {
        if (!(bad & 1u << copy) && !(o->lift && o->quarantines.good & 1u << copy))
            continue;
        if (page_put(o, zeros, NVME_QUARANTINE_OFFSET(copy)))
            o->pages_written += bad >> copy & 1;
        else
            lifted = false;
    }
    o->lifted = lifted ? o->quarantined : 0;
}

/* As the daemon does it, so that the space is there when it is needed. */
static void salvage_length(struct offline *o)
{
    uint64_t want = o->super.data_offset + o->state.segments * o->super.segment_bytes;

    if (!o->short_file || o->device)
        return; /* a device that was exchanged for a smaller one stays so */
    o->grown = worked(o, -posix_fallocate(o->fd, 0, (off_t)want));
}

/* ---- the other files ---- */

static bool spaces_copy(struct offline *o, int from, int to)
{
    struct nvme_ns_record r;
    uint8_t page[NVME_PAGE];
    int rc = 0;

    for (uint64_t i = 0; i < NVME_NS_RECORDS_MAX && (rc == 0 || rc == -EBADMSG); i++) {
        rc = nvme_ns_record_read(from, i, &r);
        if (rc < 0)
            continue;
        nvme_ns_record_encode(&r, page);
        if (!worked(o, io_write(to, page, NVME_PAGE, o->spaces_kept * NVME_PAGE)))
            return false;
        o->spaces_kept++;
    }
    if (rc != -EBADMSG && rc != -ENODATA && !worked(o, rc))
        return false; /* what follows may be sound */
    return worked(o, errno_of(fsync(to)));
}

/* The daemon's user must be able to go on with it. */
static bool owner_copy(struct offline *o, int from, int to)
{
    struct stat st;

    return worked(o, errno_of(fstat(from, &st))) &&
           worked(o, errno_of(fchown(to, st.st_uid, st.st_gid))) &&
           worked(o, errno_of(fchmod(to, st.st_mode & 07777)));
}

/* Alongside the old one and then in its place: a crash leaves either. */
static void salvage_spaces(struct offline *o)
{
    char path[PATH_BYTES], fresh[PATH_BYTES];
    int from, to;

    if (o->corrupt_spaces == 0)
        return;
    offline_path(o, NVME_NS_FILE, path);
    offline_path(o, NVME_NS_FILE ".tmp", fresh);
    from = errno_of(open(path, O_RDONLY | O_CLOEXEC));
    to = errno_of(open(fresh, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    o->spaces_rewritten = worked(o, from) && worked(o, to) && spaces_copy(o, from, to) &&
                          owner_copy(o, from, to) && worked(o, errno_of(rename(fresh, path)));
    if (from >= 0)
        close(from);
    if (to >= 0)
        close(to);
    if (!o->spaces_rewritten)
        unlink(fresh);
    else
        (void)worked(o, io_directory_sync(o->directory));
}

/* A checkpoint saves time only; one that lists what has been changed here must go. */
static void salvage_index(struct offline *o)
{
    char path[PATH_BYTES];

    if (!o->index_there ||
        !(o->index_damaged || o->dropped > 0 || o->rebuilt > 0 || o->emptied > 0))
        return;
    offline_path(o, NVME_INDEX_FILE, path);
    o->index_removed = worked(o, errno_of(unlink(path)));
    if (o->index_removed)
        (void)worked(o, io_directory_sync(o->directory));
}

void salvage_rest(struct offline *o)
{
    bool whole = !o->halt;

    if (o->salvage && whole)
        salvage_state(o);
    if ((o->salvage || o->lift) && whole)
        salvage_quarantine(o);
    if (o->salvage && whole)
        salvage_length(o);
    if (o->salvage || o->lift)
        (void)worked(o, errno_of(fsync(o->fd)));
    if (!o->salvage)
        return;
    if (whole)
        salvage_spaces(o);
    salvage_index(o);
}
