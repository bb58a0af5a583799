/* One worker: a connection, a namespace and a registered cpu region whose blocks are scattered over
 * planes of `fragment` bytes, as an engine's paged KV memory is (plane p is layer p, and holds
 * fragment p of every block). Fills blocks with their pattern and checks them.
 *
 * Functions return 0 or a negative enum ucm_status, with a sentence in rig->error.
 * Threads: a rig belongs to one thread. */
#ifndef UCM_BENCH_RIG_H
#define UCM_BENCH_RIG_H

#include "client/bench/gpu.h"
#include "client/include/ucmclient.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct bench_copy_agent;

#define RIG_KEY_BYTES 32
#define RIG_MAX_PLANES 1024

/* GPU: blocks are stored in another form. K and V of each layer are planes of tokens x heads x dim
 * bf16, and fragment is one of them. */
struct rig_encoding {
    const char *name;
    uint32_t tokens, heads, dim;
};

struct rig_options {
    const char *socket; /* NULL: the library's default */
    const char *name;   /* of the client */
    const char *model;  /* of the namespace */
    uint32_t parts, part;
    uint64_t block_bytes; /* of one part; a multiple of fragment */
    uint64_t fragment;    /* a multiple of 8, or the whole block */
    uint32_t blocks;      /* of the region */
    int timeout_ms;
    int gpu; /* not 0: the region lies on GPU number gpu - 1; `memory` is then a mirror of it */
    bool copy_agent; /* GPU: copies may go through entries of this process, by libucmclient_cuda */
    uint32_t
        spread; /* GPU: a block's fragments lie so many of them from those of the next; 0 and 1:
                        densely, else rig_push and rig_pull are of no use */
    const struct rig_encoding *encoding; /* NULL: blocks are stored as they are */
};

struct rig {
    struct ucm_client *client;
    struct ucm_namespace *ns;
    struct ucm_namespace *base; /* of ns, if its blocks are encoded */
    struct ucm_region *region;
    struct ucm_server_info server;
    struct gpu gpu;
    int on_gpu;
    const struct bench_copy_agent *copy_agent; /* with a copy agent: its library */
    struct ucm_cuda *cuda;                     /* and its ring */
    uint8_t *memory;
    size_t memory_bytes;
    uint32_t blocks, planes, fragment, part, spread;
    uint32_t tensors; /* planes of a layer */
    uint64_t block_bytes;
    int timeout_ms;
    char error[320];
};

/* Waits until the daemon's arena has grown to what is configured, at most 30 s: a daemon serves
 * before that, with less room. On failure nothing is held, and rig->error tells. */
int rig_open(struct rig *rig, const struct rig_options *options);
void rig_close(struct rig *rig);

void rig_fill(struct rig *rig, uint32_t block, const uint8_t *key);
size_t rig_differ(const struct rig *rig, uint32_t block, const uint8_t *key); /* bytes */
void rig_poison(struct rig *rig); /* no byte is a pattern's any more */

/* With a region on a GPU: brings there what was filled, before a dump; and back what was loaded,
 * before it is checked. Else nothing to do. */
int rig_push(struct rig *rig);
int rig_pull(struct rig *rig);

/* ---- moving blocks ---- */

enum rig_op { RIG_LOAD, RIG_DUMP, RIG_PREFETCH };

struct rig_move {
    const uint8_t *keys;
    uint32_t n;
    uint32_t first_block; /* keys[i] goes to or comes from block first_block + i */
    uint32_t batch;       /* blocks of one request */
    uint32_t in_flight;   /* requests under way at once */
    uint32_t lease;       /* given back with the last request */
};

/* Counts by enum ucm_block_result; bytes as the daemon tells them. */
struct rig_moved {
    uint32_t ok, miss, failed, no_room, exists, in_progress, other;
    uint64_t bytes;
};

/* Moves all and waits. result may be NULL, else it receives n enum ucm_block_result. A request that
 * fails as a whole ends it (after waiting for those under way). */
int rig_move(struct rig *rig, enum rig_op op, const struct rig_move *move, uint8_t *result,
             struct rig_moved *out);

/* ---- what only operators' calls tell ---- */

/* A counter or gauge of `stats`. */
int rig_metric(struct rig *rig, const char *name, uint64_t *out);
/* How many parts have gone to NVMe since the daemon's start, or were given up on the way. */
int rig_written(struct rig *rig, uint64_t *out);
/* Waits until that is `target` or more; -UCM_EDEADLINE after 60 s. */
int rig_wait_written(struct rig *rig, uint64_t target);
/* Evicts every block of the namespace, from DRAM only or from everywhere, waiting a while for those
 * in use. */
int rig_evict(struct rig *rig, int dram_only);

#endif
