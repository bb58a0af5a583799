/* What an operation of the shared tier costs its server. Tests count the same on real servers: of S3
 * tests/integration/test_share_s3_hosts.py, of NFS tests/integration/roots/test_share_nfs.c. POSIX's are the calls of
 * daemon/share/posix_file.c that a client of a mounted file system sends on; no test counts them. */
#ifndef UCM_TESTS_SCALE_COSTS_H
#define UCM_TESTS_SCALE_COSTS_H

#define SCALE_S3_FIND 1  /* HEAD */
#define SCALE_S3_READ 1  /* GET */
#define SCALE_S3_WRITE 1 /* PUT, on condition that nothing is there */
#define SCALE_S3_AGAIN_PUT 1
#define SCALE_S3_AGAIN_HEAD 1 /* has it the right length? */

#define SCALE_NFS_FIND 1        /* LOOKUP */
#define SCALE_NFS_READ 1        /* LOOKUP, if the file's handle is not kept, and READs */
#define SCALE_NFS_WRITE_LOOKS 1 /* LOOKUP, */
#define SCALE_NFS_WRITE 2       /* CREATE and RENAME, and WRITEs */
#define SCALE_NFS_AGAIN 1       /* LOOKUP; the first of 17 in a row also CREATE and REMOVE */
#define SCALE_NFS_MOVE_BYTES (1u << 20)

#define SCALE_POSIX_FIND 1 /* fstatat */
#define SCALE_POSIX_READ 1 /* openat */
#define SCALE_POSIX_WRITE_LOOKS 1
#define SCALE_POSIX_WRITE 2 /* openat of a new file, renameat */
#define SCALE_POSIX_AGAIN 1

#endif
