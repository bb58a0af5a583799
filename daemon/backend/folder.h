/* Files below a folder of a mounted file system: what a root in a folder does with them, in the daemon's threads and in
 * ucmd-backend-folder.
 *
 * Promises:
 * - Each call walks from the root, so a mount or an unmount takes effect at once. The root itself is never made: its file
 *   system may not be mounted yet. No link below it is followed.
 * - A write leaves a whole file under its name or none; on failure its temporary file is removed, or left to others.
 * - Bytes go past the page cache (uncached.h).
 *
 * All return 0 or -errno, of which
 * - -ENOENT, -ESTALE: the file does not exist
 * - -EEXIST: of a write, a file of that length does
 * - -EBADMSG: something else has the name
 * - -ENODEV: the root does not exist
 *
 * Threads: any. */
#ifndef UCM_BACKEND_FOLDER_H
#define UCM_BACKEND_FOLDER_H

#include "daemon/backend/uncached.h"

struct folder_file {
    const char *root;
    const char *bucket; /* "blocks/ab": below the root */
    const char *name;
    const char *temp; /* folder_write, folder_check: a name of nobody else's */
    uint64_t bytes;   /* its length, header included */
    /* folder_read, folder_write: where the bytes are; memory for what lies askew. */
    const struct iovec *pieces;
    unsigned n;
    const struct uncached_bounce *bounce;
    bool sync; /* folder_write: durable, its name too. folder_check: does the root take writes? */
    /* folder_write: before each attempt, which wants another temp, and before the bytes are read; NULL: all is there. */
    void (*begin_cb)(void *ctx);
    void *ctx;
    uint64_t mtime_ns; /* out: folder_read; folder_check with sync: the server's time */
};

int folder_find(struct folder_file *f);
int folder_read(struct folder_file *f);
int folder_write(struct folder_file *f);
int folder_remove(struct folder_file *f);
/* Sets its time to the server's now. */
int folder_touch(struct folder_file *f);
/* Does the root answer? */
int folder_check(struct folder_file *f);

struct folder_listing {
    const char *root, *bucket;
    bool (*wants_cb)(const char *name); /* should add_cb get a file of that name? */
    int (*add_cb)(void *ctx, const char *name, uint64_t bytes, uint64_t mtime_ns);
    void *ctx;
    uint32_t unread; /* out: files left out because nothing could be learnt of them */
};
/* Regular files of a bucket; none of one that does not exist. Ends with what add_cb returns, where that is not 0. */
int folder_list(struct folder_listing *l);

#endif
