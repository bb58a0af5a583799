#include "daemon/snapshot/persist.h"

#include "daemon/base/kill_point.h"
#include "daemon/base/log.h"
#include "daemon/config/config.h"
#include "daemon/format/take.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <systemd/sd-id128.h>
#include <unistd.h>

#define MODULE "arena"
#define NEW_SNAPSHOT CONFIG_KEEP_SNAPSHOT ".tmp"

struct map {
    uint8_t *p;
    size_t n, mapped; /* mapped: rounded up to the file system's pages */
};

struct persist {
    int directory, fd; /* directory: holds the lock; fd: the arena's file, -1 for none */
    sd_id128_t boot;
    struct map snapshot, fresh; /* of the run before; that this run writes */
    bool ours;                  /* persist_take or persist_reset succeeded */
    bool committed;
};

static void map_close(struct map *m)
{
    if (m->p)
        munmap(m->p, m->mapped);
    *m = (struct map){0};
}

/* ---- opening ---- */

/* A file of this user in the directory, or -1. */
static int own_open(const struct persist *k, const char *name, struct stat *st)
{
    int fd = openat(k->directory, name, O_RDWR | O_NOFOLLOW | O_CLOEXEC);

    if (fd < 0)
        return -1;
    if (fstat(fd, st) == 0 && S_ISREG(st->st_mode) && st->st_uid == geteuid() && st->st_nlink == 1)
        return fd;
    log_warn(MODULE, "snapshot-refused", "file=%s: not a file of this user", name);
    close(fd);
    return -1;
}

static void snapshot_map(struct persist *k)
{
    struct stat st;
    int fd = own_open(k, CONFIG_KEEP_SNAPSHOT, &st);
    void *p;

    if (fd < 0)
        return;
    if (st.st_size > 0) {
        p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
        if (p != MAP_FAILED)
            k->snapshot = (struct map){p, (size_t)st.st_size, (size_t)st.st_size};
    }
    close(fd);
}

int persist_open(const char *directory, struct persist **out, char why[PERSIST_WHY_BYTES])
{
    struct persist *k = calloc(1, sizeof(*k));
    struct stat st;
    int rc = -ENOMEM;

    why[0] = '\0';
    if (!k)
        return rc;
    k->fd = -1;
    k->directory = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    rc = k->directory < 0 ? -errno : take_lock(k->directory, TAKE_WAIT_MS);
    if (rc == 0)
        rc = sd_id128_get_boot(&k->boot);
    if (rc < 0) {
        snprintf(why, PERSIST_WHY_BYTES, "arena.persist_dir: %.200s: %s", directory,
                 rc == -EWOULDBLOCK ? "another daemon uses it; stop it, or name another directory"
                                    : strerror(-rc));
        if (k->directory >= 0)
            close(k->directory);
        free(k);
        return rc;
    }
    (void)unlinkat(k->directory, NEW_SNAPSHOT, 0); /* of a run that was killed while it wrote it */
    k->fd = own_open(k, CONFIG_KEEP_ARENA, &st);
    if (k->fd >= 0)
        snapshot_map(k);
    *out = k;
    return 0;
}

const uint8_t *persist_snapshot(const struct persist *k, size_t *n)
{
    *n = k->snapshot.n;
    return k->snapshot.p;
}

bool persist_removed(const struct persist *k)
{
    struct stat file, directory;

    return k->fd >= 0 && fstat(k->fd, &file) == 0 && fstat(k->directory, &directory) == 0 &&
           (file.st_nlink == 0 || directory.st_nlink == 0);
}

struct persist_identity persist_identity(const struct persist *k)
{
    struct persist_identity id = {.inode = 0};
    struct stat st;

    memcpy(id.boot, k->boot.bytes, sizeof(id.boot));
    if (k->fd >= 0 && fstat(k->fd, &st) == 0) {
        id.inode = st.st_ino;
        id.bytes = (uint64_t)st.st_size;
    }
    return id;
}

/* ---- taking it over, or starting again ---- */

int persist_take(struct persist *k)
{
    KILL_POINT("persist-take");
    if (unlinkat(k->directory, CONFIG_KEEP_SNAPSHOT, 0) < 0 && errno != ENOENT)
        return -errno;
    k->ours = true;
    KILL_POINT("persist-taken");
    return 0;
}

void persist_forget(struct persist *k)
{
    map_close(&k->snapshot);
}

int persist_reset(struct persist *k, uint64_t bytes)
{
    int rc;

    persist_forget(k);
    rc = persist_take(k);
    if (rc < 0)
        return rc;
    if (k->fd >= 0)
        close(k->fd);
    k->fd = -1;
    if (unlinkat(k->directory, CONFIG_KEEP_ARENA, 0) < 0 && errno != ENOENT)
        return -errno;
    k->fd = openat(k->directory, CONFIG_KEEP_ARENA, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (k->fd < 0 || ftruncate(k->fd, (off_t)bytes) < 0)
        return -errno;
    return 0;
}

int persist_fd(const struct persist *k)
{
    return k->fd;
}

/* ---- at the end ---- */

/* A hugetlbfs has no write(2), so the file is mapped; its space is taken first, as a full file
 * system would cause a SIGBUS. */
int persist_create(struct persist *k, size_t n, uint8_t **out)
{
    struct map m = {.n = n};
    struct stat st;
    int rc = 0;
    int fd = openat(k->directory, NEW_SNAPSHOT, O_RDWR | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC,
                    0600);

    if (fd < 0)
        return -errno;
    if (fstat(fd, &st) < 0) {
        rc = -errno;
    } else {
        m.mapped = (n + (size_t)st.st_blksize - 1) / (size_t)st.st_blksize * (size_t)st.st_blksize;
        if (ftruncate(fd, (off_t)m.mapped) < 0 || fallocate(fd, 0, 0, (off_t)m.mapped) < 0)
            rc = -errno;
    }
    if (rc == 0) {
        m.p = mmap(NULL, m.mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        rc = m.p == MAP_FAILED ? -errno : 0;
    }
    close(fd);
    if (rc < 0) {
        (void)unlinkat(k->directory, NEW_SNAPSHOT, 0);
        return rc;
    }
    k->fresh = m;
    *out = m.p;
    return 0;
}

int persist_commit(struct persist *k)
{
    map_close(&k->fresh);
    KILL_POINT("persist-written");
    if (renameat(k->directory, NEW_SNAPSHOT, k->directory, CONFIG_KEEP_SNAPSHOT) < 0)
        return -errno;
    KILL_POINT("persist-named");
    k->committed = true;
    return 0;
}

void persist_close(struct persist *k)
{
    if (!k)
        return;
    map_close(&k->fresh);
    map_close(&k->snapshot);
    if (k->ours && !k->committed) {
        (void)unlinkat(k->directory, NEW_SNAPSHOT, 0);
        (void)unlinkat(k->directory, CONFIG_KEEP_ARENA, 0); /* gives its memory back */
    }
    if (k->fd >= 0)
        close(k->fd);
    close(k->directory); /* and the lock with it */
    free(k);
}
