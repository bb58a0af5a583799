#include "daemon/share/nfs_proc.h"

#include <errno.h>
#include <netinet/in.h>
#include <stddef.h>
#include <string.h>

#define PORTMAP_PROGRAM 100000u
#define NFS_PROGRAM 100003u
#define MOUNT_PROGRAM 100005u

/* ---- arguments ---- */

void nfs_put_proc(struct nfs_xdr_out *o, enum nfs_proc proc)
{
    static const struct {
        uint32_t program, version, number;
    } procs[NFS_PROCS] = {
        [NFS_GETATTR] = {NFS_PROGRAM, 3, 1},     [NFS_SETATTR] = {NFS_PROGRAM, 3, 2},
        [NFS_LOOKUP] = {NFS_PROGRAM, 3, 3},      [NFS_READ] = {NFS_PROGRAM, 3, 6},
        [NFS_WRITE] = {NFS_PROGRAM, 3, 7},       [NFS_CREATE] = {NFS_PROGRAM, 3, 8},
        [NFS_MKDIR] = {NFS_PROGRAM, 3, 9},       [NFS_REMOVE] = {NFS_PROGRAM, 3, 12},
        [NFS_RENAME] = {NFS_PROGRAM, 3, 14},     [NFS_READDIRPLUS] = {NFS_PROGRAM, 3, 17},
        [NFS_FSINFO] = {NFS_PROGRAM, 3, 19},     [NFS_COMMIT] = {NFS_PROGRAM, 3, 21},
        [NFS_MOUNT_MNT] = {MOUNT_PROGRAM, 3, 1}, [NFS_GETPORT] = {PORTMAP_PROGRAM, 2, 3},
    };

    nfs_xdr_put_u32(o, procs[proc].program);
    nfs_xdr_put_u32(o, procs[proc].version);
    nfs_xdr_put_u32(o, procs[proc].number);
}

void nfs_put_handle(struct nfs_xdr_out *o, const struct nfs_handle *h)
{
    nfs_xdr_put_opaque(o, h->bytes, h->n);
}

void nfs_put_place(struct nfs_xdr_out *o, const struct nfs_handle *folder, const char *name)
{
    nfs_put_handle(o, folder);
    nfs_xdr_put_string(o, name);
}

/* sattr3: a mode or none; no owner, no size; both times the server's now, or none. */
static void put_attributes(struct nfs_xdr_out *o, uint32_t mode, bool now)
{
    enum { DONT_CHANGE, SET_TO_SERVER_TIME };

    nfs_xdr_put_u32(o, mode != 0);
    if (mode)
        nfs_xdr_put_u32(o, mode);
    nfs_xdr_put_u32(o, false); /* uid */
    nfs_xdr_put_u32(o, false); /* gid */
    nfs_xdr_put_u32(o, false); /* size */
    nfs_xdr_put_u32(o, now ? SET_TO_SERVER_TIME : DONT_CHANGE);
    nfs_xdr_put_u32(o, now ? SET_TO_SERVER_TIME : DONT_CHANGE);
}

void nfs_put_args(struct nfs_xdr_out *o, enum nfs_proc proc, const struct nfs_handle *h,
                  const char *name)
{
    enum { GUARDED = 1 };

    nfs_put_handle(o, h);
    if (name)
        nfs_xdr_put_string(o, name);
    switch (proc) {
    case NFS_SETATTR:
        put_attributes(o, 0, true);
        nfs_xdr_put_u32(o, false); /* whatever its ctime is */
        break;
    case NFS_COMMIT:
        nfs_xdr_put_u64(o, 0);
        nfs_xdr_put_u32(o, 0); /* all of it */
        break;
    case NFS_CREATE:
        nfs_xdr_put_u32(o, GUARDED);
        put_attributes(o, 0600, false);
        break;
    case NFS_MKDIR:
        put_attributes(o, 0700, false);
        break;
    default:
        break;
    }
}

void nfs_put_read(struct nfs_xdr_out *o, const struct nfs_handle *file, uint64_t at, uint32_t n)
{
    nfs_put_handle(o, file);
    nfs_xdr_put_u64(o, at);
    nfs_xdr_put_u32(o, n);
}

void nfs_put_write(struct nfs_xdr_out *o, const struct nfs_handle *file, uint64_t at, uint32_t n,
                   bool sync)
{
    enum { UNSTABLE = 0, FILE_SYNC = 2 };

    nfs_put_handle(o, file);
    nfs_xdr_put_u64(o, at);
    nfs_xdr_put_u32(o, n);
    nfs_xdr_put_u32(o, sync ? FILE_SYNC : UNSTABLE);
    nfs_xdr_put_u32(o, n);
}

