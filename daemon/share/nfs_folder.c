#include "daemon/share/nfs_task.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

void nfs_folders_forget(struct share_backend *b)
{
    b->blocks.n = 0;
    for (unsigned i = 0; i < BLOCK_FILE_BUCKETS; i++)
        b->buckets[i].n = 0;
}

int nfs_missing_errno(int err, const struct nfs_attributes *folder)
{
    bool gone = folder->known && folder->links == 0;

    return err == -ENOENT && gone ? -ESTALE : err;
}

void nfs_folder_stale(struct nfs_task *t)
{
    struct nfs_handle *bucket = &t->b->buckets[t->bucket];

    t->b->blocks.n = 0;
    if (bucket->n == t->folder.n && memcmp(bucket->bytes, t->folder.bytes, bucket->n) == 0)
        bucket->n = 0; /* unless another task has looked it up anew */
}

/* A request about the folder whose handle the task lacks: `blocks`, or else its bucket. */
static void folder_ask(struct nfs_task *t, enum nfs_proc proc, nfs_replied_cb *replied_cb)
{
    struct share_backend *b = t->b;
    char name[3];

    if (b->blocks.n == 0) {
        t->wanted = &b->blocks;
        nfs_ask(t, proc, &b->conn.root, "blocks", replied_cb);
        return;
    }
    t->wanted = &b->buckets[t->bucket];
    snprintf(name, sizeof(name), "%02x", (unsigned)t->bucket);
    nfs_ask(t, proc, &b->blocks, name, replied_cb);
}

static void made_reply_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    if (r->status != NFS_OK && r->status != NFS_ERR_EXIST)
        nfs_task_end(t, nfs_status_errno(r->status));
    else
        nfs_task_next(t, nfs_folder_step); /* looks it up: MKDIR need not return the handle */
}

static void make_step(struct nfs_task *t)
{
    folder_ask(t, NFS_MKDIR, made_reply_cb);
}

static void found_reply_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    int err = nfs_missing_errno(nfs_status_errno(r->status), &r->folder);
    bool makes = t->op->verb == SHARE_WRITE || t->op->verb == SHARE_CHECK;

    if (err == -ENOENT && makes) {
        nfs_task_next(t, make_step);
    } else if (err == -ENOENT && t->op->verb == SHARE_LIST) {
        nfs_task_end(t, 0);
    } else if (err < 0) {
        nfs_task_end(t, err);
    } else if (r->attributes.known && r->attributes.type != NFS_TYPE_FOLDER) {
        nfs_task_end(t, t->op->verb == SHARE_LIST ? 0 : -EBADMSG); /* a link leads elsewhere */
    } else {
        *t->wanted = r->handle;
        nfs_task_next(t, nfs_folder_step);
    }
}

void nfs_folder_step(struct nfs_task *t)
{
    static nfs_step *const steps[] = {
        [SHARE_FIND] = nfs_look_step,     [SHARE_READ] = nfs_look_step,
        [SHARE_WRITE] = nfs_look_step,    [SHARE_TOUCH] = nfs_look_step,
        [SHARE_REMOVE] = nfs_remove_step, [SHARE_LIST] = nfs_list_step,
        [SHARE_CHECK] = nfs_create_step};

    if (t->b->buckets[t->bucket].n > 0) {
        t->folder = t->b->buckets[t->bucket];
        steps[t->op->verb](t);
        return;
    }
    folder_ask(t, NFS_LOOKUP, found_reply_cb);
}
