/* How many requests an operation of the shared tier makes of its server. Tests count the same on
 * real servers: tests/integration/test_shared_s3_hosts.py for S3,
 * tests/integration/roots/test_shared_nfs.c for NFS. */
#ifndef UCM_TESTS_SHARED_COSTS_H
#define UCM_TESTS_SHARED_COSTS_H

#define COST_S3_FIND 1  /* HEAD */
#define COST_S3_READ 1  /* GET */
#define COST_S3_WRITE 1 /* PUT, on condition that nothing is there */
#define COST_S3_AGAIN_PUT 1
#define COST_S3_AGAIN_HEAD 1 /* has it the right length? */

#define COST_NFS_FIND 1        /* LOOKUP */
#define COST_NFS_READ 1        /* LOOKUP, if the file's handle is not kept, and READs */
#define COST_NFS_WRITE_LOOKS 1 /* LOOKUP, */
#define COST_NFS_WRITE 2       /* CREATE and RENAME, and WRITEs */
#define COST_NFS_AGAIN 1       /* LOOKUP; the first of 17 in a row also CREATE and REMOVE */
#define COST_NFS_MOVE_BYTES (1u << 20)

#endif