void nfs_put_readdirplus(struct nfs_xdr_out *o, const struct nfs_handle *folder, uint64_t cookie,
                         const uint8_t verifier[NFS_VERIFIER_BYTES], uint32_t names_bytes,
                         uint32_t page_bytes)
{
    nfs_put_handle(o, folder);
    nfs_xdr_put_u64(o, cookie);
    nfs_xdr_put_bytes(o, verifier, NFS_VERIFIER_BYTES);
    nfs_xdr_put_u32(o, names_bytes);
    nfs_xdr_put_u32(o, page_bytes);
}

void nfs_put_getport(struct nfs_xdr_out *o)
{
    nfs_xdr_put_u32(o, MOUNT_PROGRAM);
    nfs_xdr_put_u32(o, 3);
    nfs_xdr_put_u32(o, IPPROTO_TCP);
    nfs_xdr_put_u32(o, 0);
}

/* ---- statuses ---- */

static const struct {
    uint32_t status;
    int error;
} errors[] = {{NFS_OK, 0},
              {NFS_ERR_PERM, -EPERM},
              {NFS_ERR_NOENT, -ENOENT},
              {NFS_ERR_ACCES, -EACCES},
              {NFS_ERR_EXIST, -EEXIST},
              {NFS_ERR_NOTEMPTY, -EEXIST},
              {NFS_ERR_NOTDIR, -ENOTDIR},
              {NFS_ERR_ISDIR, -EISDIR},
              {NFS_ERR_FBIG, -EFBIG},
              {NFS_ERR_NOSPC, -ENOSPC},
              {NFS_ERR_DQUOT, -EDQUOT},
              {NFS_ERR_ROFS, -EROFS},
              {NFS_ERR_NAMETOOLONG, -ENAMETOOLONG},
              {NFS_ERR_STALE, -ESTALE},
              {NFS_ERR_BADHANDLE, -ESTALE},
              {NFS_ERR_BAD_COOKIE, -EAGAIN},
              {NFS_ERR_JUKEBOX, -EAGAIN},
              {NFS_ERR_NOTSUPP, -EOPNOTSUPP}};

int nfs_status_errno(uint32_t status)
{
    for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++)
        if (errors[i].status == status)
            return errors[i].error;
    return -EIO;
}

int nfs_mount_errno(uint32_t status)
{
    switch (status) {
    case NFS_OK:
        return 0;
    case NFS_ERR_PERM:
    case NFS_ERR_ACCES:
        return -EACCES;
    case NFS_ERR_NOENT:
    case NFS_ERR_NOTDIR:
    case NFS_ERR_INVAL:
    case NFS_ERR_NAMETOOLONG:
        return -ENODEV; /* there is no such root: -ENOENT would be an answer about a part */
    default:
        return -EIO;
    }
}

/* ---- results ---- */

static void get_handle(struct nfs_xdr *x, struct nfs_handle *out)
{
    uint32_t n;
    const uint8_t *bytes = nfs_xdr_opaque(x, NFS_HANDLE_BYTES, &n);

    if (n == 0)
        x->bad = true;
    if (x->bad)
        return;
    memcpy(out->bytes, bytes, n);
    out->n = n;
}

static void get_attributes(struct nfs_xdr *x, struct nfs_attributes *out)
{
    uint32_t seconds, nanoseconds;

    out->type = nfs_xdr_u32(x);
    nfs_xdr_skip(x, 4); /* mode */
    out->links = nfs_xdr_u32(x);
    nfs_xdr_skip(x, 8); /* uid, gid */
    out->bytes = nfs_xdr_u64(x);
    nfs_xdr_skip(x, 8 + 8 + 8 + 8 + 8); /* used, device, file system, number, atime */
    seconds = nfs_xdr_u32(x);
    nanoseconds = nfs_xdr_u32(x);
    nfs_xdr_skip(x, 8); /* ctime */
    out->mtime_ns = seconds * (uint64_t)1000000000u + nanoseconds % 1000000000u;
    out->known = !x->bad;
}

static void get_perhaps_attributes(struct nfs_xdr *x, struct nfs_attributes *out)
{
    if (nfs_xdr_bool(x))
        get_attributes(x, out);
}

static void get_perhaps_handle(struct nfs_xdr *x, struct nfs_handle *out)
{
    if (nfs_xdr_bool(x))
        get_handle(x, out);
}

/* wcc_data: before and after. */
static void get_change(struct nfs_xdr *x, struct nfs_attributes *after)
{
    if (nfs_xdr_bool(x))
        nfs_xdr_skip(x, 8 + 8 + 8);
    get_perhaps_attributes(x, after);
}

static void get_verifier(struct nfs_xdr *x, struct nfs_reply *out)
{
    const uint8_t *bytes = nfs_xdr_bytes(x, NFS_VERIFIER_BYTES);

    if (bytes)
        memcpy(out->verifier, bytes, NFS_VERIFIER_BYTES);
}

