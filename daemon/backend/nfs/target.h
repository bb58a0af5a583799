/* The target of an NFS root: "nfs://SERVER[:PORT]/EXPORT[?OPTION=VALUE[&OPTION=VALUE...]]".
 *
 * Options, each at most once:
 * - version: 3
 * - nfsport, mountport: 1 to 65535
 * - uid, gid: the identity that the server sees
 *
 * Pure functions, any thread. */
#ifndef UCM_BACKEND_NFS_TARGET_H
#define UCM_BACKEND_NFS_TARGET_H

#include <stdint.h>

#define NFS_SERVER_CAP 256
#define NFS_EXPORT_CAP 1024

struct nfs_target {
    char server[NFS_SERVER_CAP]; /* a name or an address, without brackets */
    char export[NFS_EXPORT_CAP];
    uint16_t port;       /* of NFS; default 2049 */
    uint16_t mount_port; /* of mountd; 0: ask the server's portmapper */
    int64_t uid, gid;    /* -1: those of this process */
};

/* 0, or -EINVAL and *why: what is wrong and what would be right. */
int nfs_target_parse(const char *text, struct nfs_target *out, const char **why);

#endif
