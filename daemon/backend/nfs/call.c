/* The procedures of NFSv3 by libnfs: arguments out of struct nfs_args, results into struct nfs_reply. */
#include "daemon/backend/nfs/nfs.h"

#include <errno.h>
#include <nfsc/libnfs-raw-mount.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PAGE_BYTES 65536u      /* of READDIRPLUS's reply, attributes and handles included */
#define PAGE_NAMES_BYTES 8192u /* of which names and cookies */

/* ---- statuses ---- */

static int status_errno(nfsstat3 status)
{
    switch (status) {
    case NFS3_OK:
        return 0;
    case NFS3ERR_PERM:
        return -EPERM;
    case NFS3ERR_NOENT:
        return -ENOENT;
    case NFS3ERR_ACCES:
        return -EACCES;
    case NFS3ERR_EXIST:
    case NFS3ERR_NOTEMPTY:
        return -EEXIST;
    case NFS3ERR_NOTDIR:
        return -ENOTDIR;
    case NFS3ERR_ISDIR:
        return -EISDIR;
    case NFS3ERR_NOSPC:
        return -ENOSPC;
    case NFS3ERR_DQUOT:
        return -EDQUOT;
    case NFS3ERR_ROFS:
        return -EROFS;
    case NFS3ERR_STALE:
    case NFS3ERR_BADHANDLE:
        return -ESTALE;
    case NFS3ERR_BAD_COOKIE:
    case NFS3ERR_JUKEBOX:
        return -NFS_LATER;
    default:
        return -EIO;
    }
}

int nfs_mount_errno(int status)
{
    switch (status) {
    case MNT3_OK:
        return 0;
    case MNT3ERR_PERM:
    case MNT3ERR_ACCES:
        return -EACCES;
    case MNT3ERR_NOENT:
    case MNT3ERR_NOTDIR:
    case MNT3ERR_INVAL:
    case MNT3ERR_NAMETOOLONG:
        return -ENODEV; /* there is no such root: -ENOENT would be an answer about a file */
    default:
        return -EIO;
    }
}

/* ---- results ---- */

bool nfs_handle_take(struct nfs_handle *h, uint32_t n, const char *bytes)
{
    if (n == 0 || n > NFS_HANDLE_BYTES || !bytes)
        return false;
    h->n = n;
    memcpy(h->bytes, bytes, n);
    return true;
}

static void attributes_take(struct nfs_attributes *out, const fattr3 *a)
{
    out->known = true;
    out->file = a->type == NF3REG;
    out->folder = a->type == NF3DIR;
    out->links = a->nlink;
    out->bytes = a->size;
    out->mtime_ns = (uint64_t)a->mtime.seconds * 1000000000u + a->mtime.nseconds;
}

static void post_take(struct nfs_attributes *out, const post_op_attr *a)
{
    if (a->attributes_follow)
        attributes_take(out, &a->post_op_attr_u.attributes);
}

static int lookup_take(const LOOKUP3res *res, struct nfs_reply *r)
{
    const LOOKUP3resok *ok = &res->LOOKUP3res_u.resok;

    r->err = status_errno(res->status);
    if (res->status != NFS3_OK) {
        post_take(&r->folder, &res->LOOKUP3res_u.resfail.dir_attributes);
        return 0;
    }
    post_take(&r->attributes, &ok->obj_attributes);
    post_take(&r->folder, &ok->dir_attributes);
    return nfs_handle_take(&r->handle, ok->object.data.data_len, ok->object.data.data_val)
               ? 0
               : -EPROTO;
}

static int read_take(const READ3res *res, struct nfs_reply *r)
{
    const READ3resok *ok = &res->READ3res_u.resok;

    r->err = status_errno(res->status);
    if (r->err < 0)
        return 0;
    post_take(&r->attributes, &ok->file_attributes);
    r->count = ok->data.data_len;
    r->data = ok->data.data_val;
    return r->count <= r->n ? 0 : -EPROTO;
}

static int write_take(const WRITE3res *res, struct nfs_reply *r)
{
    const WRITE3resok *ok = &res->WRITE3res_u.resok;

    r->err = status_errno(res->status);
    if (r->err < 0)
        return 0;
    r->count = ok->count;
    r->verifier = ok->verf;
    return r->count <= r->n ? 0 : -EPROTO;
}

