/* verify --offline: the file that is looked at, which may be a block device, and the directory of
 * what belongs to it. */
#include "client/ctl/ctl.h"
#include "client/ctl/offline.h"
#include "daemon/format/io.h"
#include "daemon/format/take.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define WAIT_MS 3000u

void offline_path(const struct offline *o, const char *name, char out[PATH_BYTES])
{
    int n = snprintf(out, PATH_BYTES, "%s/%s", o->directory, name);

    if (o->directory[0] == '\0' || n >= (int)PATH_BYTES)
        out[0] = '\0'; /* opens nothing */
}

int offline_take(const char *path, bool device)
{
    int fd = take_open(path, O_RDWR | (device ? O_EXCL : 0), WAIT_MS);
    int rc = fd < 0 ? fd : take_lock(fd, WAIT_MS);

    if (fd >= 0 && rc < 0)
        close(fd);
    return rc < 0 ? rc : fd;
}

static int file_open(struct offline *o)
{
    if (o->salvage || o->lift) {
        o->fd = offline_take(o->file, o->device);
        if (o->fd == -EBUSY || o->fd == -EWOULDBLOCK)
            return program_fail(CTL_ERROR, "%s is in use: nothing was changed; stop ucmd first",
                                o->file);
    } else {
        o->fd = open(o->file, O_RDONLY | O_CLOEXEC);
        if (o->fd < 0)
            o->fd = -errno;
        else if (flock(o->fd, LOCK_SH | LOCK_NB) < 0)
            fprintf(stderr, "%s is in use: what is being written now may seem corrupt\n", o->file);
    }
    if (o->fd < 0)
        return program_fail(CTL_ERROR, "%s: %s", o->file, strerror(-o->fd));
    return CTL_OK;
}

static int super_read(struct offline *o)
{
    uint8_t page[NVME_PAGE];
    int rc = io_length(o->fd, &o->size);

    if (rc < 0)
        return program_fail(CTL_ERROR, "%s: %s", o->file, strerror(-rc));
    rc = io_read(o->fd, page, NVME_PAGE, NVME_SUPER_OFFSET);
    if (rc == 0)
        rc = nvme_super_decode(page, &o->super);
    if (rc == -EPROTONOSUPPORT)
        return program_fail(
            CTL_ERROR,
            "%s has storage format version %u and this ucmctl reads %u: use the one "
            "that came with the ucmd that wrote it",
            o->file, nvme_super_version(page), NVME_FORMAT_VERSION);
    if (rc == -EBADMSG || (rc == 0 && o->super.data_offset > o->size))
        return program_fail(
            CTL_CORRUPT,
            "%s: the superblock is damaged, and without it nothing can be found: %s "
            "to start empty",
            o->file,
            o->as_it_is ? "run 'ucmctl format --force' on it"
                        : "delete the directory's three files");
    if (rc < 0)
        return program_fail(CTL_ERROR, "%s is not a file of ucmd's NVMe tier", o->file);
    if ((o->size - o->super.data_offset) / o->super.segment_bytes > SEGMENTS_MAX)
        return program_fail(CTL_ERROR, "%s is longer than a file of ucmd's can be", o->file);
    o->payload = malloc(o->super.segment_bytes);
    return o->payload ? CTL_OK : program_fail(CTL_ERROR, "no memory");
}

/* nvme.state has a directory for it, named after its UUID. */
static int directory_find(struct offline *o, const char *state)
{
    char name[NVME_UUID_TEXT];

    if (!state)
        return CTL_OK;
    nvme_uuid_text(o->super.uuid, name);
    if (snprintf(o->directory, sizeof(o->directory), "%s/%s", state, name) >=
        (int)sizeof(o->directory))
        return program_fail(CTL_USAGE, "the name of the directory is too long");
    if (access(o->directory, F_OK) == 0)
        return CTL_OK;
    if (o->salvage)
        return program_fail(CTL_ERROR, "%s: %s; nothing was changed", o->directory,
                            strerror(errno));
    fprintf(stderr, "%s: %s\n", o->directory, strerror(errno));
    return CTL_OK;
}

/* A directory has everything in it; anything else is an entry that ucmd uses as it is. */
static int entry_find(struct offline *o, const char *path, const char *state)
{
    struct stat st;
    int n;

    if (stat(path, &st) < 0)
        return program_fail(CTL_ERROR, "%s: %s", path, strerror(errno));
    o->as_it_is = !S_ISDIR(st.st_mode);
    n = snprintf(o->file, sizeof(o->file), "%s%s", path, o->as_it_is ? "" : "/" NVME_CACHE_FILE);
    if (n >= (int)sizeof(o->file))
        return program_fail(CTL_USAGE, "the path is too long");
    if (!o->as_it_is)
        memcpy(o->directory, path, strlen(path) + 1);
    if (!o->as_it_is && state)
        return program_fail(CTL_USAGE, "%s is a directory, and needs no --state", path);
    if (!o->as_it_is && stat(o->file, &st) < 0)
        return program_fail(CTL_ERROR, "%s: %s", o->file, strerror(errno));
    o->device = S_ISBLK(st.st_mode);
    if (!o->device && !S_ISREG(st.st_mode))
        return program_fail(CTL_ERROR, "%s is neither a regular file nor a block device", o->file);
    if (o->as_it_is && !state && o->salvage)
        return program_fail(CTL_USAGE,
                            "%s is not a directory: --salvage needs --state DIRECTORY, "
                            "the nvme.state of its daemon",
                            path);
    return CTL_OK;
}

int offline_open(struct offline *o, const char *path, const char *state)
{
    int rc;

    o->fd = -1;
    rc = entry_find(o, path, state);
    if (rc == CTL_OK)
        rc = file_open(o);
    if (rc == CTL_OK)
        rc = super_read(o);
    return rc == CTL_OK && o->as_it_is ? directory_find(o, state) : rc;
}

void offline_close(struct offline *o)
{
    if (o->fd >= 0)
        close(o->fd);
    free(o->space);
    free(o->payload);
}
