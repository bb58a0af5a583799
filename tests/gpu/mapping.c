#include "tests/gpu/mapping.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

void mapping_open(struct mapping *w, size_t bytes)
{
    w->size = bytes;
    w->fd = memfd_create("mapping", MFD_CLOEXEC);
    if (w->fd < 0 || ftruncate(w->fd, (off_t)bytes) != 0)
        must(CUDA_ERROR_OUT_OF_MEMORY, "a file in memory");
    w->bytes = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, w->fd, 0);
    w->readable = mmap(NULL, bytes, PROT_READ, MAP_SHARED, w->fd, 0);
    if (w->bytes == MAP_FAILED || w->readable == MAP_FAILED)
        must(CUDA_ERROR_OUT_OF_MEMORY, "a mapping");
    memset(w->bytes, 0, bytes);
    must(cuMemHostRegister(w->readable, bytes,
                           CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_READ_ONLY),
         "registering read-only memory");
    must(cuMemHostGetDevicePointer(&w->gpu, w->readable, 0), "its address");
}

void mapping_close(struct mapping *w)
{
    must(cuMemHostUnregister(w->readable), "unregistering");
    munmap(w->readable, w->size);
    munmap(w->bytes, w->size);
    close(w->fd);
}