static int create_take(const CREATE3res *res, struct nfs_reply *r)
{
    const CREATE3resok *ok = &res->CREATE3res_u.resok;
    const nfs_fh3 *handle = &ok->obj.post_op_fh3_u.handle;

    r->err = status_errno(res->status);
    if (r->err < 0 || !ok->obj.handle_follows)
        return 0;
    return nfs_handle_take(&r->handle, handle->data.data_len, handle->data.data_val) ? 0 : -EPROTO;
}

static int page_take(const READDIRPLUS3res *res, struct nfs_reply *r)
{
    const READDIRPLUS3resok *ok = &res->READDIRPLUS3res_u.resok;

    r->err = status_errno(res->status);
    if (res->status != NFS3_OK) {
        post_take(&r->folder, &res->READDIRPLUS3res_u.resfail.dir_attributes);
        return 0;
    }
    post_take(&r->folder, &ok->dir_attributes);
    r->verifier = ok->cookieverf;
    r->entries = ok->reply.entries;
    r->last = ok->reply.eof;
    return 0;
}

int nfs_reply_take(enum nfs_proc proc, const void *data, struct nfs_reply *r)
{
    const GETATTR3res *attributes = data;
    const REMOVE3res *removed = data;
    const FSINFO3res *limits = data;
    const COMMIT3res *committed = data;

    if (!data)
        return -EPROTO;
    switch (proc) {
    case NFS_LOOKUP:
        return lookup_take(data, r);
    case NFS_READ:
        return read_take(data, r);
    case NFS_WRITE:
        return write_take(data, r);
    case NFS_CREATE:
        return create_take(data, r);
    case NFS_READDIRPLUS:
        return page_take(data, r);
    case NFS_GETATTR:
        r->err = status_errno(attributes->status);
        if (r->err == 0)
            attributes_take(&r->attributes, &attributes->GETATTR3res_u.resok.obj_attributes);
        return 0;
    case NFS_REMOVE:
        r->err = status_errno(removed->status);
        post_take(&r->folder, removed->status == NFS3_OK
                                  ? &removed->REMOVE3res_u.resok.dir_wcc.after
                                  : &removed->REMOVE3res_u.resfail.dir_wcc.after);
        return 0;
    case NFS_FSINFO:
        r->err = status_errno(limits->status);
        r->read_bytes = limits->FSINFO3res_u.resok.rtmax;
        r->write_bytes = limits->FSINFO3res_u.resok.wtmax;
        return 0;
    case NFS_COMMIT:
        r->err = status_errno(committed->status);
        r->verifier = committed->COMMIT3res_u.resok.verf;
        return 0;
    default: /* SETATTR, MKDIR, RENAME: the status is all, and comes first */
        r->err = status_errno(((const SETATTR3res *)data)->status);
        return 0;
    }
}

/* ---- sending ---- */

static void replied(struct rpc_context *rpc, int status, void *data, void *ctx)
{
    struct nfs_call *c = ctx;
    struct nfs_task *t = c->task;
    struct nfs *n = t->nfs;
    struct nfs_reply r = {.at = c->at, .n = c->n};
    bool came = status == RPC_STATUS_SUCCESS && n->conn.rpc == rpc;

    TAILQ_REMOVE(&n->calls, c, link);
    n->n_calls--;
    n->n_write_calls -= t->verb == WIRE_WRITE;
    t->awaiting--;
    if (came && nfs_reply_take(c->proc, data, &r) == 0) {
        n->conn.heard_ms = n->now_ms;
        if (t->request && !t->over && c->replied_cb)
            c->replied_cb(t, &r);
    } else {
        /* What can't be decoded loses the connection, and with it all other replies. */
        if (n->conn.rpc == rpc)
            nfs_conn_drop(n, came ? -EPROTO : -ECONNRESET,
                          status == RPC_STATUS_ERROR ? data : NULL);
        nfs_task_end(t, -ECONNRESET);
    }
    free(c);
    nfs_task_settle(t);
    if (nfs_conn_up(n)) /* not while libnfs ends all calls */
        nfs_pump(n);
}

static nfs_fh3 handle_of(const struct nfs_handle *h)
{
    return (nfs_fh3){{h->n, (char *)h->bytes}};
}

static diropargs3 place_of(const struct nfs_handle *h, const char *name)
{
    return (diropargs3){handle_of(h), (char *)name};
}

static sattr3 mode_of(uint32_t mode)
{
    sattr3 s = {.mode = {.set_it = 1}};

    s.mode.set_mode3_u.mode = mode;
    return s;
}

