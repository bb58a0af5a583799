/* Building the coded form of blocks that name one (form.c): a queue of complete blocks, and for some of them
 * at a time the builds of their parts, which threads run (cache_coder).
 *
 * Where the coded form goes below, this is the first half of write-behind: the block keeps the flags of the
 * queues that it would wait in, so that it is dirty and spared by eviction, until its coded form waits there
 * in its place. */
#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"

#include <errno.h>
#include <stdlib.h>

/* Blocks that one turn of the loop begins. */
#define PUMP_BLOCKS 16

struct coding_part {
    struct cache_wait w;
    struct coding *op;
    uint32_t part;
};

struct coding {
    struct list link, waits; /* in coding.ops; in coding.waiting */
    struct cache *cache;
    block_ref base, coded; /* leased */
    uint64_t bytes;
    uint32_t parts, next, builds; /* next: part to begin with; builds: under way */
    int status;
    bool built; /* something of the coded block is there for this */
    struct coding_part part[];
};

/* ---- the end of one ---- */

static void count_failed(struct cache *c, int status)
{
    struct metrics *m = c->config.metrics;

    if (status == -ERANGE)
        m->transcode_unfit++;
    else if (status == -EBUSY || status == -EDQUOT || status == -ENOMEM || status == -ENOSPC)
        m->transcode_no_room++;
    else
        m->transcode_failed++;
}

/* What waited for the coded form is written as it is. */
static void write_plain(struct cache *c, block_ref ref)
{
    struct ns *ns;
    struct block *b = cache_block(c, ref, &ns);
    const struct ns_coded_form *form = cache_form_of(ns, b);
    bool waits = !form || form->below; /* else it is in the queues of write-behind itself */

    b->flags &= (uint16_t)~BLOCK_CODING;
    cache_form_forget(c, ref);
    for (enum write_to to = 0; waits && to < WRITE_TARGETS; to++)
        cache_write_handed(c, ref, ref, to);
}

/* A copy in the other form that nobody asked for. */
static void coded_drop(struct cache *c, block_ref ref)
{
    struct block *b = index_peek(c->config.index, ref);
    struct ns *ns = b ? index_ns(c->config.index, b->ns) : NULL;

    if (!b || b->leases > 0 || !block_idle(b, ns))
        return;
    block_drop_dram(c, ref, false);
    cache_settle(c, ref);
}

/* Whether the block may be paired with what was built. */
static int outcome(const struct coding *op)
{
    struct cache *c = op->cache;
    struct ns *ns, *coded_ns;
    const struct block *b = cache_block(c, op->base, &ns);
    const struct block *k = cache_block(c, op->coded, &coded_ns);
    const struct ns_coded_form *form = cache_form_of(ns, b);

    if (op->status != 0)
        return op->status;
    if (!form || form->ended || (b->flags | k->flags) & BLOCK_DOOMED || !block_complete(b, ns))
        return -ECANCELED;
    if (!block_complete(k, coded_ns))
        return -EIO;
    /* It was below already: then the plain one may be, too. */
    return form->below || k->dram_parts == op->parts ? 0 : -EEXIST;
}

static void op_end(struct coding *op)
{
    struct cache *c = op->cache;
    struct ns *ns;
    struct block *b = cache_block(c, op->base, &ns);
    int status = outcome(op);
    bool unwanted = status != 0 && status != -EEXIST;

    list_remove(&op->link);
    c->coding.bytes -= op->bytes;
    if (status == 0) {
        const struct ns_coded_form *form = cache_form_of(ns, b);

        b->flags &= (uint16_t)~BLOCK_CODING;
        cache_pair(c, op->base, op->coded, form->below);
        for (enum write_to to = 0; form->below && to < WRITE_TARGETS; to++)
            cache_write_handed(c, op->base, op->coded, to);
    } else {
        if (unwanted && !(b->flags & BLOCK_DOOMED) && !c->no_writes)
            count_failed(c, status);
        index_block(c->config.index, op->coded)->flags &= (uint16_t)~BLOCK_HELD_BACK;
        write_plain(c, op->base);
        /* Dumps may have stored the coded block meanwhile. */
        for (enum write_to to = 0; !op->built && to < WRITE_TARGETS; to++)
            cache_write_stored(c, op->coded, to);
    }
    cache_unlease(c, op->coded);
    cache_unlease(c, op->base);
    if (unwanted && op->built)
        coded_drop(c, op->coded);
    free(op);
    cache_coding_later(c);
}

/* ---- its builds ---- */

static void op_continue(struct coding *op);

static void built_cb(struct cache_wait *w, int status)
{
    struct coding_part *p = LIST_ENTRY(w, struct coding_part, w);
    struct coding *op = p->op;

    op->builds--;
    if (status == 0)
        cache_put(op->cache, op->coded, p->part);
    else if (op->status == 0)
        op->status = status;
    op_continue(op);
}

/* 0: it is there, or under way; or -errno. */
static int part_begin(struct coding *op, uint32_t part)
{
    struct cache *c = op->cache;
    struct coding_part *p = &op->part[part];
    struct ns *ns;
    const struct block *k = cache_block(c, op->coded, &ns);
    int rc;

    if (k->part[part].dram == PART_DRAM_READY || part_backed(&k->part[part]))
        return 0;
    *p = (struct coding_part){.w.done_cb = built_cb, .op = op, .part = part};
    list_init(&p->w.link);
    rc = c->coder.build(c->coder.ctx, op->base, op->coded, part, &p->w);
    op->builds += rc == CACHE_PENDING;
    op->built |= rc >= 0;
    if (rc == CACHE_READY)
        cache_put(c, op->coded, part);
    return rc < 0 ? rc : 0;
}

