#include "daemon/lookup_table/table.h"

#include "daemon/base/memfd.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* The kernel takes about 100 us to get and clear so much. */
#define RESERVE_BYTES (256u << 10)

struct lookup_table {
    struct ucm_lookup_table_header *header; /* mapped, and after it the buckets */
    struct ucm_lookup_table_bucket *bucket;
    uint64_t mask, seed;
    uint32_t key_bytes;
    int fd, read_fd;
    uint64_t bytes, reserved;
    uint64_t entries, generation;
    bool live;
};

/* ---- life ---- */

static uint64_t buckets_for(uint64_t blocks)
{
    uint64_t buckets = UCM_LOOKUP_TABLE_MIN_BUCKETS;

    /* Four of a bucket's entries at most, so that it has some time until it is crowded. */
    while (buckets < UCM_LOOKUP_TABLE_MAX_BUCKETS && 4 * buckets < blocks)
        buckets *= 2;
    return buckets;
}

static int table_map(struct lookup_table *h, uint64_t buckets, uint64_t now_ms)
{
    void *p;
    int rc;

    h->bytes = ucm_lookup_table_bytes(buckets);
    rc = memfd_new("ucmd-lookup-table", h->bytes, &h->fd);
    if (rc < 0)
        return rc;
    p = mmap(NULL, h->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, h->fd, 0);
    if (p == MAP_FAILED)
        return -errno;
    h->header = p;
    h->bucket = (struct ucm_lookup_table_bucket *)((char *)p + UCM_LOOKUP_TABLE_HEADER_BYTES);
    (void)madvise(p, h->bytes, MADV_HUGEPAGE); /* where files of memory may have them */
    (void)madvise(p, h->bytes, MADV_DONTDUMP);
    rc = lookup_table_reserve(h);
    if (rc < 0)
        return rc;
    h->mask = buckets - 1;
    memcpy(h->header->magic, UCM_LOOKUP_TABLE_MAGIC, sizeof(h->header->magic));
    h->header->version = UCM_LOOKUP_TABLE_VERSION;
    h->header->key_bytes = h->key_bytes;
    h->header->buckets = buckets;
    h->header->seed = h->seed;
    lookup_table_beat(h, now_ms);
    h->read_fd = memfd_share(h->fd);
    return h->read_fd < 0 ? h->read_fd : 0;
}

int lookup_table_new(uint32_t key_bytes, uint64_t blocks, uint64_t now_ms,
                     struct lookup_table **out)
{
    struct lookup_table *h = calloc(1, sizeof(*h));
    int rc;

    if (!h)
        return -ENOMEM;
    h->fd = h->read_fd = -1;
    h->key_bytes = key_bytes;
    rc = getentropy(&h->seed, sizeof(h->seed)) < 0 ? -errno : 0;
    if (rc == 0)
        rc = table_map(h, buckets_for(blocks), now_ms);
    if (rc < 0) {
        lookup_table_free(h, UCM_LOOKUP_TABLE_ENDED);
        return rc;
    }
    *out = h;
    return 0;
}

void lookup_table_end(struct lookup_table *h, enum ucm_lookup_table_state last)
{
    atomic_store_explicit(&h->header->state, last, memory_order_release);
}

void lookup_table_free(struct lookup_table *h, enum ucm_lookup_table_state last)
{
    if (!h)
        return;
    if (h->header) {
        lookup_table_end(h, last);
        munmap(h->header, h->bytes);
    }
    if (h->read_fd >= 0)
        close(h->read_fd);
    if (h->fd >= 0)
        close(h->fd);
    free(h);
}

int lookup_table_reserve(struct lookup_table *h)
{
    uint64_t left = h->bytes - h->reserved, n = left < RESERVE_BYTES ? left : RESERVE_BYTES;

    int rc = n > 0 ? memfd_populate(h->fd, h->reserved, (char *)h->header + h->reserved, n) : 0;

    if (rc < 0)
        return rc;
    h->reserved += n;
    return h->reserved < h->bytes;
}

/* ---- entries ---- */

void lookup_table_set(struct lookup_table *h, const uint8_t *key, uint8_t was, uint8_t is)
{
    uint64_t hash = ucm_lookup_table_hash(key, h->key_bytes, h->seed);
    uint64_t left_out = lookup_table_left_out(h);

    switch (ucm_lookup_table_set(h->bucket, h->mask, hash, is, h->generation)) {
    case UCM_LOOKUP_TABLE_ADDED:
        h->entries++;
        h->generation++;
        /* It had none in a table that has all blocks: it was left out. */
        left_out -= h->live && was != 0 && left_out > 0;
        break;
    case UCM_LOOKUP_TABLE_REMOVED:
        h->entries--;
        break;
    case UCM_LOOKUP_TABLE_FULL:
        left_out += !h->live || was == 0;
        break;
    case UCM_LOOKUP_TABLE_SAME:
        left_out -= h->live && was != 0 && is == 0 && left_out > 0;
        break;
    }
    if (left_out != lookup_table_left_out(h))
        atomic_store_explicit(&h->header->left_out, left_out, memory_order_release);
}

void lookup_table_begin(struct lookup_table *h)
{
    h->live = true;
    close(h->fd);
    h->fd = -1;
    atomic_store_explicit(&h->header->state, UCM_LOOKUP_TABLE_LIVE, memory_order_release);
}

void lookup_table_beat(struct lookup_table *h, uint64_t now_ms)
{
    atomic_store_explicit(&h->header->beat_ms, now_ms, memory_order_release);
}

bool lookup_table_crowded(const struct lookup_table *h)
{
    return h->entries > (h->mask + 1) * UCM_LOOKUP_TABLE_ENTRIES * 3 / 5 &&
           h->mask + 1 < UCM_LOOKUP_TABLE_MAX_BUCKETS;
}

/* ---- what it is ---- */

int lookup_table_fd(const struct lookup_table *h)
{
    return h->read_fd;
}

uint64_t lookup_table_bytes(const struct lookup_table *h)
{
    return h->bytes;
}

uint64_t lookup_table_entries(const struct lookup_table *h)
{
    return h->entries;
}

uint64_t lookup_table_left_out(const struct lookup_table *h)
{
    return atomic_load_explicit(&h->header->left_out, memory_order_relaxed);
}
