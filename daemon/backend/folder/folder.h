/* Files below a folder of a mounted file system: what ucmd-backend-folder does with them.
 *
 * Promises:
 * - Each call walks from the root, so a mount or an unmount takes effect at once. The root itself
 *   is never made: its file system may not be mounted yet. No link below it is followed.
 * - A write leaves a whole file under its name or none; on failure its temporary file is removed,
 *   or left to others. Each attempt at it has a temporary name of its own.
 * - Bytes go past the page cache (uncached.h).
 *
 * All return 0 or -errno, of which
 * - -ENOENT, -ESTALE: the file does not exist
 * - -EEXIST: of a write, a file of that length does
 * - -EBADMSG: something else has the name
 * - -ENODEV: the root does not exist
 *
 * Threads: any. */
#ifndef UCM_BACKEND_FOLDER_FOLDER_H
#define UCM_BACKEND_FOLDER_FOLDER_H

#include "daemon/backend/wire.h"

struct folder_file {
    const char *root;
    const char *bucket; /* "blocks/ab": below the root */
    const char *name;
    /* folder_write, folder_check: a name of nobody else's, which ends with a digit to the base
     * of 16 */
    const char *temp;
    uint64_t bytes; /* its length, header included */
    void *memory;   /* folder_read, folder_write: as uncached.h says */
    bool sync; /* folder_write: durable, its name too. folder_check: does the root take writes? */
    unsigned attempt;  /* the module's own */
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

#define FOLDER_FILES (1u << 19) /* of a listing; more are left out */

/* Regular files of a bucket; none of one that does not exist. Zeroes before but for root and
 * bucket; `files` is the caller's, by malloc, whatever is returned. */
struct folder_listing {
    const char *root, *bucket;
    struct wire_file *files;
    uint32_t n, cap;
    uint32_t unread; /* files left out because nothing could be learnt of them */
};
int folder_list(struct folder_listing *l);

#endif
