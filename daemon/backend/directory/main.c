/* ucmd-backend-directory DIRECTORY [THREADS]: keeps blocks in a directory of a mounted file system:
 * a mount that hangs or a file system's bug costs the process. */
#include "daemon/backend/directory/directory.h"
#include "daemon/backend/ucmbackend.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FILES 200u /* of a page of a listing */

/* The path of a file's directory, and its name. NULL: it has none. */
static const char *key_split(const char *key, char directory[WIRE_KEY_BYTES + 1])
{
    const char *slash = strrchr(key, '/');

    if (!slash)
        return NULL;
    snprintf(directory, WIRE_KEY_BYTES + 1, "%.*s", (int)(slash - key), key);
    return slash + 1;
}

static int list(const char *root, const char *bucket, struct ucm_backend *b,
                struct ucm_backend_request *r, struct ucm_backend_result *result)
{
    struct directory_listing l = {.root = root, .bucket = bucket};
    int rc = directory_list(&l);

    for (uint32_t at = 0; rc == 0 && at < l.n; at += FILES)
        rc = ucm_backend_files(b, r, l.files + at, l.n - at < FILES ? l.n - at : FILES);
    free(l.files);
    result->unread = l.unread;
    return rc;
}

static int file_handle(struct directory_file *f, struct ucm_backend_request *r,
                       struct ucm_backend_result *result)
{
    int err;

    result->bytes = r->bytes;
    switch (r->verb) {
    case WIRE_FIND:
        return directory_find(f);
    case WIRE_READ:
        err = directory_read(f);
        result->mtime_ns = f->mtime_ns;
        return err;
    case WIRE_WRITE:
        return directory_write(f);
    case WIRE_REMOVE:
        return directory_remove(f);
    case WIRE_TOUCH:
        return directory_touch(f);
    default:
        err = directory_check(f);
        result->now_ns = f->mtime_ns;
        return err;
    }
}

static enum wire_status status_of(int err)
{
    return err == -EEXIST    ? WIRE_EXISTS
           : err == -EBADMSG ? WIRE_OTHER
           : err == -ENOTDIR ? WIRE_FAILED /* says nothing about a file */
                             : ucm_backend_status(-err);
}

static void handle_cb(void *ctx, struct ucm_backend *b, struct ucm_backend_request *r,
                      struct ucm_backend_result *result)
{
    char directory[WIRE_KEY_BYTES + 1] = "";
    const char *key = r->verb == WIRE_CHECK ? r->temp : r->key, *name = key_split(key, directory);
    struct directory_file f = {.root = ctx,
                               .bucket = directory,
                               .name = name,
                               .bytes = r->bytes,
                               .memory = r->data, /* spans are aligned, and so is the buffer */
                               .sync = r->sync};
    int err = -EINVAL;

    if (r->temp && strrchr(r->temp, '/'))
        f.temp = strrchr(r->temp, '/') + 1;
    if (name)
        err =
            r->verb == WIRE_LIST ? list(ctx, directory, b, r, result) : file_handle(&f, r, result);
    result->status = status_of(err);
    result->reason =
        err == -ENODEV ? "the directory does not exist: is it mounted?" : strerror(-err);
}

int main(int argc, char **argv)
{
    const struct ucm_backend_about about = {.name = "directory", .touch = true, .list = true};
    int threads = argc > 2 ? atoi(argv[2]) : 16, rc;

    if (argc < 2 || argv[1][0] != '/' || threads < 1 || threads > 1024) {
        fprintf(stderr, "Usage: ucmd-backend-directory DIRECTORY [THREADS], which ucmd starts: see "
                        "docs/backends.md\n");
        return 2;
    }
    rc = ucm_backend_serve(&about, (unsigned)threads, handle_cb, argv[1]);
    if (rc < 0)
        fprintf(stderr, "ucmd-backend-directory: %s\n", strerror(-rc));
    return rc < 0;
}
