#include "daemon/share/nfs_status.h"

#include "daemon/share/nfs_conn.h"

#include <errno.h>

int nfs_status_errno(int status)
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
    case NFS3ERR_FBIG:
        return -EFBIG;
    case NFS3ERR_NOSPC:
        return -ENOSPC;
    case NFS3ERR_DQUOT:
        return -EDQUOT;
    case NFS3ERR_ROFS:
        return -EROFS;
    case NFS3ERR_NAMETOOLONG:
        return -ENAMETOOLONG;
    case NFS3ERR_STALE:
    case NFS3ERR_BADHANDLE:
        return -ESTALE;
    case NFS3ERR_BAD_COOKIE:
    case NFS3ERR_JUKEBOX:
        return -EAGAIN;
    case NFS3ERR_NOTSUPP:
        return -EOPNOTSUPP;
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
        return -ENODEV; /* the root is not there: -ENOENT would be an answer about a part */
    default:
        return -EIO;
    }
}
