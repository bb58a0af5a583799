/* Taking over what the run before has left in the arena's file. The pool compares bytes with their
 * checksums, some parts at a time; the loop makes those that agree parts of blocks again. */
#include "daemon/cache/snapshot.h"

#include "daemon/base/log.h"
#include "daemon/cache/internal.h"
#include "daemon/cache/snapshot_format.h"
#include "daemon/format/checksum.h"
#include "proto/errors.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define ROOM "cache"
#define WORKS 2u /* beside loads, which want the pool and the memory's bandwidth too */
#define WORK_PARTS 64u
#define WORK_BYTES (8u << 20)

struct adopt_ns {
    struct ns *ns; /* NULL: can't be had */
    bool forgotten;
};

struct adopt_work {
    uv_work_t work;
    struct snapshot_load *adopt;
    uint64_t first;
    uint32_t n;
    bool busy;
    const void *data[WORK_PARTS]; /* NULL: to be left out */
    uint64_t bytes[WORK_PARTS], sums[WORK_PARTS];
};

struct snapshot_load {
    struct cache *cache;
    struct persist *keep;
    const uint8_t *parts;
    uint64_t n, at, done, start_ns;
    struct adopt_ns *ns;
    uint32_t namespaces;
    slot_ref *slots; /* taken in the arena; 0: could not be */
    uint64_t adopted, bytes, corrupt;
    bool stopped;
    struct adopt_work works[WORKS];
};

/* ---- which arena ---- */

static bool manifest_fits(struct persist *k, uint64_t arena_bytes, uint64_t extent)
{
    struct persist_identity id = persist_identity(k);
    struct snapshot_head head;
    size_t n, at;
    const uint8_t *p = persist_snapshot(k, &n);
    int rc;

    if (!p) {
        log_info(ROOM, "kept-nothing", "reason=\"%s\"",
                 id.inode ? "the run before was not stopped in order" : "first run");
        return false;
    }
    id.bytes = id.bytes == arena_bytes ? arena_bytes : 0;
    rc = snapshot_check(p, n, &id, extent, &head, &at);
    if (rc == 0)
        return true;
    log_warn(ROOM, "kept-refused", "reason=\"%s\": starting with empty DRAM",
             rc == -ESTALE            ? "of another boot, or of another arena.size or arena.extent"
             : rc == -EPROTONOSUPPORT ? "of another format version"
                                      : "damaged");
    return false;
}

int cache_snapshot_open(struct persist *k, uint64_t arena_bytes, uint64_t extent, bool *warm)
{
    *warm = manifest_fits(k, arena_bytes, extent);
    return *warm ? 0 : persist_reset(k, arena_bytes);
}

/* ---- the end ---- */

static void adopt_free(struct snapshot_load *a)
{
    persist_forget(a->keep);
    for (uint32_t i = 0; i < a->namespaces; i++)
        if (a->ns[i].ns)
            index_ns_unuse(a->cache->config.index, a->ns[i].ns);
    free(a->ns);
    free(a->slots);
    free(a);
}

static void adopt_end(struct snapshot_load *a)
{
    struct cache *c = a->cache;

    log_info(ROOM, "kept",
             "parts=%" PRIu64 " of=%" PRIu64 " left=%" PRIu64 " bytes=%" PRIu64 " corrupt=%" PRIu64
             " seconds=%.3f",
             a->adopted, a->n, a->n - a->at, a->bytes, a->corrupt,
             (double)(uv_hrtime() - a->start_ns) / 1e9);
    c->adopt = NULL;
    c->tier_busy--;
    cache_list_sweep_begin(c);
    if (a->at < a->n)
        c->rest = a;
    else
        adopt_free(a);
    cache_released(c);
}

/* ---- a part ---- */

static void part_leave_out(struct snapshot_load *a, uint64_t i)
{
    if (a->slots[i])
        arena_slot_free(a->cache->arena, a->slots[i]);
    a->cache->config.metrics->arena_kept_refused++;
}

/* What was dumped or found on NVMe meanwhile counts more. */
static bool part_wanted(const struct block *b, const struct snapshot_part *k)
{
    const struct part *p = &b->part[k->part];

    return !(b->flags & BLOCK_DOOMED) && p->dram == PART_DRAM_NONE &&
           (p->nvme == PART_NVME_NONE ||
            (p->nvme == PART_NVME_READY && p->checksum == k->checksum));
}

