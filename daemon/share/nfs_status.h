/* What servers say, as errno says it. Pure functions, any thread. */
#ifndef UCMD_SHARE_NFS_STATUS_H
#define UCMD_SHARE_NFS_STATUS_H

/* Of nfsstat3 and mountstat3: 0 or -errno; -EIO for numbers that are none. NFS3ERR_JUKEBOX (later,
 * perhaps) is -EAGAIN, handles that are no good are -ESTALE. */
int nfs_status_errno(int status);
int nfs_mount_errno(int status);

#endif
