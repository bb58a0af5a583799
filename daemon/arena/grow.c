/* The arena's growth: a thread touches extent after extent; the loop hands out their slots. */
#include "daemon/arena/arena.h"
#include "daemon/arena/internal.h"

#include "daemon/base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

static void extents_take(struct arena *a, uint32_t upto)
{
    while (a->ready < upto) {
        uint32_t extent = a->ready++;

        arena_extent_ready(a, extent);
        a->config.extent_ready_cb(a->config.ctx, extent, a->extent[extent].base, a->config.extent);
    }
}

static void grown_cb(uv_async_t *async)
{
    struct arena *a = async->data;
    uint32_t touched;
    bool ended;

    pthread_mutex_lock(&a->lock);
    touched = a->touched;
    ended = a->ended;
    pthread_mutex_unlock(&a->lock);
    if (ended)
        a->limit = touched;
    extents_take(a, touched);
    if (ended && a->config.ended_cb)
        a->config.ended_cb(a->config.ctx);
}

/* One write a page: MADV_POPULATE_WRITE is newer than kernels in use. */
static int touch(char *p, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes; i += ARENA_ALIGN)
        *(volatile char *)(p + i) = 0;
    return 0;
}

/* Reads only: the file may have parts of an earlier run. */
static int touch_file(int fd, uint64_t offset, const char *p, uint64_t bytes)
{
    int rc;

    do
        rc = fallocate(fd, 0, (off_t)offset, (off_t)bytes);
    while (rc < 0 && errno == EINTR);
    if (rc < 0)
        return -errno;
    for (uint64_t i = 0; i < bytes; i += ARENA_ALIGN)
        (void)*(const volatile char *)(p + i);
    return 0;
}

/* Sets a policy for this thread. One for the memory would split the mapping at every extent, of
 * which a process may have some 65000, and need not hold for a file's memory (mbind(2)). */
static void extent_place(struct arena *a, uint32_t extent)
{
    int rc = a->nodes > 0 ? a->config.numa->prefer(a->config.numa->node[extent % a->nodes]) : 0;

    if (rc < 0 && !a->unplaced)
        log_warn("arena", "not-placed", "extent=%u error=%s", extent, strerror(-rc));
    a->unplaced |= rc < 0;
}

/* Where it really is: the node may have been full, or the file have the memory already. */
static void extent_settle(struct arena *a, uint32_t extent)
{
    const char *base = a->extent[extent].base;

    if (a->nodes > 0)
        a->extent[extent].home = arena_home_of(a, a->config.numa->where(base));
}

static int extent_touch(struct arena *a, uint32_t extent)
{
    uint64_t offset = (uint64_t)extent * a->config.extent;
    int rc;

    extent_place(a, extent);
    rc = a->config.file ? touch_file(a->config.fd, offset, a->base + offset, a->config.extent)
                        : touch(a->base + offset, a->config.extent);
    if (rc == 0)
        extent_settle(a, extent);
    return rc;
}

static void *grow_thread(void *arg)
{
    struct arena *a = arg;
    bool stop = false;
    int rc = 0;

    for (uint32_t i = 0; i < a->extents && !stop && rc == 0; i++) {
        rc = extent_touch(a, i);
        if (rc < 0)
            log_error("arena", "no-room", "bytes=%llu of=%llu error=%s: serving with less",
                      (unsigned long long)(i * a->config.extent),
                      (unsigned long long)(a->extents * a->config.extent), strerror(-rc));
        pthread_mutex_lock(&a->lock);
        a->touched = rc < 0 ? i : i + 1;
        a->ended = rc < 0;
        stop = a->stop;
        pthread_mutex_unlock(&a->lock);
        if (!stop)
            uv_async_send(&a->grown);
    }
    return NULL;
}

int arena_grow(struct arena *a)
{
    int rc;

    if (!a->config.prefault && !a->config.file) {
        extents_take(a, a->extents);
        return 0;
    }
    rc = uv_async_init(a->loop, &a->grown, grown_cb);
    if (rc != 0)
        return rc;
    a->grown.data = a;
    uv_unref((uv_handle_t *)&a->grown);
    rc = pthread_create(&a->thread, NULL, grow_thread, a);
    if (rc != 0) {
        log_warn("arena", "no-prefault", "error=%s", strerror(rc));
        uv_close((uv_handle_t *)&a->grown, NULL);
        if (a->config.file)
            return -rc;
        extents_take(a, a->extents);
        return 0;
    }
    a->threaded = true;
    return 0;
}

void arena_grow_stop(struct arena *a)
{
    if (!a->threaded)
        return;
    pthread_mutex_lock(&a->lock);
    a->stop = true;
    pthread_mutex_unlock(&a->lock);
    pthread_join(a->thread, NULL);
}
