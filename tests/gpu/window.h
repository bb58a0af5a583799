/* Memory of the host that a GPU reads while it changes, for tests of what reads windows. */
#ifndef UCM_TESTS_GPU_WINDOW_H
#define UCM_TESTS_GPU_WINDOW_H

#include "tests/gpu/compare.h"

/* Host memory as a window is: a file in memory, mapped to be written here, and read-only, registered, for the GPU. */
struct window {
    uint8_t *bytes;
    CUdeviceptr gpu;
    size_t size;
    void *readable;
    int fd;
};
void window_open(struct window *w, size_t bytes);
void window_close(struct window *w);

#endif