/* A mode that the server has to make the file with; the size empties one that is there. */
static createhow3 how_of(const struct nfs_args *a)
{
    createhow3 how = {.mode = a->anew ? UNCHECKED : GUARDED};
    sattr3 s = mode_of(0600);

    if (a->anew) {
        s.size.set_it = 1;
        how.createhow3_u.obj_attributes = s;
    } else {
        how.createhow3_u.g_obj_attributes = s;
    }
    return how;
}

static int page_send(struct rpc_context *rpc, const struct nfs_args *a, struct nfs_call *c)
{
    READDIRPLUS3args args = {.dir = handle_of(a->handle),
                             .cookie = a->at,
                             .dircount = PAGE_NAMES_BYTES,
                             .maxcount = PAGE_BYTES};

    memcpy(args.cookieverf, a->verifier, NFS_VERIFIER_BYTES);
    return rpc_nfs3_readdirplus_async(rpc, replied, &args, c);
}

/* Both times become the server's. */
static int touch_send(struct rpc_context *rpc, nfs_fh3 handle, struct nfs_call *c)
{
    SETATTR3args args = {.object = handle};

    args.new_attributes.atime.set_it = SET_TO_SERVER_TIME;
    args.new_attributes.mtime.set_it = SET_TO_SERVER_TIME;
    return rpc_nfs3_setattr_async(rpc, replied, &args, c);
}

/* libnfs encodes the arguments before it returns. */
static int call_send(struct rpc_context *rpc, enum nfs_proc proc, const struct nfs_args *a,
                     struct nfs_call *c)
{
    nfs_fh3 handle = handle_of(a->handle);
    diropargs3 place = place_of(a->handle, a->name);
    RENAME3args rename = {place, place_of(a->handle, a->new_name)};
    READ3args read = {.file = handle, .offset = a->at, .count = a->n};
    WRITE3args write = {.file = handle,
                        .offset = a->at,
                        .count = a->n,
                        .stable = a->sync ? FILE_SYNC : UNSTABLE,
                        .data = {a->n, (char *)a->data}};

    switch (proc) {
    case NFS_GETATTR:
        return rpc_nfs3_getattr_async(rpc, replied, &(GETATTR3args){handle}, c);
    case NFS_SETATTR:
        return touch_send(rpc, handle, c);
    case NFS_LOOKUP:
        return rpc_nfs3_lookup_async(rpc, replied, &(LOOKUP3args){place}, c);
    case NFS_READ:
        return rpc_nfs3_read_async(rpc, replied, &read, c);
    case NFS_WRITE:
        return rpc_nfs3_write_async(rpc, replied, &write, c);
    case NFS_CREATE:
        return rpc_nfs3_create_async(rpc, replied, &(CREATE3args){place, how_of(a)}, c);
    case NFS_MKDIR:
        return rpc_nfs3_mkdir_async(rpc, replied, &(MKDIR3args){place, mode_of(0700)}, c);
    case NFS_REMOVE:
        return rpc_nfs3_remove_async(rpc, replied, &(REMOVE3args){place}, c);
    case NFS_RENAME:
        return rpc_nfs3_rename_async(rpc, replied, &rename, c);
    case NFS_READDIRPLUS:
        return page_send(rpc, a, c);
    case NFS_FSINFO:
        return rpc_nfs3_fsinfo_async(rpc, replied, &(FSINFO3args){handle}, c);
    default:
        return rpc_nfs3_commit_async(rpc, replied, &(COMMIT3args){.file = handle}, c);
    }
}

void nfs_ask(struct nfs_task *t, enum nfs_proc proc, const struct nfs_args *args,
             nfs_replied_cb *replied_cb)
{
    struct nfs *n = t->nfs;
    struct nfs_call *c = calloc(1, sizeof(*c));

    if (c) {
        *c = (struct nfs_call){.task = t,
                               .proc = proc,
                               .replied_cb = replied_cb,
                               .at = args->at,
                               .n = args->n,
                               .sent_ms = n->now_ms};
        if (call_send(n->conn.rpc, proc, args, c) == 0) {
            if (n->n_calls == 0) /* the server was not asked before */
                n->conn.heard_ms = n->now_ms;
            TAILQ_INSERT_TAIL(&n->calls, c, link);
            n->n_calls++;
            n->unsent++;
            n->n_write_calls += t->verb == WIRE_WRITE;
            t->awaiting++;
            return;
        }
        free(c);
    }
    nfs_task_end(t, -ENOMEM);
    nfs_task_settle(t);
}
