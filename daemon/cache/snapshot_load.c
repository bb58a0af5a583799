/* Loading a snapshot: what the run before left in the persistent arena becomes parts of blocks
 * again. The pool compares a part's bytes with its checksum; until then the part is a miss, and its
 * slot has no owner. */
#include "daemon/cache/snapshot.h"

#include "daemon/base/log.h"
#include "daemon/cache/internal.h"
#include "daemon/cache/snapshot_format.h"
#include "daemon/cache/snapshot_sum.h"
#include "proto/errors.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define ROOM "cache"
#define PIECES 2u /* loads want the pool and the memory's bandwidth, too */

struct load_ns {
    struct ns *ns; /* NULL: it could not be opened */
    bool forgotten;
};

struct snapshot_load {
    struct cache *cache;
    struct persist *persist;
    const uint8_t *parts;
    uint64_t n, done, start_ns;
    struct load_ns *ns;
    uint32_t namespaces;
    slot_ref *slots; /* by part; 0: could not be taken */
    uint64_t loaded, bytes, corrupt;
    struct sums sums;
};

/* ---- before there is an arena ---- */

static bool snapshot_fits(struct persist *k, uint64_t arena_bytes, uint64_t extent)
{
    struct persist_identity id = persist_identity(k);
    struct snapshot_head head;
    size_t n, at;
    const uint8_t *p = persist_snapshot(k, &n);
    int rc;

    if (!p) {
        log_info(ROOM, "no-snapshot", "reason=\"%s\"",
                 id.inode ? "the run before did not stop in order" : "first run");
        return false;
    }
    id.bytes = id.bytes == arena_bytes ? arena_bytes : 0;
    rc = snapshot_check(p, n, &id, extent, &head, &at);
    if (rc == 0)
        return true;
    log_warn(ROOM, "snapshot-refused", "reason=\"%s\": starting with empty DRAM",
             rc == -ESTALE            ? "of another boot, or of another arena.size or arena.extent"
             : rc == -EPROTONOSUPPORT ? "of another format version"
                                      : "damaged");
    return false;
}

int cache_snapshot_open(struct persist *k, uint64_t arena_bytes, uint64_t extent, bool *warm)
{
    *warm = snapshot_fits(k, arena_bytes, extent);
    return *warm ? 0 : persist_reset(k, arena_bytes);
}

/* ---- the end ---- */

static void load_free(struct snapshot_load *l)
{
    persist_forget(l->persist);
    for (uint32_t i = 0; i < l->namespaces; i++)
        if (l->ns[i].ns)
            index_ns_unuse(l->cache->config.index, l->ns[i].ns);
    free(l->ns);
    free(l->slots);
    free(l);
}

/* What was not reached stays known for the snapshot that this run writes. */
static void load_end(struct snapshot_load *l)
{
    struct cache *c = l->cache;

    log_info(ROOM, "snapshot-loaded",
             "parts=%" PRIu64 " of=%" PRIu64 " left=%" PRIu64 " bytes=%" PRIu64 " corrupt=%" PRIu64
             " seconds=%.3f",
             l->loaded, l->n, l->n - l->sums.at, l->bytes, l->corrupt,
             (double)(uv_hrtime() - l->start_ns) / 1e9);
    c->snapshot.loading = false;
    c->tier_busy--;
    cache_list_sweep_begin(c);
    if (l->sums.at == l->n)
        cache_snapshot_forget(c);
    cache_released(c);
}

static void load_pump(struct snapshot_load *l)
{
    if (!sums_pump(&l->sums) && l->sums.at == l->sums.n)
        load_end(l);
}

/* ---- a part ---- */

static struct snapshot_part part_at(const struct snapshot_load *l, uint64_t i)
{
    struct snapshot_part part;

    snapshot_part_decode(l->parts + i * SNAPSHOT_PART_BYTES, &part);
    return part;
}

