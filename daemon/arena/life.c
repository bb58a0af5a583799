/* An arena's beginning, growth and end: a thread touches slab after slab; the event loop hands
 * out their slots. */
#include "daemon/arena/internal.h"

#include "daemon/base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static void slabs_take(struct arena *a, uint32_t upto)
{
    while (a->ready < upto) {
        uint32_t slab = a->ready++;

        arena_slab_ready(a, slab);
        a->config.slab_ready_cb(a->config.ctx, slab, a->slab[slab].base, a->config.slab);
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
    slabs_take(a, touched);
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

/* Sets a policy for this thread. One for the memory would split the mapping at every slab, and a
 * process may have only some 65000 mappings. It also need not hold for a file's memory
 * (mbind(2)). */
static void slab_place(struct arena *a, uint32_t slab)
{
    int rc = a->nodes > 0 ? a->config.numa->prefer(a->config.numa->node[slab % a->nodes]) : 0;

    if (rc < 0 && !a->unplaced)
        log_warn("arena", "not-placed", "slab=%u error=%s", slab, strerror(-rc));
    a->unplaced |= rc < 0;
}

/* Where it really is: the node may have been full, or the file have the memory already. */
static void slab_settle(struct arena *a, uint32_t slab)
{
    const char *base = a->slab[slab].base;

    if (a->nodes > 0)
        a->slab[slab].home = arena_home_of(a, a->config.numa->where(base));
}

static int slab_touch(struct arena *a, uint32_t slab)
{
    uint64_t offset = (uint64_t)slab * a->config.slab;
    int rc;

    slab_place(a, slab);
    rc = a->config.file ? touch_file(a->config.fd, offset, a->base + offset, a->config.slab)
                        : touch(a->base + offset, a->config.slab);
    if (rc == 0)
        slab_settle(a, slab);
    return rc;
}

static void *grow_thread(void *arg)
{
    struct arena *a = arg;
    bool stop = false;
    int rc = 0;

    for (uint32_t i = 0; i < a->slabs && !stop && rc == 0; i++) {
        rc = slab_touch(a, i);
        if (rc < 0)
            log_error("arena", "no-room", "bytes=%llu of=%llu error=%s: serving with less",
                      (unsigned long long)(i * a->config.slab),
                      (unsigned long long)(a->slabs * a->config.slab), strerror(-rc));
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
        slabs_take(a, a->slabs);
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
        slabs_take(a, a->slabs);
        return 0;
    }
    a->threaded = true;
    return 0;
}

static void grow_stop(struct arena *a)
{
    if (!a->threaded)
        return;
    pthread_mutex_lock(&a->lock);
    a->stop = true;
    pthread_mutex_unlock(&a->lock);
    pthread_join(a->thread, NULL);
}

/* ---- the beginning and the end ---- */

static int slabs_count(struct arena *a)
{
    uint64_t n = a->config.size / a->config.slab, names;

    while ((uint64_t)ARENA_ALIGN << a->slot_bits < a->config.slab)
        a->slot_bits++;
    names = UINT64_C(1) << (32 - a->slot_bits); /* 0 is none */
    if (n == 0 || n >= names)
        return -EINVAL;
    a->slabs = a->limit = (uint32_t)n;
    n = a->config.granted_max / a->config.slab;
    a->granted = (uint32_t)(n < names - 1 - a->slabs ? n : names - 1 - a->slabs);
    return 0;
}

static int homes_init(struct arena *a)
{
    const struct numa *numa = a->config.numa;

    if (numa && numa->n > 1 && (a->config.prefault || a->config.file))
        a->nodes = numa->n;
    a->home = calloc(a->nodes + 1, sizeof(*a->home));
    if (!a->home)
        return -ENOMEM;
    for (uint32_t i = 0; i <= a->nodes; i++)
        list_init(&a->home[i].free);
    return 0;
}

int arena_new(struct uv_loop_s *loop, const struct arena_config *config, struct arena **out)
{
    struct arena *a = calloc(1, sizeof(*a));
    int rc;

    if (!a)
        return -ENOMEM;
    a->config = *config;
    a->loop = loop;
    rc = slabs_count(a);
    if (rc != 0)
        goto err_after_arena;
    rc = homes_init(a);
    if (rc != 0)
        goto err_after_arena;
    rc = -ENOMEM;
    pthread_mutex_init(&a->lock, NULL);
    a->slab = calloc((size_t)a->slabs + a->granted, sizeof(*a->slab));
    a->partial = calloc(config->slab / ARENA_ALIGN * (a->nodes + 1), sizeof(*a->partial));
    if (!a->slab || !a->partial)
        goto err_after_lock;
    for (uint32_t i = 0; a->nodes > 0 && i < a->slabs; i++)
        a->slab[i].home = a->nodes; /* until its memory is touched */
    a->base = mmap(NULL, a->slabs * config->slab, PROT_READ | PROT_WRITE,
                   config->file ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   config->file ? config->fd : -1, 0);
    if (a->base == MAP_FAILED) {
        rc = -errno;
        goto err_after_lock;
    }
    for (uint32_t i = 0; i < a->slabs; i++)
        a->slab[i].base = a->base + i * config->slab;
    if (madvise(a->base, a->slabs * config->slab, MADV_HUGEPAGE) != 0)
        log_info("arena", "no-hugepages", "reason=\"%s\"",
                 errno == EINVAL ? "this kernel has no transparent huge pages" : strerror(errno));
    /* A core dump would be as large as the host's memory, and hold tenants' data. */
    if (madvise(a->base, a->slabs * config->slab, MADV_DONTDUMP) != 0)
        log_info("arena", "in-core-dumps", "errno=%d", errno);
    rc = arena_granted_init(a);
    if (rc != 0)
        goto err_after_map;
    rc = config->file ? 0 : arena_grow(a);
    if (rc != 0)
        goto err_after_granted;
    *out = a;
    return 0;

err_after_granted:
    arena_granted_close(a);
err_after_map:
    free(a->granter);
    munmap(a->base, a->slabs * config->slab);
err_after_lock:
    pthread_mutex_destroy(&a->lock);
    free(a->slab);
    free(a->partial);
    free(a->home);
err_after_arena:
    free(a);
    return rc;
}

static void arena_release(struct arena *a)
{
    for (uint32_t i = 0; i < a->slabs + a->granted_used; i++)
        free(a->slab[i].owner);
    free(a->slab);
    free(a->partial);
    free(a->home);
    free(a->granter);
    pthread_mutex_destroy(&a->lock);
    free(a);
}

static void handle_closed_cb(uv_handle_t *handle)
{
    struct arena *a = handle->data;

    if (--a->handles == 0)
        arena_release(a);
}

static void handle_close(struct arena *a, uv_async_t *handle)
{
    a->handles++;
    uv_close((uv_handle_t *)handle, handle_closed_cb);
}

void arena_free(struct arena *a)
{
    uv_async_t *granted;

    if (!a)
        return;
    granted = arena_granted_handle(a);
    grow_stop(a);
    arena_granted_stop(a);
    for (uint32_t i = 0; i < a->slabs + a->granted_used; i++)
        arena_slab_unpoison(a, i);
    arena_granted_close(a);
    munmap(a->base, a->slabs * a->config.slab);
    if (a->threaded)
        handle_close(a, &a->grown);
    if (granted)
        handle_close(a, granted);
    if (a->handles == 0)
        arena_release(a);
}
