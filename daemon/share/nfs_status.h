/* What servers say, as errno says it. Pure functions, any thread. */
#ifndef UCMD_SHARE_NFS_STATUS_H
#define UCMD_SHARE_NFS_STATUS_H

#include <stdint.h>

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

/* What the server says, and mountd (a part of the same numbers): 0 or -errno; -EIO for numbers that
 * are none. NFS_ERR_JUKEBOX (later, perhaps) is -EAGAIN, handles that are no good are -ESTALE. */
int nfs_status_errno(uint32_t status);
int nfs_mount_errno(uint32_t status);

#endif
