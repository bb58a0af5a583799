#include "daemon/cache/op.h"

#include "daemon/cache/internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct tier_name cache_tier_name(struct cache *c, block_ref ref, uint32_t part)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);
    struct tier_name name = {
        .key_bytes = ns->identity.key_bytes, .part = part, .owner = part_owner(ref, part)};

    memcpy(name.fingerprint, ns->fingerprint, sizeof(name.fingerprint));
    memcpy(name.key, b->key, sizeof(name.key));
    return name;
}

void cache_tier_io(struct cache *c, struct tier_io *io, enum tier_op op, block_ref ref,
                   uint32_t part, const struct span *span)
{
    *io = (struct tier_io){.op = op,
                           .bytes = ns_part_bytes(cache_ns(c, ref), part),
                           .who = tenant_who(cache_ns(c, ref)->tenant),
                           .shard_bytes = cache_ns(c, ref)->identity.shard_bytes,
                           .seal = cache_sealed(c, cache_ns(c, ref)),
                           .name = cache_tier_name(c, ref, part)};
    if (op != TIER_WRITE)
        io->place = part_place(cache_part(c, ref, part));
    if (span) {
        io->data = span->origin;
        io->buffer = arena_extent_of(c->arena, span->slot);
    }
}

int cache_tier_submit(struct cache *c, struct tier_io *io)
{
    int rc = c->tier_ops->submit(c->tier, io);

    c->tier_busy += rc == 0;
    return rc;
}

void cache_tier_read(struct cache *c, block_ref ref, const struct tier_io *io, uint64_t bytes)
{
    struct metrics_tenant *m = cache_ns(c, ref)->tenant->metrics;

    m->nvme_read_bytes += bytes;
    m->nvme_contended_bytes += io->got.contended;
    m->nvme_due_bytes += io->got.due;
}

struct part_op *op_new(struct cache *c, const struct op_kind *kind, block_ref ref, uint32_t part)
{
    struct part_op *op = calloc(1, sizeof(*op));

    if (!op)
        return NULL;
    op->kind = kind;
    op->cache = c;
    op->ref = ref;
    op->part = part;
    list_init(&op->waiters);
    return op;
}

static void tier_done_cb(struct tier_io *io, int status)
{
    struct part_op *op = LIST_ENTRY(io, struct part_op, io.tier);

    op->cache->tier_busy--;
    op->kind->tier_cb(op, status);
}

int op_tier(struct part_op *op, enum tier_op what, const struct span *span)
{
    struct tier_io *io = &op->io.tier;

    op->shared = false;
    cache_tier_io(op->cache, io, what, op->ref, op->part, span);
    io->priority = op->priority;
    io->small = op->small;
    io->check = op->check;
    if (op->check)
        io->who = (struct fair_who){0};
    io->done_cb = tier_done_cb;
    op->begun_ns = uv_hrtime();
    return cache_tier_submit(op->cache, io);
}

static void share_done_cb(struct share_io *io, int status)
{
    struct part_op *op = LIST_ENTRY(io, struct part_op, io.share);

    op->cache->share_busy--;
    op->kind->share_cb(op, status);
}

static void share_released_cb(struct share_io *io)
{
    struct part_op *op = LIST_ENTRY(io, struct part_op, io.share);

    op->kind->released_cb(op);
}

int op_share(struct part_op *op, bool write, const struct span *span)
{
    struct cache *c = op->cache;
    const struct ns *ns = cache_ns(c, op->ref);
    int rc;

    op->shared = true;
    op->io.share = (struct share_io){.write = write,
                                     .id = cache_shared_id(c, op->ref, op->part),
                                     .data = span->origin,
                                     .bytes = span->len,
                                     .who = tenant_who(ns->tenant),
                                     .tenant = ns->identity.tenant,
                                     .root = cache_part(c, op->ref, op->part)->root,
                                     .sealed = cache_sealed(c, ns),
                                     .space = {.fingerprint = ns->fingerprint,
                                               .identity = ns->canonical,
                                               .identity_bytes = ns->canonical_bytes},
                                     .done_cb = share_done_cb,
                                     .released_cb = share_released_cb};
    rc = share_submit(c->share, &op->io.share);
    c->share_busy += rc == 0;
    if (rc == -EAGAIN)
        c->write[WRITE_SHARE].full = true;
    return rc;
}
