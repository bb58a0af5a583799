#include "daemon/share/nfs_task.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define BUCKET_NAME_CAP 3

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

/* The handle that the task lacks: of `blocks`, or of its bucket; its name and parent. */
static struct nfs_handle *folder_wanted(struct nfs_task *t, char name[sizeof("blocks")],
                                        struct nfs_handle **parent)
{
    struct share_backend *b = t->b;

    if (b->blocks.n == 0) {
        strcpy(name, "blocks");
        *parent = &b->conn.root;
        return &b->blocks;
    }
    snprintf(name, BUCKET_NAME_CAP, "%02x", (unsigned)t->bucket);
    *parent = &b->blocks;
    return &b->buckets[t->bucket];
}

static void made_reply_cb(struct nfs_task *t, const struct nfs_call *call,
                          const struct nfs_reply *r)
{
    (void)call;
    if (r->status != NFS_OK && r->status != NFS_ERR_EXIST)
        nfs_task_end(t, nfs_status_errno(r->status));
    else
        nfs_task_next(t, nfs_folder_step); /* looks it up: MKDIR need not return the handle */
}

static void make_step(struct nfs_task *t)
{
    struct nfs_handle *parent;
    char name[sizeof("blocks")];

    (void)folder_wanted(t, name, &parent);
    nfs_ask(t, NFS_MKDIR, parent, name, made_reply_cb);
}

static void found(struct nfs_task *t, struct nfs_handle *folder, const struct nfs_reply *r)
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
        *folder = r->handle;
        nfs_task_next(t, nfs_folder_step);
    }
}

static void blocks_reply_cb(struct nfs_task *t, const struct nfs_call *call,
                            const struct nfs_reply *r)
{
    (void)call;
    found(t, &t->b->blocks, r);
}

static void bucket_reply_cb(struct nfs_task *t, const struct nfs_call *call,
                            const struct nfs_reply *r)
{
    (void)call;
    found(t, &t->b->buckets[t->bucket], r);
}

void nfs_folder_step(struct nfs_task *t)
{
    static nfs_step *const steps[] = {
        [SHARE_FIND] = nfs_look_step,     [SHARE_READ] = nfs_look_step,
        [SHARE_WRITE] = nfs_look_step,    [SHARE_TOUCH] = nfs_look_step,
        [SHARE_REMOVE] = nfs_remove_step, [SHARE_LIST] = nfs_list_step,
        [SHARE_CHECK] = nfs_create_step};
    struct nfs_handle *parent;
    char name[sizeof("blocks")];
    bool blocks;

    if (t->b->buckets[t->bucket].n > 0) {
        t->folder = t->b->buckets[t->bucket];
        steps[t->op->verb](t);
        return;
    }
    blocks = folder_wanted(t, name, &parent) == &t->b->blocks;
    nfs_ask(t, NFS_LOOKUP, parent, name, blocks ? blocks_reply_cb : bucket_reply_cb);
}
