/* verify --offline --salvage: makes the files such that the next start finds nothing damaged. Only
 * what did not pass is written over; no sound part is lost. */
#include "client/ctl/offline.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#define NAME_PAGES_MAX 65536u
#define EPOCH_SHIFT 40

static void put32(uint8_t *p, uint32_t v)
{
    for (unsigned i = 0; i < 4; i++)
        p[i] = (uint8_t)(v >> (8 * i));
}

static void put64(uint8_t *p, uint64_t v)
{
    put32(p, (uint32_t)v);
    put32(p + 4, (uint32_t)(v >> 32));
}

static void failed(struct offline *o)
{
    if (o->error == 0)
        o->error = errno ? errno : EIO;
}

static bool write_page(struct offline *o, int fd, const uint8_t *page, uint64_t at)
{
    ssize_t n;

    do
        n = pwrite(fd, page, PAGE, (off_t)at);
    while (n < 0 && errno == EINTR);
    if (n == (ssize_t)PAGE)
        return true;
    failed(o);
    return false;
}

static void page_begin(const struct offline *o, uint8_t *page, const char *magic)
{
    memset(page, 0, PAGE);
    memcpy(page, magic, strlen(magic));
    put32(page + strlen(magic), FORMAT_VERSION);
    memcpy(page + 16, o->uuid, sizeof(o->uuid));
}

static void page_end(uint8_t *page)
{
    put64(page + PAGE - 8, XXH3_64bits(page, PAGE - 8));
}

/* ---- slots and segments ---- */

void salvage_slot(struct offline *o, uint64_t at)
{
    static const uint8_t zeros[PAGE];

    if (o->salvage && at + PAGE <= o->size && write_page(o, o->fd, zeros, at))
        o->dropped++;
}

/* Slot `slot` of segment `number`, its header at `at`: the opening that wrote it; 0: there is none.
 */
static uint64_t slot_generation(const struct offline *o, uint32_t number, uint32_t slot,
                                uint64_t at, uint8_t page[PAGE])
{
    if (!offline_read(o->fd, page, PAGE, at) || offline_page_kind(page, "UCMS") != PAGE_GOOD ||
        memcmp(page + 16, o->uuid, sizeof(o->uuid)) != 0 || offline_u32(page + 8) != number ||
        offline_u32(page + 12) != slot)
        return 0;
    return offline_u64(page + 112);
}

/* From slot to slot: where slot 1 of the same opening begins; without one, behind slot 0. */
static uint64_t stride_find(const struct offline *o, uint32_t number, uint64_t generation,
                            uint64_t first_bytes)
{
    uint64_t base = o->data_offset + number * o->segment_bytes + PAGE;
    uint64_t shortest = PAGE + (first_bytes + PAGE - 1) / PAGE * PAGE;
    uint8_t page[PAGE];

    for (uint64_t s = shortest; PAGE + s + PAGE <= o->segment_bytes && s <= 2 * shortest; s += PAGE)
        if (slot_generation(o, number, 1, base + s, page) == generation)
            return s;
    return shortest;
}

bool salvage_segment(struct offline *o, uint32_t number, uint8_t page[PAGE])
{
    uint64_t base = o->data_offset + number * o->segment_bytes, generation, bytes, stride;
    static const uint8_t zeros[PAGE];

    if (!o->salvage || base + PAGE > o->size)
        return false;
    generation = slot_generation(o, number, 0, base + PAGE, page);
    bytes = offline_u64(page + 104);
    if (generation == 0 || bytes == 0 || bytes > o->segment_bytes - 2 * PAGE) {
        o->emptied += write_page(o, o->fd, zeros, base);
        return false;
    }
    stride = stride_find(o, number, generation, bytes);
    page_begin(o, page, "UCMG");
    put32(page + 8, number);
    put64(page + 32, generation);
    put64(page + 40, stride);
    page_end(page);
    if (!write_page(o, o->fd, page, base))
        return false;
    o->rebuilt++;
    return true;
}

/* ---- pages of the file itself ---- */

