/* Open folders of the buckets below a root, so that an operation on a file walks one name and not a
 * path. A folder that was taken away, or a root on which something else is mounted by now, is found
 * out and opened anew.
 *
 * Promise: below the root no symbolic link is followed to a folder. The root itself is never made:
 * that of a file system which is not mounted is not there. No lock is held over a call that may
 * hang. Any thread. */
#ifndef UCMD_SHARE_POSIX_FOLDER_H
#define UCMD_SHARE_POSIX_FOLDER_H

#include "daemon/share/block_file.h"

#include <pthread.h>
#include <sys/types.h>

struct posix_folder {
    int fd;
    unsigned users; /* the table is one of them */
};

struct posix_folders {
    char *root;
    pthread_mutex_t lock; /* guards what follows, and `users` */
    dev_t dev;            /* of the root that the buckets were opened below */
    ino_t ino;
    struct posix_folder *buckets[BLOCK_FILE_BUCKETS]; /* NULL: not open */
};

/* 0 or -ENOMEM. No I/O. */
int posix_folders_init(struct posix_folders *f, const char *root);
/* Nobody uses a folder any more. */
void posix_folders_close(struct posix_folders *f);

/* With `make` the folders below the root are made where they are missing. 0; -ENOENT: there is no
 * such bucket; -EBADMSG: there is something else of that name; -ENODEV: there is no such root;
 * -errno. */
int posix_folder_get(struct posix_folders *f, uint8_t bucket, bool make, struct posix_folder **out);
void posix_folder_put(struct posix_folders *f, struct posix_folder *folder);
/* 0: what is missing in this folder is missing on the root. -ESTALE: the folder is not the bucket's
 * any more, the next get opens it anew. Otherwise as posix_folder_get. */
int posix_folder_current(struct posix_folders *f, uint8_t bucket,
                         const struct posix_folder *folder);
/* 0, or what is wrong with the root; all folders are opened anew. The root's descriptor in *fd. */
int posix_folders_renew(struct posix_folders *f, int *fd);

#endif
