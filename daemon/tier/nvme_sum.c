/* A record's checksum, or what stands for it where it is encrypted, or where some of its layers
 * were read. */
#include "daemon/tier/nvme.h"

#include "daemon/format/checksum.h"

#include <stdlib.h>

void nvme_sums_reserve(struct tier_io *io)
{
    bool wanted = nvme_sums_kept(io);

    /* Without memory the record has none. */
    io->scratch[NVME_IO_SUMS] =
        wanted ? malloc(io->bytes / io->layer_bytes * sizeof(uint64_t)) : NULL;
}

void nvme_sums_drop(struct tier_io *io)
{
    free(io->scratch[NVME_IO_SUMS]);
    io->scratch[NVME_IO_SUMS] = NULL;
}

uint64_t nvme_sum_bytes(const struct tier_io *io)
{
    return io->op == TIER_READ_LAYERS ? io->layers * io->layer_bytes : io->bytes;
}

uint64_t nvme_sum(const struct tier_io *io)
{
    if (nvme_encrypted(io))
        return nvme_encrypted_sum(io);
    if (io->op == TIER_READ_LAYERS)
        return nvme_layers_wrong(io);
    if (io->scratch[NVME_IO_SUMS])
        return checksum_fragments(io->data, io->bytes, io->layer_bytes, io->scratch[NVME_IO_SUMS]);
    return checksum_of(io->data, io->bytes);
}