/* Waits for a slot, or for something else that is full. */
static bool retry_wait(struct cache *c, int rc)
{
    if (c->no_writes)
        return false;
    return !list_empty(&c->coding.retry.link) ||
           (rc == -EBUSY ? cache_space_wait(c, &c->coding.retry, false)
                         : cache_most_wait(c, &c->coding.retry));
}

static void op_continue(struct coding *op)
{
    struct cache *c = op->cache;

    while (op->status == 0 && op->next < op->parts) {
        int rc = part_begin(op, op->next);

        if ((rc == -EBUSY || rc == -EAGAIN) && op->builds > 0)
            return; /* the end of one goes on */
        if ((rc == -EBUSY || rc == -EAGAIN) && retry_wait(c, rc)) {
            list_push_back(&c->coding.waiting, &op->waits);
            return;
        }
        op->status = rc == -EAGAIN ? -EBUSY : rc;
        op->next += rc == 0;
    }
    if (op->builds == 0)
        op_end(op);
}

static void retry_cb(struct cache_retry *r)
{
    struct cache *c = LIST_ENTRY(r, struct cache, coding.retry);
    struct list waiting, *node;

    list_init(&waiting);
    list_splice_front(&waiting, &c->coding.waiting);
    while ((node = list_pop_front(&waiting)) != NULL)
        op_continue(LIST_ENTRY(node, struct coding, waits));
}

/* ---- the queue ---- */

int cache_coding_push(struct cache *c, block_ref ref)
{
    struct block *b = index_block(c->config.index, ref);
    int rc;

    if (b->flags & BLOCK_CODING)
        return 0;
    rc = queue_push(&c->coding.queue, ref);
    if (rc != 0)
        return rc;
    b->flags |= BLOCK_CODING;
    cache_coding_later(c);
    return 0;
}

/* A part that is only PRESUMED on the shared tier is built, as a dump would store it: the plain block must not
 * be held back for one that may not be there. */
static void presumed_forget(struct cache *c, block_ref ref)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);

    for (uint32_t i = 0; i < ns->identity.parts; i++)
        if (b->part[i].share == PART_SHARE_PRESUMED && b->part[i].dram == PART_DRAM_NONE)
            part_set_share(c, ref, i, PART_SHARE_NONE, 0);
}

/* 0, or -errno: it is not begun. */
static int op_begin(struct cache *c, block_ref ref)
{
    struct ns *ns;
    const struct block *b = cache_block(c, ref, &ns);
    const struct ns_coded_form *form = cache_form_of(ns, b);
    uint32_t parts = ns->identity.parts;
    struct coding *op;
    struct block *k;

    if (!form || form->ended || b->flags & BLOCK_DOOMED || b->dram_parts != parts || c->no_writes)
        return -ECANCELED;
    op = calloc(1, sizeof(*op) + parts * sizeof(op->part[0]));
    if (!op)
        return -ENOMEM;
    cache_lease(c, ref); /* first: a new block may take the place of another */
    op->coded = cache_open(c, form->coded, b->key);
    if (op->coded == 0) {
        cache_unlease(c, ref);
        free(op);
        return -ENOSPC;
    }
    presumed_forget(c, op->coded);
    k = index_block(c->config.index, op->coded);
    if (!block_complete(k, form->coded))
        k->flags |= BLOCK_HELD_BACK; /* while it is built */
    op->cache = c;
    op->base = ref;
    op->parts = parts;
    op->bytes = ns->block_bytes;
    c->coding.bytes += op->bytes;
    list_push_back(&c->coding.ops, &op->link);
    list_init(&op->waits);
    op_continue(op);
    return 0;
}

static void queue_take(struct cache *c)
{
    block_ref ref = queue_pop(&c->coding.queue);
    const struct block *b = index_peek(c->config.index, ref);
    int rc;

    /* Another block may have the number now; if that one waits too, it has its turn early. */
    if (!b || !(b->flags & BLOCK_CODING) || cache_coding_under_way(c, ref))
        return;
    rc = op_begin(c, ref);
    if (rc == 0)
        return;
    if (rc != -ECANCELED)
        count_failed(c, rc);
    write_plain(c, ref);
}

bool cache_coding_under_way(const struct cache *c, block_ref ref)
{
    for (struct list *n = c->coding.ops.next; n != &c->coding.ops; n = n->next)
        if (LIST_ENTRY(n, struct coding, link)->base == ref)
            return true;
    return false;
}

static bool may_begin(const struct cache *c)
{
    return c->coding.queue.n > 0 && c->coding.bytes < CACHE_WRITE_WINDOW &&
           list_empty(&c->coding.waiting);
}

bool cache_coding_pump(struct cache *c)
{
    for (int i = 0; i < PUMP_BLOCKS && may_begin(c); i++)
        queue_take(c);
    return may_begin(c);
}

void cache_coding_stop(struct cache *c)
{
    struct list *node;

    cache_retry_cancel(&c->coding.retry);
    while ((node = list_pop_front(&c->coding.waiting)) != NULL)
        op_continue(LIST_ENTRY(node, struct coding, waits)); /* ends, without a slot */
    while (c->coding.queue.n > 0)
        queue_take(c);
}

/* ---- life ---- */

void cache_coding_init(struct cache *c)
{
    list_init(&c->coding.ops);
    list_init(&c->coding.waiting);
    list_init(&c->coding.retry.link);
    c->coding.retry.retry_cb = retry_cb;
}

void cache_coder_attach(struct cache *c, cache_build_fn *build, void *ctx)
{
    c->coder.build = build;
    c->coder.ctx = ctx;
}
