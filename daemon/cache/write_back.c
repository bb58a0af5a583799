/* Write-back: two queues of complete blocks, one for each target, NVMe and the shared tier. A
 * tenant's blocks are written from DRAM in the order in which they became complete, a bounded
 * window of bytes at a time; tenants take turns by their weights, in bytes. A part that has left
 * DRAM before its turn is not read back, and not written.
 *
 * A namespace may be closed to writes for a while: until its record is on stable storage, or during
 * a purge, which may take as long as the shared tier. Its blocks and durable parts are stalled:
 * they step aside, so that no other namespace waits for them. So do blocks for the shared tier
 * while the secret of their namespace is being read.
 *
 * The shared tier gets a block's last part when it has all others: a host that finds the last part
 * may count on them. */
#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"

#include "daemon/base/log.h"

#include <errno.h>

/* Parts that one iteration of the event loop begins to write, and blocks that it looks at for them:
 * a queue of small blocks must not hold up lookups. */
#define PUMP_PARTS 4
#define PUMP_BLOCKS 16
/* Blocks without a secret that one iteration of the event loop looks at. */
#define SECRET_LOOKS 256

/* ---- which blocks are written ---- */

static bool write_reused(const struct cache *c, enum write_to to, struct ns *ns)
{
    if (to != WRITE_NVME)
        return c->config.shared_reused;
    return c->config.write_reused || (c->config.write_learned && admission_reused_only(ns->admits));
}

static bool admitted(struct cache *c, enum write_to to, const struct block *b, struct ns *ns)
{
    if (policy_heat(b) > 0)
        return true;
    if (to == WRITE_NVME && c->config.write_learned)
        return admission_first(ns->admits);
    return !write_reused(c, to, ns);
}

/* Also of a block whose last part is there: a root may have lost another one. */
static bool shared_lacks(const struct block *b, const struct ns *ns)
{
    for (uint32_t i = 0; i < ns->identity.parts; i++)
        if (b->part[i].shared == PART_SHARED_NONE)
            return true;
    return false;
}

static bool writable(const struct cache *c, enum write_to to, const struct block *b,
                     const struct ns *ns)
{
    if (!block_complete(b, ns) || b->flags & BLOCK_DELETING)
        return false;
    if (to == WRITE_NVME)
        return c->tier && cache_block_dirty(b, ns) > 0;
    return c->shared && b->dram_parts == ns->identity.parts && shared_lacks(b, ns);
}

/* ---- queueing them ---- */

static void write_later(struct cache *c, enum write_to to, block_ref ref)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    if (c->no_writes || b->flags & write_flags[to] || !writable(c, to, b, ns))
        return;
    if (writes_push(&c->write[to], ns->tenant, ref, false) != 0) {
        *write_dropped(c, to) += cache_parts_missing(b, ns, to);
        return;
    }
    cache_queued_set(c, to, ref, true);
    cache_released(c);
}

void cache_write_stored(struct cache *c, block_ref ref, enum write_to to)
{
    struct metrics *m = c->config.metrics;
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);

    if (admitted(c, to, b, ns))
        write_later(c, to, ref);
    else if (writable(c, to, b, ns))
        *(to == WRITE_NVME ? &m->nvme_write_refused : &m->shared_write_refused) +=
            cache_parts_missing(b, ns, to);
}

static void write_used(struct cache *c, enum write_to to, const block_ref *refs, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (refs[i] != 0 && policy_heat(index_block(c->config.index, refs[i])) > 0)
            write_later(c, to, refs[i]);
}

void cache_write_touched(struct cache *c, struct ns *ns, const block_ref *refs, uint32_t n)
{
    for (enum write_to to = 0; to < WRITE_TARGETS; to++)
        if ((to == WRITE_NVME ? c->tier != NULL : c->shared != NULL) && write_reused(c, to, ns))
            write_used(c, to, refs, n);
}

void cache_write_again(struct cache *c, block_ref ref)
{
    write_later(c, WRITE_NVME, ref);
}

/* Reading a block that other hosts found worth storing is not its first use. */
void cache_write_fetched(struct cache *c, block_ref ref)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);

    if (!writable(c, WRITE_NVME, b, ns))
        return;
    cache_ns_record(c, ns);
    if (write_reused(c, WRITE_NVME, ns))
        write_used(c, WRITE_NVME, &ref, 1);
    else
        write_later(c, WRITE_NVME, ref);
}

