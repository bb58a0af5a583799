/* What the roles of test_serve share: a worker, and the contents of its blocks. */
#ifndef UCM_TESTS_GPU_SERVE_H
#define UCM_TESTS_GPU_SERVE_H

#include "ucmclient_cuda.h"

#include <cuda_runtime.h>
#include <vector>

#define LAYERS 8u
#define FRAGMENT 32768u /* of K, and of V, in one layer of one block */
#define BLOCKS 128u
#define KEY_BYTES 32u

struct worker {
    struct ucm_client *client;
    struct ucm_namespace *base; /* of blocks as they are */
    struct ucm_namespace *ns;   /* the region's: base, or one of encoded blocks */
    struct ucm_region *region;
    struct ucm_cuda *cuda; /* the copy agent, where copies shall be staged */
    unsigned *kv;
    cudaStream_t stream;
    cudaEvent_t event;
    cudaIpcEventHandle_t handle;
    size_t bytes;
    uint8_t kept[16]; /* the bytes at the nonce's place */
};

/* A check in a role: a failure ends the role. */
void need(bool ok, const char *what);
double now_s(void);

__host__ __device__ static inline unsigned pattern(unsigned seed, unsigned plane, unsigned word)
{
    unsigned x = (seed * 2654435761u) ^ (plane * 40503u + word) * 2246822519u;

    x ^= x >> 15;
    return x * 3266489917u;
}

/* Of `base`. */
struct ucm_identity identity(void);
void worker_open(struct worker *w);
void worker_close(struct worker *w);
/* The region under w->ns; open has registered one under base, and close unregisters what there is. */
void worker_register(struct worker *w);
void worker_unregister(struct worker *w);
/* Of block number first + i to place i, or reversed to BLOCKS - 1 - i. */
struct transfer : ucm_transfer {
    std::vector<uint8_t> all_keys;
    std::vector<uint32_t> all_blocks;

    transfer(unsigned first, unsigned n, bool reversed);
    transfer(const transfer &) = delete; /* it has pointers into itself */
    /* Only n blocks, those after the first `at`. */
    void only(unsigned at, unsigned n);
};
/* The test's strategy: whether a worker has a copy agent, whether copies go through its ring, and
 * whether the daemon's planner decides about raw ones. */
bool copy_agent(void);
bool staged(void);
bool plans(void);
/* serve_ring.c: how many orders of the process's ring are claimed; direction 0: of loads, 1: of dumps. */
extern "C" unsigned ring_claimed(unsigned direction);
/* A kernel that takes so long. */
__global__ void delay_ms(long long ms);
/* Block b of the first n gets the pattern of seed first + b, at place b of the planes from..from+planes. */
__global__ void fill(unsigned *kv, unsigned first, unsigned n, unsigned from, unsigned planes);
/* The dump is sent while the kernel that writes the bytes has not even begun. */
struct ucm_task *dump_begin(struct worker *w, unsigned first, unsigned n, long long ms);
void poison(struct worker *w);
/* Counts words that a load of n blocks would not leave; n 0: words that are not poison. */
size_t compare(struct worker *w, unsigned first, unsigned n);
size_t load_and_compare(struct worker *w, unsigned first, unsigned n);

/* serve_roles.cu */
int role_produce(void);
int role_consume(void);
int role_produce_layers(void);
int role_consume_layers(void);
int role_victim(void);
int role_survivor(void);
int role_free_bytes(void);

/* serve_encoded.cu */
int role_encoded(void);
int role_encoded_hangs(void);
int role_encoded_dies(void);
int role_encoded_after(void);

/* serve_stream.cu */
int role_consume_stream(void);
int role_stream_orphan(void);

#endif
