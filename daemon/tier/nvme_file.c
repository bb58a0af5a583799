#include "daemon/tier/nvme_file.h"

#include "daemon/base/kill_point.h"
#include "daemon/base/log.h"
#include "daemon/format/io.h"
#include "daemon/format/nvme_read.h"
#include "daemon/format/take.h"
#include "proto/errors.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/fs.h>
#include <stdalign.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- opening ---- */

static int entry_kind(const char *path, struct nvme_file *f, struct ucm_error *e)
{
    struct stat st;
    int rc = stat(path, &st) < 0 ? -errno : 0;

    if (rc == 0 && !S_ISDIR(st.st_mode) && !S_ISREG(st.st_mode) && !S_ISBLK(st.st_mode))
        rc = -EINVAL;
    if (rc < 0) {
        ucm_error_set(e, UCM_WIRE_IO, "%s can't be used (%s): name a directory, a file or a device",
                      path, strerror(-rc));
        return rc;
    }
    f->as_it_is = !S_ISDIR(st.st_mode);
    f->device = S_ISBLK(st.st_mode);
    return 0;
}

static int device_check(int fd, const char *path, struct ucm_error *e)
{
    int block_bytes = 0, rc = ioctl(fd, BLKSSZGET, &block_bytes) < 0 ? -errno : 0;

    if (rc == 0 && (block_bytes <= 0 || (int)NVME_PAGE % block_bytes != 0))
        rc = -EINVAL;
    if (rc < 0)
        ucm_error_set(e, UCM_WIRE_IO,
                      "%s has logical blocks of %d bytes: ucmd needs blocks of 512 to %u bytes",
                      path, block_bytes, NVME_PAGE);
    return rc;
}

static int device_open(const char *path, struct ucm_error *e)
{
    int fd = take_open(path, O_RDWR | O_DIRECT | O_EXCL, TAKE_WAIT_MS), rc;

    if (fd < 0) {
        ucm_error_set(e, UCM_WIRE_IO,
                      fd == -EBUSY ? "%s is in use: it is mounted, part of something else, or "
                                     "another ucmd has it"
                                   : "%s can't be opened: %s",
                      path, strerror(-fd));
        return fd;
    }
    rc = device_check(fd, path, e);
    if (rc == 0)
        return fd;
    close(fd);
    return rc;
}

/* Falls back to the page cache where O_DIRECT is not known. */
static int file_open(const char *name, int flags)
{
    int fd = open(name, flags | O_RDWR | O_CLOEXEC | O_DIRECT, 0600);

    if (fd < 0 && errno == EINVAL) {
        fd = open(name, flags | O_RDWR | O_CLOEXEC, 0600);
        if (fd >= 0)
            log_warn("tier", "no-direct-io", "path=%s: the file system lacks O_DIRECT", name);
    }
    return fd < 0 ? -errno : fd;
}

static int file_lock(const struct nvme_file *f, struct ucm_error *e)
{
    int rc = take_lock(f->fd, TAKE_WAIT_MS);

    if (rc == 0)
        return 0;
    ucm_error_set(e, UCM_WIRE_IO,
                  rc == -EWOULDBLOCK ? "%s is in use by another ucmd: give each daemon its own "
                                       "nvme.paths, or stop the other one"
                                     : "%s can't be locked",
                  f->path);
    return rc;
}

/* Space on disk for the first `bytes`, so that a full file system is met now and not later. */
static int file_reserve(const struct nvme_file *f, uint64_t bytes)
{
    struct stat st;
    int rc;

    if (f->device)
        return 0;
    do
        rc = fallocate(f->fd, 0, 0, (off_t)bytes) < 0 ? -errno : 0;
    while (rc == -EINTR);
    if (rc != -EOPNOTSUPP && rc != -ENOSYS)
        return rc;
    if (fstat(f->fd, &st) < 0)
        return -errno;
    if ((uint64_t)st.st_size < bytes &&
        ftruncate(f->fd, (off_t)bytes) < 0) /* longer, never shorter */
        return -errno;
    log_warn("tier", "not-preallocated", "path=%s: the file system can't; writes may find it full",
             f->path);
    return 0;
}

static uint64_t file_bytes(uint64_t segments, uint64_t segment_bytes)
{
    return NVME_DATA_OFFSET + segments * segment_bytes;
}

