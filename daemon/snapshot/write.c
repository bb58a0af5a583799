/* Writing the snapshot at an orderly stop: all parts in DRAM, hottest first, with the checksums of
 * their bytes. A part that was written to NVMe has its checksum; the pool computes the others. */
#include "daemon/snapshot/internal.h"

#include "daemon/base/log.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct snapshot_write {
    struct snapshot *of;
    uint32_t *ns_number; /* by a namespace's place in the index: 1 + its number in the snapshot; 0:
                          * it is not listed */
    uint32_t namespaces;
    uint8_t *snapshot, *parts; /* parts: after the namespaces */
    struct sums_part *memory;  /* by part: where its bytes are */
    uint64_t n, cap, start_ns;
    uint64_t in_groups, lost; /* parts in shared mappings; of these, those that lie nowhere else */
    struct sums sums;
};

static uint8_t *part_at(const struct snapshot_write *w, uint64_t i)
{
    return w->parts + i * SNAPSHOT_PART_BYTES;
}

/* ---- namespaces ---- */

static void ns_list(struct snapshot_write *w, const struct ns *ns)
{
    w->ns_number[index_ns_place(w->of->modules.index, ns)] = 1;
}

static void ns_unloaded_cb(void *ctx, struct ns *ns, const struct snapshot_part *part)
{
    (void)part;
    ns_list(ctx, ns);
}

/* Numbers the namespaces that have something in DRAM. Returns the bytes that they take. */
static size_t namespaces_number(struct snapshot_write *w)
{
    struct index *ix = w->of->modules.index;
    size_t bytes = 0;

    snapshot_unloaded(w->of, ns_unloaded_cb, w);
    for (uint32_t place = 0; place < index_ns_places(ix); place++) {
        const struct ns *ns = index_ns_at(ix, place);

        if (ns && ns->dram_bytes > 0)
            ns_list(w, ns);
        if (w->ns_number[place] == 0)
            continue;
        bytes += snapshot_ns_bytes(ns->canonical_bytes);
        w->ns_number[place] = ++w->namespaces;
    }
    return bytes;
}

static void namespaces_write(struct snapshot_write *w)
{
    struct index *ix = w->of->modules.index;
    uint8_t *at = w->snapshot + SNAPSHOT_HEAD_BYTES;

    for (uint32_t place = 0; place < index_ns_places(ix); place++) {
        const struct ns *ns = index_ns_at(ix, place);

        if (w->ns_number[place] != 0)
            at += snapshot_ns_encode(at,
                                     &(struct snapshot_ns){.fingerprint = ns->fingerprint,
                                                           .identity = ns->canonical,
                                                           .identity_bytes = ns->canonical_bytes});
    }
    assert(at == w->parts);
}

/* ---- parts ---- */

static void part_add(struct snapshot_write *w, const struct ns *ns, struct snapshot_part *part,
                     const void *data)
{
    assert(w->n < w->cap);
    part->ns = w->ns_number[index_ns_place(w->of->modules.index, ns)] - 1;
    snapshot_part_encode(part_at(w, w->n), part);
    w->memory[w->n++] = (struct sums_part){.data = data, .bytes = ns_part_bytes(ns, part->part)};
}

/* Its bytes were not looked at since the last snapshot: the next run compares them. */
static void part_unloaded_cb(void *ctx, struct ns *ns, const struct snapshot_part *part)
{
    struct snapshot_part again = *part;

    part_add(ctx, ns, &again, NULL);
}

static void block_cb(void *ctx, block_ref ref, uint32_t uses)
{
    struct snapshot_write *w = ctx;
    const struct snapshot_modules *modules = &w->of->modules;
    const struct block *b = index_block(modules->index, ref);
    const struct ns *ns = index_ns(modules->index, b->ns);
    struct snapshot_part part = {.uses = uses};
    struct span span;

    if (!block_found(b, ns))
        return;
    memcpy(part.key, b->key, sizeof(part.key));
    for (part.part = 0; part.part < ns->identity.parts; part.part++) {
        const struct part *p = &b->part[part.part];

        if (p->dram != PART_DRAM_READY)
            continue;
        if (arena_slot_group(modules->arena, part_slot(p))) { /* memory that ends with the daemon */
            w->in_groups++;
            w->lost += !part_clean(p);
            continue;
        }
        part.stored = p->nvme == PART_NVME_READY;
        part.checksum = p->encrypted ? 0 : p->checksum; /* 0: not known */
        arena_slot_position(modules->arena, part_slot(p), &part.slab, &part.slot);
        if (span_kept(modules->cache, part_slot(p), ns_form(ns, part.part), &span) == 0)
            part_add(w, ns, &part, part.checksum ? NULL : span.origin);
    }
}

