/* An arena's beginning and end. */
#include "daemon/arena/internal.h"

#include "daemon/base/log.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static int extents_count(struct arena *a)
{
    uint64_t n = a->config.size / a->config.extent, names;

    while ((uint64_t)ARENA_ALIGN << a->slot_bits < a->config.extent)
        a->slot_bits++;
    names = UINT64_C(1) << (32 - a->slot_bits); /* 0 is none */
    if (n == 0 || n >= names)
        return -EINVAL;
    a->extents = a->limit = (uint32_t)n;
    n = a->config.lent_max / a->config.extent;
    a->lent = (uint32_t)(n < names - 1 - a->extents ? n : names - 1 - a->extents);
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
    rc = extents_count(a);
    if (rc != 0)
        goto err_after_arena;
    rc = homes_init(a);
    if (rc != 0)
        goto err_after_arena;
    rc = -ENOMEM;
    pthread_mutex_init(&a->lock, NULL);
    a->extent = calloc((size_t)a->extents + a->lent, sizeof(*a->extent));
    a->partial = calloc(config->extent / ARENA_ALIGN * (a->nodes + 1), sizeof(*a->partial));
    if (!a->extent || !a->partial)
        goto err_after_lock;
    for (uint32_t i = 0; a->nodes > 0 && i < a->extents; i++)
        a->extent[i].home = a->nodes; /* until its memory is touched */
    a->base = mmap(NULL, a->extents * config->extent, PROT_READ | PROT_WRITE,
                   config->file ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   config->file ? config->fd : -1, 0);
    if (a->base == MAP_FAILED) {
        rc = -errno;
        goto err_after_lock;
    }
    for (uint32_t i = 0; i < a->extents; i++)
        a->extent[i].base = a->base + i * config->extent;
    if (madvise(a->base, a->extents * config->extent, MADV_HUGEPAGE) != 0)
        log_info("arena", "no-hugepages", "reason=\"%s\"",
                 errno == EINVAL ? "this kernel has no transparent huge pages" : strerror(errno));
    /* A core dump would be as large as the host's memory, and hold tenants' data. */
    if (madvise(a->base, a->extents * config->extent, MADV_DONTDUMP) != 0)
        log_info("arena", "in-core-dumps", "errno=%d", errno);
    rc = arena_lent_init(a);
    if (rc != 0)
        goto err_after_map;
    rc = config->file ? 0 : arena_grow(a);
    if (rc != 0)
        goto err_after_lent;
    *out = a;
    return 0;

err_after_lent:
    arena_lent_close(a);
err_after_map:
    free(a->windows);
    munmap(a->base, a->extents * config->extent);
err_after_lock:
    pthread_mutex_destroy(&a->lock);
    free(a->extent);
    free(a->partial);
    free(a->home);
err_after_arena:
    free(a);
    return rc;
}

static void arena_release(struct arena *a)
{
    for (uint32_t i = 0; i < a->extents + a->lent_used; i++)
        free(a->extent[i].owner);
    free(a->extent);
    free(a->partial);
    free(a->home);
    free(a->windows);
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
    uv_async_t *lent;

    if (!a)
        return;
    lent = arena_lent_handle(a);
    arena_grow_stop(a);
    arena_lent_stop(a);
    for (uint32_t i = 0; i < a->extents + a->lent_used; i++)
        arena_extent_unpoison(a, i);
    arena_lent_close(a);
    munmap(a->base, a->extents * a->config.extent);
    if (a->threaded)
        handle_close(a, &a->grown);
    if (lent)
        handle_close(a, lent);
    if (a->handles == 0)
        arena_release(a);
}

void arena_give_up(struct arena *a)
{
    arena_grow_stop(a);
    /* Memory of nobody's takes its place: a read that the kernel has yet to finish would else write
     * into what the next daemon keeps there. */
    if (mmap(a->base, a->extents * a->config.extent, PROT_READ | PROT_WRITE,
             MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) == MAP_FAILED)
        abort(); /* rather than that */
}
