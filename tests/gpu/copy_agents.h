/* Copy agents for programs that speak the protocol by themselves: the inside of libucmclient_cuda
 * without libucmclient. */
#ifndef UCM_TESTS_GPU_COPY_AGENTS_H
#define UCM_TESTS_GPU_COPY_AGENTS_H

#include "kernels/copy.h"

#include <stdint.h>

#define VISIBLE __attribute__((visibility("default")))

struct copy_agents_ring;
struct ucm_encoding_spec;

#ifdef __cplusplus
extern "C" {
#endif

/* NULL: there is none. *fd, the shared memory, is the caller's. */
VISIBLE struct copy_agents_ring *copy_agents_open(const uint8_t *uuid, uint64_t entry_bytes,
                                                  uint32_t entries, uint8_t *ipc, uint64_t *offset,
                                                  int *fd);
/* The first entry begins with the nonce. 0 or a CUDA error. */
VISIBLE int copy_agents_prove(struct copy_agents_ring *ring, const uint8_t *nonce);
/* The daemon has answered: orders come from now on. */
VISIBLE void copy_agents_serve(struct copy_agents_ring *ring);
/* The region's number in orders, or a negative CUDA error. encoding: or NULL. */
VISIBLE int copy_agents_region(struct copy_agents_ring *ring, const struct ucm_copy_plane *planes,
                               uint32_t n_planes, uint32_t blocks,
                               const struct ucm_encoding_spec *encoding);

#ifdef __cplusplus
}
#endif
#endif
