/* What an NFS root's target says: "nfs://SERVER/EXPORT[?OPTION=VALUE[&...]]". Pure functions, any
 * thread. Options: version (3), nfsport, mountport, uid, gid. */
#ifndef UCMD_SHARE_NFS_TARGET_H
#define UCMD_SHARE_NFS_TARGET_H

#include <stdint.h>

#define NFS_SERVER_CAP 256
#define NFS_EXPORT_CAP 1024

struct nfs_target {
    char server[NFS_SERVER_CAP]; /* a name or an address, without brackets */
    char export[NFS_EXPORT_CAP];
    uint16_t port;       /* of NFS; 2049 */
    uint16_t mount_port; /* of mountd; 0: the server's portmapper tells it */
    int64_t uid, gid;    /* whom the server takes us for; -1: who we are */
};

/* 0, or -EINVAL and *why: a sentence. */
int nfs_target_parse(const char *text, struct nfs_target *out, const char **why);

#endif
