#include "daemon/device/guard.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <uv.h>

/* Newer than headers and kernels in use: Linux 5.11 has it, and lets users without privileges open
 * one with it. */
#ifndef UFFD_USER_MODE_ONLY
#define UFFD_USER_MODE_ONLY 1
#endif

struct guarded {
    sigjmp_buf out;
    const struct device_region *region;
};

static _Thread_local struct guarded *volatile guarded; /* what the thread copies now */
static struct sigaction before;
static uv_once_t once = UV_ONCE_INIT;

static bool covers(const struct device_region *r, uint64_t address)
{
    for (uint32_t i = 0; i < r->n_handles; i++) {
        const struct device_handle *h = &r->handles[i];

        if (h->address != 0 && address - h->address < h->offset + h->bytes)
            return true;
    }
    return false;
}

/* Any other fault kills the daemon, as it would without this: the instruction faults again. */
static void fault_cb(int number, siginfo_t *info, void *context)
{
    struct guarded *g = guarded;

    (void)context;
    if (g && info->si_code > 0 && covers(g->region, (uintptr_t)info->si_addr))
        siglongjmp(g->out, 1);
    (void)sigaction(number, &before, NULL);
}

/* Without a mask, since a fault leaves the handler by a jump. */
static void handle_once(void)
{
    struct sigaction action = {.sa_sigaction = fault_cb, .sa_flags = SA_SIGINFO | SA_NODEFER};

    (void)sigaction(SIGBUS, &action, &before); /* can't fail */
}

int guard_open(void)
{
    struct uffdio_api api = {.api = UFFD_API,
                             .features = UFFD_FEATURE_SIGBUS | UFFD_FEATURE_MISSING_SHMEM};
    int rc, fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY);

    if (fd < 0 && errno == EINVAL)
        fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return -errno;
    if (ioctl(fd, UFFDIO_API, &api) < 0) {
        rc = -errno;
        close(fd);
        return rc;
    }
    return fd;
}

int guard_add(int guard, void *p, size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    struct uffdio_register r = {
        .range = {.start = (uintptr_t)p, .len = (bytes + page - 1) / page * page},
        .mode = UFFDIO_REGISTER_MODE_MISSING};

    if (guard < 0)
        return 0;
    return ioctl(guard, UFFDIO_REGISTER, &r) < 0 ? -errno : 0;
}

/* ThreadSanitizer calls handlers with all signals blocked, and a jump keeps that. */
static void unblock(void)
{
    sigset_t bus;

    sigemptyset(&bus);
    sigaddset(&bus, SIGBUS);
    (void)pthread_sigmask(SIG_UNBLOCK, &bus, NULL); /* can't fail */
}

bool guard_run(const struct device_region *r, void (*copy_cb)(void *ctx), void *ctx)
{
    struct guarded g = {.region = r};

    uv_once(&once, handle_once);
    if (sigsetjmp(g.out, 0) != 0) {
        guarded = NULL;
        unblock();
        return false;
    }
    guarded = &g;
    copy_cb(ctx);
    guarded = NULL;
    return true;
}
