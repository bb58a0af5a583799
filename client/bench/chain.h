/* chain: the daemon, the connection and the stored blocks that chain.c measures.
 *
 * A block has one token, so that its KV takes a slot of 4 KiB: appends and selections read nothing of
 * it. Its digests are `mean` of 8 KV heads x 128, stored as a worker on a GPU stores them.
 *
 * Functions return 0, or an exit code after a sentence on standard error. */
#ifndef UCM_BENCH_CHAIN_H
#define UCM_BENCH_CHAIN_H

#include "client/bench/daemon.h"
#include "kernels/sparse/sparse.h"
#include "ucmclient_sparse.h"

#define CHAIN_KV_HEADS 8
#define CHAIN_Q_HEADS 32
#define CHAIN_HEAD_DIM 128

struct args;

/* A namespace, and a region in which its blocks are made. */
struct chain_store {
    struct ucm_namespace *ns;
    struct ucm_region *region;
    uint8_t *memory;
    size_t bytes;
};

struct chain_rig {
    char dir[32];
    struct daemon daemon;
    struct ucm_client *client;
    struct ucm_server_info server;
    struct ucm_digest_plan plan;
    struct chain_store base, digests;
    uint8_t *keys; /* of all blocks */
    uint32_t layers;
    unsigned threads;
};

/* Of the digests. */
struct ucm_digest_plan chain_plan(void);
/* Starts the daemon and stores that many blocks and their digests. On failure, too, close it. */
int chain_rig_open(struct chain_rig *rig, const struct args *a, uint32_t blocks);
void chain_rig_close(struct chain_rig *rig);
/* A counter or gauge of the daemon. */
int chain_rig_metric(struct chain_rig *rig, const char *name, uint64_t *out);

#endif