/* ---- writing them ---- */

/* Something waits for write-back to that target, which may take it. */
static bool write_waits(const struct cache *c, enum write_to to)
{
    const struct write_target *t = &c->write[to];

    return (t->n > 0 || (to == WRITE_NVME && !list_empty(&c->durables.waiting))) &&
           t->writing_bytes < CACHE_WRITE_WINDOW && !t->full && !c->no_writes;
}

/* 0: the part is being written. 1: nothing is to be done. -EAGAIN: the target accepts none now, or
 * *left, which counts this iteration's parts down, is 0. Another -errno: it can't be
 * written. */
static int part_begin(struct cache *c, enum write_to to, block_ref ref, uint32_t part,
                      unsigned *left)
{
    const struct part *p = cache_part(c, ref, part);
    enum part_below copy = part_below(p, to);
    int rc;

    if (copy != COPY_NONE)
        return copy == COPY_THERE;
    if (p->dram != PART_DRAM_READY)
        return to == WRITE_NVME ? 1 : -ENOENT;
    if (*left == 0)
        return -EAGAIN;
    rc =
        to == WRITE_NVME ? cache_nvme_write(c, ref, part, false) : cache_shared_write(c, ref, part);
    if (rc == -EAGAIN)
        c->write[to].full = true;
    if (rc == 0)
        --*left;
    return rc;
}

/* Begins to write what the target lacks of the block. -EAGAIN: the rest has to wait. The shared
 * tier's last part waits for the others: the end of each (cache_write_next_part) comes here again.
 */
static int block_write(struct cache *c, enum write_to to, block_ref ref, unsigned *left)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);
    uint32_t parts = ns->identity.parts;
    bool under_way = false;

    if (to == WRITE_SHARED && !shared_lacks(b, ns))
        return 0; /* another host was faster, or it is being written */
    for (uint32_t i = 0; i < parts; i++) {
        int rc;

        if (to == WRITE_SHARED && i == parts - 1 && under_way)
            return 0;
        rc = part_begin(c, to, ref, i, left);
        if (rc == -EAGAIN)
            return rc;
        if (rc < 0) {
            *write_dropped(c, to) += cache_parts_missing(b, ns, to);
            return 0;
        }
        under_way |= rc == 0;
    }
    return 0;
}

/* Where its blocks have to wait now; NULL: they may be written. */
static struct block_queue *stalled_in(struct cache *c, const struct ns *ns, enum write_to to)
{
    if (to == WRITE_NVME ? !cache_ns_writable(ns) : ns->purges > 0)
        return &c->write[to].stalled;
    return to == WRITE_SHARED && cache_secret_awaited(c, ns) ? &c->without_secret : NULL;
}

/* What `begun` parts of a block are charged: its parts differ little in size. */
static uint64_t cost_of(const struct ns *ns, unsigned begun)
{
    return ns->block_bytes / ns->identity.parts * begun;
}

/* Takes a block out of its queue. False: it has to stay there, and the target accepts none now.
 * *bytes: of its parts whose write has begun. */
static bool block_take(struct cache *c, enum write_to to, block_ref ref, unsigned *left,
                       uint64_t *bytes)
{
    struct write_target *t = &c->write[to];
    struct block_queue *stalled;
    unsigned before = *left;
    struct ns *ns;
    bool deleting, over;

    if (!cache_still_waits(c, to, ref))
        return true;
    deleting = index_block(c->config.index, ref)->flags & BLOCK_DELETING;
    stalled = deleting ? NULL : stalled_in(c, cache_ns(c, ref), to);
    if (stalled) {
        if (queue_push(stalled, ref) != 0)
            cache_write_give_up(c, to, ref);
        else if (stalled == &c->without_secret && c->with_secret > 0)
            c->with_secret++; /* it is the last one, where the look goes on */
        return true;
    }
    cache_queued_set(c, to, ref, false);
    if (deleting)
        return true;
    ns = cache_ns(c, ref);
    over = block_write(c, to, ref, left) != -EAGAIN;
    *bytes = cost_of(ns, before - *left);
    if (!over) {
        cache_queued_set(c, to, ref, true);
        (void)writes_push(t, ns->tenant, ref, true); /* where it was: there is a place */
    }
    return over;
}

