#include "daemon/share/nfs_proc.h"

#include <errno.h>
#include <netinet/in.h>
#include <stddef.h>
#include <string.h>

/* ---- what procedures take and return ---- */

static const struct {
    uint32_t number, version;
} programs[] = {{100003, 3}, {100005, 3}, {100000, 2}};
enum { NFS, MOUNT, PORTMAP };

/* The RFC's types; DIR: of the folder that has the name, or was read. */
enum field {
    END,
    FH,        /* nfs_fh3 */
    NAME,      /* filename3, dirpath */
    NEW_NAME,  /* of RENAME */
    OFFSET,    /* offset3, cookie3 */
    COUNT,     /* count3 */
    STABLE,    /* stable_how */
    VERF,      /* writeverf3, cookieverf3 */
    PAGE,      /* dircount, maxcount */
    WHOLE,     /* offset and count of all bytes */
    NOW,       /* sattr3 and guard: the server's time */
    FILE_MODE, /* createhow3 */
    DIR_MODE,  /* sattr3 */
    SERVICE,   /* mapping: mountd by TCP */
    ATTR,      /* fattr3 */
    POST_FH,   /* post_op_fh3 */
    POST_ATTR, /* post_op_attr */
    DIR_ATTR,
    WCC, /* wcc_data */
    DIR_WCC,
    OPAQUE, /* eof, and the length of the bytes that follow */
    ENTRIES,
    LIMITS,
    PORT
};

#define FIELDS_MAX 5

static const struct procedure {
    uint32_t program, number;
    enum field arguments[FIELDS_MAX], results[FIELDS_MAX], failure[FIELDS_MAX];
} procedures[NFS_PROCS] = {
    [NFS_GETATTR] = {NFS, 1, {FH}, {ATTR}, {END}},
    [NFS_SETATTR] = {NFS, 2, {FH, NOW}, {WCC}, {WCC}},
    [NFS_LOOKUP] = {NFS, 3, {FH, NAME}, {FH, POST_ATTR, DIR_ATTR}, {DIR_ATTR}},
    [NFS_READ] = {NFS, 6, {FH, OFFSET, COUNT}, {POST_ATTR, COUNT, OPAQUE}, {POST_ATTR}},
    [NFS_WRITE] = {NFS, 7, {FH, OFFSET, COUNT, STABLE, COUNT}, {WCC, COUNT, STABLE, VERF}, {WCC}},
    [NFS_CREATE] = {NFS, 8, {FH, NAME, FILE_MODE}, {POST_FH, POST_ATTR, DIR_WCC}, {DIR_WCC}},
    [NFS_MKDIR] = {NFS, 9, {FH, NAME, DIR_MODE}, {POST_FH, POST_ATTR, DIR_WCC}, {DIR_WCC}},
    [NFS_REMOVE] = {NFS, 12, {FH, NAME}, {DIR_WCC}, {DIR_WCC}},
    [NFS_RENAME] = {NFS, 14, {FH, NAME, FH, NEW_NAME}, {DIR_WCC}, {DIR_WCC}},
    [NFS_READDIRPLUS] = {NFS, 17, {FH, OFFSET, VERF, PAGE}, {DIR_ATTR, VERF, ENTRIES}, {DIR_ATTR}},
    [NFS_FSINFO] = {NFS, 19, {FH}, {POST_ATTR, LIMITS}, {POST_ATTR}},
    [NFS_COMMIT] = {NFS, 21, {FH, WHOLE}, {WCC, VERF}, {WCC}},
    [NFS_MOUNT_MNT] = {MOUNT, 1, {NAME}, {FH}, {END}},
    [NFS_GETPORT] = {PORTMAP, 3, {SERVICE}, {PORT}, {END}},
};

/* ---- arguments ---- */

