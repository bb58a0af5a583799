/* Telling the next run what lies in the arena's file: a list of all parts in DRAM with the
 * checksums of their bytes. Those that were written to the tier have one, the pool computes the
 * others. */
#include "daemon/cache/snapshot.h"

#include "daemon/base/log.h"
#include "daemon/cache/internal.h"
#include "daemon/cache/snapshot_format.h"
#include "daemon/format/checksum.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROOM "cache"
#define WORKS 8u /* as many as the pool has threads, and some that wait */
#define WORK_PARTS 64u
#define WORK_BYTES (8u << 20)

struct keep_work {
    uv_work_t work;
    struct snapshot_write *keep;
    uint64_t first;
    uint32_t n;
    bool busy;
};

/* A part beside its place in the manifest. */
struct keep_part {
    const void *data;
    uint64_t bytes;
    bool summed; /* the manifest has its checksum */
};

struct snapshot_write {
    struct cache *cache;
    struct persist *keep;
    uint32_t *ns_places; /* by a namespace's place in the index: 1 + that in the manifest; 0: it has
                            no part */
    uint32_t namespaces;
    size_t parts_at, cap; /* in the manifest; cap: parts that there is room for */
    uint8_t *manifest;
    struct keep_part *parts;
    uint64_t n, at, start_ns;
    struct keep_work works[WORKS];
};

/* ---- what there is to keep ---- */

static bool part_kept(const struct block *b, const struct ns *ns, uint32_t part)
{
    return b->part[part].dram == PART_DRAM_READY && block_complete(b, ns) &&
           !(b->flags & BLOCK_DOOMED);
}

static void count_cb(void *ctx, block_ref ref, uint32_t uses)
{
    struct snapshot_write *k = ctx;
    struct ns *ns;
    const struct block *b = cache_block(k->cache, ref, &ns);

    (void)uses;
    for (uint32_t i = 0; i < ns->identity.parts; i++) {
        if (!part_kept(b, ns, i))
            continue;
        k->cap++;
        k->ns_places[index_ns_place(k->cache->config.index, ns)] = 1;
    }
}

static void rest_count_cb(void *ctx, struct ns *ns, const struct snapshot_part *part)
{
    struct snapshot_write *k = ctx;

    (void)part;
    k->cap++;
    k->ns_places[index_ns_place(k->cache->config.index, ns)] = 1;
}

/* Its bytes are where they were, and as good as they were: the next run compares them. */
static void rest_list_cb(void *ctx, struct ns *ns, const struct snapshot_part *part)
{
    struct snapshot_write *k = ctx;
    struct snapshot_part kept = *part;

    kept.ns = k->ns_places[index_ns_place(k->cache->config.index, ns)] - 1;
    snapshot_part_encode(k->manifest + k->parts_at + k->n * SNAPSHOT_PART_BYTES, &kept);
    k->parts[k->n++] = (struct keep_part){.bytes = ns_part_bytes(ns, kept.part), .summed = true};
}

static void list_cb(void *ctx, block_ref ref, uint32_t uses)
{
    struct snapshot_write *k = ctx;
    struct cache *c = k->cache;
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);
    struct snapshot_part kept = {.uses = uses};

    kept.ns = k->ns_places[index_ns_place(k->cache->config.index, ns)] - 1;
    memcpy(kept.key, b->key, sizeof(kept.key));
    for (uint32_t i = 0; i < ns->identity.parts; i++) {
        const struct part *p = &b->part[i];

        if (!part_kept(b, ns, i))
            continue;
        kept.part = i;
        kept.stored = p->nvme == PART_NVME_READY;
        kept.checksum = p->checksum; /* 0: not known */
        arena_slot_place(c->arena, p->slot, &kept.extent, &kept.slot);
        snapshot_part_encode(k->manifest + k->parts_at + k->n * SNAPSHOT_PART_BYTES, &kept);
        k->parts[k->n++] = (struct keep_part){.data = arena_memory(c->arena, p->slot),
                                              .bytes = ns_part_bytes(ns, i),
                                              .summed = kept.checksum != 0};
    }
}

/* Bytes that the namespaces take; their places are given out on the way. */
static size_t namespaces_place(struct snapshot_write *k)
{
    struct index *ix = k->cache->config.index;
    uint8_t identity[NS_CANONICAL_MAX];
    size_t bytes = 0;

    for (uint32_t place = 0; place < index_ns_places(ix); place++) {
        int n;

        if (k->ns_places[place] == 0)
            continue;
        n = ns_identity_encode(&index_ns_at(ix, place)->identity, identity, sizeof(identity));
        assert(n > 0); /* namespace.open takes none that is longer */
        bytes += snapshot_ns_bytes((uint32_t)n);
        k->ns_places[place] = ++k->namespaces;
    }
    return bytes;
}

static void namespaces_write(struct snapshot_write *k)
{
    struct index *ix = k->cache->config.index;
    uint8_t identity[NS_CANONICAL_MAX];
    size_t at = SNAPSHOT_HEAD_BYTES;

    for (uint32_t place = 0; place < index_ns_places(ix); place++) {
        const struct ns *ns = index_ns_at(ix, place);
        struct snapshot_ns kept = {.identity = identity};

        if (k->ns_places[place] == 0)
            continue;
        kept.fingerprint = ns->fingerprint;
        kept.identity_bytes =
            (uint32_t)ns_identity_encode(&ns->identity, identity, sizeof(identity));
        at += snapshot_ns_encode(k->manifest + at, &kept);
    }
    assert(at == k->parts_at);
}