static bool queue_take(struct cache *c, enum write_to to, unsigned *left)
{
    struct write_lane *lane;
    uint64_t bytes = 0;
    block_ref ref = writes_pop(&c->write[to], &lane);
    bool over = block_take(c, to, ref, left, &bytes);

    writes_charge(&c->write[to], lane, bytes);
    return over;
}

void cache_writes_abandon(struct cache *c)
{
    uint32_t blocks[WRITE_TARGETS] = {0};

    for (enum write_to to = 0; to < WRITE_TARGETS; to++) {
        while (c->write[to].n > 0) {
            struct write_lane *lane;
            block_ref ref = writes_pop(&c->write[to], &lane);
            struct ns *ns;
            const struct block *b;
            uint32_t parts;

            writes_charge(&c->write[to], lane, 0);
            if (!cache_still_waits(c, to, ref))
                continue;
            b = cache_block(c, ref, &ns);
            parts = b->flags & BLOCK_DELETING ? 0 : cache_parts_missing(b, ns, to);
            cache_queued_set(c, to, ref, false);
            *write_dropped(c, to) += parts;
            blocks[to] += parts > 0;
        }
    }
    if (blocks[WRITE_NVME] + blocks[WRITE_SHARED] > 0)
        log_warn("cache", "write-back-cut", "nvme_blocks=%u shared_blocks=%u", blocks[WRITE_NVME],
                 blocks[WRITE_SHARED]);
}

/* The end of recovery goes on. */
static bool has_to_wait(const struct cache *c, enum write_to to)
{
    return to == WRITE_NVME && cache_recovering(c);
}

/* Begins some writes. True: there is more for the next iteration of the event loop. */
static bool write_some(struct cache *c, enum write_to to)
{
    unsigned left = PUMP_PARTS;

    if (to == WRITE_NVME)
        cache_durables_retry(
            c); /* of these, what is on NVMe does not wait for the end of recovery */
    if (has_to_wait(c, to))
        return false;
    for (int i = 0; i < PUMP_BLOCKS && left > 0; i++)
        if (c->write[to].n == 0 || !write_waits(c, to) || !queue_take(c, to, &left))
            break;
    return c->write[to].n > 0 && write_waits(c, to);
}

static bool write_run(struct cache *c, enum write_to to)
{
    bool more = write_some(c, to);

    c->lists.fruitless = 0; /* a block that no longer waits may be dropped for a new one */
    return more;
}

bool cache_write_nvme_run(void *ctx)
{
    return write_run(ctx, WRITE_NVME);
}

bool cache_write_shared_run(void *ctx)
{
    return write_run(ctx, WRITE_SHARED);
}

static bool write_ready(const struct cache *c, enum write_to to)
{
    return c->write[to].n > 0 && write_waits(c, to) && !has_to_wait(c, to);
}

bool cache_write_nvme_ready(const void *ctx)
{
    return write_ready(ctx, WRITE_NVME);
}

bool cache_write_shared_ready(const void *ctx)
{
    return write_ready(ctx, WRITE_SHARED);
}

/* From the last one on, so that each comes to be in front of those that came after it. */
bool cache_writes_secret(struct cache *c)
{
    struct block_queue *q = &c->without_secret;

    for (int i = 0; i < SECRET_LOOKS && c->with_secret > 0; i++, c->with_secret--) {
        block_ref ref = queue_pop_last(q);

        if (!c->no_writes && cache_still_waits(c, WRITE_SHARED, ref) &&
            cache_secret_awaited(c, cache_ns(c, ref)))
            (void)queue_push_front(q, ref); /* there is a place */
        else
            cache_write_unstall(c, WRITE_SHARED, ref);
    }
    cache_released(c);
    return c->with_secret > 0;
}

bool cache_secrets_run(void *ctx)
{
    struct cache *c = ctx;

    return c->with_secret > 0 && cache_writes_secret(c);
}

bool cache_secrets_ready(const void *ctx)
{
    return ((const struct cache *)ctx)->with_secret > 0;
}
