/* What a mapping maps, and reading from it. Nothing that the daemon says or writes leads a reader
 * out of a range. Each range is checked before it is used, and every place against this process's
 * own copy of the sizes. */
#include "client/lib/sparse/internal.h"
#include "proto/memory/mapping.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* ---- mapping ---- */

static int range_add(struct client_maps *m, uint32_t slab, uint64_t opened, int fd, uint64_t bytes,
                     struct ucm_error *e)
{
    void *p;
    int r;

    if (m->n == m->room) {
        uint32_t room = m->room ? 2 * m->room : 16;
        struct client_range *ranges = realloc(m->ranges, room * sizeof *ranges);

        if (!ranges)
            return ucm_error_set(e, UCM_ENOMEMORY, "no memory for a mapping");
        m->ranges = ranges;
        m->room = room;
    }
    r = client_memory_map(fd, bytes, "a mapping", &p, e);
    if (r)
        return r;
    m->ranges[m->n++] =
        (struct client_range){.p = p, .bytes = bytes, .slab = slab, .opened = opened};
    return 0;
}

/* Removes it from both lists; the caller has the lock for writing. */
static void range_drop(struct client_maps *m, struct client_range *range)
{
    if (range->slab != UCM_PLACE_NONE && m->slabs && range->opened == atomic_load(&m->opened))
        m->slabs[range->slab] = NULL;
    munmap(range->p, range->bytes);
    *range = m->ranges[--m->n];
}

/* ---- the life of an opening ---- */

/* By default, overlapping readers keep a writer out for as long as they go on, and the whole client
 * waits with it. */
