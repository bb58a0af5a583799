/* Blocks that wait to be written: their queues, the tenants' turns, and the counters. */
#include "daemon/cache/internal.h"

#include <errno.h>
#include <stdlib.h>

/* A block that is removed while it waits leaves its number here, so that the index's bound is none
 * for the queue. */
#define QUEUE_MAX (1u << 20)

static int queue_grow(struct block_queue *q)
{
    uint32_t cap = q->cap ? 2 * q->cap : 1024;
    block_ref *entries;

    if (q->n == QUEUE_MAX)
        return -ENOSPC;
    entries = malloc(cap * sizeof(*entries));
    if (!entries)
        return -ENOMEM;
    for (uint32_t i = 0; i < q->n; i++)
        entries[i] = q->entries[(q->head + i) % q->cap];
    free(q->entries);
    *q = (struct block_queue){.entries = entries, .n = q->n, .cap = cap};
    return 0;
}

int queue_push(struct block_queue *q, block_ref ref)
{
    int rc = q->n == q->cap ? queue_grow(q) : 0;

    if (rc == 0)
        q->entries[(q->head + q->n++) % q->cap] = ref;
    return rc;
}

int queue_push_front(struct block_queue *q, block_ref ref)
{
    int rc = q->n == q->cap ? queue_grow(q) : 0;

    if (rc < 0)
        return rc;
    q->head = (q->head + q->cap - 1) % q->cap;
    q->entries[q->head] = ref;
    q->n++;
    return 0;
}

static block_ref queue_pop(struct block_queue *q)
{
    block_ref ref = q->entries[q->head];

    q->head = (q->head + 1) % q->cap;
    q->n--;
    return ref;
}

block_ref queue_pop_last(struct block_queue *q)
{
    return q->entries[(q->head + --q->n) % q->cap];
}

/* ---- tenants' queues ---- */

int writes_push(struct write_target *t, const struct tenant *of, block_ref ref, bool front)
{
    struct write_lane *lane = &t->lane[1 + (of->id - 1) % (FAIR_LANES - 1)];
    int rc = front ? queue_push_front(&lane->queue, ref) : queue_push(&lane->queue, ref);

    if (rc != 0)
        return rc;
    t->n++;
    lane->who = tenant_who(of);
    if (!lane->waits)
        fair_queue_push(&t->turns, &lane->who, 0, &lane->link, false);
    lane->waits = true;
    return 0;
}

block_ref writes_pop(struct write_target *t, struct write_lane **lane)
{
    *lane = LIST_ENTRY(fair_queue_first(&t->turns), struct write_lane, link);
    t->n--;
    return queue_pop(&(*lane)->queue);
}

void writes_charge(struct write_target *t, struct write_lane *lane, uint64_t bytes)
{
    lane->waits = lane->queue.n > 0;
    if (!lane->waits)
        list_remove(&lane->link);
    if (bytes > 0)
        fair_queue_charge(&t->turns, &lane->who, bytes, NULL);
}

void writes_free(struct write_target *t)
{
    for (uint32_t i = 0; i < FAIR_LANES; i++)
        free(t->lane[i].queue.entries);
    free(t->stalled.entries);
}

/* ---- what waits ---- */

const uint16_t write_flags[WRITE_TARGETS] = {BLOCK_QUEUED, BLOCK_SHARED_QUEUED};

uint64_t *write_dropped(struct cache *c, enum write_to to)
{
    struct metrics *m = c->config.metrics;

    return to == WRITE_NVME ? &m->nvme_write_dropped : &m->shared_write_dropped;
}

/* The bytes of the block that lie in DRAM and not on NVMe: dirty while it waits. */
uint64_t cache_block_dirty(const struct block *b, const struct ns *ns)
{
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < ns->identity.parts; i++)
        if (b->part[i].dram == PART_DRAM_READY && b->part[i].nvme == PART_NVME_NONE)
            bytes += arena_padded(ns_part_bytes(ns, i));
    return bytes;
}

