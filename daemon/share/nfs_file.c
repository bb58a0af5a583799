#include "daemon/share/nfs_task.h"

#include <errno.h>

static int file_fits(const struct nfs_task *t, const struct nfs_attributes *a)
{
    bool fits = a->type == NFS_TYPE_FILE && a->bytes == share_op_file_bytes(t->op);

    t->op->mtime_ns = a->mtime_ns;
    return fits ? 0 : -EBADMSG;
}

int nfs_gone_errno(uint32_t status)
{
    return status == NFS_ERR_STALE ? -ENOENT : nfs_status_errno(status);
}

/* ---- removing, touching ---- */

static void remove_reply_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    int err = nfs_missing_errno(nfs_status_errno(r->status), &r->folder);

    nfs_task_end(t, err == -EISDIR ? -EBADMSG : err);
}

void nfs_remove_step(struct nfs_task *t)
{
    nfs_ask(t, NFS_REMOVE, &t->folder, t->op->name, remove_reply_cb);
}

static void touched_reply_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    nfs_task_end(t, nfs_gone_errno(r->status));
}

static void set_time_step(struct nfs_task *t)
{
    nfs_ask(t, NFS_SETATTR, &t->file, NULL, touched_reply_cb);
}

/* ---- looking a file up ---- */

/* err: 0: the file exists; -EBADMSG: something else has its name. */
static void looked(struct nfs_task *t, int err)
{
    switch (t->op->verb) {
    case SHARE_READ:
        if (err < 0) {
            nfs_task_end(t, err);
            break;
        }
        nfs_data_begin(t);
        break;
    case SHARE_WRITE:
        if (err == -ENOENT || err == -EBADMSG)
            nfs_task_next(t, nfs_create_step);
        else
            nfs_task_end(t, err == 0 ? -EEXIST : err);
        break;
    case SHARE_TOUCH:
        if (err == 0 || err == -EBADMSG)
            nfs_task_next(t, set_time_step);
        else
            nfs_task_end(t, err);
        break;
    default:
        nfs_task_end(t, err);
    }
}

static void attributes_reply_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    looked(t, r->status == NFS_OK ? file_fits(t, &r->attributes) : nfs_gone_errno(r->status));
}

/* For servers whose LOOKUP has no attributes. */
static void attributes_step(struct nfs_task *t)
{
    nfs_ask(t, NFS_GETATTR, &t->file, NULL, attributes_reply_cb);
}

static void look_reply_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    t->file = r->handle;
    if (r->status != NFS_OK)
        looked(t, nfs_missing_errno(nfs_status_errno(r->status), &r->folder));
    else if (r->attributes.known)
        looked(t, file_fits(t, &r->attributes));
    else
        nfs_task_next(t, attributes_step);
}

void nfs_look_step(struct nfs_task *t)
{
    nfs_ask(t, NFS_LOOKUP, &t->folder, t->op->name, look_reply_cb);
}
