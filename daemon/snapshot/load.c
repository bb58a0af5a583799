/* Loading a snapshot: what the run before left in the persistent arena becomes parts of blocks
 * again. The pool compares a part's bytes with its checksum; until then the part is a miss, and its
 * slot has no owner. */
#include "daemon/snapshot/internal.h"

#include "daemon/base/log.h"
#include "proto/errors.h"
#include "proto/metrics/metrics.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PIECES 2u /* loads want the pool and the memory's bandwidth, too */

struct load_ns {
    struct ns *ns;  /* NULL: it could not be opened */
    uint64_t wiped; /* ns.wiped, when the load began */
};

struct snapshot_load {
    struct snapshot *of;
    const uint8_t *parts;
    uint64_t n, done, start_ns;
    struct load_ns *ns;
    uint32_t namespaces;
    slot_ref *slots; /* by part; 0: could not be taken */
    uint64_t loaded, bytes, corrupt;
    struct sums sums;
};

/* ---- before there is an arena ---- */

static bool snapshot_fits(struct persist *k, uint64_t arena_bytes, uint64_t slab)
{
    struct persist_identity id = persist_identity(k);
    struct snapshot_head head;
    size_t n, at;
    const uint8_t *p = persist_snapshot(k, &n);
    int rc;

    if (!p) {
        log_info(MODULE, "no-snapshot", "reason=\"%s\"",
                 id.inode ? "the run before did not stop in order" : "first run");
        return false;
    }
    id.bytes = id.bytes == arena_bytes ? arena_bytes : 0;
    rc = snapshot_check(p, n, &id, slab, &head, &at);
    if (rc == 0)
        return true;
    log_warn(MODULE, "snapshot-refused", "reason=\"%s\": starting with empty DRAM",
             rc == -ESTALE            ? "of another boot, or of another arena.size or arena.slab"
             : rc == -EPROTONOSUPPORT ? "of another format version"
                                      : "damaged");
    return false;
}

int snapshot_open(const char *directory, uint64_t arena_bytes, uint64_t slab, struct snapshot **out,
                  char why[PERSIST_WHY_BYTES])
{
    struct snapshot *s = calloc(1, sizeof(*s));
    int rc;

    why[0] = '\0';
    if (!s)
        return -ENOMEM;
    rc = persist_open(directory, &s->persist, why);
    if (rc < 0) {
        free(s);
        return rc;
    }
    s->warm = snapshot_fits(s->persist, arena_bytes, slab);
    rc = s->warm ? 0 : persist_reset(s->persist, arena_bytes);
    if (rc < 0) {
        snprintf(why, PERSIST_WHY_BYTES, "arena.persist_dir: %.200s: no new file for the arena: %s",
                 directory, strerror(-rc));
        snapshot_close(s);
        return rc;
    }
    *out = s;
    return 0;
}

int snapshot_fd(const struct snapshot *s)
{
    return persist_fd(s->persist);
}

int snapshot_take(struct snapshot *s)
{
    return s ? persist_take(s->persist) : 0;
}

bool snapshot_removed(const struct snapshot *s)
{
    return s && persist_removed(s->persist);
}

/* ---- the end ---- */

static void load_free(struct snapshot_load *l)
{
    persist_forget(l->of->persist);
    for (uint32_t i = 0; i < l->namespaces; i++)
        if (l->ns[i].ns)
            index_ns_unref(l->of->modules.index, l->ns[i].ns);
    free(l->ns);
    free(l->slots);
    free(l);
}

/* Parts that were not reached stay known for the snapshot that this run writes. */
static void load_end(struct snapshot_load *l)
{
    struct snapshot *s = l->of;

    log_info(MODULE, "snapshot-loaded",
             "parts=%" PRIu64 " of=%" PRIu64 " left=%" PRIu64 " bytes=%" PRIu64 " corrupt=%" PRIu64
             " seconds=%.3f",
             l->loaded, l->n, l->n - l->sums.at, l->bytes, l->corrupt,
             (double)(uv_hrtime() - l->start_ns) / 1e9);
    s->loading = false;
    if (l->sums.at == l->n)
        snapshot_forget(s);
    cache_restore_end(s->modules.cache);
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

static bool forgotten(const struct load_ns *n)
{
    return n->ns->wiped != n->wiped;
}

static bool part_load(struct snapshot_load *l, const struct snapshot_part *k, slot_ref slot)
{
    struct ns *ns = l->ns[k->ns].ns;
    const struct cache_restored part = {.ns = ns,
                                        .key = k->key,
                                        .part = k->part,
                                        .slot = slot,
                                        .checksum = k->checksum,
                                        .uses = k->uses,
                                        .stored = k->stored};

    if (!cache_restore(l->of->modules.cache, &part))
        return false;
    l->loaded++;
    l->bytes += ns_part_bytes(ns, k->part);
    l->of->modules.metrics->arena_kept_parts++;
    return true;
}

static bool sum_part_cb(void *ctx, uint64_t i, struct sums_part *out)
{
    struct snapshot_load *l = ctx;
    slot_ref slot = l->slots[i];
    int ready = slot ? arena_slot_ready(l->of->modules.arena, slot) : -ENOENT;
    struct snapshot_part k = part_at(l, i);
    struct span span;

    if (ready == -EAGAIN)
        return false;
    *out = (struct sums_part){.data = NULL};
    if (ready == 0 && !forgotten(&l->ns[k.ns])) {
        if (span_kept(l->of->modules.cache, slot, ns_form(l->ns[k.ns].ns, k.part), &span) != 0)
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
        log_warn(MODULE, "snapshot-corrupt", "key=%02x%02x%02x%02x part=%u", k.key[0], k.key[1],
                 k.key[2], k.key[3], k.part);
    }
    if (good && !forgotten(&l->ns[k.ns]) && part_load(l, &k, l->slots[i]))
        return;
    if (l->slots[i])
        arena_slot_free(l->of->modules.arena, l->slots[i]);
    l->of->modules.metrics->arena_kept_refused++;
}

static void sum_piece_cb(void *ctx)
{
    struct snapshot_load *l = ctx;

    cache_released(l->of->modules.cache);
    load_pump(l);
}

/* ---- the start ---- */

static struct ns *ns_load(struct index *ix, const struct snapshot_ns *k)
{
    struct ucm_error e = {0};
    struct ns *ns;

    if (index_ns_restore(ix, k->fingerprint, k->identity, k->identity_bytes, &ns, &e) != 0) {
        log_warn(MODULE, "namespace-not-loaded", "reason=\"%s\"", e.text);
        return NULL;
    }
    index_ns_ref(ix, ns); /* until load_free */
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
                arena_slot_take(l->of->modules.arena, k.slab, k.slot, ns_part_bytes(ns, k.part));
    }
}