static bool sum_part_cb(void *ctx, uint64_t i, struct sums_part *out)
{
    struct snapshot_write *w = ctx;

    *out = w->memory[i];
    return true;
}

static void sum_done_cb(void *ctx, uint64_t i, const struct sums_part *part)
{
    if (part->data)
        snapshot_checksum_put(part_at(ctx, i), part->checksum);
}

/* ---- begin and end ---- */

static void write_free(struct snapshot_write *w)
{
    free(w->ns_number);
    free(w->memory);
    free(w);
}

int snapshot_start(struct snapshot *s)
{
    struct snapshot_write *w = calloc(1, sizeof(*w));
    size_t head_bytes;
    int rc = -ENOMEM;

    if (!w)
        return rc;
    w->of = s;
    w->start_ns = uv_hrtime();
    w->cap = arena_slots_used(s->modules.arena);
    w->ns_number = calloc(index_ns_places(s->modules.index), sizeof(*w->ns_number));
    w->memory = calloc(w->cap + 1, sizeof(*w->memory));
    if (!w->ns_number || !w->memory)
        goto err_after_write;
    head_bytes = SNAPSHOT_HEAD_BYTES + namespaces_number(w);
    rc = persist_create(s->persist, head_bytes + w->cap * SNAPSHOT_PART_BYTES, &w->snapshot);
    if (rc < 0)
        goto err_after_write;
    w->parts = w->snapshot + head_bytes;
    namespaces_write(w);
    policy_walk(s->modules.policy, block_cb, w);
    snapshot_unloaded(s, part_unloaded_cb, w);
    w->sums = (struct sums){.loop = s->modules.loop,
                            .pieces = SUMS_PIECES,
                            .n = w->n,
                            .part_cb = sum_part_cb,
                            .done_cb = sum_done_cb,
                            .ctx = w};
    s->write = w;
    (void)sums_pump(&w->sums);
    return 0;

err_after_write:
    log_warn(MODULE, "snapshot-not-written", "error=%s", strerror(-rc));
    write_free(w);
    return rc;
}

void snapshot_cut(struct snapshot *s)
{
    s->write->sums.n = s->write->sums.at;
}

bool snapshot_ready(const struct snapshot *s)
{
    const struct sums *sums = &s->write->sums;

    return sums->at == sums->n && !sums_busy(sums);
}

/* Leaves out the parts whose checksum was not computed in time. */
static uint64_t parts_pack(struct snapshot_write *w, uint64_t *bytes)
{
    uint64_t n = 0;

    for (uint64_t i = 0; i < w->n; i++) {
        struct snapshot_part part;

        snapshot_part_decode(part_at(w, i), &part);
        if (part.checksum == 0)
            continue;
        if (i != n)
            memcpy(part_at(w, n), part_at(w, i), SNAPSHOT_PART_BYTES);
        *bytes += w->memory[i].bytes;
        n++;
    }
    return n;
}

void snapshot_finish(struct snapshot *s)
{
    struct snapshot_write *w = s->write;
    uint64_t bytes = 0;
    struct snapshot_head head = {.arena = persist_identity(s->persist),
                                 .slab = arena_slab_bytes(s->modules.arena),
                                 .parts = parts_pack(w, &bytes),
                                 .namespaces = w->namespaces};
    int rc;

    snprintf(head.program, sizeof(head.program), "ucmd %s", UCM_VERSION);
    snapshot_complete(w->snapshot, (size_t)(part_at(w, head.parts) - w->snapshot), &head);
    rc = persist_commit(s->persist);
    if (rc == 0)
        log_info(MODULE, "snapshot-written",
                 "parts=%" PRIu64 " of=%" PRIu64 " bytes=%" PRIu64 " in_mappings=%" PRIu64
                 " lost=%" PRIu64 " seconds=%.3f",
                 head.parts, w->n, bytes, w->in_groups, w->lost,
                 (double)(uv_hrtime() - w->start_ns) / 1e9);
    else
        log_warn(MODULE, "snapshot-not-written", "error=%s", strerror(-rc));
    s->write = NULL;
    snapshot_forget(s);
    write_free(w);
}