void nfs_put_proc(struct nfs_xdr_out *o, enum nfs_proc proc)
{
    nfs_xdr_put_u32(o, programs[procedures[proc].program].number);
    nfs_xdr_put_u32(o, programs[procedures[proc].program].version);
    nfs_xdr_put_u32(o, procedures[proc].number);
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

static void put_field(struct nfs_xdr_out *o, enum field which, const struct nfs_args *a)
{
    enum { UNSTABLE = 0, GUARDED = 1, FILE_SYNC = 2 };

    switch (which) {
    case FH:
        nfs_xdr_put_opaque(o, a->handle->bytes, a->handle->n);
        break;
    case NAME:
        nfs_xdr_put_string(o, a->name);
        break;
    case NEW_NAME:
        nfs_xdr_put_string(o, a->new_name);
        break;
    case OFFSET:
        nfs_xdr_put_u64(o, a->at);
        break;
    case COUNT:
        nfs_xdr_put_u32(o, a->n);
        break;
    case STABLE:
        nfs_xdr_put_u32(o, a->sync ? FILE_SYNC : UNSTABLE);
        break;
    case VERF:
        nfs_xdr_put_bytes(o, a->verifier, NFS_VERIFIER_BYTES);
        break;
    case PAGE:
        nfs_xdr_put_u32(o, NFS_PAGE_NAMES_BYTES);
        nfs_xdr_put_u32(o, NFS_PAGE_BYTES);
        break;
    case WHOLE:
        nfs_xdr_put_u64(o, 0);
        nfs_xdr_put_u32(o, 0);
        break;
    case NOW:
        put_attributes(o, 0, true);
        nfs_xdr_put_u32(o, false); /* whatever its ctime is */
        break;
    case FILE_MODE:
        nfs_xdr_put_u32(o, GUARDED);
        put_attributes(o, 0600, false);
        break;
    case DIR_MODE:
        put_attributes(o, 0700, false);
        break;
    case SERVICE:
        nfs_xdr_put_u32(o, programs[MOUNT].number);
        nfs_xdr_put_u32(o, programs[MOUNT].version);
        nfs_xdr_put_u32(o, IPPROTO_TCP);
        nfs_xdr_put_u32(o, 0);
        break;
    default:
        break;
    }
}

void nfs_put_args(struct nfs_xdr_out *o, enum nfs_proc proc, const struct nfs_args *args)
{
    for (unsigned i = 0; i < FIELDS_MAX; i++)
        put_field(o, procedures[proc].arguments[i], args);
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

static void get_limits(struct nfs_xdr *x, struct nfs_reply *out)
{
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

    out->entries = *x;
    while (nfs_entry_next(x, &entry, &last))
        ;
}

static void get_field(struct nfs_xdr *x, enum field which, struct nfs_reply *out)
{
    switch (which) {
    case FH:
        get_handle(x, &out->handle);
        break;
    case POST_FH:
        get_perhaps_handle(x, &out->handle);
        break;
    case ATTR:
        get_attributes(x, &out->attributes);
        break;
    case POST_ATTR:
        get_perhaps_attributes(x, &out->attributes);
        break;
    case WCC:
        get_change(x, &out->attributes);
        break;
    case DIR_ATTR:
        get_perhaps_attributes(x, &out->folder);
        break;
    case DIR_WCC:
        get_change(x, &out->folder);
        break;
    case COUNT:
        out->count = nfs_xdr_u32(x);
        break;
    case OPAQUE:
        (void)nfs_xdr_bool(x); /* end of file */
        if (nfs_xdr_u32(x) != out->count)
            x->bad = true;
        break;
    case STABLE:
        nfs_xdr_skip(x, 4);
        break;
    case VERF:
        get_verifier(x, out);
        break;
    case ENTRIES:
        get_page(x, out);
        break;
    case LIMITS:
        get_limits(x, out);
        break;
    case PORT:
        out->port = nfs_xdr_u32(x);
        break;
    default:
        break;
    }
}

int nfs_reply_decode(enum nfs_proc proc, struct nfs_xdr *x, struct nfs_reply *out)
{
    const enum field *fields;

    memset(out, 0, sizeof(*out));
    if (proc != NFS_GETPORT) /* which has no status */
        out->status = nfs_xdr_u32(x);
    fields = out->status == NFS_OK ? procedures[proc].results : procedures[proc].failure;
    for (unsigned i = 0; i < FIELDS_MAX; i++)
        get_field(x, fields[i], out);
    return x->bad ? -EPROTO : 0;
}
