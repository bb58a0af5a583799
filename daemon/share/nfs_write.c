#include "daemon/share/nfs_task.h"

#include <errno.h>
#include <string.h>

void nfs_unlink_temp_step(struct nfs_task *t)
{
    t->temp_made = false; /* what can't be removed is left to garbage collection */
    nfs_ask(t, NFS_REMOVE, &t->folder, t->temp, NULL);
}

/* ---- its name ---- */

static void renamed_reply_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    int err = nfs_status_errno(r->status);

    if (err == 0)
        t->temp_made = false;
    else if (err == -EISDIR || err == -EEXIST || err == -ENOTDIR)
        err = -EBADMSG; /* a folder has the name */
    else if (err == -ENOENT)
        err = -ESTALE; /* another host removed the file or the folder: try again */
    nfs_task_end(t, err);
}

void nfs_rename_step(struct nfs_task *t)
{
    const struct nfs_args args = {.handle = &t->folder, .name = t->temp, .new_name = t->op->name};

    nfs_request(t, NFS_RENAME, &args, renamed_reply_cb);
}

/* ---- CHECK: does the root take writes, and what is its time? ---- */

static void time_reply_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    if (r->status == NFS_OK)
        t->op->now_ns = r->attributes.mtime_ns;
    nfs_task_end(t, nfs_status_errno(r->status));
}

static void time_step(struct nfs_task *t)
{
    nfs_ask(t, NFS_GETATTR, &t->file, NULL, time_reply_cb);
}

static void check_written_reply_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    if (r->status != NFS_OK)
        nfs_task_end(t, nfs_status_errno(r->status));
    else
        nfs_task_next(t, time_step);
}

/* A full server refuses bytes, not the making of a file. */
static void check_write_step(struct nfs_task *t)
{
    const struct nfs_args args = {.handle = &t->file, .n = sizeof(t->temp), .sync = true};
    struct nfs_call *call = nfs_call_new(t, NFS_WRITE, &args, check_written_reply_cb);

    if (!call)
        return;
    nfs_xdr_put_bytes(&call->rpc.out, t->temp, sizeof(t->temp));
    nfs_call_send(call);
}

static void root_reply_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    if (r->status != NFS_OK)
        nfs_task_end(t, nfs_status_errno(r->status));
    else if (t->op->sync)
        nfs_task_next(t, nfs_folder_step);
    else
        nfs_task_end(t, 0);
}

void nfs_check_step(struct nfs_task *t)
{
    nfs_ask(t, NFS_GETATTR, &t->b->conn.root, NULL, root_reply_cb);
}

/* ---- the temporary file ---- */

static void fill(struct nfs_task *t)
{
    if (t->op->verb == SHARE_CHECK) {
        nfs_task_next(t, check_write_step);
        return;
    }
    share_op_seal(t->op);
    nfs_data_begin(t);
}

static void temp_found_reply_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    t->file = r->handle;
    if (r->status != NFS_OK)
        nfs_task_end(t, r->status == NFS_ERR_NOENT ? -ESTALE : nfs_status_errno(r->status));
    else
        fill(t);
}

/* For servers whose CREATE returns no handle. */
static void temp_find_step(struct nfs_task *t)
{
    nfs_ask(t, NFS_LOOKUP, &t->folder, t->temp, temp_found_reply_cb);
}

static void created_reply_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    t->file = r->handle;
    if (r->status == NFS_ERR_EXIST) { /* -EEXIST would mean that the part exists */
        t->temp_made = false;
        nfs_task_end(t, -EIO);
    } else if (r->status != NFS_OK) {
        t->temp_made = false;
        nfs_task_end(t, r->status == NFS_ERR_NOENT ? -ESTALE : nfs_status_errno(r->status));
    } else if (r->handle.n == 0) {
        nfs_task_next(t, temp_find_step);
    } else {
        fill(t);
    }
}

void nfs_create_step(struct nfs_task *t)
{
    share_temp_next(&t->b->temps, t->temp);
    t->temp_made = true;
    nfs_ask(t, NFS_CREATE, &t->folder, t->temp, created_reply_cb);
}
