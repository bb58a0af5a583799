#include "daemon/share/posix_file.h"

#include <stdio.h>

static void seal_cb(void *ctx)
{
    share_op_seal(ctx);
}

static int add_cb(void *ctx, const char *name, uint64_t bytes, uint64_t mtime_ns)
{
    struct share_listing *l = ctx;
    int err = share_listing_add(l, name, bytes, mtime_ns);

    return err < 0 ? err : l->cut;
}

static int list(const char *root, const char *bucket, struct share_op *op)
{
    struct share_listing found = {0};
    struct folder_listing l = {.root = root,
                               .bucket = bucket,
                               .wants_cb = share_listing_wants,
                               .add_cb = add_cb,
                               .ctx = &found};
    int rc = folder_list(&l);

    if (rc >= 0)
        rc = l.unread > SHARE_LISTING_UNREAD ? -EIO : 0;
    found.unread = l.unread;
    op->listing = found;
    if (rc < 0)
        share_listing_free(&op->listing);
    return rc;
}

static int check(struct folder_file *f, const struct share_temp *temps, struct share_op *op)
{
    int err;

    share_temp_next(temps, op->temp);
    err = folder_check(f);
    op->now_ns = f->mtime_ns;
    return err;
}

static int read_file(struct folder_file *f, struct share_op *op)
{
    int err = folder_read(f);

    if (err == 0)
        err = share_op_verify(op);
    if (err == 0)
        op->mtime_ns = f->mtime_ns;
    return err;
}

int posix_file_run(const char *root, const struct share_temp *temps,
                   const struct uncached_bounce *bounce, struct share_op *op)
{
    /* The header, or header and seal; the payload. */
    struct iovec pieces[2] = {{.iov_base = op->header, .iov_len = share_op_head_bytes(op)},
                              {.iov_base = op->data, .iov_len = op->bytes}};
    char bucket[] = "blocks/00";
    struct folder_file f = {.root = root,
                            .bucket = bucket,
                            .name = op->name,
                            .temp = op->temp,
                            .bytes = share_op_file_bytes(op),
                            .pieces = pieces,
                            .n = 2,
                            .bounce = bounce,
                            .sync = op->sync,
                            .fill_cb = seal_cb,
                            .ctx = op};

    snprintf(bucket, sizeof(bucket), "blocks/%02x", op->bucket);
    switch (op->verb) {
    case SHARE_FIND:
        return folder_find(&f);
    case SHARE_READ:
        return read_file(&f, op);
    case SHARE_WRITE:
        share_temp_next(temps, op->temp);
        return folder_write(&f);
    case SHARE_REMOVE:
        return folder_remove(&f);
    case SHARE_TOUCH:
        return folder_touch(&f);
    case SHARE_LIST:
        return list(root, bucket, op);
    default:
        return check(&f, temps, op);
    }
}
