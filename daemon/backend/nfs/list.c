/* A listing is held until it is whole: it may begin again. */
#include "daemon/backend/nfs/nfs.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_FILES (1u << 19)
#define MAX_PAGES (1u << 18) /* bounds a server that never ends its listing */
#define NO_TIME UINT64_MAX   /* of a file without attributes so far */

static int file_add(struct nfs_task *t, const char *name, uint64_t bytes, uint64_t mtime_ns)
{
    struct wire_file *file;

    if (t->n_files == t->cap) {
        uint32_t cap = t->cap ? 2 * t->cap : 256;
        struct wire_file *files = realloc(t->files, cap * sizeof(*files));

        if (!files)
            return -ENOMEM;
        t->files = files;
        t->cap = cap;
    }
    file = &t->files[t->n_files++];
    snprintf(file->name, sizeof(file->name), "%s", name);
    file->bytes = bytes;
    file->mtime_ns = mtime_ns;
    return 0;
}

static int entry_add(struct nfs_task *t, const struct entryplus3 *e)
{
    const post_op_attr *a = &e->name_attributes;
    const fattr3 *is = &a->post_op_attr_u.attributes;

    if (!e->name || strlen(e->name) > WIRE_KEY_BYTES || strcmp(e->name, ".") == 0 ||
        strcmp(e->name, "..") == 0 || t->n_files == MAX_FILES)
        return 0;
    if (!a->attributes_follow)
        return file_add(t, e->name, 0, NO_TIME);
    if (is->type != NF3REG)
        return 0;
    return file_add(t, e->name, is->size,
                    (uint64_t)is->mtime.seconds * 1000000000u + is->mtime.nseconds);
}

/* ---- attributes that READDIRPLUS left out ---- */

static void blanks_step(struct nfs_task *t);

static void blank_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    struct wire_file *file = &t->files[t->blank];
    bool there = r->err == 0 && r->attributes.known && r->attributes.file;

    if (there) {
        file->bytes = r->attributes.bytes;
        file->mtime_ns = r->attributes.mtime_ns;
    } else {
        t->unread += r->err < 0 && r->err != -ENOENT && r->err != -ESTALE;
        *file = t->files[--t->n_files];
    }
    nfs_task_next(t, blanks_step);
}

static void blanks_step(struct nfs_task *t)
{
    while (t->blank < t->n_files && t->files[t->blank].mtime_ns != NO_TIME)
        t->blank++;
    if (t->blank == t->n_files) {
        nfs_task_end(t, 0);
        nfs_task_settle(t);
        return;
    }
    nfs_ask(t, NFS_LOOKUP,
            &(struct nfs_args){.handle = &t->directory, .name = t->files[t->blank].name}, blank_cb);
}

/* ---- pages ---- */

static void page_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    const void *at = r->entries;
    int err = r->err == 0 && r->directory.known && r->directory.links == 0 ? -ESTALE : r->err;

    while (err == 0 && at) {
        struct entryplus3 e;

        memcpy(&e, at, sizeof(e)); /* libnfs does not align them */
        err = entry_add(t, &e);
        t->cookie = e.cookie;
        at = e.nextentry;
    }
    if (err < 0) {
        nfs_task_end(t, err);
        return;
    }
    memcpy(t->cookie_verifier, r->verifier, sizeof(t->cookie_verifier));
    if (r->last || t->n_files == MAX_FILES)
        nfs_task_next(t, blanks_step);
    else if (!r->entries || ++t->pages == MAX_PAGES)
        nfs_task_end(t, -EIO);
    else
        nfs_task_next(t, nfs_list_step);
}

void nfs_list_step(struct nfs_task *t)
{
    nfs_ask(t, NFS_READDIRPLUS,
            &(struct nfs_args){
                .handle = &t->directory, .at = t->cookie, .verifier = t->cookie_verifier},
            page_cb);
}