static void get_read(struct nfs_xdr *x, struct nfs_reply *out)
{
    get_perhaps_attributes(x, &out->attributes);
    out->count = nfs_xdr_u32(x);
    (void)nfs_xdr_bool(x); /* end of file */
    if (nfs_xdr_u32(x) != out->count)
        x->bad = true;
}

static void get_written(struct nfs_xdr *x, struct nfs_reply *out)
{
    get_change(x, &out->attributes);
    out->count = nfs_xdr_u32(x);
    nfs_xdr_skip(x, 4); /* how stable */
    get_verifier(x, out);
}

static void get_made(struct nfs_xdr *x, struct nfs_reply *out)
{
    get_perhaps_handle(x, &out->handle);
    get_perhaps_attributes(x, &out->attributes);
    get_change(x, &out->folder);
}

static void get_limits(struct nfs_xdr *x, struct nfs_reply *out)
{
    get_perhaps_attributes(x, &out->attributes);
    out->read_bytes = nfs_xdr_u32(x);
    nfs_xdr_skip(x, 8); /* preferred, multiple */
    out->write_bytes = nfs_xdr_u32(x);
    nfs_xdr_skip(x, 8 + 4 + 8 + 8 + 4); /* ..., folders, largest file, clock, properties */
}

int nfs_entry_next(struct nfs_xdr *entries, struct nfs_entry *out, bool *last)
{
    struct nfs_handle handle;
    const uint8_t *name;
    uint32_t n;

    memset(out, 0, sizeof(*out));
    *last = false;
    if (!nfs_xdr_bool(entries)) {
        *last = nfs_xdr_bool(entries);
        return 0;
    }
    nfs_xdr_skip(entries, 8); /* number */
    name = nfs_xdr_opaque(entries, UINT32_MAX, &n);
    out->cookie = nfs_xdr_u64(entries);
    get_perhaps_attributes(entries, &out->attributes);
    get_perhaps_handle(entries, &handle);
    if (entries->bad)
        return 0;
    if (n < sizeof(out->name) && !memchr(name, 0, n))
        memcpy(out->name, name, n);
    return 1;
}

/* Walks all entries, so that a bad one is found before any is used. */
static void get_page(struct nfs_xdr *x, struct nfs_reply *out)
{
    struct nfs_entry entry;
    bool last;

    get_perhaps_attributes(x, &out->folder);
    get_verifier(x, out);
    out->entries = *x;
    while (nfs_entry_next(x, &entry, &last))
        ;
}

static void get_good(enum nfs_proc proc, struct nfs_xdr *x, struct nfs_reply *out)
{
    switch (proc) {
    case NFS_GETATTR:
        get_attributes(x, &out->attributes);
        break;
    case NFS_LOOKUP:
        get_handle(x, &out->handle);
        get_perhaps_attributes(x, &out->attributes);
        get_perhaps_attributes(x, &out->folder);
        break;
    case NFS_READ:
        get_read(x, out);
        break;
    case NFS_WRITE:
        get_written(x, out);
        break;
    case NFS_CREATE:
    case NFS_MKDIR:
        get_made(x, out);
        break;
    case NFS_READDIRPLUS:
        get_page(x, out);
        break;
    case NFS_FSINFO:
        get_limits(x, out);
        break;
    case NFS_COMMIT:
        get_change(x, &out->attributes);
        get_verifier(x, out);
        break;
    case NFS_MOUNT_MNT: /* authentication flavors follow */
        get_handle(x, &out->handle);
        break;
    default: /* SETATTR, REMOVE, RENAME: as when it failed */
        get_change(x, &out->folder);
    }
}

static void get_failed(enum nfs_proc proc, struct nfs_xdr *x, struct nfs_reply *out)
{
    switch (proc) {
    case NFS_GETATTR:
    case NFS_MOUNT_MNT:
        break;
    case NFS_LOOKUP:
    case NFS_READDIRPLUS:
        get_perhaps_attributes(x, &out->folder);
        break;
    case NFS_READ:
    case NFS_FSINFO:
        get_perhaps_attributes(x, &out->attributes);
        break;
    default:
        get_change(x, &out->folder);
    }
}

int nfs_reply_decode(enum nfs_proc proc, struct nfs_xdr *x, struct nfs_reply *out)
{
    memset(out, 0, sizeof(*out));
    if (proc == NFS_GETPORT) {
        out->port = nfs_xdr_u32(x);
        return x->bad ? -EPROTO : 0;
    }
    out->status = nfs_xdr_u32(x);
    if (out->status == 0)
        get_good(proc, x, out);
    else
        get_failed(proc, x, out);
    return x->bad ? -EPROTO : 0;
}
