#include "daemon/backend/nfs/nfs.h"

#include <errno.h>
#include <limits.h>

static int file_fits(struct nfs_task *t, const struct nfs_attributes *a)
{
    t->result.bytes = a->bytes;
    t->result.mtime_ns = a->mtime_ns;
    return a->file && (t->verb == WIRE_FIND || a->bytes == t->request->bytes) ? 0 : -EBADMSG;
}

/* ---- removing, touching ---- */

static void removed_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    int err = nfs_missing_errno(r);

    nfs_task_end(t, err == -EISDIR ? -EBADMSG : err);
}

void nfs_remove_step(struct nfs_task *t)
{
    nfs_known_forget(t);
    nfs_ask(t, NFS_REMOVE, &(struct nfs_args){.handle = &t->directory, .name = t->name},
            removed_cb);
}

static void touched_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    nfs_task_end(t, nfs_gone_errno(r));
}

static void set_time_step(struct nfs_task *t)
{
    nfs_ask(t, NFS_SETATTR, &(struct nfs_args){.handle = &t->file}, touched_cb);
}

/* ---- looking a file up ---- */

/* A write of it was for nothing. Where hosts store the same blocks there will be more of these. */
static void file_there(struct nfs_task *t)
{
    if (t->nfs->not_eager < NFS_NOT_EAGER)
        t->nfs->not_eager = NFS_NOT_EAGER;
    nfs_task_end(t, -EEXIST);
}

/* err: 0: the file is there; -EBADMSG: something else has its name. */
static void looked(struct nfs_task *t, int err)
{
    if (err < 0 && err != -ENOENT && err != -EBADMSG)
        nfs_task_end(t, err);
    else if (t->verb == WIRE_READ && err == 0)
        nfs_data_begin(t, NULL);
    else if (t->verb == WIRE_WRITE && err < 0)
        nfs_write_looked(t);
    else if (t->verb == WIRE_TOUCH && err != -ENOENT)
        nfs_task_next(t, set_time_step);
    else if (t->verb == WIRE_WRITE)
        file_there(t);
    else
        nfs_task_end(t, err);
}

static void attributes_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    looked(t, r->err == 0 ? file_fits(t, &r->attributes) : nfs_gone_errno(r));
}

/* For servers whose LOOKUP has no attributes. */
static void attributes_step(struct nfs_task *t)
{
    nfs_ask(t, NFS_GETATTR, &(struct nfs_args){.handle = &t->file}, attributes_cb);
}

static void look_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    if (!t->eager)
        t->file = r->handle;
    if (r->err == 0 && r->attributes.known && r->attributes.file)
        nfs_known_put(t, &r->handle, r->attributes.bytes);
    if (r->err < 0)
        looked(t, nfs_missing_errno(r));
    else if (r->attributes.known)
        looked(t, file_fits(t, &r->attributes));
    else if (t->eager)
        nfs_not_eager(t);
    else
        nfs_task_next(t, attributes_step);
}

/* Most files that are written are not there: a write makes its file meanwhile. */
void nfs_look_step(struct nfs_task *t)
{
    struct nfs *n = t->nfs;

    if (t->verb == WIRE_WRITE) {
        t->eager = n->not_eager == 0 && t->attempts == 0 && t->turns == 0;
        n->not_eager -= n->not_eager > 0 && n->not_eager < UINT_MAX;
        if (t->eager)
            nfs_task_next(t, nfs_create_step);
    }
    nfs_ask(t, NFS_LOOKUP, &(struct nfs_args){.handle = &t->directory, .name = t->name}, look_cb);
}

/* Whether the handle still means the file shows when it is read: a task that fails by it begins
 * again without it. */
void nfs_read_step(struct nfs_task *t)
{
    const struct nfs_known *k = nfs_known_of(t);

    t->by_known = k && t->attempts == 0 && t->turns == 0 && k->bytes == t->request->bytes;
    if (!t->by_known) {
        nfs_directory_step(t);
        return;
    }
    t->file = k->handle;
    t->result.bytes = k->bytes;
    nfs_data_begin(t, NULL);
}
