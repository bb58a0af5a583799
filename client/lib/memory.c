#include "client/lib/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE /* newer than headers in use */
#define MADV_POPULATE_WRITE 23
#endif

/* Allocates all pages in one call: the daemon accepts no memory whose pages would be allocated when
 * it touches them. Before Linux 5.14 the file allocates them. */
static int populate(int fd, void *p, size_t bytes)
{
    int r = madvise(p, bytes, MADV_POPULATE_WRITE);

    if (r == 0 || errno != EINVAL)
        return r;
    do
        r = fallocate(fd, 0, 0, (off_t)bytes);
    while (r < 0 && errno == EINTR);
    return r;
}

int ucm_shared_memory(size_t bytes, int *fd, void **address)
{
    void *p;
    int f;

    if (!fd || !address || bytes == 0)
        return client_fail(UCM_EINVALID, "fd or address is NULL, or bytes is 0");
    f = memfd_create("ucm-region", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (f < 0)
        return client_fail(UCM_ENOMEMORY, "memfd_create: %s", strerror(errno));
    if (ftruncate(f, (off_t)bytes) < 0 || fcntl(f, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0)
        goto err_after_open;
    p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, f, 0);
    if (p == MAP_FAILED)
        goto err_after_open;
    if (populate(f, p, bytes) < 0)
        goto err_after_map;
    *fd = f;
    *address = p;
    return 0;

err_after_map:
    munmap(p, bytes);
err_after_open:
    client_fail(UCM_ENOMEMORY, "no %zu bytes of shared memory: %s", bytes, strerror(errno));
    close(f);
    return -UCM_ENOMEMORY;
}