/* Whole segments in a file of `bytes`. */
static uint64_t file_segments(uint64_t bytes, uint64_t segment_bytes)
{
    return bytes < NVME_DATA_OFFSET ? 0 : (bytes - NVME_DATA_OFFSET) / segment_bytes;
}

/* ---- making ---- */

static int file_format(struct nvme_file *f, uint64_t segments, uint64_t segment_bytes)
{
    alignas(NVME_PAGE) uint8_t page[NVME_PAGE];
    struct nvme_super super = {.segment_bytes = segment_bytes, .data_offset = NVME_DATA_OFFSET};
    struct nvme_state state = {.segments = segments};
    int rc = getentropy(super.uuid, sizeof(super.uuid)) < 0 ? -errno : 0;

    if (rc == 0)
        rc = file_reserve(f, file_bytes(segments, segment_bytes));
    if (rc < 0)
        return rc;
    memcpy(state.uuid, super.uuid, sizeof(state.uuid));
    nvme_state_encode(&state, page);
    rc = io_write(f->fd, page, NVME_PAGE, NVME_STATE_OFFSET(0));
    if (rc == 0) {
        nvme_super_encode(&super, page);
        rc = io_write(f->fd, page, NVME_PAGE, NVME_SUPER_OFFSET);
    }
    return rc == 0 && fsync(f->fd) < 0 ? -errno : rc;
}

/* Is the file that was opened and locked still the one that has this name? */
static bool file_is(const struct nvme_file *f, const char *path)
{
    struct stat one, other;

    return fstat(f->fd, &one) == 0 && stat(path, &other) == 0 && one.st_ino == other.st_ino &&
           one.st_dev == other.st_dev;
}

/* Never over a file that has the name by now. */
static int file_rename(const char *from, const char *to)
{
    int rc = renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE);

    if (rc < 0 && errno == EINVAL) /* the file system does not know how */
        rc = rename(from, to);
    return rc < 0 ? -errno : 0;
}

/* Under another name until it is whole. The next daemon takes over what one that was killed
 * meanwhile has left, once it can lock it. */
static int file_make(struct nvme_file *f, uint64_t segments, uint64_t segment_bytes,
                     struct ucm_error *e)
{
    char path[PATH_MAX];
    int rc =
        snprintf(path, sizeof(path), "%s.new", f->path) < (int)sizeof(path) ? 0 : -ENAMETOOLONG;

    if (rc == 0)
        rc = f->fd = file_open(path, O_CREAT);
    if (rc >= 0)
        rc = file_lock(f, e);
    if (rc == 0 && !file_is(f, path))
        rc = -EWOULDBLOCK; /* another daemon has finished it meanwhile */
    if (rc == 0) {
        rc = file_format(f, segments, segment_bytes);
        if (rc == 0)
            rc = file_rename(path, f->path);
        if (rc < 0)
            unlink(path);
    }
    if (rc == 0)
        rc = io_directory_sync(f->directory);
    if (rc < 0 && e->code == 0)
        ucm_error_set(e, UCM_WIRE_IO, "%s of %" PRIu64 " MiB can't be made: %s%s", f->path,
                      file_bytes(segments, segment_bytes) >> 20, strerror(-rc),
                      rc == -ENOSPC || rc == -EFBIG ? "; free some space or lower nvme.size" : "");
    return rc;
}

/* ---- reading what is there ---- */

static const char *start_empty(const struct nvme_file *f)
{
    return f->as_it_is ? "run 'ucmctl format --force' on it" : "delete the file";
}

