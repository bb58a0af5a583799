#include "daemon/share/nfs_status.h"

#include <errno.h>

int nfs_status_errno(uint32_t status)
{
    switch (status) {
    case NFS_OK:
        return 0;
    case NFS_ERR_PERM:
        return -EPERM;
    case NFS_ERR_NOENT:
        return -ENOENT;
    case NFS_ERR_ACCES:
        return -EACCES;
    case NFS_ERR_EXIST:
    case NFS_ERR_NOTEMPTY:
        return -EEXIST;
    case NFS_ERR_NOTDIR:
        return -ENOTDIR;
    case NFS_ERR_ISDIR:
        return -EISDIR;
    case NFS_ERR_FBIG:
        return -EFBIG;
    case NFS_ERR_NOSPC:
        return -ENOSPC;
    case NFS_ERR_DQUOT:
        return -EDQUOT;
    case NFS_ERR_ROFS:
        return -EROFS;
    case NFS_ERR_NAMETOOLONG:
        return -ENAMETOOLONG;
    case NFS_ERR_STALE:
    case NFS_ERR_BADHANDLE:
        return -ESTALE;
    case NFS_ERR_BAD_COOKIE:
    case NFS_ERR_JUKEBOX:
        return -EAGAIN;
    case NFS_ERR_NOTSUPP:
        return -EOPNOTSUPP;
    default:
        return -EIO;
    }
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
        return -ENODEV; /* the root is not there: -ENOENT would be an answer about a part */
    default:
        return -EIO;
    }
}
