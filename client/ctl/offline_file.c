/* verify --offline: the file that is looked at, which may be a block device, and the folder of what
 * belongs to it. */
#include "client/ctl/ctl.h"
#include "client/ctl/offline.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/fs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define SEGMENT_MIN (1ull << 20)
#define SEGMENT_MAX (1ull << 30)
#define TAKE_TRIES 60

void offline_path(const struct offline *o, const char *name, char out[PATH_BYTES])
{
    int n = snprintf(out, PATH_BYTES, "%s/%s", o->folder, name);

    if (o->folder[0] == '\0' || n >= (int)PATH_BYTES)
        out[0] = '\0'; /* opens nothing */
}

static bool changes(const struct offline *o)
{
    return o->salvage || o->lift;
}

/* Once; errno tells why not. A device that is mounted, or somebody else's, is not changed. */
static bool file_take(struct offline *o)
{
    int flags = changes(o) ? O_RDWR | (o->device ? O_EXCL : 0) : O_RDONLY;
    int why;

    o->fd = open(o->file, flags | O_CLOEXEC);
    if (o->fd >= 0 && flock(o->fd, (changes(o) ? LOCK_EX : LOCK_SH) | LOCK_NB) == 0)
        return true;
    if (o->fd >= 0 && !changes(o)) {
        fprintf(stderr, "%s is in use: what is being written now may seem corrupt\n", o->file);
        return true;
    }
    why = errno;
    if (o->fd >= 0)
        close(o->fd);
    o->fd = -1;
    errno = why;
    return false;
}

/* A killed daemon's file stays locked until its last transfers have ended. */
static int file_open(struct offline *o)
{
    const struct timespec pause = {.tv_nsec = 50000000};

    for (int i = 0; i < TAKE_TRIES; i++) {
        if (i > 0)
            nanosleep(&pause, NULL);
        if (file_take(o))
            return CTL_OK;
        if (errno != EBUSY && errno != EWOULDBLOCK)
            return ctl_fail(CTL_ERROR, "%s: %s", o->file, strerror(errno));
    }
    return ctl_fail(CTL_ERROR, "%s is in use: nothing was changed; stop ucmd first", o->file);
}

static int size_read(struct offline *o)
{
    struct stat st;
    int rc = fstat(o->fd, &st);

    o->size = rc < 0 ? 0 : (uint64_t)st.st_size;
    if (rc == 0 && o->device)
        rc = ioctl(o->fd, BLKGETSIZE64, &o->size);
    return rc < 0 ? ctl_fail(CTL_ERROR, "%s: %s", o->file, strerror(errno)) : CTL_OK;
}

static int super_read(struct offline *o)
{
    uint8_t page[PAGE];

    if (!offline_read(o->fd, page, PAGE, 0) || offline_page_kind(page, "UCMDNVME") == PAGE_NONE)
        return ctl_fail(CTL_ERROR, "%s is not a file of ucmd's NVMe tier", o->file);
    if (offline_u32(page + 8) != FORMAT_VERSION)
        return ctl_fail(CTL_ERROR,
                        "%s has storage format version %u and this ucmctl reads %u: use the one "
                        "that came with the ucmd that wrote it",
                        o->file, offline_u32(page + 8), FORMAT_VERSION);
    o->segment_bytes = offline_u64(page + 32);
    o->data_offset = offline_u64(page + 40);
    memcpy(o->uuid, page + 16, sizeof(o->uuid));
    if (offline_page_kind(page, "UCMDNVME") != PAGE_GOOD || o->segment_bytes < SEGMENT_MIN ||
        o->segment_bytes > SEGMENT_MAX || o->segment_bytes % PAGE != 0 || o->data_offset > o->size)
        return ctl_fail(CTL_CORRUPT,
                        "%s: the superblock is damaged, and without it nothing can be told from "
                        "anything: %s to start empty",
                        o->file,
                        o->as_it_is ? "run 'ucmctl format --force' on it"
                                    : "delete the folder's three files");
    if ((o->size - o->data_offset) / o->segment_bytes > SEGMENTS_MAX)
        return ctl_fail(CTL_ERROR, "%s is longer than a file of ucmd's can be", o->file);
    o->payload = malloc(o->segment_bytes);
    return o->payload ? CTL_OK : ctl_fail(CTL_ERROR, "no memory");
}

/* nvme.state has a folder for it, named after its UUID. */
static int folder_find(struct offline *o, const char *state)
{
    char name[2 * sizeof(o->uuid) + 1];

    if (!state)
        return CTL_OK;
    for (unsigned i = 0; i < sizeof(o->uuid); i++)
        snprintf(name + 2 * (size_t)i, 3, "%02x", o->uuid[i]);
    if (snprintf(o->folder, sizeof(o->folder), "%s/%s", state, name) >= (int)sizeof(o->folder))
        return ctl_fail(CTL_USAGE, "the name of the folder is too long");
    if (access(o->folder, F_OK) == 0)
        return CTL_OK;
    if (o->salvage)
        return ctl_fail(CTL_ERROR, "%s: %s; nothing was changed", o->folder, strerror(errno));
    fprintf(stderr, "%s: %s\n", o->folder, strerror(errno));
    return CTL_OK;
}

/* A folder has everything in it; anything else is an entry that ucmd uses as it is. */
static int entry_find(struct offline *o, const char *path, const char *state)
{
    struct stat st;
    int n;

    if (stat(path, &st) < 0)
        return ctl_fail(CTL_ERROR, "%s: %s", path, strerror(errno));
    o->as_it_is = !S_ISDIR(st.st_mode);
    n = snprintf(o->file, sizeof(o->file), "%s%s", path, o->as_it_is ? "" : "/ucmd.cache");
    if (n >= (int)sizeof(o->file))
        return ctl_fail(CTL_USAGE, "the path is too long");
    if (!o->as_it_is)
        memcpy(o->folder, path, strlen(path) + 1);
    if (!o->as_it_is && state)
        return ctl_fail(CTL_USAGE, "%s is a folder, and needs no --state", path);
    if (!o->as_it_is && stat(o->file, &st) < 0)
        return ctl_fail(CTL_ERROR, "%s: %s", o->file, strerror(errno));
    o->device = S_ISBLK(st.st_mode);
    if (!o->device && !S_ISREG(st.st_mode))
        return ctl_fail(CTL_ERROR, "%s is neither a regular file nor a block device", o->file);
    if (o->as_it_is && !state && o->salvage)
        return ctl_fail(CTL_USAGE,
                        "%s is no folder: --salvage needs --state FOLDER, "
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
        rc = size_read(o);
    if (rc == CTL_OK)
        rc = super_read(o);
    return rc == CTL_OK && o->as_it_is ? folder_find(o, state) : rc;
}

void offline_close(struct offline *o)
{
    if (o->fd >= 0)
        close(o->fd);
    free(o->space);
    free(o->payload);
}
