#include "daemon/share/nfs_task.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define BUCKET_NAME_CAP 3

struct nfs_fh3 nfs_fh(struct nfs_handle *h)
{
    return (struct nfs_fh3){{h->n, h->bytes}};
}

/* libnfs only reads what it is given, but doesn't say so. */
static struct diropargs3 in_folder(struct nfs_handle *folder, const char *name)
{
    return (struct diropargs3){nfs_fh(folder), (char *)(uintptr_t)name};
}

struct diropargs3 nfs_in_bucket(struct nfs_task *t, const char *name)
{
    return in_folder(&t->folder, name);
}

void nfs_folders_forget(struct share_backend *b)
{
    b->blocks.n = 0;
    for (unsigned i = 0; i < BLOCK_FILE_BUCKETS; i++)
        b->buckets[i].n = 0;
}

int nfs_missing_errno(int err, const struct post_op_attr *folder)
{
    bool gone = folder->attributes_follow && folder->post_op_attr_u.attributes.nlink == 0;

    return err == -ENOENT && gone ? -ESTALE : err;
}

void nfs_folder_stale(struct nfs_task *t)
{
    struct nfs_handle *bucket = &t->b->buckets[t->bucket];

    t->b->blocks.n = 0;
    if (bucket->n == t->folder.n && memcmp(bucket->bytes, t->folder.bytes, bucket->n) == 0)
        bucket->n = 0; /* not one that somebody has looked up since */
}

/* The folder that the task needs next: `blocks` in the root, or its bucket in that. */
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

static void made_reply(struct nfs_task *t, const struct nfs_call *call, const void *res)
{
    const MKDIR3res *made = res;

    (void)call;
    if (made->status != NFS3_OK && made->status != NFS3ERR_EXIST)
        nfs_task_end(t, nfs_status_errno(made->status));
    else
        nfs_task_next(t, nfs_folder_step); /* its handle may not have come: it is looked up */
}

static void make_step(struct nfs_task *t)
{
    struct nfs_call *call = nfs_call_new(t, made_reply);
    struct nfs_handle *parent;
    char name[sizeof("blocks")];
    MKDIR3args args = {.attributes.mode = {1, {0700}}};

    if (!call)
        return;
    folder_wanted(t, name, &parent);
    args.where = in_folder(parent, name);
    nfs_call_sent(call, rpc_nfs3_mkdir_async(nfs_conn_rpc(&t->b->conn), nfs_call_cb, &args, call));
}

static void found_reply(struct nfs_task *t, const struct nfs_call *call, const void *res)
{
    const LOOKUP3res *found = res;
    const LOOKUP3resok *ok = &found->LOOKUP3res_u.resok;
    struct nfs_handle *folder = call->at ? &t->b->buckets[t->bucket] : &t->b->blocks;
    const post_op_attr *a = &ok->obj_attributes;
    int err = nfs_missing_errno(nfs_status_errno(found->status),
                                &found->LOOKUP3res_u.resfail.dir_attributes);
    bool makes = t->op->verb == SHARE_WRITE || t->op->verb == SHARE_CHECK;

    if (err == -ENOENT && makes) {
        nfs_task_next(t, make_step);
    } else if (err == -ENOENT && t->op->verb == SHARE_LIST) {
        nfs_task_end(t, 0);
    } else if (err < 0) {
        nfs_task_end(t, err);
    } else if (a->attributes_follow && a->post_op_attr_u.attributes.type != NF3DIR) {
        nfs_task_end(t, t->op->verb == SHARE_LIST ? 0 : -EBADMSG); /* a link leads elsewhere */
    } else if (!nfs_handle_set(folder, ok->object.data.data_val, ok->object.data.data_len)) {
        nfs_task_end(t, -EPROTO);
    } else {
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
    struct nfs_call *call;
    struct nfs_handle *parent;
    char name[sizeof("blocks")];
    LOOKUP3args args;

    if (t->b->buckets[t->bucket].n > 0) {
        t->folder = t->b->buckets[t->bucket];
        steps[t->op->verb](t);
        return;
    }
    call = nfs_call_new(t, found_reply);
    if (!call)
        return;
    call->at = folder_wanted(t, name, &parent) != &t->b->blocks;
    args.what = in_folder(parent, name);
    nfs_call_sent(call, rpc_nfs3_lookup_async(nfs_conn_rpc(&t->b->conn), nfs_call_cb, &args, call));
}
