#include "daemon/backend/nfs/nfs.h"

#include <errno.h>
#include <limits.h>

void nfs_unlink_temp_step(struct nfs_task *t)
{
    t->temp_made = false; /* what can't be removed is left to garbage collection */
    nfs_ask(t, NFS_REMOVE, &(struct nfs_args){.handle = &t->directory, .name = t->temp}, NULL);
}

/* ---- its name ---- */

static void renamed_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    int err = r->err;

    if (err == 0) {
        t->temp_made = false;
        nfs_known_put(t, &t->file, t->request->bytes);
    }
    if (err == -EISDIR || err == -EEXIST || err == -ENOTDIR)
        err = -EBADMSG; /* a directory has the name */
    else if (err == -ENOENT)
        err = -ESTALE; /* another host removed the file or the directory: try again */
    nfs_task_end(t, err);
}

static void rename_step(struct nfs_task *t)
{
    nfs_ask(t, NFS_RENAME,
            &(struct nfs_args){.handle = &t->directory, .name = t->temp, .new_name = t->name},
            renamed_cb);
}

/* ---- CHECK: does the root take writes, and what is its time? ---- */

static void time_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    t->result.now_ns = r->attributes.mtime_ns;
    nfs_task_end(t, r->err);
}

static void time_step(struct nfs_task *t)
{
    nfs_ask(t, NFS_GETATTR, &(struct nfs_args){.handle = &t->file}, time_cb);
}

static void check_written_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    if (r->err < 0)
        nfs_task_end(t, r->err);
    else
        nfs_task_next(t, time_step);
}

/* A full server refuses bytes, not the making of a file. */
static void check_write_step(struct nfs_task *t)
{
    nfs_ask(
        t, NFS_WRITE,
        &(struct nfs_args){.handle = &t->file, .n = sizeof(t->temp), .data = t->temp, .sync = true},
        check_written_cb);
}

static void root_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    if (r->err < 0)
        nfs_task_end(t, r->err);
    else if (t->request->sync)
        nfs_task_next(t, nfs_directory_step);
    else
        nfs_task_end(t, 0);
}

void nfs_check_step(struct nfs_task *t)
{
    nfs_ask(t, NFS_GETATTR, &(struct nfs_args){.handle = &t->nfs->conn.root}, root_cb);
}

/* ---- the temporary file ---- */

static void fill(struct nfs_task *t)
{
    if (t->verb == WIRE_CHECK)
        nfs_task_next(t, check_write_step);
    else if (t->looked && t->make_error < 0)
        nfs_task_end(t, t->make_error);
    else if (t->looked && t->made)
        nfs_data_begin(t, rename_step);
}

void nfs_write_looked(struct nfs_task *t)
{
    t->looked = true;
    if (t->eager)
        fill(t);
    else
        nfs_task_next(t, nfs_create_step);
}

void nfs_not_eager(struct nfs_task *t)
{
    t->nfs->not_eager = UINT_MAX;
    nfs_task_end(t, -ECONNRESET); /* begins again */
}

static void make_failed(struct nfs_task *t, int err)
{
    if (t->eager && !t->looked) /* the file may be there */
        t->make_error = err;
    else
        nfs_task_end(t, err);
}

static void temp_found_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    t->file = r->handle;
    if (r->err < 0) {
        make_failed(t, r->err == -ENOENT ? -ESTALE : r->err);
    } else {
        t->made = true;
        fill(t);
    }
}

/* For servers whose CREATE returns no handle. */
static void temp_find_step(struct nfs_task *t)
{
    nfs_ask(t, NFS_LOOKUP, &(struct nfs_args){.handle = &t->directory, .name = t->temp},
            temp_found_cb);
}

static void created_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    t->file = r->handle;
    if (r->err < 0) {
        t->temp_made = false;
        /* -EEXIST would mean that the file is there. */
        make_failed(t, r->err == -EEXIST ? -EIO : r->err == -ENOENT ? -ESTALE : r->err);
    } else if (r->handle.n == 0 && t->eager) {
        nfs_not_eager(t);
    } else if (r->handle.n == 0) {
        nfs_task_next(t, temp_find_step);
    } else {
        t->made = true;
        fill(t);
    }
}

/* The name is this task's alone. A file of an earlier attempt, whose connection was lost, may have
 * it. */
void nfs_create_step(struct nfs_task *t)
{
    t->temp_made = true;
    nfs_ask(t, NFS_CREATE,
            &(struct nfs_args){
                .handle = &t->directory, .name = t->temp, .anew = t->attempts > 0 || t->turns > 0},
            created_cb);
}