void salvage_state(struct offline *o)
{
    uint8_t page[PAGE];

    if (!o->salvage)
        return;
    page_begin(o, page, "UCMDSTAT");
    put64(page + 32, o->epoch);
    put64(page + 40,
          o->state_segments ? o->state_segments : (o->size - o->data_offset) / o->segment_bytes);
    page_end(page);
    for (unsigned copy = 0; copy < 2; copy++) {
        uint8_t was[PAGE];

        if (offline_read(o->fd, was, PAGE, STATE_AT(copy)) &&
            offline_page_kind(was, "UCMDSTAT") == PAGE_GOOD)
            continue;
        o->pages_written += write_page(o, o->fd, page, STATE_AT(copy));
    }
}

/* A damaged copy is emptied; to lift the quarantine, both are. */
void salvage_quarantine(struct offline *o)
{
    static const uint8_t zeros[PAGE];
    bool lifted = o->lift && o->quarantined > 0;

    if (!o->salvage && !o->lift)
        return;
    for (unsigned copy = 0; copy < 2; copy++) {
        uint8_t was[PAGE];
        bool read = offline_read(o->fd, was, PAGE, QUARANTINE_AT(copy));
        bool damaged = !read || offline_page_kind(was, "UCMQ") == PAGE_DAMAGED;

        if (!o->lift && !damaged)
            continue;
        if (read && memcmp(was, zeros, PAGE) == 0)
            continue;
        if (write_page(o, o->fd, zeros, QUARANTINE_AT(copy)))
            o->pages_written += damaged;
        else
            lifted = false;
    }
    o->lifted = lifted ? o->quarantined : 0;
}

/* As the daemon does it, so that the room is there when it is needed. */
void salvage_size(struct offline *o)
{
    uint64_t want = o->data_offset + o->state_segments * o->segment_bytes;

    if (!o->salvage || !o->short_file || o->device)
        return; /* a device that was exchanged for a smaller one stays so */
    errno = posix_fallocate(o->fd, 0, (off_t)want);
    if (errno == 0)
        o->grown = true;
    else
        failed(o);
}

/* ---- the other files ---- */

static void folder_sync(struct offline *o)
{
    int fd = open(o->folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    if (fd < 0 || fsync(fd) < 0)
        failed(o);
    if (fd >= 0)
        close(fd);
}

static bool names_copy(struct offline *o, int from, int to)
{
    uint8_t page[PAGE];

    for (uint64_t i = 0; i < NAME_PAGES_MAX && offline_read(from, page, PAGE, i * PAGE); i++) {
        if (offline_page_kind(page, "UCMN") != PAGE_GOOD)
            continue;
        if (!write_page(o, to, page, o->names_kept * PAGE))
            return false;
        o->names_kept++;
    }
    if (fsync(to) == 0)
        return true;
    failed(o);
    return false;
}

/* Beside the old one and then in its place: a crash leaves either. */
void salvage_names(struct offline *o)
{
    char path[PATH_BYTES], fresh[PATH_BYTES];
    int from, to;

    if (!o->salvage || o->corrupt_names == 0)
        return;
    offline_path(o, "ucmd.namespaces", path);
    offline_path(o, "ucmd.namespaces.tmp", fresh);
    from = open(path, O_RDONLY | O_CLOEXEC);
    to = open(fresh, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (from < 0 || to < 0) {
        failed(o);
    } else if (names_copy(o, from, to)) {
        struct stat st;

        /* the daemon's user must be able to go on with it */
        if (fstat(from, &st) < 0 || fchown(to, st.st_uid, st.st_gid) < 0 ||
            fchmod(to, st.st_mode & 07777) < 0 || rename(fresh, path) < 0)
            failed(o);
        else
            o->names_rewritten = true;
    }
    if (from >= 0)
        close(from);
    if (to >= 0)
        close(to);
    if (o->names_rewritten)
        folder_sync(o);
    else
        unlink(fresh);
}

/* A checkpoint saves time only; one that tells of what has been changed here must go. */
void salvage_index(struct offline *o)
{
    char path[PATH_BYTES];

    if (!o->salvage || !o->index_there ||
        !(o->index_damaged || o->dropped > 0 || o->rebuilt > 0 || o->emptied > 0))
        return;
    offline_path(o, "ucmd.index", path);
    if (unlink(path) == 0) {
        o->index_removed = true;
        folder_sync(o);
    } else {
        failed(o);
    }
}

void salvage_sync(struct offline *o)
{
    if ((o->salvage || o->lift) && fsync(o->fd) < 0)
        failed(o);
}