/* What was dumped or found on NVMe since the start counts more. */
static bool part_wanted(const struct block *b, const struct snapshot_part *k)
{
    const struct part *p = &b->part[k->part];

    return !(b->flags & BLOCK_DOOMED) && p->dram == PART_DRAM_NONE &&
           (p->nvme == PART_NVME_NONE ||
            (p->nvme == PART_NVME_READY && (p->sealed || p->checksum == k->checksum)));
}

static bool part_load(struct snapshot_load *l, const struct snapshot_part *k, slot_ref slot)
{
    struct cache *c = l->cache;
    struct ns *ns = l->ns[k->ns].ns;
    block_ref ref = index_find(c->config.index, ns, k->key);
    struct block *b;

    if (ref == 0)
        ref = cache_insert(c, ns, k->key, INDEX_SPACE_BELOW);
    if (ref == 0)
        return false;
    b = index_block(c->config.index, ref);
    if (!part_wanted(b, k))
        return false;
    arena_slot_own(c->arena, slot, part_owner(ref, k->part));
    cache_list_unlink(c, ref);
    if (!(b->flags & BLOCK_IN_POLICY))
        policy_restore(c->config.policy, ref, k->uses);
    part_set_dram(c, ref, k->part, PART_DRAM_READY, slot);
    if (b->part[k->part].nvme == PART_NVME_NONE)
        b->part[k->part].checksum = k->checksum;
    l->loaded++;
    l->bytes += ns_part_bytes(ns, k->part);
    c->config.metrics->arena_kept_parts++;
    if (!c->tier || !block_complete(b, ns) || b->part[k->part].nvme == PART_NVME_READY ||
        (k->stored && cache_recovering(c)))
        return true;
    /* It has no copy on NVMe, or a full index dropped that copy. */
    cache_ns_record(c, ns);
    cache_write_stored(c, ref, WRITE_NVME);
    return true;
}

static bool sum_part_cb(void *ctx, uint64_t i, struct sums_part *out)
{
    struct snapshot_load *l = ctx;
    slot_ref slot = l->slots[i];
    int ready = slot ? arena_slot_ready(l->cache->arena, slot) : -ENOENT;
    struct snapshot_part k = part_at(l, i);
    struct span span;

    if (ready == -EAGAIN)
        return false;
    *out = (struct sums_part){.data = NULL};
    if (ready == 0 && !l->ns[k.ns].forgotten) {
        if (span_kept(l->cache, slot, ns_form(l->ns[k.ns].ns, k.part), &span) != 0)
            return true;
        out->data = span.origin;
        out->bytes = span.len;
    }
    return true;
}

static void sum_done_cb(void *ctx, uint64_t i, const struct sums_part *part)
{
    struct snapshot_load *l = ctx;
    struct snapshot_part k = part_at(l, i);
    bool good = part->data && part->checksum == k.checksum;

    l->done++;
    if (part->data && !good) {
        l->corrupt++;
        log_warn(ROOM, "snapshot-corrupt", "key=%02x%02x%02x%02x part=%u", k.key[0], k.key[1],
                 k.key[2], k.key[3], k.part);
    }
    if (good && !l->ns[k.ns].forgotten && part_load(l, &k, l->slots[i]))
        return;
    if (l->slots[i])
        arena_slot_free(l->cache->arena, l->slots[i]);
    l->cache->config.metrics->arena_kept_refused++;
}

static void sum_piece_cb(void *ctx)
{
    struct snapshot_load *l = ctx;

    cache_released(l->cache);
    load_pump(l);
}

/* ---- the start ---- */

static struct ns *ns_load(struct cache *c, const struct snapshot_ns *k)
{
    struct ucm_error e = {0};
    struct ns *ns;

    if (index_ns_restore(c->config.index, k->fingerprint, k->identity, k->identity_bytes, &ns,
                         &e) != 0) {
        log_warn(ROOM, "namespace-not-loaded", "reason=\"%s\"", e.text);
        return NULL;
    }
    index_ns_use(c->config.index, ns); /* until load_free */
    return ns;
}

