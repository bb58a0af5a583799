/* The procedures of NFSv3 and mountd (RFC 1813) and of the portmapper (RFC 1833): arguments into a
 * request, results out of a reply. Every length in a reply is compared with what was received and
 * with what the protocol allows. Pure functions, any thread. */
#ifndef UCMD_SHARE_NFS_PROC_H
#define UCMD_SHARE_NFS_PROC_H

#include "daemon/share/nfs_xdr.h"

#define NFS_HANDLE_BYTES 64u
#define NFS_VERIFIER_BYTES 8u
#define NFS_NAME_CAP 256
#define NFS_PAGE_BYTES 65536u      /* of READDIRPLUS's reply, attributes and handles included */
#define NFS_PAGE_NAMES_BYTES 8192u /* of which names and cookies */

enum nfs_proc {
    NFS_GETATTR,
    NFS_SETATTR,
    NFS_LOOKUP,
    NFS_READ,
    NFS_WRITE,
    NFS_CREATE,
    NFS_MKDIR,
    NFS_REMOVE,
    NFS_RENAME,
    NFS_READDIRPLUS,
    NFS_FSINFO,
    NFS_COMMIT,
    NFS_MOUNT_MNT,
    NFS_GETPORT, /* the portmapper's */
    NFS_PROCS
};

enum nfs_status {
    NFS_OK = 0,
    NFS_ERR_PERM = 1,
    NFS_ERR_NOENT = 2,
    NFS_ERR_IO = 5,
    NFS_ERR_ACCES = 13,
    NFS_ERR_EXIST = 17,
    NFS_ERR_NOTDIR = 20,
    NFS_ERR_ISDIR = 21,
    NFS_ERR_INVAL = 22,
    NFS_ERR_FBIG = 27,
    NFS_ERR_NOSPC = 28,
    NFS_ERR_ROFS = 30,
    NFS_ERR_NAMETOOLONG = 63,
    NFS_ERR_NOTEMPTY = 66,
    NFS_ERR_DQUOT = 69,
    NFS_ERR_STALE = 70,
    NFS_ERR_BADHANDLE = 10001,
    NFS_ERR_BAD_COOKIE = 10003,
    NFS_ERR_NOTSUPP = 10004,
    NFS_ERR_JUKEBOX = 10008
};

/* What NFS and mountd say, as errno says it: 0 or -errno; -EIO for numbers that are none.
 * NFS_ERR_JUKEBOX (try again later) is -EAGAIN, a handle that is no good -ESTALE. */
int nfs_status_errno(uint32_t status);
int nfs_mount_errno(uint32_t status);

enum nfs_type { NFS_TYPE_FILE = 1, NFS_TYPE_FOLDER = 2 };

struct nfs_handle {
    uint32_t n; /* 0: none */
    uint8_t bytes[NFS_HANDLE_BYTES];
};

struct nfs_attributes {
    bool known;
    uint32_t type, links; /* of enum nfs_type, or something else */
    uint64_t bytes, mtime_ns;
};

/* Each procedure takes some of these. */
struct nfs_args {
    const struct nfs_handle *handle; /* of the file, or of the folder that has the name */
    const char *name;                /* MNT: the export's path */
    const char *new_name;            /* RENAME: in the same folder */
    uint64_t at;                     /* READ, WRITE; READDIRPLUS: the cookie */
    uint32_t n;                      /* READ, WRITE: bytes */
    bool sync;                       /* WRITE */
    const uint8_t *verifier;         /* READDIRPLUS */
};

/* One for all procedures; fields that a reply lacks are zero. */
struct nfs_reply {
    uint32_t status; /* enum nfs_status */
    struct nfs_attributes attributes;
    struct nfs_attributes folder;         /* of the folder that has the name, or was read */
    struct nfs_handle handle;             /* LOOKUP and MNT with status 0: always */
    uint32_t count;                       /* READ, WRITE */
    uint8_t verifier[NFS_VERIFIER_BYTES]; /* WRITE, COMMIT, READDIRPLUS */
    uint32_t read_bytes, write_bytes;     /* FSINFO */
    uint32_t port;                        /* GETPORT */
    struct nfs_xdr entries;               /* READDIRPLUS: for nfs_entry_next */
    const struct nfs_args *args;          /* of the request; set by its sender */
};

struct nfs_entry {
    char name[NFS_NAME_CAP]; /* "": too long, or contains a zero */
    uint64_t cookie;
    struct nfs_attributes attributes;
};

/* Program, version and number. */
void nfs_put_proc(struct nfs_xdr_out *o, enum nfs_proc proc);

/* - SETATTR: both times become the server's now
 * - COMMIT: of the whole file
 * - CREATE (guarded), MKDIR: for the owner only
 * - WRITE: all but the bytes themselves and their padding
 * - GETPORT: of mountd */
void nfs_put_args(struct nfs_xdr_out *o, enum nfs_proc proc, const struct nfs_args *args);

/* x: what follows an accepted reply's header; of a READ it may end before the bytes. 0; -EPROTO: no
 * reply of that procedure, nothing of `out` may be used. */
int nfs_reply_decode(enum nfs_proc proc, struct nfs_xdr *x, struct nfs_reply *out);
/* 1: the next entry; 0: no more in this reply, *last: none in the folder either. */
int nfs_entry_next(struct nfs_xdr *entries, struct nfs_entry *out, bool *last);

#endif
