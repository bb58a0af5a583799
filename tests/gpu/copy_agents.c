#include "tests/gpu/copy_agents.h"

#include "client/cuda/copy_agent.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct copy_agents_ring {
    struct copy_agent copy_agent;
    struct ucm_staging *shared;
};

struct copy_agents_ring *copy_agents_open(const uint8_t *uuid, uint64_t entry_bytes,
                                          uint32_t entries, uint8_t *ipc, uint64_t *offset, int *fd)
{
    struct copy_agents_ring *ring = calloc(1, sizeof(*ring));

    if (!ring)
        return NULL;
    *fd = memfd_create("ring", MFD_ALLOW_SEALING | MFD_CLOEXEC);
    if (*fd < 0 || fallocate(*fd, 0, 0, sizeof(*ring->shared)) < 0 ||
        fcntl(*fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0)
        goto err;
    ring->shared = mmap(NULL, sizeof(*ring->shared), PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
    if (ring->shared == MAP_FAILED ||
        copy_agent_init(&ring->copy_agent, uuid, entry_bytes, entries) != CUDA_SUCCESS)
        goto err;
    memcpy(ipc, ring->copy_agent.ipc, sizeof(ring->copy_agent.ipc));
    *offset = ring->copy_agent.offset;
    return ring;

err:
    if (*fd >= 0)
        close(*fd);
    free(ring);
    return NULL;
}

int copy_agents_prove(struct copy_agents_ring *ring, const uint8_t *nonce)
{
    return (int)copy_agent_prove(&ring->copy_agent, nonce);
}

void copy_agents_serve(struct copy_agents_ring *ring)
{
    copy_agent_serve(&ring->copy_agent, ring->shared);
}

int copy_agents_region(struct copy_agents_ring *ring, const struct ucm_copy_plane *planes,
                       uint32_t n_planes, uint32_t blocks, const struct ucm_encoding_spec *encoding)
{
    uint32_t number = 0;
    CUresult r = copy_agent_region_add(&ring->copy_agent, planes, n_planes, blocks,
                                       (struct copy_agent_skills){.encoding = encoding}, &number);

    return r == CUDA_SUCCESS ? (int)number : -(int)r;
}
