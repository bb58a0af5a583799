/* Write-behind: complete blocks go to the tier in the order in which they became complete, a
 * bounded window of bytes at a time. What is evicted before its turn is simply not written. */
#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct cache_write {
    struct tier_io io;
    struct cache *cache;
    block_ref ref;
    uint32_t part, number;
    struct list waiters; /* of cache_durable.link */
};

/* The bytes of the block that wait because of BLOCK_QUEUED. */
static uint64_t block_dirty(const struct block *b, const struct ns *ns)
{
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < ns->identity.parts; i++)
        if (b->part[i].dram == PART_DRAM_READY && b->part[i].nvme == PART_NVME_NONE)
            bytes += arena_padded(ns_part_bytes(ns, i));
    return bytes;
}

/* Something of it lies in DRAM alone. */
static bool block_writable(const struct block *b, const struct ns *ns)
{
    return block_complete(b, ns) && !(b->flags & BLOCK_DOOMED) && block_dirty(b, ns) > 0;
}

void cache_write_later(struct cache *c, block_ref ref)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    if (!c->tier || c->no_writes || b->flags & BLOCK_QUEUED)
        return;
    /* A number that was reused while it waited names a block that waits as well, or is passed over.
     */
    if (queue_push(&c->queue, (struct write_entry){.ref = ref}) != 0) {
        c->config.metrics->nvme_write_dropped += ns->identity.parts;
        return;
    }
    b->flags |= BLOCK_QUEUED;
    c->dirty_bytes += block_dirty(b, ns);
    cache_released(c);
}

void cache_write_stored(struct cache *c, block_ref ref)
{
    if (!c->config.write_reused || policy_heat(c->config.policy, ref) > 0)
        cache_write_later(c, ref);
    else if (c->tier)
        c->config.metrics->nvme_write_refused += cache_ns(c, ref)->identity.parts;
}

void cache_write_used(struct cache *c, block_ref ref)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);

    if (c->config.write_reused && block_writable(b, ns) && policy_heat(c->config.policy, ref) > 0)
        cache_write_later(c, ref);
}

void cache_write_again(struct cache *c, block_ref ref)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);

    if (block_writable(b, ns))
        cache_write_later(c, ref);
}

/* One that other hosts found worth storing is not seen for the first time by reading it. */
void cache_write_fetched(struct cache *c, block_ref ref)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);

    if (!c->tier || !block_complete(b, ns) || b->flags & BLOCK_DOOMED)
        return;
    cache_ns_record(c, ns);
    if (c->config.write_reused)
        cache_write_used(c, ref);
    else
        cache_write_later(c, ref);
}

static void write_done_cb(struct tier_io *io, int status)
{
    struct cache_write *w = (struct cache_write *)io;
    struct cache *c = w->cache;
    block_ref ref = w->ref;
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);
    struct list waiters, *node;

    c->tier_busy--;
    table_remove(&c->writes, w->number);
    c->writing_bytes -= io->bytes;
    part_unuse(c, &b->part[w->part]);
    if (status == 0)
        part_set_nvme(c, ref, w->part, PART_NVME_READY, &io->place);
    else
        part_set_nvme(c, ref, w->part, PART_NVME_NONE, NULL);
    list_init(&waiters);
    while ((node = list_pop_front(&w->waiters)) != NULL)
        list_push_back(&waiters, node);
    free(w);
    cache_settle(c, ref);
    cache_released(c);
    cache_durables_written(&waiters, status);
    cache_durables_retry(c);
}

struct list *cache_write_waiters(struct cache *c, const struct part *p)
{
    return &((struct cache_write *)table_get(&c->writes, (uint32_t)p->loc))->waiters;
}