int client_maps_init(struct client_maps *m)
{
    pthread_rwlockattr_t attr;
    int r = pthread_rwlockattr_init(&attr);

    if (r == 0) {
        (void)pthread_rwlockattr_setkind_np(&attr, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
        r = pthread_rwlock_init(&m->lock, &attr);
        (void)pthread_rwlockattr_destroy(&attr);
    }
    return r ? client_fail(UCM_ENOMEMORY, "no memory for a lock") : 0;
}

void client_maps_free(struct client_maps *m)
{
    client_maps_end(m, false);
    free(m->ranges);
    pthread_rwlock_destroy(&m->lock);
}

void client_maps_end(struct client_maps *m, bool keep)
{
    pthread_rwlock_wrlock(&m->lock);
    atomic_store(&m->opened, 0);
    for (uint32_t i = 0; keep && i < m->n; i++)
        m->ranges[i].wanted = true;
    while (!keep && m->n > 0)
        range_drop(m, &m->ranges[m->n - 1]);
    free(m->slabs);
    m->slabs = NULL;
    m->seqs = NULL;
    pthread_rwlock_unlock(&m->lock);
}

static int header_check(const uint8_t *table, const struct client_geometry *g, struct ucm_error *e)
{
    struct ucm_mapping_header h;

    memcpy(&h, table, sizeof h); /* it may change; the copy does not */
    if (memcmp(h.magic, UCM_MAPPING_MAGIC, sizeof h.magic) != 0 || h.version != UCM_MAPPING_VERSION)
        return ucm_error_set(e, UCM_EPROTOCOL, "ucmd's table of a mapping is of another format");
    if (h.slot_align != UCM_MAPPING_ALIGN || h.slab_bytes != g->slab_bytes || h.slabs != g->slabs ||
        h.slots_per_slab != g->slab_bytes / UCM_MAPPING_ALIGN)
        return ucm_error_set(e, UCM_EPROTOCOL,
                             "ucmd's table of a mapping has other sizes than its answer");
    return 0;
}

int client_maps_open(struct client_maps *m, uint64_t opened, const struct client_geometry *g,
                     int fd, struct ucm_error *e)
{
    uint64_t bytes =
        ucm_mapping_table_bytes(g->slabs, (uint32_t)(g->slab_bytes / UCM_MAPPING_ALIGN));
    const uint8_t *table;
    int r;

    pthread_rwlock_wrlock(&m->lock);
    m->slabs = calloc(g->slabs, sizeof *m->slabs);
    r = m->slabs ? range_add(m, UCM_PLACE_NONE, opened, fd, bytes, e)
                 : ucm_error_set(e, UCM_ENOMEMORY, "no memory for a mapping");
    if (r == 0) {
        table = m->ranges[m->n - 1].p;
        r = header_check(table, g, e);
        if (r)
            range_drop(m, &m->ranges[m->n - 1]);
    }
    if (r == 0) {
        m->geometry = *g;
        m->seqs = (const _Atomic uint64_t *)(table + UCM_MAPPING_HEADER_BYTES);
        atomic_store(&m->opened, opened);
    } else {
        free(m->slabs);
        m->slabs = NULL;
    }
    pthread_rwlock_unlock(&m->lock);
    return r;
}

int client_maps_add(struct client_maps *m, uint32_t slab, int fd, struct ucm_error *e)
{
    int r;

    pthread_rwlock_wrlock(&m->lock);
    r = range_add(m, slab, atomic_load(&m->opened), fd, m->geometry.slab_bytes, e);
    if (r == 0)
        m->slabs[slab] = m->ranges[m->n - 1].p;
    pthread_rwlock_unlock(&m->lock);
    return r;
}

bool client_maps_has(const struct client_maps *m, uint32_t slab)
{
    return m->slabs && slab < m->geometry.slabs && m->slabs[slab];
}

static struct client_range *range_of(struct client_maps *m, uint32_t slab)
{
    return client_maps_has(m, slab) ? client_maps_find(m, m->slabs[slab]) : NULL;
}

void client_maps_want(struct client_maps *m, uint32_t slab)
{
    range_of(m, slab)->wanted = true;
}

void client_maps_remove(struct client_maps *m, uint32_t slab)
{
    client_maps_unmap(m, range_of(m, slab));
}

struct client_range *client_maps_find(struct client_maps *m, const void *address)
{
    for (uint32_t i = 0; i < m->n; i++)
        if (m->ranges[i].p == address)
            return &m->ranges[i];
    return NULL;
}

void client_maps_unmap(struct client_maps *m, struct client_range *range)
{
    pthread_rwlock_wrlock(&m->lock);
    range_drop(m, range);
    pthread_rwlock_unlock(&m->lock);
}

/* ---- reading ---- */

/* The caller holds the lock. False: a miss. */
static bool place_find(const struct client_maps *m, const struct ucm_place *place,
                       const uint8_t **p, const _Atomic uint64_t **seq)
{
    const struct client_geometry *g = &m->geometry;
    uint64_t opened = atomic_load(&m->opened);

    if (opened == 0 || place->opened != opened || place->slab >= g->slabs ||
        place->slot >= g->slots || !m->slabs[place->slab])
        return false;
    *p = m->slabs[place->slab] + place->slot * g->slot_bytes;
    *seq = &m->seqs[place->slab * (g->slab_bytes / UCM_MAPPING_ALIGN) + place->slot];
    return true;
}

int ucm_mapping_read(struct ucm_mapping *w, const struct ucm_place *place, uint64_t offset,
                     uint64_t bytes, void *out)
{
    const _Atomic uint64_t *seq;
    const uint8_t *p;
    int r = UCM_MAPPING_MISS;

    if (!w || !place || !out)
        return client_fail(UCM_EINVALID, "mapping, place or out is NULL");
    pthread_rwlock_rdlock(&w->maps.lock);
    if (place_find(&w->maps, place, &p, &seq)) {
        if (offset > w->maps.geometry.part_bytes || bytes > w->maps.geometry.part_bytes - offset) {
            r = -UCM_EINVALID;
        } else if (ucm_mapping_begin(seq, place->seq)) {
            memcpy(out, p + offset, bytes);
            r = ucm_mapping_end(seq, place->seq) ? 0 : UCM_MAPPING_MISS;
        }
    }
    pthread_rwlock_unlock(&w->maps.lock);
    return r == -UCM_EINVALID
               ? client_fail(UCM_EINVALID, "bytes %llu to %llu are beyond the block",
                             (unsigned long long)offset, (unsigned long long)(offset + bytes))
               : r;
}

int ucm_mapping_address(struct ucm_mapping *w, const struct ucm_place *place, const void **address,
                        const uint64_t **seq)
{
    const _Atomic uint64_t *g;
    const uint8_t *p;
    bool found;

    if (!w || !place || !address || !seq)
        return client_fail(UCM_EINVALID, "mapping, place, address or seq is NULL");
    if (!(w->flags & UCM_MAPPING_ADDRESSES))
        return client_fail(UCM_EINVALID,
                           "the mapping was opened without UCM_MAPPING_ADDRESSES: the "
                           "library may unmap it at any time");
    pthread_rwlock_rdlock(&w->maps.lock);
    found = place_find(&w->maps, place, &p, &g);
    pthread_rwlock_unlock(&w->maps.lock);
    if (!found)
        return UCM_MAPPING_MISS;
    *address = p;
    *seq = (const uint64_t *)g;
    return 0;
}