/* ---- checksums ---- */

static void work_cb(uv_work_t *work)
{
    struct keep_work *w = work->data;
    struct snapshot_write *k = w->keep;

    for (uint64_t i = w->first; i < w->first + w->n; i++) {
        if (k->parts[i].summed)
            continue;
        snapshot_checksum_put(k->manifest + k->parts_at + i * SNAPSHOT_PART_BYTES,
                              checksum_of(k->parts[i].data, k->parts[i].bytes));
        k->parts[i].summed = true;
    }
}

static void keep_pump(struct snapshot_write *k);

static void work_done_cb(uv_work_t *work, int status)
{
    struct keep_work *w = work->data;

    assert(status == 0); /* nobody cancels */
    (void)status;
    w->busy = false;
    keep_pump(w->keep);
}

static void keep_pump(struct snapshot_write *k)
{
    for (unsigned i = 0; i < WORKS; i++) {
        struct keep_work *w = &k->works[i];
        uint64_t bytes = 0;
        int rc;

        if (w->busy)
            continue;
        while (k->at < k->n && k->parts[k->at].summed)
            k->at++;
        if (k->at == k->n)
            return;
        w->keep = k;
        w->work.data = w;
        w->first = k->at;
        while (k->at < k->n && k->at - w->first < WORK_PARTS && bytes < WORK_BYTES)
            bytes += k->parts[k->at++].bytes;
        w->n = (uint32_t)(k->at - w->first);
        w->busy = true;
        rc = uv_queue_work(k->cache->config.loop, &w->work, work_cb, work_done_cb);
        assert(rc == 0); /* refuses a missing callback only */
        (void)rc;
    }
}

/* ---- begin and end ---- */

static void keep_free(struct snapshot_write *k)
{
    free(k->ns_places);
    free(k->parts);
    free(k);
}

int cache_snapshot_start(struct cache *c, struct persist *keep)
{
    struct snapshot_write *k = calloc(1, sizeof(*k));
    int rc = -ENOMEM;

    if (!k)
        return rc;
    k->cache = c;
    k->keep = keep;
    k->start_ns = uv_hrtime();
    k->ns_places = calloc(index_ns_places(c->config.index), sizeof(*k->ns_places));
    if (!k->ns_places)
        goto err_after_keep;
    policy_walk(c->config.policy, count_cb, k);
    cache_snapshot_rest_walk(c, rest_count_cb, k);
    k->parts = calloc(k->cap + 1, sizeof(*k->parts));
    if (!k->parts)
        goto err_after_keep;
    k->parts_at = SNAPSHOT_HEAD_BYTES + namespaces_place(k);
    rc = persist_create(keep, k->parts_at + k->cap * SNAPSHOT_PART_BYTES, &k->manifest);
    if (rc < 0)
        goto err_after_keep;
    namespaces_write(k);
    policy_walk(c->config.policy, list_cb, k);
    cache_snapshot_rest_walk(c, rest_list_cb, k);
    assert(k->n == k->cap);
    c->keep = k;
    keep_pump(k);
    return 0;

err_after_keep:
    log_warn(ROOM, "not-kept", "error=%s", strerror(-rc));
    keep_free(k);
    return rc;
}

void cache_snapshot_cut(struct cache *c)
{
    c->keep->at = c->keep->n;
}

bool cache_snapshot_ready(const struct cache *c)
{
    for (unsigned i = 0; i < WORKS; i++)
        if (c->keep->works[i].busy)
            return false;
    return c->keep->at == c->keep->n;
}

/* What was not computed in time is left out. */
static uint64_t parts_pack(struct snapshot_write *k, uint64_t *bytes)
{
    uint8_t *p = k->manifest + k->parts_at;
    uint64_t n = 0;

    for (uint64_t i = 0; i < k->n; i++) {
        if (!k->parts[i].summed)
            continue;
        if (i != n)
            memcpy(p + n * SNAPSHOT_PART_BYTES, p + i * SNAPSHOT_PART_BYTES, SNAPSHOT_PART_BYTES);
        *bytes += k->parts[i].bytes;
        n++;
    }
    return n;
}

void cache_snapshot_finish(struct cache *c)
{
    struct snapshot_write *k = c->keep;
    uint64_t bytes = 0;
    struct snapshot_head head = {.arena = persist_identity(k->keep),
                                 .extent = arena_extent_bytes(c->arena),
                                 .namespaces = k->namespaces};
    int rc;

    head.parts = parts_pack(k, &bytes);
    snprintf(head.program, sizeof(head.program), "ucmd %s", UCM_VERSION);
    snapshot_seal(k->manifest, k->parts_at + head.parts * SNAPSHOT_PART_BYTES, &head);
    rc = persist_commit(k->keep);
    if (rc == 0)
        log_info(ROOM, "kept", "parts=%" PRIu64 " of=%" PRIu64 " bytes=%" PRIu64 " seconds=%.3f",
                 head.parts, k->n, bytes, (double)(uv_hrtime() - k->start_ns) / 1e9);
    else
        log_warn(ROOM, "not-kept", "error=%s", strerror(-rc));
    c->keep = NULL;
    cache_snapshot_rest_free(c);
    keep_free(k);
}