static int super_check(struct nvme_file *f, uint64_t segment_bytes, struct ucm_error *e)
{
    alignas(NVME_PAGE) uint8_t page[NVME_PAGE] = {0};
    struct nvme_super super;
    ssize_t n = io_read_some(f->fd, page, NVME_PAGE, NVME_SUPER_OFFSET);
    int rc;

    if (n < 0) {
        ucm_error_set(e, UCM_WIRE_IO, "%s can't be read: %s", f->path, strerror((int)-n));
        return (int)n;
    }
    rc = nvme_super_decode(page, &super);
    if (rc == -EILSEQ)
        ucm_error_set(e, UCM_WIRE_INVALID,
                      f->as_it_is
                          ? "%s is not ucmd's: if nothing on it is wanted, make it so with "
                            "'ucmctl format'; or choose another nvme.paths"
                          : "%s is not a file of ucmd: move it away or choose another nvme.paths",
                      f->path);
    else if (rc == -EPROTONOSUPPORT)
        ucm_error_set(
            e, UCM_WIRE_INVALID,
            "%s has storage format version %u, this ucmd needs %u: run the ucmd that wrote "
            "it, or %s to start empty",
            f->path, nvme_super_version(page), NVME_FORMAT_VERSION, start_empty(f));
    else if (rc < 0)
        ucm_error_set(e, UCM_WIRE_INVALID, "the superblock of %s is damaged: %s to start empty",
                      f->path, start_empty(f));
    if (rc < 0)
        return rc == -EBADMSG ? -EUCLEAN : -EINVAL;
    if (super.segment_bytes != segment_bytes) {
        ucm_error_set(e, UCM_WIRE_INVALID,
                      "%s was made with segments of %" PRIu64
                      " bytes: set nvme.segment to that, or %s to start empty",
                      f->path, super.segment_bytes, start_empty(f));
        return -EINVAL;
    }
    memcpy(f->uuid, super.uuid, sizeof(f->uuid));
    return 0;
}

/* A state page is gone, perhaps the newer one: the sequences of the segments give the epoch. */
static int epoch_rebuild(struct nvme_file *f, uint64_t segment_bytes)
{
    alignas(NVME_PAGE) uint8_t page[NVME_PAGE];
    struct nvme_segment_header header;

    for (uint64_t i = 0; i < f->state.segments; i++) {
        int rc = io_read(f->fd, page, NVME_PAGE, file_bytes(i, segment_bytes));

        if (rc == -ENODATA)
            break;
        if (rc < 0)
            return rc;
        if (nvme_segment_header_decode(page, &header) == 0 &&
            memcmp(header.uuid, f->uuid, sizeof(f->uuid)) == 0 &&
            header.sequence >> (64 - NVME_EPOCH_BITS) > f->state.epoch)
            f->state.epoch = header.sequence >> (64 - NVME_EPOCH_BITS);
    }
    f->damaged++;
    log_warn("tier", "state-rebuilt", "path=%s epoch=%" PRIu64 " segments=%" PRIu64, f->path,
             f->state.epoch, f->state.segments);
    return 0;
}

static int state_load(struct nvme_file *f, uint64_t segment_bytes)
{
    struct nvme_copies c = nvme_state_read(f->fd, f->uuid, &f->state);
    uint64_t bytes;
    int rc = c.error;

    f->state_next = c.next;
    if (rc == 0 && c.good == 0) {
        rc = io_length(f->fd, &bytes);
        if (rc == 0)
            f->state.segments = file_segments(bytes, segment_bytes);
    }
    return rc == 0 && (c.damaged || c.good == 0) ? epoch_rebuild(f, segment_bytes) : rc;
}

/* Lets the file grow to `wanted` segments, or makes do with those that it has. */
static int file_fit(struct nvme_file *f, uint64_t wanted, uint64_t segment_bytes)
{
    uint64_t bytes;
    int rc = io_length(f->fd, &bytes);

    if (rc < 0)
        return rc;
    if (bytes < file_bytes(f->state.segments, segment_bytes)) {
        f->damaged++;
        log_warn("tier", "file-was-cut", "path=%s: what lay past its end is gone", f->path);
    }
    if (wanted <= f->state.segments && bytes >= file_bytes(wanted, segment_bytes)) {
        f->segments = wanted;
        if (wanted < f->state.segments)
            log_warn("tier", "file-larger-than-configured",
                     "path=%s: the rest lies unused; delete the file to give it back", f->path);
        return 0;
    }
    rc = file_reserve(f, file_bytes(wanted, segment_bytes));
    if (rc == 0) {
        f->segments = wanted;
        if (wanted > f->state.segments)
            f->state.segments = wanted;
        return 0;
    }
    f->segments = file_segments(bytes, segment_bytes);
    if (f->segments > f->state.segments)
        f->segments = f->state.segments;
    if (f->segments == 0)
        return rc;
    log_warn("tier", "file-not-grown", "path=%s segments=%" PRIu64 " wanted=%" PRIu64 " error=%s",
             f->path, f->segments, wanted, strerror(-rc));
    return 0;
}

int nvme_file_intact(const struct nvme_file *f)
{
    struct stat st;

    if (f->device)
        return 0;
    if (fstat(f->fd, &st) < 0)
        return -errno;
    if (st.st_nlink == 0)
        return -ENOENT;
    return (uint64_t)st.st_size < f->bytes ? -ENXIO : 0;
}