/* Before anybody else gets a slot. */
static void slots_take(struct snapshot_load *l)
{
    for (uint64_t i = 0; i < l->n; i++) {
        struct snapshot_part k = part_at(l, i);
        const struct ns *ns = l->ns[k.ns].ns;

        if (ns && k.part < ns->identity.parts)
            l->slots[i] =
                arena_slot_take(l->cache->arena, k.extent, k.slot, ns_part_bytes(ns, k.part));
    }
}

int cache_snapshot_load(struct cache *c, struct persist *k)
{
    struct snapshot_load *l = calloc(1, sizeof(*l));
    struct persist_identity id = persist_identity(k);
    struct snapshot_head head;
    size_t n, at = SNAPSHOT_HEAD_BYTES, parts_at = 0;
    const uint8_t *p = persist_snapshot(k, &n);
    int rc =
        l ? snapshot_check(p, n, &id, arena_extent_bytes(c->arena), &head, &parts_at) : -ENOMEM;

    if (rc < 0)
        goto err_after_load;
    rc = -ENOMEM;
    l->ns = calloc(head.namespaces + 1, sizeof(*l->ns));
    if (!l->ns)
        goto err_after_load;
    l->slots = calloc(head.parts + 1, sizeof(*l->slots));
    if (!l->slots)
        goto err_after_ns;
    l->cache = c;
    l->persist = k;
    l->parts = p + parts_at;
    l->n = head.parts;
    l->namespaces = head.namespaces;
    l->start_ns = uv_hrtime();
    l->sums = (struct sums){.loop = c->config.loop,
                            .pieces = PIECES,
                            .n = l->n,
                            .part_cb = sum_part_cb,
                            .done_cb = sum_done_cb,
                            .piece_cb = sum_piece_cb,
                            .ctx = l};
    for (uint32_t i = 0; i < head.namespaces; i++) {
        struct snapshot_ns ns;

        at += snapshot_ns_decode(p + at, &ns);
        l->ns[i].ns = ns_load(c, &ns);
    }
    slots_take(l);
    log_info(ROOM, "snapshot-loading", "parts=%" PRIu64 " written-by=%s", l->n, head.program);
    c->snapshot.load = l;
    c->snapshot.loading = true;
    c->tier_busy++;
    return 0; /* cache_snapshot_load_grew goes on when an extent is ready */

err_after_ns:
    free(l->ns);
err_after_load:
    free(l);
    return rc;
}

/* ---- meanwhile ---- */

void cache_snapshot_load_grew(struct cache *c)
{
    if (c->snapshot.loading)
        load_pump(c->snapshot.load);
}

void cache_snapshot_load_drop(struct cache *c, const struct ns *ns)
{
    for (uint32_t i = 0; c->snapshot.load && i < c->snapshot.load->namespaces; i++)
        if (c->snapshot.load->ns[i].ns == ns)
            c->snapshot.load->ns[i].forgotten = true;
}

bool cache_snapshot_loading(const struct cache *c, uint64_t *done, uint64_t *of)
{
    *done = c->snapshot.loading ? c->snapshot.load->done : 0;
    *of = c->snapshot.loading ? c->snapshot.load->n : 0;
    return c->snapshot.loading;
}

void cache_snapshot_load_stop(struct cache *c)
{
    if (!c->snapshot.loading)
        return;
    c->snapshot.load->sums.n = c->snapshot.load->sums.at;
    load_pump(c->snapshot.load);
}

/* ---- what was not reached ---- */

void cache_snapshot_unloaded(struct cache *c,
                             void (*each)(void *ctx, struct ns *ns,
                                          const struct snapshot_part *part),
                             void *ctx)
{
    const struct snapshot_load *l = c->snapshot.load;

    for (uint64_t i = l ? l->sums.at : 0; l && i < l->n; i++) {
        struct snapshot_part k = part_at(l, i);

        if (l->slots[i] != 0 && !l->ns[k.ns].forgotten)
            each(ctx, l->ns[k.ns].ns, &k);
    }
}

void cache_snapshot_forget(struct cache *c)
{
    if (c->snapshot.load)
        load_free(c->snapshot.load);
    c->snapshot.load = NULL;
}
