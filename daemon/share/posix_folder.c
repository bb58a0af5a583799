#include "daemon/share/posix_folder.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FOLDER (O_RDONLY | O_DIRECTORY | O_CLOEXEC)

int posix_folders_init(struct posix_folders *f, const char *root)
{
    memset(f, 0, sizeof(*f));
    f->root = strdup(root);
    if (!f->root)
        return -ENOMEM;
    pthread_mutex_init(&f->lock, NULL);
    return 0;
}

/* Locked. A descriptor to close, or -1. */
static int folder_leave(struct posix_folder *folder)
{
    int fd = -1;

    if (--folder->users == 0) {
        fd = folder->fd;
        free(folder);
    }
    return fd;
}

/* A folder's descriptor: nothing was written through it that closing could lose. */
static void fd_close(int fd)
{
    if (fd >= 0)
        close(fd);
}

void posix_folder_put(struct posix_folders *f, struct posix_folder *folder)
{
    int fd;

    pthread_mutex_lock(&f->lock);
    fd = folder_leave(folder);
    pthread_mutex_unlock(&f->lock);
    fd_close(fd);
}

/* One after the other, since closing is for outside the lock. */
static void folders_drop(struct posix_folders *f)
{
    for (unsigned i = 0; i < BLOCK_FILE_BUCKETS; i++) {
        int fd = -1;

        pthread_mutex_lock(&f->lock);
        if (f->buckets[i])
            fd = folder_leave(f->buckets[i]);
        f->buckets[i] = NULL;
        pthread_mutex_unlock(&f->lock);
        fd_close(fd);
    }
}

void posix_folders_close(struct posix_folders *f)
{
    folders_drop(f);
    pthread_mutex_destroy(&f->lock);
    free(f->root);
}

static int root_error(int error)
{
    return error == ENOENT ? -ENODEV : -error;
}

/* Opens the root. What is open below another one that had its name before is dropped. */
static int root_open(struct posix_folders *f, struct stat *st, int *out)
{
    int fd = open(f->root, FOLDER), err = 0;
    bool other;

    if (fd < 0)
        return root_error(errno);
    if (fstat(fd, st) < 0) {
        err = -errno;
        close(fd);
        return err;
    }
    pthread_mutex_lock(&f->lock);
    other = f->dev != st->st_dev || f->ino != st->st_ino;
    f->dev = st->st_dev;
    f->ino = st->st_ino;
    pthread_mutex_unlock(&f->lock);
    if (other)
        folders_drop(f);
    *out = fd;
    return 0;
}

/* A folder that the file system can't read (EBADMSG) is not one that is not there. */
static int folder_error(int error)
{
    return error == ELOOP ? -ENOTDIR : error == EBADMSG ? -EIO : -error;
}

static int folder_open(int parent, const char *name, bool make)
{
    int fd;

    if (make && mkdirat(parent, name, 0700) < 0 && errno != EEXIST)
        return -errno;
    fd = openat(parent, name, FOLDER | O_NOFOLLOW);
    if (fd < 0)
        return folder_error(errno);
    return fd;
}

/* `blocks`, then the bucket. A descriptor or -errno. */
static int bucket_open(int root, uint8_t bucket, bool make)
{
    char name[3];
    int blocks = folder_open(root, "blocks", make), fd;

    if (blocks < 0)
        return blocks;
    snprintf(name, sizeof(name), "%02x", bucket);
    fd = folder_open(blocks, name, make);
    close(blocks);
    return fd == -ENOTDIR ? -EBADMSG : fd;
}

/* Keeps the folder for the next one, unless the root is another one by now or somebody was faster:
 * then it is only the caller's. */
static void folder_keep(struct posix_folders *f, uint8_t bucket, const struct stat *root,
                        struct posix_folder *folder)
{
    pthread_mutex_lock(&f->lock);
    if (!f->buckets[bucket] && f->dev == root->st_dev && f->ino == root->st_ino) {
        f->buckets[bucket] = folder;
        folder->users++;
    }
    pthread_mutex_unlock(&f->lock);
}

static int folder_new(struct posix_folders *f, uint8_t bucket, bool make, struct posix_folder **out)
{
    struct posix_folder *folder;
    struct stat st;
    int root, err = root_open(f, &st, &root);

    if (err < 0)
        return err;
    folder = malloc(sizeof(*folder));
    if (!folder) {
        err = -ENOMEM;
        goto err_after_root;
    }
    *folder = (struct posix_folder){bucket_open(root, bucket, make), 1};
    if (folder->fd < 0) {
        err = folder->fd;
        goto err_after_folder;
    }
    close(root);
    folder_keep(f, bucket, &st, folder);
    *out = folder;
    return 0;

err_after_folder:
    free(folder);
err_after_root:
    close(root);
    return err;
}

int posix_folder_get(struct posix_folders *f, uint8_t bucket, bool make, struct posix_folder **out)
{
    struct posix_folder *folder;

    pthread_mutex_lock(&f->lock);
    folder = f->buckets[bucket];
    if (folder)
        folder->users++;
    pthread_mutex_unlock(&f->lock);
    if (!folder)
        return folder_new(f, bucket, make, out);
    *out = folder;
    return 0;
}

/* The caller still has the folder, so there is nothing to close. */
static void folder_forget(struct posix_folders *f, uint8_t bucket,
                          const struct posix_folder *folder)
{
    pthread_mutex_lock(&f->lock);
    if (f->buckets[bucket] == folder) {
        (void)folder_leave(f->buckets[bucket]);
        f->buckets[bucket] = NULL;
    }
    pthread_mutex_unlock(&f->lock);
}

int posix_folder_current(struct posix_folders *f, uint8_t bucket, const struct posix_folder *folder)
{
    struct stat root, own;
    bool same_root, kept;

    if (stat(f->root, &root) < 0)
        return root_error(errno);
    if (fstat(folder->fd, &own) < 0) {
        if (errno != ESTALE)
            return -errno;
        own.st_nlink = 0;
    }
    pthread_mutex_lock(&f->lock);
    same_root = f->dev == root.st_dev && f->ino == root.st_ino;
    kept = f->buckets[bucket] == folder; /* else it may be of a root that was there before */
    pthread_mutex_unlock(&f->lock);
    if (same_root && kept && own.st_nlink > 0)
        return 0;
    if (!same_root)
        folders_drop(f);
    folder_forget(f, bucket, folder);
    return -ESTALE;
}

int posix_folders_renew(struct posix_folders *f, int *fd)
{
    struct stat st;

    folders_drop(f);
    return root_open(f, &st, fd);
}
