/* A worker process of the GPU tests: owns GPU memory and does what the test asks, one request at a
 * time over a socket. Everything is of one machine and one build, so requests are plain structs. */
#ifndef UCM_TESTS_GPU_WORKER_H
#define UCM_TESTS_GPU_WORKER_H

#include "kernels/copy.h"

#include <stdint.h>

#define WORKER_SHARED_BYTES (1ull << 30) /* of the memory that test and worker share */
/* Of a worker's ring. */
#define STAGING_ENTRY_BYTES (16u << 20)
#define STAGING_ENTRIES 4

/* The nonce of all registrations of the tests. */
static const uint8_t test_nonce[16] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};

/* Planes of a region, at the end of the memory that test and worker share; bases count from the
 * worker's memory. */
struct worker_region {
    uint32_t n_planes, blocks;
    struct ucm_copy_plane planes[128];
};

enum worker_op {
    WORKER_HELLO,     /* handle: the GPU's UUID */
    WORKER_ALLOC_IPC, /* bytes after offset; handle */
    WORKER_ALLOC_VMM, /* bytes; a descriptor follows */
    WORKER_FREE,      /* the allocation */
    WORKER_WRITE,     /* shared memory to the allocation */
    WORKER_READ,      /* the allocation to shared memory */
    WORKER_EVENT, /* after ms: a kernel that copies shared memory to the allocation, then an event;
                     handle */
    WORKER_EVENT_AGAIN,   /* records the same event again, after the same */
    WORKER_EVENT_NEVER,   /* the same after a kernel that ends with WORKER_RELEASE; handle */
    WORKER_EVENT_FAULT,   /* after ms the kernel traps; handle */
    WORKER_EVENT_DESTROY, /* the event */
    WORKER_RELEASE,
    WORKER_FREE_BYTES,  /* value: free GPU memory */
    WORKER_RING,        /* makes a ring; handle, value: its offset; a descriptor follows */
    WORKER_RING_SERVE,  /* the ring is open */
    WORKER_RING_REGION, /* the planes at the end of shared memory; value: their number in orders */
};

struct worker_request {
    uint32_t op, ms;
    uint64_t bytes, offset;
};

struct worker_reply {
    int32_t error; /* cudaError_t */
    uint64_t value;
    uint8_t handle[64];
};

#ifdef __cplusplus
extern "C" {
#endif
int worker_main(int socket, void *shared);
/* A kernel of this very process traps: its context is lost. 0, or -1 when it did not. */
int worker_trap(void);
#ifdef __cplusplus
}
#endif

#endif