static int load_begin(struct snapshot *s)
{
    struct snapshot_load *l = calloc(1, sizeof(*l));
    struct persist_identity id = persist_identity(s->persist);
    struct snapshot_head head;
    size_t n, at = SNAPSHOT_HEAD_BYTES, parts_at = 0;
    const uint8_t *p = persist_snapshot(s->persist, &n);
    int rc = l ? snapshot_check(p, n, &id, arena_slab_bytes(s->modules.arena), &head, &parts_at)
               : -ENOMEM;

    if (rc < 0)
        goto err_after_load;
    rc = -ENOMEM;
    l->ns = calloc(head.namespaces + 1, sizeof(*l->ns));
    if (!l->ns)
        goto err_after_load;
    l->slots = calloc(head.parts + 1, sizeof(*l->slots));
    if (!l->slots)
        goto err_after_ns;
    l->of = s;
    l->parts = p + parts_at;
    l->n = head.parts;
    l->namespaces = head.namespaces;
    l->start_ns = uv_hrtime();
    l->sums = (struct sums){.loop = s->modules.loop,
                            .pieces = PIECES,
                            .n = l->n,
                            .part_cb = sum_part_cb,
                            .done_cb = sum_done_cb,
                            .piece_cb = sum_piece_cb,
                            .ctx = l};
    for (uint32_t i = 0; i < head.namespaces; i++) {
        struct snapshot_ns ns;

        at += snapshot_ns_decode(p + at, &ns);
        l->ns[i].ns = ns_load(s->modules.index, &ns);
        l->ns[i].wiped = l->ns[i].ns ? l->ns[i].ns->wiped : 0;
    }
    slots_take(l);
    log_info(MODULE, "snapshot-loading", "parts=%" PRIu64 " written-by=%s", l->n, head.program);
    s->load = l;
    s->loading = true;
    cache_restore_begin(s->modules.cache);
    return 0; /* snapshot_grew goes on when a slab is ready */

err_after_ns:
    free(l->ns);
err_after_load:
    free(l);
    return rc;
}

void snapshot_load(struct snapshot *s, const struct snapshot_modules *modules)
{
    s->modules = *modules;
    if (s->warm && load_begin(s) != 0)
        log_warn(MODULE, "snapshot-refused", "reason=\"%s\"", "no memory to take it over");
}

/* ---- meanwhile ---- */

void snapshot_grew(struct snapshot *s)
{
    if (s && s->loading)
        load_pump(s->load);
}

bool snapshot_loading(const struct snapshot *s, uint64_t *done, uint64_t *of)
{
    bool loading = s && s->loading;

    *done = loading ? s->load->done : 0;
    *of = loading ? s->load->n : 0;
    return loading;
}

void snapshot_load_stop(struct snapshot *s)
{
    if (!s || !s->loading)
        return;
    s->load->sums.n = s->load->sums.at;
    load_pump(s->load);
}

/* ---- what was not reached ---- */

void snapshot_unloaded(struct snapshot *s,
                       void (*each)(void *ctx, struct ns *ns, const struct snapshot_part *part),
                       void *ctx)
{
    const struct snapshot_load *l = s->load;

    for (uint64_t i = l ? l->sums.at : 0; l && i < l->n; i++) {
        struct snapshot_part k = part_at(l, i);

        if (l->slots[i] != 0 && !forgotten(&l->ns[k.ns]))
            each(ctx, l->ns[k.ns].ns, &k);
    }
}

void snapshot_forget(struct snapshot *s)
{
    if (s->load)
        load_free(s->load);
    s->load = NULL;
}

void snapshot_close(struct snapshot *s)
{
    if (!s)
        return;
    snapshot_forget(s); /* where no snapshot was written */
    persist_close(s->persist);
    free(s);
}
