#include "daemon/tier/names.h"

#include "daemon/base/config.h"
#include "daemon/base/kill_point.h"
#include "daemon/base/log.h"
#include "daemon/tier/nvme_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PAGES_MAX 65536u /* that are looked at in one file */

const struct nvme_name *names_find(const struct names *n, const uint8_t *fingerprint)
{
    for (uint32_t i = 0; i < n->count; i++)
        if (memcmp(n->name[i]->fingerprint, fingerprint, UCM_FINGERPRINT_BYTES) == 0)
            return n->name[i];
    return NULL;
}

void names_forget(struct names *n, const uint8_t *fingerprint, uint64_t from_sequence)
{
    for (uint32_t i = 0; i < n->count; i++)
        if (memcmp(n->name[i]->fingerprint, fingerprint, UCM_FINGERPRINT_BYTES) == 0 &&
            n->name[i]->from_sequence < from_sequence)
            n->name[i]->from_sequence = from_sequence;
}

int names_set(struct names *n, const struct nvme_name *name)
{
    struct nvme_name *known;

    if (names_find(n, name->fingerprint)) {
        names_forget(n, name->fingerprint, name->from_sequence);
        return 0;
    }
    if (n->count == n->cap) {
        uint32_t cap = n->cap ? 2 * n->cap : 16;
        struct nvme_name **p = realloc(n->name, cap * sizeof(*p));

        if (!p)
            return -ENOMEM;
        n->name = p;
        n->cap = cap;
    }
    known = malloc(sizeof(*known));
    if (!known)
        return -ENOMEM;
    *known = *name;
    n->name[n->count++] = known;
    return 0;
}

static int file_read(struct names *n, struct names_file *f, int fd)
{
    uint8_t page[NVME_PAGE];
    struct nvme_name name;
    uint64_t damaged = 0;
    ssize_t got = 0;

    memset(&name, 0, sizeof(name));
    for (uint64_t i = 0; i < PAGES_MAX; i++) {
        got = pread(fd, page, sizeof(page), (off_t)(i * NVME_PAGE));
        if (got != (ssize_t)sizeof(page))
            break;
        if (nvme_name_decode(page, &name) < 0) {
            damaged++;
            continue;
        }
        if (names_set(n, &name) < 0)
            return -ENOMEM;
        f->pages = i + 1;
    }
    if (got < 0)
        log_error("tier", "names-not-read", "path=%s error=%s", f->path, strerror(errno));
    n->unread |= got < 0;
    if (damaged > 0)
        log_warn("tier", "names-damaged", "path=%s records=%llu", f->path,
                 (unsigned long long)damaged);
    return 0;
}

static int file_init(struct names *n, struct names_file *f, const char *folder)
{
    int fd, rc;

    f->folder = strdup(folder);
    if (!f->folder || asprintf(&f->path, "%s/%s", folder, CONFIG_NVME_NAMES) < 0) {
        f->path = NULL;
        return -ENOMEM;
    }
    fd = open(f->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        n->unread |= errno != ENOENT;
        if (errno != ENOENT)
            log_error("tier", "names-not-read", "path=%s error=%s", f->path, strerror(errno));
        return 0;
    }
    rc = file_read(n, f, fd);
    /* The run that wrote the last of them may have ended before they were on the disk. */
    if (rc == 0 && (fdatasync(fd) < 0 || nvme_folder_sync(folder) < 0)) {
        log_error("tier", "names-not-synced", "path=%s error=%s", f->path, strerror(errno));
        n->doubtful = true;
    }
    close(fd);
    return rc;
}

int names_open(struct names *n, const char *const *folders, unsigned count)
{
    int rc = 0;

    *n = (struct names){.n_files = count};
    n->files = calloc(count, sizeof(n->files[0]));
    if (!n->files)
        return -ENOMEM;
    for (unsigned i = 0; i < count && rc == 0; i++)
        if (folders[i])
            rc = file_init(n, &n->files[i], folders[i]);
    if (rc < 0)
        names_close(n);
    return rc;
}

void names_close(struct names *n)
{
    for (unsigned i = 0; n->files && i < n->n_files; i++) {
        free(n->files[i].folder);
        free(n->files[i].path);
    }
    for (uint32_t i = 0; i < n->count; i++)
        free(n->name[i]);
    free(n->files);
    free(n->name);
    *n = (struct names){0};
}

/* ---- writing ---- */

static int file_append(struct names_file *f, const uint8_t *page)
{
    int fd = open(f->path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    ssize_t n;
    int rc = 0;

    if (fd < 0)
        return -errno;
    KILL_POINT("name-begin");
    KILL_POINT_WITH("name-torn",
                    if (pwrite(fd, page, 512, (off_t)(f->pages * NVME_PAGE)) < 0) abort());
    do
        n = pwrite(fd, page, NVME_PAGE, (off_t)(f->pages * NVME_PAGE));
    while (n < 0 && errno == EINTR);
    if (n != (ssize_t)NVME_PAGE)
        rc = n < 0 ? -errno : -EIO;
    if (rc == 0 && fdatasync(fd) < 0)
        rc = -errno;
    close(fd);
    KILL_POINT("name-done");
    if (rc == 0 && f->pages == 0)
        rc = nvme_folder_sync(f->folder);
    if (rc == 0)
        f->pages++;
    return rc;
}

int names_write(struct names *n, const struct nvme_name *name)
{
    uint8_t page[NVME_PAGE];
    int rc = 0;

    nvme_name_encode(name, page);
    for (unsigned i = 0; i < n->n_files; i++) {
        int one = n->files[i].path ? file_append(&n->files[i], page) : 0;

        if (one == 0)
            continue;
        log_error("tier", "name-not-written", "path=%s error=%s", n->files[i].path, strerror(-one));
        rc = one;
    }
    return rc;
}
