/* The memory of mapping slabs: a thread gets it and gives it back, since both take the kernel some
 * 10 ms and more a 64 MiB. It has others alongside it while it gets memory, as one alone is slower
 * than the copies that wait for it. Nobody else touches the slab meanwhile. */
#include "daemon/mapping/grant_internal.h"

#include "daemon/base/log.h"
#include "daemon/base/memfd.h"
#include "proto/memory/mapping.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Threads that allocate the memory of one slab, the calling one included. */
#define MAKERS 4u

/* ---- one slab ---- */

struct stretch {
    int fd, rc;
    uint64_t offset, bytes;
    char *base; /* of the slab */
};

static void *stretch_populate(void *arg)
{
    struct stretch *s = arg;

    s->rc = memfd_populate(s->fd, s->offset, s->base + s->offset, s->bytes);
    return NULL;
}

/* Threads take the policy of memory of the one that starts them. */
static int slab_populate(const struct arena *a, int fd, char *base)
{
    struct stretch stretches[MAKERS];
    pthread_t threads[MAKERS];
    uint64_t each = arena_padded(a->config.slab / MAKERS);
    unsigned started = 1;
    int rc = 0;

    for (unsigned i = 0; i < MAKERS; i++) {
        uint64_t from = i * each < a->config.slab ? i * each : a->config.slab;
        uint64_t left = a->config.slab - from;

        stretches[i] = (struct stretch){
            .fd = fd, .offset = from, .bytes = left < each ? left : each, .base = base};
    }
    while (started < MAKERS && stretches[started].bytes > 0 &&
           pthread_create(&threads[started], NULL, stretch_populate, &stretches[started]) == 0)
        started++;
    (void)stretch_populate(&stretches[0]);
    for (unsigned i = started; i < MAKERS; i++)
        if (stretches[i].bytes > 0)
            (void)stretch_populate(&stretches[i]);
    for (unsigned i = 1; i < started; i++)
        pthread_join(threads[i], NULL);
    for (unsigned i = 0; i < MAKERS; i++)
        rc = stretches[i].bytes > 0 && stretches[i].rc < 0 ? stretches[i].rc : rc;
    return rc;
}

/* The sequence numbers of all slots that the slab may have. */
static int table_populate(struct arena *a, const struct mapping *w)
{
    const struct arena_group *g = grant_group(a, w);
    uint64_t slots = a->config.slab / ARENA_ALIGN;
    uint64_t from = UCM_MAPPING_HEADER_BYTES + grant_number(a, w) * slots * sizeof(uint64_t);
    uint64_t upto = arena_padded(from + slots * sizeof(uint64_t));

    from -= from % ARENA_ALIGN;
    if (upto > ucm_mapping_table_bytes(a->granted, (uint32_t)slots))
        upto = ucm_mapping_table_bytes(a->granted, (uint32_t)slots); /* it may not grow */
    return fallocate(g->fd, 0, (off_t)from, (off_t)(upto - from)) < 0 ? -errno : 0;
}

static void place(struct arena *a, const struct mapping *w)
{
    const struct numa *numa = a->config.numa;
    int rc = a->nodes > 0 ? numa->prefer(numa->node[grant_number(a, w) % a->nodes]) : 0;

    if (rc < 0 && !a->granter->unplaced)
        log_warn("arena", "not-placed", "mapping=%u error=%s", grant_number(a, w), strerror(-rc));
    a->granter->unplaced |= rc < 0;
}

static int unmap(struct arena *a, const struct mapping *w)
{
    void *p = mmap(grant_slab(a, w)->base, a->config.slab, PROT_NONE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);

    return p == MAP_FAILED ? -errno : 0;
}

/* Maps and fills the file; the descriptor for workers, or -errno. */
static int mapped_slabs(struct arena *a, const struct mapping *w, int fd)
{
    uint32_t slab = a->slabs + grant_number(a, w);
    char *base = a->slab[slab].base;
    int rc;

    if (mmap(base, a->config.slab, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) ==
        MAP_FAILED)
        return -errno;
    (void)madvise(base, a->config.slab, MADV_HUGEPAGE); /* where files of memory may have them */
    (void)madvise(base, a->config.slab, MADV_DONTDUMP);
    place(a, w);
    rc = slab_populate(a, fd, base);
    if (rc == 0)
        rc = table_populate(a, w);
    if (rc == 0)
        rc = memfd_share(fd);
    if (rc >= 0 && a->nodes > 0)
        a->slab[slab].home = arena_home_of(a, a->config.numa->where(base));
    return rc;
}

static int mapping_make(struct arena *a, struct mapping *w)
{
    int fd, rc = memfd_new("ucmd-mapping", a->config.slab, &fd);

    if (rc < 0)
        return rc;
    rc = mapped_slabs(a, w, fd);
    close(fd);
    if (rc < 0) {
        (void)unmap(a, w);
        return rc;
    }
    w->fd = rc;
    return 0;
}

static int mapping_unmake(struct arena *a, struct mapping *w)
{
    int rc = unmap(a, w);

    close(w->fd);
    w->fd = -1;
    return rc;
}

/* ---- the thread ---- */

static void *mappings_thread(void *arg)
{
    struct arena *a = arg;
    struct granter *l = a->granter;

    pthread_mutex_lock(&l->lock);
    while (!l->stop) {
        struct list *node = list_pop_front(&l->jobs);
        struct mapping *w;

        if (!node) {
            pthread_cond_wait(&l->more, &l->lock);
            continue;
        }
        pthread_mutex_unlock(&l->lock);
        w = LIST_ENTRY(node, struct mapping, job);
        w->status = w->state == MAPPING_MAKING ? mapping_make(a, w) : mapping_unmake(a, w);
        pthread_mutex_lock(&l->lock);
        list_push_back(&l->ended, &w->job);
        (void)uv_async_send(&l->done);
    }
    pthread_mutex_unlock(&l->lock);
    return NULL;
}

int grant_submit(struct arena *a, struct mapping *w)
{
    struct granter *l = a->granter;
    int rc = l->threaded ? 0 : pthread_create(&l->thread, NULL, mappings_thread, a);

    if (rc != 0)
        return -rc;
    l->threaded = true;
    pthread_mutex_lock(&l->lock);
    list_push_back(&l->jobs, &w->job);
    pthread_cond_signal(&l->more);
    pthread_mutex_unlock(&l->lock);
    return 0;
}

struct mapping *grant_ended(struct arena *a)
{
    struct granter *l = a->granter;
    struct list *node;

    pthread_mutex_lock(&l->lock);
    node = list_pop_front(&l->ended);
    pthread_mutex_unlock(&l->lock);
    return node ? LIST_ENTRY(node, struct mapping, job) : NULL;
}

void arena_granted_stop(struct arena *a)
{
    struct granter *l = a->granter;

    if (!l || !l->threaded)
        return;
    pthread_mutex_lock(&l->lock);
    l->stop = true;
    pthread_cond_signal(&l->more);
    pthread_mutex_unlock(&l->lock);
    pthread_join(l->thread, NULL);
    l->threaded = false;
}
