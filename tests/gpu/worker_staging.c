#include "tests/gpu/worker_staging.h"

#include "client/cuda/copy_agent.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

static struct copy_agent copy_agent;
static struct ucm_staging *ring;

int worker_ring_make(const uint8_t uuid[16], uint8_t ipc[64], uint64_t *offset, int *fd)
{
    CUresult r = copy_agent_init(&copy_agent, uuid, STAGING_ENTRY_BYTES, STAGING_ENTRIES);

    if (r == CUDA_SUCCESS)
        r = copy_agent_prove(&copy_agent, test_nonce);
    if (r != CUDA_SUCCESS)
        return (int)r;
    *fd = memfd_create("ring", MFD_ALLOW_SEALING);
    if (*fd < 0 || fallocate(*fd, 0, 0, sizeof(*ring)) < 0 ||
        fcntl(*fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    ring = mmap(NULL, sizeof(*ring), PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
    if (ring == MAP_FAILED)
        return CUDA_ERROR_OPERATING_SYSTEM;
    for (unsigned i = 0; i < 64; i++)
        ipc[i] = copy_agent.ipc[i];
    *offset = copy_agent.offset;
    return 0;
}

void worker_ring_serve(void)
{
    copy_agent_serve(&copy_agent, ring);
}

int worker_ring_region(const struct worker_region *region, uint64_t memory, uint32_t *number)
{
    struct ucm_copy_plane planes[128];

    for (uint32_t i = 0; i < region->n_planes; i++) {
        planes[i] = region->planes[i];
        planes[i].base += memory;
    }
    return (int)copy_agent_region_add(&copy_agent, planes, region->n_planes, region->blocks,
                                      (struct copy_agent_skills){NULL, NULL}, number);
}
