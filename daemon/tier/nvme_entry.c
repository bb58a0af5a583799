#include "daemon/tier/nvme_entry.h"

#include "daemon/base/take.h"
#include "daemon/format/io.h"
#include "proto/errors.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

int nvme_entry_kind(const char *path, enum nvme_entry *out, struct ucm_error *e)
{
    struct stat st;
    int rc = stat(path, &st) < 0 ? -errno : 0;

    if (rc == 0 && S_ISDIR(st.st_mode))
        *out = NVME_ENTRY_FOLDER;
    else if (rc == 0 && S_ISREG(st.st_mode))
        *out = NVME_ENTRY_FILE;
    else if (rc == 0 && S_ISBLK(st.st_mode))
        *out = NVME_ENTRY_DEVICE;
    else if (rc == 0)
        rc = -EINVAL;
    if (rc < 0)
        ucm_error_set(e, UCM_WIRE_IO, "%s can't be used (%s): name a folder, a file or a device",
                      path, strerror(-rc));
    return rc;
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

int nvme_entry_open_device(const char *path, struct ucm_error *e)
{
    int fd = take_open(path, O_RDWR | O_DIRECT), rc;

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

int nvme_entry_folder(const char *path, const char *state, const uint8_t uuid[NVME_UUID_BYTES],
                      char **out, struct ucm_error *e)
{
    char name[NVME_UUID_TEXT], *folder;
    int rc = 0;

    if (state[0] == '\0') {
        ucm_error_set(e, UCM_WIRE_INVALID,
                      "%s is no folder: set nvme.state to a folder for what belongs to it", path);
        return -EINVAL;
    }
    nvme_uuid_text(uuid, name);
    if (asprintf(&folder, "%s/%s", state, name) < 0)
        return -ENOMEM;
    if (mkdir(folder, 0700) == 0)
        rc = io_folder_sync(state);
    else if (errno != EEXIST)
        rc = -errno;
    if (rc < 0) {
        ucm_error_set(e, UCM_WIRE_IO, "nvme.state: %.100s can't be made: %s", folder,
                      strerror(-rc));
        free(folder);
        return rc;
    }
    *out = folder;
    return 0;
}