static bool part_adopt(struct snapshot_load *a, const struct snapshot_part *k, slot_ref slot)
{
    struct cache *c = a->cache;
    struct ns *ns = a->ns[k->ns].ns;
    block_ref ref = index_find(c->config.index, ns, k->key);
    struct block *b;

    if (ref == 0)
        ref = cache_insert(c, ns, k->key, INDEX_ROOM_BELOW);
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
    a->adopted++;
    a->bytes += ns_part_bytes(ns, k->part);
    c->config.metrics->arena_kept_parts++;
    c->config.metrics->arena_kept_bytes += ns_part_bytes(ns, k->part);
    if (!c->tier || !block_complete(b, ns) || b->part[k->part].nvme == PART_NVME_READY ||
        (k->stored && cache_recovering(c))) /* else its copy has made way in a full index */
        return true;
    cache_ns_record(c, ns);
    cache_write_stored(c, ref, WRITE_NVME);
    return true;
}

static void part_judge(struct snapshot_load *a, uint64_t i, const struct adopt_work *w, uint32_t at)
{
    struct snapshot_part k;
    bool good;

    snapshot_part_decode(a->parts + i * SNAPSHOT_PART_BYTES, &k);
    good = w->data[at] && w->sums[at] == k.checksum;
    if (w->data[at] && !good) {
        a->corrupt++;
        log_warn(ROOM, "kept-corrupt", "key=%02x%02x%02x%02x part=%u", k.key[0], k.key[1], k.key[2],
                 k.key[3], k.part);
    }
    if (!good || a->ns[k.ns].forgotten || !part_adopt(a, &k, a->slots[i]))
        part_leave_out(a, i);
}

/* ---- some parts at a time ---- */

static void work_cb(uv_work_t *work)
{
    struct adopt_work *w = work->data;

    for (uint32_t i = 0; i < w->n; i++)
        if (w->data[i])
            w->sums[i] = checksum_of(w->data[i], w->bytes[i]);
}

static void adopt_pump(struct snapshot_load *a);

static void work_done_cb(uv_work_t *work, int status)
{
    struct adopt_work *w = work->data;
    struct snapshot_load *a = w->adopt;

    assert(status == 0); /* nobody cancels */
    (void)status;
    w->busy = false;
    for (uint32_t i = 0; i < w->n; i++)
        part_judge(a, w->first + i, w, i);
    a->done += w->n;
    cache_released(a->cache);
    adopt_pump(a);
}

/* False: its extent is not ready yet. */
static bool work_add(struct adopt_work *w, uint64_t i, uint64_t *bytes)
{
    struct snapshot_load *a = w->adopt;
    struct cache *c = a->cache;
    slot_ref slot = a->slots[i];
    int ready = slot ? arena_slot_ready(c->arena, slot) : 0;
    struct snapshot_part k;

    if (ready == -EAGAIN)
        return false;
    snapshot_part_decode(a->parts + i * SNAPSHOT_PART_BYTES, &k);
    w->data[w->n] = NULL;
    if (slot && ready == 0 && !a->ns[k.ns].forgotten) {
        w->data[w->n] = arena_memory(c->arena, slot);
        w->bytes[w->n] = ns_part_bytes(a->ns[k.ns].ns, k.part);
        *bytes += w->bytes[w->n];
    }
    w->n++;
    return true;
}

static bool work_start(struct snapshot_load *a, struct adopt_work *w)
{
    uint64_t bytes = 0;
    int rc;

    w->adopt = a;
    w->work.data = w;
    w->first = a->at;
    w->n = 0;
    while (a->at < a->n && w->n < WORK_PARTS && bytes < WORK_BYTES && work_add(w, a->at, &bytes))
        a->at++;
    if (w->n == 0)
        return false;
    w->busy = true;
    rc = uv_queue_work(a->cache->config.loop, &w->work, work_cb, work_done_cb);
    assert(rc == 0); /* refuses a missing callback only */
    (void)rc;
    return true;
}

static void adopt_pump(struct snapshot_load *a)
{
    bool busy = false;

    for (unsigned i = 0; i < WORKS; i++)
        if (a->works[i].busy || (!a->stopped && work_start(a, &a->works[i])))
            busy = true;
    if (!busy && (a->stopped || a->at == a->n))
        adopt_end(a);
}

/* ---- the start ---- */

static struct ns *ns_adopt(struct cache *c, const struct snapshot_ns *k)
{
    struct ns_identity_memory memory;
    struct ns_identity id;
    struct ucm_error e = {0};
    struct ns *ns;