const char *nvme_file_trouble(int status)
{
    switch (status) {
    case -ENOENT:
        return "it was removed or replaced while in use: restart ucmd";
    case -ENXIO:
        return "it was cut while in use: restart ucmd";
    default:
        return strerror(-status);
    }
}

static int kind_check(const struct nvme_file *f, struct ucm_error *e)
{
    struct stat st;

    if (fstat(f->fd, &st) == 0 && (f->device ? S_ISBLK(st.st_mode) : S_ISREG(st.st_mode)))
        return 0;
    ucm_error_set(e, UCM_WIRE_INVALID, "%s is not a regular file: move it away", f->path);
    return -EINVAL;
}

static int file_take(struct nvme_file *f, uint64_t wanted, uint64_t segment_bytes,
                     struct ucm_error *e)
{
    int rc = kind_check(f, e);

    if (rc == 0)
        rc = file_lock(f, e); /* held already when this process made the file */
    if (rc == 0)
        rc = super_check(f, segment_bytes, e);
    if (rc < 0)
        return rc;
    /* The daemon that made the file may have died before its name was synced. */
    rc = f->as_it_is ? 0 : io_directory_sync(f->directory);
    if (rc == 0)
        rc = state_load(f, segment_bytes);
    if (rc == 0)
        rc = file_fit(f, wanted, segment_bytes);
    f->bytes = file_bytes(f->segments, segment_bytes);
    if (rc < 0)
        ucm_error_set(e, UCM_WIRE_IO, "%s can't be used: %s", f->path, strerror(-rc));
    return rc;
}

/* ---- the module's interface ---- */

static int directory_open(struct nvme_file *f, const char *directory, uint64_t wanted,
                          uint64_t segment_bytes, struct ucm_error *e)
{
    f->directory = strdup(directory);
    if (!f->directory || asprintf(&f->path, "%s/" NVME_CACHE_FILE, directory) < 0) {
        f->path = NULL;
        return -ENOMEM;
    }
    f->fd = file_open(f->path, 0);
    if (f->fd == -ENOENT)
        return file_make(f, wanted, segment_bytes, e);
    if (f->fd < 0)
        ucm_error_set(e, UCM_WIRE_IO, "%s can't be opened: %s", f->path, strerror(-f->fd));
    return f->fd < 0 ? f->fd : 0;
}

/* Writes to it only if it is blank. The mark goes first, so that an interrupted one is
 * blank still. */
static int as_it_is_format(struct nvme_file *f, uint64_t segments, uint64_t segment_bytes,
                           struct ucm_error *e)
{
    alignas(NVME_PAGE) uint8_t page[NVME_PAGE] = {0};
    ssize_t n = io_read_some(f->fd, page, NVME_PAGE, NVME_SUPER_OFFSET);
    int rc = n < 0 ? (int)n : 0;

    if (n == 0 || (n > 0 && nvme_mark_decode(page) == 0)) {
        nvme_mark_encode(page);
        rc = io_write(f->fd, page, NVME_PAGE, NVME_SUPER_OFFSET);
        if (rc == 0)
            rc = file_format(f, segments, segment_bytes);
        if (rc == 0)
            log_info("tier", "formatted", "path=%s segments=%" PRIu64, f->path, segments);
    }
    if (rc < 0)
        ucm_error_set(e, UCM_WIRE_IO, "%s can't be made a cache: %s", f->path, strerror(-rc));
    return rc;
}

static int as_it_is_open(struct nvme_file *f, const char *path, uint64_t *wanted,
                         uint64_t segment_bytes, struct ucm_error *e)
{
    uint64_t bytes = 0;
    int rc;

    f->path = strdup(path);
    if (!f->path)
        return -ENOMEM;
    f->fd = f->device ? device_open(path, e) : file_open(path, 0);
    if (f->fd < 0)
        return f->fd;
    rc = file_lock(f, e);
    if (rc == 0 && f->device)
        rc = io_length(f->fd, &bytes);
    if (rc == 0 && f->device && file_segments(bytes, segment_bytes) < *wanted)
        *wanted = file_segments(bytes, segment_bytes);
    if (rc == 0 && *wanted < 2) {
        ucm_error_set(e, UCM_WIRE_INVALID, "%s is too small: two segments do not fit", path);
        return -EINVAL;
    }
    return rc == 0 ? as_it_is_format(f, *wanted, segment_bytes, e) : rc;
}

