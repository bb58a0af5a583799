#include "daemon/hints/table.h"

#include "daemon/base/memfd.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* The kernel takes about 100 us to get and clear so much. */
#define RESERVE_BYTES (256u << 10)

struct hints {
    struct ucm_hint_header *header; /* mapped, and behind it the buckets */
    struct ucm_hint_bucket *bucket;
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
    uint64_t buckets = UCM_HINT_MIN_BUCKETS;

    /* Four of a bucket's entries at most, so that it has some time until it is crowded. */
    while (buckets < UCM_HINT_MAX_BUCKETS && 4 * buckets < blocks)
        buckets *= 2;
    return buckets;
}

static int table_map(struct hints *h, uint64_t buckets, uint64_t now_ms)
{
    void *p;
    int rc;

    h->bytes = ucm_hint_bytes(buckets);
    rc = memfd_new("ucmd-hints", h->bytes, &h->fd);
    if (rc < 0)
        return rc;
    p = mmap(NULL, h->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, h->fd, 0);
    if (p == MAP_FAILED)
        return -errno;
    h->header = p;
    h->bucket = (struct ucm_hint_bucket *)((char *)p + UCM_HINT_HEADER_BYTES);
    (void)madvise(p, h->bytes, MADV_HUGEPAGE); /* where files of memory may have them */
    (void)madvise(p, h->bytes, MADV_DONTDUMP);
    rc = hints_reserve(h);
    if (rc < 0)
        return rc;
    h->mask = buckets - 1;
    memcpy(h->header->magic, UCM_HINT_MAGIC, sizeof(h->header->magic));
    h->header->version = UCM_HINT_VERSION;
    h->header->key_bytes = h->key_bytes;
    h->header->buckets = buckets;
    h->header->seed = h->seed;
    hints_beat(h, now_ms);
    h->read_fd = memfd_share(h->fd);
    return h->read_fd < 0 ? h->read_fd : 0;
}

int hints_new(uint32_t key_bytes, uint64_t blocks, uint64_t now_ms, struct hints **out)
{
    struct hints *h = calloc(1, sizeof(*h));
    int rc;

    if (!h)
        return -ENOMEM;
    h->fd = h->read_fd = -1;
    h->key_bytes = key_bytes;
    rc = getentropy(&h->seed, sizeof(h->seed)) < 0 ? -errno : 0;
    if (rc == 0)
        rc = table_map(h, buckets_for(blocks), now_ms);
    if (rc < 0) {
        hints_free(h, UCM_HINT_ENDED);
        return rc;
    }
    *out = h;
    return 0;
}

void hints_end(struct hints *h, enum ucm_hint_state last)
{
    atomic_store_explicit(&h->header->state, last, memory_order_release);
}

void hints_free(struct hints *h, enum ucm_hint_state last)
{
    if (!h)
        return;
    if (h->header) {
        hints_end(h, last);
        munmap(h->header, h->bytes);
    }
    if (h->read_fd >= 0)
        close(h->read_fd);
    if (h->fd >= 0)
        close(h->fd);
    free(h);
}

int hints_reserve(struct hints *h)
{
    uint64_t left = h->bytes - h->reserved, n = left < RESERVE_BYTES ? left : RESERVE_BYTES;

    int rc = n > 0 ? memfd_populate(h->fd, h->reserved, (char *)h->header + h->reserved, n) : 0;

    if (rc < 0)
        return rc;
    h->reserved += n;
    return h->reserved < h->bytes;
}

/* ---- entries ---- */

void hints_set(struct hints *h, const uint8_t *key, uint8_t was, uint8_t is)
{
    uint64_t hash = ucm_hint_hash(key, h->key_bytes, h->seed);
    uint64_t left_out = hints_left_out(h);

    switch (ucm_hint_set(h->bucket, h->mask, hash, is, h->generation)) {
    case UCM_HINT_ADDED:
        h->entries++;
        h->generation++;
        /* It had none in a table that has all blocks: it was left out. */
        left_out -= h->live && was != 0 && left_out > 0;
        break;
    case UCM_HINT_REMOVED:
        h->entries--;
        break;
    case UCM_HINT_FULL:
        left_out += !h->live || was == 0;
        break;
    case UCM_HINT_SAME:
        left_out -= h->live && was != 0 && is == 0 && left_out > 0;
        break;
    }
    if (left_out != hints_left_out(h))
        atomic_store_explicit(&h->header->left_out, left_out, memory_order_release);
}

void hints_begin(struct hints *h)
{
    h->live = true;
    close(h->fd);
    h->fd = -1;
    atomic_store_explicit(&h->header->state, UCM_HINT_LIVE, memory_order_release);
}

void hints_beat(struct hints *h, uint64_t now_ms)
{
    atomic_store_explicit(&h->header->beat_ms, now_ms, memory_order_release);
}

bool hints_crowded(const struct hints *h)
{
    return h->entries > (h->mask + 1) * UCM_HINT_ENTRIES * 3 / 5 &&
           h->mask + 1 < UCM_HINT_MAX_BUCKETS;
}

/* ---- what it is ---- */

int hints_fd(const struct hints *h)
{
    return h->read_fd;
}

uint64_t hints_bytes(const struct hints *h)
{
    return h->bytes;
}

uint64_t hints_entries(const struct hints *h)
{
    return h->entries;
}

uint64_t hints_left_out(const struct hints *h)
{
    return atomic_load_explicit(&h->header->left_out, memory_order_relaxed);
}
