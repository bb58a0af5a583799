/* Replies of NFSv3, as libnfs decodes them: results into struct nfs_reply. */
#include "daemon/backend/nfs/nfs.h"

#include <errno.h>
#include <nfsc/libnfs-raw-mount.h>
#include <string.h>

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

int nfs_missing_errno(const struct nfs_reply *r)
{
    bool gone = r->directory.known && r->directory.links == 0;

    return r->err == -ENOENT && gone ? -ESTALE : r->err;
}

int nfs_gone_errno(const struct nfs_reply *r)
{
    return r->err == -ESTALE ? -ENOENT : r->err;
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
    out->directory = a->type == NF3DIR;
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
        post_take(&r->directory, &res->LOOKUP3res_u.resfail.dir_attributes);
        return 0;
    }
    post_take(&r->attributes, &ok->obj_attributes);
    post_take(&r->directory, &ok->dir_attributes);
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
        post_take(&r->directory, &res->READDIRPLUS3res_u.resfail.dir_attributes);
        return 0;
    }
    post_take(&r->directory, &ok->dir_attributes);
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
        post_take(&r->directory, removed->status == NFS3_OK
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