int cache_part_write(struct cache *c, block_ref ref, uint32_t part)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);
    struct cache_write *w = calloc(1, sizeof(*w));
    struct part *p = &b->part[part];
    int rc;

    if (!w)
        return -ENOMEM;
    w->number = table_add(&c->writes, w);
    if (w->number == 0) {
        free(w);
        return -EAGAIN;
    }
    list_init(&w->waiters);
    w->cache = c;
    w->ref = ref;
    w->part = part;
    w->io.op = TIER_WRITE;
    w->io.data = arena_memory(c->arena, p->slot);
    w->io.bytes = ns_part_bytes(ns, part);
    w->io.buffer = arena_extent_of(c->arena, p->slot);
    memcpy(w->io.name.fingerprint, ns->fingerprint, sizeof(w->io.name.fingerprint));
    memcpy(w->io.name.key, b->key, sizeof(w->io.name.key));
    w->io.name.key_bytes = ns->identity.key_bytes;
    w->io.name.part = part;
    w->io.name.owner = part_owner(ref, part);
    w->io.done = write_done_cb;
    rc = c->tier_ops->submit(c->tier, &w->io);
    if (rc != 0) {
        table_remove(&c->writes, w->number);
        free(w);
        return rc;
    }
    part_use(c, p);
    /* loc: where to find the write while it is under way */
    part_set_nvme(c, ref, part, PART_NVME_WRITING, &(struct tier_place){.loc = w->number});
    c->tier_busy++;
    c->writing_bytes += ns_part_bytes(ns, part);
    return 0;
}

/* At most *left parts, which counts down. -EAGAIN: that was all of them, or the tier's queue is
 * full; the rest of the block must wait. */
static int block_write(struct cache *c, block_ref ref, struct block *b, struct ns *ns,
                       unsigned *left)
{
    for (uint32_t i = 0; i < ns->identity.parts; i++) {
        int rc;

        if (b->part[i].dram != PART_DRAM_READY || b->part[i].nvme != PART_NVME_NONE)
            continue;
        rc = *left > 0 ? cache_part_write(c, ref, i) : -EAGAIN;
        if (rc == -EAGAIN)
            return rc;
        --*left;
        if (rc != 0)
            c->config.metrics->nvme_write_dropped++;
    }
    return 0;
}

/* Begun in one turn of the loop, and blocks looked at for them: a queue of small ones must not hold
 * up lookups. */
#define PUMP_PARTS 4
#define PUMP_BLOCKS 16

/* They came before what is queued; what finds no room there comes as that gets shorter. */
void cache_writes_unhold(struct cache *c)
{
    while (c->held_queue.n > 0 && queue_push_front(&c->queue, queue_last(&c->held_queue)) == 0)
        c->held_queue.n--;
    c->unholding = c->held_queue.n > 0;
}

/* False: the turn's share is used up, or the tier's queue is full, whose end comes here again. */
static bool queue_step(struct cache *c, unsigned *left)
{
    struct write_entry entry = queue_pop(&c->queue);
    block_ref ref = entry.ref;
    struct block *b = index_peek(c->config.index, ref);
    struct ns *ns;

    if (!b || !(b->flags & BLOCK_QUEUED))
        return true;
    ns = index_ns(c->config.index, b->ns);
    if (!cache_ns_writable(ns) && !(b->flags & BLOCK_DOOMED)) {
        if (queue_push(&c->held_queue, entry) == 0)
            return true;
        queue_unpop(&c->queue, entry);
        return false;
    }
    c->dirty_bytes -= block_dirty(b, ns);
    b->flags &= (uint16_t)~BLOCK_QUEUED;
    if (b->flags & BLOCK_DOOMED || block_write(c, ref, b, ns, left) != -EAGAIN)
        return true;
    b->flags |= BLOCK_QUEUED;
    c->dirty_bytes += block_dirty(b, ns);
    queue_unpop(&c->queue, entry);
    return false;
}

void cache_write_pump(struct cache *c)
{
    unsigned left = PUMP_PARTS;

    if (c->unholding)
        cache_writes_unhold(c);
    if (c->queue.n == 0 || cache_recovering(c))
        return;
    for (int i = 0; i < PUMP_BLOCKS && left > 0; i++) {
        if (c->queue.n == 0 || c->writing_bytes >= CACHE_WRITE_WINDOW || c->no_writes)
            return;
        if (!queue_step(c, &left) && left > 0)
            return;
    }
    cache_released(c);
}
