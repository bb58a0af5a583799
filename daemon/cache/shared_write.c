/* Write-behind to the shared tier: complete blocks in the order in which they became complete,
 * straight from DRAM, a bounded window of bytes at a time and behind all reads. What has left DRAM
 * before its turn is not read back for it, and not written.
 *
 * A block's last part is written when all others are there: whoever finds it may count on them. */
#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"

#include <errno.h>
#include <stdlib.h>

struct shared_write {
    struct share_io io;
    struct cache *cache;
    block_ref ref;
    uint32_t part;
};

/* Begun in one turn of the loop, and blocks looked at for them. */
#define PUMP_PARTS 4
#define PUMP_BLOCKS 16

/* ---- one part ---- */

static void write_told(struct shared_write *w, int status)
{
    struct cache *c = w->cache;
    struct ns *ns;
    struct block *b = cache_block(c, w->ref, &ns);

    if (status != 0)
        c->config.metrics->share_write_dropped++;
    part_set_share(c, w->ref, w->part, status == 0 ? PART_SHARE_KNOWN : PART_SHARE_NONE,
                   status == 0 ? w->io.root : 0);
    if (status != 0 || w->part == ns->identity.parts - 1 ||
        b->flags & (BLOCK_SHARE_QUEUED | BLOCK_DOOMED))
        return;
    /* Its other parts are in DRAM now, and may not be when those behind have had their turn. */
    if (queue_push_front(&c->share_queue, (struct write_entry){.ref = w->ref}) == 0)
        b->flags |= BLOCK_SHARE_QUEUED;
    else
        c->config.metrics->share_write_dropped++;
}

static void write_done_cb(struct share_io *io, int status)
{
    struct shared_write *w = LIST_ENTRY(io, struct shared_write, io);

    w->cache->share_busy--;
    w->cache->share_writing_bytes -= io->bytes;
    write_told(w, status);
    cache_released(w->cache);
}

/* The slot stays until now, and with it the block. */
static void write_released_cb(struct share_io *io)
{
    struct shared_write *w = LIST_ENTRY(io, struct shared_write, io);

    cache_put(w->cache, w->ref, w->part);
    free(w);
}

/* A part in DRAM. 0, -EAGAIN: not now, or another -errno: it will not be written. */
static int part_write(struct cache *c, block_ref ref, uint32_t part)
{
    struct ns *ns;
    struct part *p = &cache_block(c, ref, &ns)->part[part];
    struct shared_write *w = calloc(1, sizeof(*w));
    int rc;

    if (!w)
        return -ENOMEM;
    w->cache = c;
    w->ref = ref;
    w->part = part;
    w->io = (struct share_io){.write = true,
                              .id = cache_shared_id(c, ref, part),
                              .data = arena_memory(c->arena, p->slot),
                              .bytes = ns_part_bytes(ns, part),
                              .done_cb = write_done_cb,
                              .released_cb = write_released_cb};
    rc = c->share_ops->submit(c->share, &w->io);
    if (rc != 0) {
        free(w);
        if (rc == -EAGAIN) {
            c->share_full = true;
            c->config.metrics->share_write_waits++;
        }
        return rc;
    }
    part_use(c, p);
    part_set_share(c, ref, part, PART_SHARE_WRITING, 0);
    c->share_busy++;
    c->share_writing_bytes += w->io.bytes;
    return 0;
}

/* ---- blocks ---- */

/* Begins what can be begun of the block, at most *left parts. -EAGAIN: not all of that could be
 * now. When the last part has to wait for others, the end of each comes here again. */
static int block_write(struct cache *c, block_ref ref, unsigned *left)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);
    uint32_t last = ns->identity.parts - 1;
    bool waits = false;

    if (b->part[last].share != PART_SHARE_NONE)
        return 0; /* another host was faster, or it is on its way */
    for (uint32_t i = 0; i <= last && !(i == last && waits); i++) {
        const struct part *p = &b->part[i];
        int rc = p->dram == PART_DRAM_READY ? 0 : -ENOENT;

        waits = waits || p->share == PART_SHARE_WRITING;
        if (p->share == PART_SHARE_KNOWN || p->share == PART_SHARE_WRITING)
            continue;
        if (rc == 0)
            rc = *left > 0 ? part_write(c, ref, i) : -EAGAIN;
        if (rc == -EAGAIN)
            return rc;
        if (rc != 0) {
            c->config.metrics->share_write_dropped += last + 1 - i;
            return 0;
        }
        --*left;
        waits = true;
    }
    return 0;
}

/* False: the entry at the head has to wait. */
static bool queue_step(struct cache *c, unsigned *left)
{
    struct write_entry e = queue_pop(&c->share_queue);
    struct block *b = index_peek(c->config.index, e.ref);
    int rc = 0;

    if (b && b->flags & BLOCK_SHARE_QUEUED) {
        b->flags &= (uint16_t)~BLOCK_SHARE_QUEUED;
        if (!(b->flags & BLOCK_DOOMED) && cache_ns(c, e.ref)->purges == 0)
            rc = block_write(c, e.ref, left);
        else
            c->config.metrics->share_write_dropped += cache_ns(c, e.ref)->identity.parts;
        if (rc == -EAGAIN)
            b->flags |= BLOCK_SHARE_QUEUED;
    }
    if (rc == -EAGAIN)
        queue_unpop(&c->share_queue, e);
    return rc != -EAGAIN;
}

bool cache_shared_waits(const struct cache *c)
{
    return c->share_queue.n > 0 && c->share_writing_bytes < CACHE_WRITE_WINDOW && !c->share_full &&
           !c->no_writes;
}

void cache_shared_pump(struct cache *c)
{
    unsigned left = PUMP_PARTS;

    for (int i = 0; i < PUMP_BLOCKS && left > 0 && cache_shared_waits(c); i++)
        if (!queue_step(c, &left))
            break;
}

/* ---- what is worth writing ---- */

static void write_later(struct cache *c, block_ref ref)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);

    if (c->no_writes || b->flags & BLOCK_SHARE_QUEUED ||
        b->part[ns->identity.parts - 1].share != PART_SHARE_NONE)
        return;
    if (queue_push(&c->share_queue, (struct write_entry){.ref = ref}) != 0) {
        c->config.metrics->share_write_dropped += ns->identity.parts;
        return;
    }
    b->flags |= BLOCK_SHARE_QUEUED;
    cache_released(c);
}

void cache_shared_stored(struct cache *c, block_ref ref)
{
    if (!c->share)
        return;
    if (!c->config.share_reused || policy_heat(c->config.policy, ref) > 0)
        write_later(c, ref);
    else
        c->config.metrics->share_write_refused += cache_ns(c, ref)->identity.parts;
}

void cache_shared_used(struct cache *c, block_ref ref)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);

    if (c->share && c->config.share_reused && block_complete(b, ns) && !(b->flags & BLOCK_DOOMED) &&
        b->dram_parts == ns->identity.parts && policy_heat(c->config.policy, ref) > 0)
        write_later(c, ref);
}