    if (ns_identity_decode(k->identity, k->identity_bytes, &memory, &id) != 0)
        return NULL;
    if (index_ns_restore(c->config.index, &id, &ns, &e) != 0) {
        log_warn(ROOM, "namespace-not-kept", "reason=\"%s\"", e.text);
        return NULL;
    }
    if (memcmp(ns->fingerprint, k->fingerprint, UCM_FINGERPRINT_BYTES) != 0)
        return NULL;
    index_ns_use(c->config.index, ns); /* until the end */
    return ns;
}

/* Before anybody else gets a slot. */
static void slots_take(struct snapshot_load *a)
{
    for (uint64_t i = 0; i < a->n; i++) {
        const struct ns *ns;
        struct snapshot_part k;

        snapshot_part_decode(a->parts + i * SNAPSHOT_PART_BYTES, &k);
        ns = a->ns[k.ns].ns;
        if (ns && k.part < ns->identity.parts)
            a->slots[i] =
                arena_slot_keep(a->cache->arena, k.extent, k.slot, ns_part_bytes(ns, k.part));
    }
}

int cache_snapshot_load(struct cache *c, struct persist *k)
{
    struct snapshot_load *a = calloc(1, sizeof(*a));
    struct persist_identity id = persist_identity(k);
    struct snapshot_head head = {.parts = 0};
    size_t n, at = SNAPSHOT_HEAD_BYTES, parts_at = 0;
    const uint8_t *p = persist_snapshot(k, &n);
    int rc =
        a ? snapshot_check(p, n, &id, arena_extent_bytes(c->arena), &head, &parts_at) : -ENOMEM;

    if (rc == 0) {
        a->ns = calloc(head.namespaces + 1, sizeof(*a->ns));
        a->slots = calloc(head.parts + 1, sizeof(*a->slots));
        rc = a->ns && a->slots ? 0 : -ENOMEM;
    }
    if (rc < 0) {
        if (a) {
            free(a->ns);
            free(a->slots);
        }
        free(a);
        return rc;
    }
    a->cache = c;
    a->keep = k;
    a->parts = p + parts_at;
    a->n = head.parts;
    a->namespaces = head.namespaces;
    a->start_ns = uv_hrtime();
    for (uint32_t i = 0; i < head.namespaces; i++) {
        struct snapshot_ns ns;

        at += snapshot_ns_decode(p + at, &ns);
        a->ns[i].ns = ns_adopt(c, &ns);
    }
    slots_take(a);
    log_info(ROOM, "keeping", "parts=%" PRIu64 " written-by=%s", a->n, head.program);
    c->adopt = a;
    c->tier_busy++;
    return 0; /* goes on when an extent is ready */
}

/* ---- meanwhile ---- */

void cache_snapshot_load_grew(struct cache *c)
{
    if (c->adopt)
        adopt_pump(c->adopt);
}

void cache_snapshot_load_forget(struct cache *c, const struct ns *ns)
{
    struct snapshot_load *a = c->adopt ? c->adopt : c->rest;

    for (uint32_t i = 0; a && i < a->namespaces; i++)
        if (a->ns[i].ns == ns)
            a->ns[i].forgotten = true;
}

bool cache_snapshot_loading(const struct cache *c, uint64_t *done, uint64_t *of)
{
    *done = c->adopt ? c->adopt->done : 0;
    *of = c->adopt ? c->adopt->n : 0;
    return c->adopt != NULL;
}

void cache_snapshot_load_stop(struct cache *c)
{
    if (!c->adopt)
        return;
    c->adopt->stopped = true;
    adopt_pump(c->adopt);
}

/* ---- what was not reached ---- */

void cache_snapshot_rest_walk(struct cache *c,
                              void (*each)(void *ctx, struct ns *ns,
                                           const struct snapshot_part *part),
                              void *ctx)
{
    struct snapshot_load *a = c->rest;
    struct snapshot_part k;

    for (uint64_t i = a ? a->at : 0; a && i < a->n; i++) {
        snapshot_part_decode(a->parts + i * SNAPSHOT_PART_BYTES, &k);
        if (a->slots[i] != 0 && !a->ns[k.ns].forgotten)
            each(ctx, a->ns[k.ns].ns, &k);
    }
}

void cache_snapshot_rest_free(struct cache *c)
{
    if (c->rest)
        adopt_free(c->rest);
    c->rest = NULL;
}
