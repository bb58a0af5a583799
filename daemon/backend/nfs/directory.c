#include "daemon/backend/nfs/nfs.h"

#include <errno.h>
#include <stdio.h>

/* A call about the directory whose handle the task lacks: `blocks`, or else its bucket. */
static void directory_ask(struct nfs_task *t, enum nfs_proc proc, nfs_replied_cb *replied_cb)
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
        nfs_task_next(t, nfs_directory_step); /* looks it up: MKDIR need not return the handle */
}

static void make_step(struct nfs_task *t)
{
    directory_ask(t, NFS_MKDIR, made_cb);
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
    } else if (r->attributes.known && !r->attributes.directory) {
        nfs_task_end(t, t->verb == WIRE_LIST ? 0 : -EBADMSG); /* a link leads elsewhere */
    } else {
        *t->wanted = r->handle;
        nfs_task_next(t, nfs_directory_step);
    }
}

void nfs_directory_step(struct nfs_task *t)
{
    if (t->nfs->buckets[t->bucket].n > 0) {
        t->directory = t->nfs->buckets[t->bucket];
        t->nfs->verbs[t->verb].in_directory(t);
        return;
    }
    directory_ask(t, NFS_LOOKUP, found_cb);
}
