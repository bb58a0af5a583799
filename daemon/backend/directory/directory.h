/* Files below a directory of a mounted file system: what ucmd-backend-directory does with them.
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
#ifndef UCM_BACKEND_DIRECTORY_DIRECTORY_H
#define UCM_BACKEND_DIRECTORY_DIRECTORY_H

#include "daemon/backend/wire.h"

struct directory_file {
    const char *root;
    const char *bucket; /* "blocks/ab": below the root */
    const char *name;
    /* directory_write, directory_check: a name of nobody else's, which ends with a digit to the
     * base of 16 */
    const char *temp;
    uint64_t bytes; /* its length, header included */
    void *memory;   /* directory_read, directory_write: as uncached.h says */
    /* directory_write: durable, its name too. directory_check: does the root take writes? */
    bool sync;
    unsigned attempt;  /* the module's own */
    uint64_t mtime_ns; /* out: directory_read; directory_check with sync: the server's time */
};

int directory_find(struct directory_file *f);
int directory_read(struct directory_file *f);
int directory_write(struct directory_file *f);
int directory_remove(struct directory_file *f);
/* Sets its time to the server's now. */
int directory_touch(struct directory_file *f);
/* Does the root answer? */
int directory_check(struct directory_file *f);

#define DIRECTORY_FILES (1u << 19) /* of a listing; more are left out */

/* Regular files of a bucket; none of one that does not exist. Zeroes before but for root and
 * bucket; `files` is the caller's, by malloc, whatever is returned. */
struct directory_listing {
    const char *root, *bucket;
    struct wire_file *files;
    uint32_t n, cap;
    uint32_t unread; /* files left out because nothing could be learnt of them */
};
int directory_list(struct directory_listing *l);

#endif
