/* Preloaded into a daemon by tests/integration/test_bench_gate.py: each answer takes $UCM_DELAY_NS of
 * processor time more. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>

static int64_t delay_ns;
static ssize_t (*real_send)(int fd, const void *p, size_t n, int flags);

__attribute__((constructor)) static void delay_open(void)
{
    const char *text = getenv("UCM_DELAY_NS");
    void *found = dlsym(RTLD_NEXT, "send");

    __builtin_memcpy(&real_send, &found, sizeof real_send);
    delay_ns = text ? strtoll(text, NULL, 10) : 0;
}

static int64_t now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

__attribute__((visibility("default"))) ssize_t send(int fd, const void *p, size_t n, int flags)
{
    for (int64_t end = now_ns() + delay_ns; now_ns() < end;)
        ;
    return real_send(fd, p, n, flags);
}