void cache_queued_set(struct cache *c, enum write_to to, block_ref ref, bool queued)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);
    uint64_t dirty = to == WRITE_NVME ? cache_block_dirty(b, ns) : 0;

    if (queued) {
        b->flags |= write_flags[to];
        c->dirty_bytes += dirty;
    } else {
        b->flags &= (uint16_t)~write_flags[to];
        c->dirty_bytes -= dirty;
        cache_less_dirty(c);
        cache_reconsider(c, ref);
    }
}

/* The block that `ref` named when it was queued may be gone, and another have its number. If that
 * one waits too, it has its turn early. */
bool cache_still_waits(struct cache *c, enum write_to to, block_ref ref)
{
    const struct block *b = index_peek(c->config.index, ref);

    return b && b->flags & write_flags[to];
}

/* The block is not written: a queue is full. */
void cache_write_give_up(struct cache *c, enum write_to to, block_ref ref)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);

    *write_dropped(c, to) += cache_parts_missing(b, ns, to);
    cache_queued_set(c, to, ref, false);
}

/* ---- what a target lacks of a block ---- */

enum part_below part_below(const struct part *p, enum write_to to)
{
    if (to == WRITE_NVME)
        return p->nvme == PART_NVME_READY     ? COPY_THERE
               : p->nvme == PART_NVME_WRITING ? COPY_WRITING
                                              : COPY_NONE;
    return p->shared == PART_SHARED_KNOWN     ? COPY_THERE
           : p->shared == PART_SHARED_WRITING ? COPY_WRITING
                                              : COPY_NONE;
}

static bool shared_writing(const struct block *b, const struct ns *ns)
{
    for (uint32_t i = 0; i < ns->identity.parts; i++)
        if (b->part[i].shared == PART_SHARED_WRITING)
            return true;
    return false;
}

/* A part that left DRAM before its turn was counted for NVMe when it left (space.c). The end of the
 * others' writes counts the last part of the shared tier (cache_write_next_part). */
uint32_t cache_parts_missing(const struct block *b, const struct ns *ns, enum write_to to)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < ns->identity.parts; i++)
        n += part_below(&b->part[i], to) == COPY_NONE &&
             (to == WRITE_SHARED || b->part[i].dram == PART_DRAM_READY);
    return n - (n > 0 && to == WRITE_SHARED && shared_writing(b, ns));
}

void cache_write_next_part(struct cache *c, block_ref ref, uint32_t part)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);

    if (part == ns->identity.parts - 1 || b->flags & (BLOCK_SHARED_QUEUED | BLOCK_DELETING) ||
        shared_writing(b, ns))
        return;
    /* In front: the block's other parts are in DRAM now, and may not be later. */
    if (!c->no_writes && writes_push(&c->write[WRITE_SHARED], ns->tenant, ref, true) == 0)
        cache_queued_set(c, WRITE_SHARED, ref, true);
    else
        c->config.metrics->shared_write_dropped++; /* the last part */
}

/* ---- what may not be written now ---- */

void cache_write_unstall(struct cache *c, enum write_to to, block_ref ref)
{
    if (cache_still_waits(c, to, ref) &&
        writes_push(&c->write[to], cache_ns(c, ref)->tenant, ref, true) != 0)
        cache_write_give_up(c, to, ref);
}

void cache_writes_unstall(struct cache *c)
{
    for (enum write_to to = 0; to < WRITE_TARGETS; to++)
        while (c->write[to].stalled.n > 0)
            cache_write_unstall(c, to, queue_pop_last(&c->write[to].stalled));
    list_splice_front(&c->durables.waiting, &c->durables.stalled);
    cache_released(c);
    if (!list_empty(&c->durables.waiting))
        cache_wake(c, CHORE_WRITE_NVME);
}

void cache_writes_with_secret(struct cache *c)
{
    c->with_secret = c->without_secret.n;
    cache_wake(c, CHORE_SECRETS);
    cache_released(c);
}
