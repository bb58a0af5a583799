/* Memory of the host that a GPU reads while it changes, for tests of what reads mappings. */
#ifndef UCM_TESTS_GPU_MAPPING_H
#define UCM_TESTS_GPU_MAPPING_H

#include "tests/gpu/compare.h"

/* Host memory as a mapping is: a file in memory, mapped to be written here, and read-only, registered, for the GPU. */
struct mapping {
    uint8_t *bytes;
    CUdeviceptr gpu;
    size_t size;
    void *readable;
    int fd;
};
void mapping_open(struct mapping *w, size_t bytes);
void mapping_close(struct mapping *w);

#endif