static int state_directory(const char *path, const char *state, const uint8_t uuid[NVME_UUID_BYTES],
                           char **out, struct ucm_error *e)
{
    char name[NVME_UUID_TEXT], *directory;
    int rc = 0;

    if (state[0] == '\0') {
        ucm_error_set(e, UCM_WIRE_INVALID,
                      "%s is not a directory: set nvme.state to a directory for what belongs to it",
                      path);
        return -EINVAL;
    }
    nvme_uuid_text(uuid, name);
    if (asprintf(&directory, "%s/%s", state, name) < 0)
        return -ENOMEM;
    if (mkdir(directory, 0700) == 0)
        rc = io_directory_sync(state);
    else if (errno != EEXIST)
        rc = -errno;
    if (rc < 0) {
        ucm_error_set(e, UCM_WIRE_IO, "nvme.state: %.100s can't be made: %s", directory,
                      strerror(-rc));
        free(directory);
        return rc;
    }
    *out = directory;
    return 0;
}

int nvme_file_open(const char *entry, const char *state, uint64_t size_bytes,
                   uint64_t segment_bytes, struct nvme_file *out, struct ucm_error *e)
{
    struct nvme_file f = {.fd = -1};
    uint64_t wanted = file_segments(size_bytes, segment_bytes);
    int rc = entry_kind(entry, &f, e);

    if (rc < 0)
        return rc;
    if (f.as_it_is)
        rc = as_it_is_open(&f, entry, &wanted, segment_bytes, e);
    else
        rc = directory_open(&f, entry, wanted, segment_bytes, e);
    if (rc == 0)
        rc = file_take(&f, wanted, segment_bytes, e);
    if (rc == 0 && f.as_it_is)
        rc = state_directory(entry, state, f.uuid, &f.directory, e);
    if (rc < 0) {
        nvme_file_close(&f);
        return rc;
    }
    *out = f;
    return 0;
}

static int there_check(struct nvme_file *f, uint64_t segment_bytes, struct ucm_error *e)
{
    alignas(NVME_PAGE) uint8_t page[NVME_PAGE] = {0};
    int rc = kind_check(f, e);
    ssize_t n;

    if (rc < 0)
        return rc;
    n = io_read_some(f->fd, page, NVME_PAGE, NVME_SUPER_OFFSET);
    if (f->as_it_is && (n == 0 || (n > 0 && nvme_mark_decode(page) == 0)))
        return 0; /* blank: to be formatted */
    return super_check(f, segment_bytes, e);
}

int nvme_file_check(const char *entry, uint64_t segment_bytes, struct ucm_error *e)
{
    struct nvme_file f = {.fd = -1};
    char path[PATH_MAX];
    int rc = entry_kind(entry, &f, e);

    if (rc < 0)
        return rc;
    f.path = path;
    snprintf(path, sizeof(path), f.as_it_is ? "%s" : "%s/" NVME_CACHE_FILE, entry);
    f.fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (f.fd < 0 && errno == ENOENT)
        return 0;
    if (f.fd < 0) {
        rc = -errno;
        ucm_error_set(e, UCM_WIRE_IO, "%s can't be opened: %s", path, strerror(-rc));
        return rc;
    }
    rc = there_check(&f, segment_bytes, e);
    close(f.fd);
    return rc;
}

int nvme_file_start(struct nvme_file *f, uint64_t epoch)
{
    alignas(NVME_PAGE) uint8_t page[NVME_PAGE];
    int rc;

    f->state.epoch = epoch;
    memcpy(f->state.uuid, f->uuid, sizeof(f->uuid));
    nvme_state_encode(&f->state, page);
    KILL_POINT("start-begin");
    rc = io_write(f->fd, page, NVME_PAGE, NVME_STATE_OFFSET(f->state_next));
    KILL_POINT("start-written");
    return rc == 0 && fdatasync(f->fd) < 0 ? -errno : rc;
}

void nvme_file_close(struct nvme_file *f)
{
    /* Explicitly: a ring that is being torn down may hold the file for a while longer. */
    if (f->fd >= 0) {
        flock(f->fd, LOCK_UN);
        close(f->fd);
    }
    free(f->path);
    free(f->directory);
    f->fd = -1;
    f->path = f->directory = NULL;
}
