#include "daemon/backend/nfs/nfs.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

void nfs_folders_forget(struct nfs *n)
{
    n->blocks.n = 0;
    for (unsigned i = 0; i < NFS_BUCKETS; i++)
        n->buckets[i].n = 0;
}

int nfs_missing_errno(const struct nfs_reply *r)
{
    bool gone = r->folder.known && r->folder.links == 0;

    return r->err == -ENOENT && gone ? -ESTALE : r->err;
}

void nfs_folder_stale(struct nfs_task *t)
{
    struct nfs_handle *bucket = &t->nfs->buckets[t->bucket];

    t->nfs->blocks.n = 0;
    if (bucket->n == t->folder.n && memcmp(bucket->bytes, t->folder.bytes, bucket->n) == 0)
        bucket->n = 0; /* unless another task has looked it up anew */
}

/* A call about the folder whose handle the task lacks: `blocks`, or else its bucket. */
static void folder_ask(struct nfs_task *t, enum nfs_proc proc, nfs_replied_cb *replied_cb)
{
    struct nfs *n = t->nfs;
    char name[3];

    if (n->blocks.n == 0) {
        t->wanted = &n->blocks;
        nfs_ask(t, proc, &(struct nfs_args){.handle = &n->conn.root, .name = "blocks"}, replied_cb);
        return;
    }
    t->wanted = &n->buckets[t->bucket];
    snprintf(name, sizeof(name), "%02x", (unsigned)t->bucket);
    nfs_ask(t, proc, &(struct nfs_args){.handle = &n->blocks, .name = name}, replied_cb);
}

static void made_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    if (r->err < 0 && r->err != -EEXIST)
        nfs_task_end(t, r->err);
    else
        nfs_task_next(t, nfs_folder_step); /* looks it up: MKDIR need not return the handle */
}

static void make_step(struct nfs_task *t)
{
    folder_ask(t, NFS_MKDIR, made_cb);
}

static void found_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    int err = nfs_missing_errno(r);
    bool makes = t->verb == WIRE_WRITE || t->verb == WIRE_CHECK;

    if (err == -ENOENT && makes) {
        nfs_task_next(t, make_step);
    } else if (err == -ENOENT && t->verb == WIRE_LIST) {
        nfs_task_end(t, 0);
    } else if (err < 0) {
        nfs_task_end(t, err);
    } else if (r->attributes.known && !r->attributes.folder) {
        nfs_task_end(t, t->verb == WIRE_LIST ? 0 : -EBADMSG); /* a link leads elsewhere */
    } else {
        *t->wanted = r->handle;
        nfs_task_next(t, nfs_folder_step);
    }
}

void nfs_folder_step(struct nfs_task *t)
{
    static nfs_step *const steps[WIRE_VERBS] = {
        [WIRE_FIND] = nfs_look_step,     [WIRE_READ] = nfs_look_step,
        [WIRE_WRITE] = nfs_look_step,    [WIRE_TOUCH] = nfs_look_step,
        [WIRE_REMOVE] = nfs_remove_step, [WIRE_LIST] = nfs_list_step,
        [WIRE_CHECK] = nfs_create_step};

    if (t->nfs->buckets[t->bucket].n > 0) {
        t->folder = t->nfs->buckets[t->bucket];
        steps[t->verb](t);
        return;
    }
    folder_ask(t, NFS_LOOKUP, found_cb);
}
