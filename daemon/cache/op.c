#include "daemon/cache/op.h"

#include "daemon/cache/internal.h"
#include "daemon/encryption/encryption.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- names ---- */

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

bool cache_encrypted(const struct cache *c, const struct ns *ns)
{
    return encryption_wanted(c->config.encryption, ns->identity.tenant);
}

bool cache_secret_awaited(const struct cache *c, const struct ns *ns)
{
    const uint8_t *secret;

    return cache_encrypted(c, ns) && shared_secret(c->shared, ns->fingerprint, &secret) == -EAGAIN;
}

bool cache_shared_fingerprint(const struct cache *c, const struct ns *ns,
                              uint8_t out[UCM_FINGERPRINT_BYTES])
{
    return shared_file_fingerprint(c->shared, ns->fingerprint, cache_encrypted(c, ns), out) == 0;
}

static struct block_file_id shared_id(struct cache *c, block_ref ref, uint32_t part)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);
    struct block_file_id id = {.key_bytes = ns->identity.key_bytes, .part = part};

    (void)cache_shared_fingerprint(c, ns, id.fingerprint);
    memcpy(id.key, b->key, ns->identity.key_bytes);
    return id;
}

/* ---- life ---- */

void op_init(struct part_op *op, struct cache *c, const struct op_kind *kind, block_ref ref,
             uint32_t part)
{
    *op = (struct part_op){.kind = kind, .cache = c, .ref = ref, .part = part};
    list_init(&op->waiters);
}

struct part_op *op_new(struct cache *c, const struct op_kind *kind, block_ref ref, uint32_t part)
{
    struct part_op *op = malloc(sizeof(*op));

    if (op)
        op_init(op, c, kind, ref, part);
    return op;
}

/* ---- NVMe ---- */

static void tier_done_cb(struct tier_io *io, int status)
{
    struct part_op *op = LIST_ENTRY(io, struct part_op, io.tier);

    op->cache->tier_busy--;
    op->kind->tier_cb(op, status);
}

/* For some layers, the tier needs the address at which the whole part would begin. */
static void target_set(struct part_op *op, const struct span *span)
{
    struct tier_io *io = &op->io.tier;

    io->data = span->origin;
    io->buffer = arena_slab_of(op->cache->arena, span->slot);
    if (io->op != TIER_READ_LAYERS)
        return;
    io->layer = span->first;
    io->layers = span->n;
    io->data = span->origin - tier_layers_at(io->layer_bytes, io->layer);
}

int op_tier(struct part_op *op, enum tier_op what, const struct span *span)
{
    struct cache *c = op->cache;
    const struct ns *ns = cache_ns(c, op->ref);
    struct tier_io *io = &op->io.tier;
    int rc;

    op->shared = false;
    *io = (struct tier_io){.op = what,
                           .bytes = ns_part_bytes(ns, op->part),
                           .layer_bytes = ns->identity.layer_bytes,
                           .encryption = cache_encrypted(c, ns),
                           .check = op->check,
                           .priority = op->priority,
                           .small = op->small,
                           .name = cache_tier_name(c, op->ref, op->part),
                           .done_cb = tier_done_cb};
    if (!op->check)
        io->who = tenant_who(ns->tenant);
    if (what != TIER_WRITE)
        io->place = part_place(cache_part(c, op->ref, op->part));
    if (span)
        target_set(op, span);
    op->begun_ns = uv_hrtime();
    rc = c->tier_ops->submit(c->tier, io);
    c->tier_busy += rc == 0;
    if (rc == 0 && !op->check && (what == TIER_READ || what == TIER_READ_LAYERS) &&
        policy_heat(index_block(c->config.index, op->ref)) == HEAT_ONCE)
        admission_returned(ns->admits);
    return rc;
}

void op_read_count(const struct part_op *op, uint64_t bytes)
{
    struct metrics_tenant *m = cache_ns(op->cache, op->ref)->tenant->metrics;
    const struct fair_got *got = &op->io.tier.got;

    m->nvme_read_bytes += bytes;
    m->nvme_contended_bytes += got->contended;
    m->nvme_fair_share_bytes += got->due;
}

/* ---- the shared tier ---- */

static void shared_done_cb(struct shared_io *io, int status)
{
    struct part_op *op = LIST_ENTRY(io, struct part_op, io.shared);

    op->cache->shared_busy--;
    op->kind->shared_cb(op, status);
}

int op_shared(struct part_op *op, bool write, const struct span *span)
{
    struct cache *c = op->cache;
    const struct ns *ns = cache_ns(c, op->ref);
    int rc;

    op->shared = true;
    op->io.shared = (struct shared_io){.write = write,
                                       .id = shared_id(c, op->ref, op->part),
                                       .data = span->origin,
                                       .bytes = span->len,
                                       .who = tenant_who(ns->tenant),
                                       .tenant = ns->identity.tenant,
                                       .root = cache_part(c, op->ref, op->part)->root,
                                       .encrypted = cache_encrypted(c, ns),
                                       .space = {.fingerprint = ns->fingerprint,
                                                 .identity = ns->canonical,
                                                 .identity_bytes = ns->canonical_bytes},
                                       .done_cb = shared_done_cb};
    rc = shared_submit(c->shared, &op->io.shared);
    c->shared_busy += rc == 0;
    if (rc == -EAGAIN)
        c->write[WRITE_SHARED].full = true;
    return rc;
}

/* ---- what the tier does ---- */

bool cache_recovering(const struct cache *c)
{
    struct tier_stats stats = {0};

    c->tier_ops->stats(c->tier, &stats);
    return stats.recovering;
}
