/* Companions for tests/integration/encoding_gpu.py, which speaks the protocol by itself: the inside of
 * libucmclient_cuda without libucmclient. */
#include "client/cuda/companion.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define VISIBLE __attribute__((visibility("default")))

struct companions_ring {
    struct companion companion;
    struct ucm_staging *shared;
};

VISIBLE struct companions_ring *companions_open(const uint8_t *uuid, uint64_t slice_bytes,
                                                uint32_t slices, uint8_t *ipc, uint64_t *offset,
                                                int *fd);
VISIBLE int companions_prove(struct companions_ring *ring, const uint8_t *nonce);
VISIBLE void companions_serve(struct companions_ring *ring);
VISIBLE int companions_region(struct companions_ring *ring, const struct ucm_copy_plane *planes,
                              uint32_t n_planes, uint32_t blocks,
                              const struct ucm_encoding_spec *encoding);

/* NULL: there is none. *fd, the shared memory, is the caller's. */
struct companions_ring *companions_open(const uint8_t *uuid, uint64_t slice_bytes, uint32_t slices,
                                        uint8_t *ipc, uint64_t *offset, int *fd)
{
    struct companions_ring *ring = calloc(1, sizeof(*ring));

    if (!ring)
        return NULL;
    *fd = memfd_create("ring", MFD_ALLOW_SEALING | MFD_CLOEXEC);
    if (*fd < 0 || fallocate(*fd, 0, 0, sizeof(*ring->shared)) < 0 ||
        fcntl(*fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0)
        goto err;
    ring->shared = mmap(NULL, sizeof(*ring->shared), PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
    if (ring->shared == MAP_FAILED ||
        companion_init(&ring->companion, uuid, slice_bytes, slices) != CUDA_SUCCESS)
        goto err;
    memcpy(ipc, ring->companion.ipc, sizeof(ring->companion.ipc));
    *offset = ring->companion.offset;
    return ring;

err:
    if (*fd >= 0)
        close(*fd);
    free(ring);
    return NULL;
}

/* 0 or a CUDA error. */
int companions_prove(struct companions_ring *ring, const uint8_t *nonce)
{
    return (int)companion_prove(&ring->companion, nonce);
}

/* The daemon has answered: orders come from now on. */
void companions_serve(struct companions_ring *ring)
{
    companion_serve(&ring->companion, ring->shared);
}

/* The region's number in orders, or a negative CUDA error. */
int companions_region(struct companions_ring *ring, const struct ucm_copy_plane *planes,
                      uint32_t n_planes, uint32_t blocks, const struct ucm_encoding_spec *encoding)
{
    uint32_t number = 0;
    CUresult r = companion_region_add(&ring->companion, planes, n_planes, blocks,
                                      (struct companion_skills){.encoding = encoding}, &number);

    return r == CUDA_SUCCESS ? (int)number : -(int)r;
}
