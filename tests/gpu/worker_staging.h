/* A worker's side of a ring: the copy agent as libucmclient_cuda has it, on shared memory that the
 * worker makes. */
#ifndef UCM_TESTS_GPU_WORKER_STAGING_H
#define UCM_TESTS_GPU_WORKER_STAGING_H

#include "kernels/copy.h"

#include <stdint.h>

#define STAGING_ENTRY_BYTES (16u << 20)
#define STAGING_ENTRIES 4

/* Planes of a region, at the end of the memory that test and worker share; bases count from the
 * worker's memory. */
struct worker_region {
    uint32_t n_planes, blocks;
    struct ucm_copy_plane planes[128];
};

/* The nonce of all registrations of the tests. */
static const uint8_t test_nonce[16] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};

#ifdef __cplusplus
extern "C" {
#endif

/* Makes ring and copy agent; the first entry begins with test_nonce. 0 or a CUDA error; *fd is the shared memory. */
int worker_ring_make(const uint8_t uuid[16], uint8_t ipc[64], uint64_t *offset, int *fd);
/* Orders are served from now on: the test has opened the ring. */
void worker_ring_serve(void);
int worker_ring_region(const struct worker_region *region, uint64_t memory, uint32_t *number);

#ifdef __cplusplus
}
#endif
#endif
