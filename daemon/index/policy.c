#include "daemon/index/policy.h"
#include "daemon/index/internal.h"

#include <errno.h>
#include <stdlib.h>

/* LFU with dynamic aging, as a wheel of queues. A block's priority is floor + 1 + its uses when it
 * was used last; the floor is the priority of the block that left last. So each use buys the time
 * in which the floor rises by one, which is about what a block that is never used stays. Priorities
 * are integers close above the floor: a queue for each, LRU inside, and every operation touches a
 * few links. */

#define QUEUES 16u
#define USES_MAX 7u /* priorities reach floor + 8: less than QUEUES above the floor */

/* What a block remembers: policy_data. */
#define DATA_USES 0x7u
#define DATA_QUEUE_SHIFT 3
#define DATA_QUEUE (0x1fu << DATA_QUEUE_SHIFT)
#define DATA_KNOWN (1u << 8) /* was here before: coming back is a use */
#define DATA_CLOCK_SHIFT 9   /* inserts, mod 2^23, when it was inserted or a use was counted */
#define CLOCK_MASK 0x7fffffu

/* Lookup, load and what follows are one use: another counts only when this share of the capacity
 * has been inserted since. */
#define WINDOW_SHARE 64
#define WINDOW_MAX (CLOCK_MASK / 4)

/* Inserts without anything else between them are taken for a chain, head first, up to this many. */
#define RUN_MAX 1024

/* Uses of blocks that left, four for each block that DRAM holds: sets of words, newest first, a
 * word being 29 bits of hash above 3 of uses. */
#define GHOST_WAYS 32u
#define GHOST_SHARE 4
#define GHOST_USES 0x7u

struct queue {
    block_ref front, back;
    uint64_t n;
};

struct policy {
    struct index *ix;
    struct queue queue[QUEUES + POLICY_LISTS]; /* the last ones: lists aside; [QUEUES] is empty */
    uint32_t floor;                            /* priority; its queue is floor % QUEUES */
    uint32_t clock;                            /* inserts, wrapping */
    uint32_t window;
    block_ref run; /* the last of the present run of inserts, or 0 */
    uint32_t run_n;
    uint64_t count, candidates;
    uint32_t ghost_sets;
    uint32_t (*ghost)[GHOST_WAYS];
};

int policy_new(struct index *ix, uint64_t capacity_hint, struct policy **out)
{
    uint64_t sets = capacity_hint / GHOST_WAYS * GHOST_SHARE + 1;
    uint64_t window = capacity_hint / WINDOW_SHARE;
    struct policy *p = calloc(1, sizeof(*p));

    if (!p)
        return -ENOMEM;
    p->ix = ix;
    p->window = (uint32_t)(window < WINDOW_MAX ? window : WINDOW_MAX);
    p->ghost_sets = (uint32_t)(sets < UINT32_MAX ? sets : UINT32_MAX);
    p->ghost = calloc(p->ghost_sets, sizeof(*p->ghost));
    if (!p->ghost) {
        free(p);
        return -ENOMEM;
    }
    *out = p;
    return 0;
}

void policy_free(struct policy *p)
{
    if (!p)
        return;
    free(p->ghost);
    free(p);
}

/* ---- what a block remembers ---- */

static uint32_t uses_of(const struct block *b)
{
    return b->policy_data & DATA_USES;
}

static uint32_t queue_of(const struct block *b)
{
    return (b->policy_data & DATA_QUEUE) >> DATA_QUEUE_SHIFT;
}

static void set_queue(struct block *b, uint32_t queue)
{
    b->policy_data = (b->policy_data & ~DATA_QUEUE) | queue << DATA_QUEUE_SHIFT;
}

static void set_clock(const struct policy *p, struct block *b)
{
    b->policy_data = (b->policy_data & ((1u << DATA_CLOCK_SHIFT) - 1)) | p->clock
                                                                             << DATA_CLOCK_SHIFT;
}

static void set_uses(struct block *b, uint32_t uses)
{
    b->policy_data = (b->policy_data & ~DATA_USES) | (uses < USES_MAX ? uses : USES_MAX);
}

/* The queue of a block that is used now. */
static uint32_t queue_now(const struct policy *p, const struct block *b)
{
    return (p->floor + 1 + uses_of(b)) % QUEUES;
}

/* ---- queues ---- */

/* Next to `behind`, on its colder side; 0: at the front. */
static void link_behind(struct policy *p, block_ref ref, struct block *b, uint32_t queue,
                        block_ref behind)
{
    struct queue *q = &p->queue[queue];
    block_ref next = behind ? index_block(p->ix, behind)->policy_next : q->front;

    set_queue(b, queue);
    b->policy_prev = behind;
    b->policy_next = next;
    if (behind)
        index_block(p->ix, behind)->policy_next = ref;
    else
        q->front = ref;
    if (next)
        index_block(p->ix, next)->policy_prev = ref;
    else
        q->back = ref;
    q->n++;
    p->candidates += queue < QUEUES;
}

static void unlink_block(struct policy *p, struct block *b)
{
    struct queue *q = &p->queue[queue_of(b)];

    if (b->policy_prev)
        index_block(p->ix, b->policy_prev)->policy_next = b->policy_next;
    else
        q->front = b->policy_next;
    if (b->policy_next)
        index_block(p->ix, b->policy_next)->policy_prev = b->policy_prev;
    else
        q->back = b->policy_prev;
    b->policy_prev = b->policy_next = 0;
    q->n--;
    p->candidates -= queue_of(b) < QUEUES;
}

/* ---- ghosts ---- */

static uint32_t *ghost_set(const struct policy *p, const struct block *b, uint32_t *tag)
{
    uint64_t hash =
        index_hash(p->ix, b->key, UCM_MAX_KEY_BYTES) + b->ns * UINT64_C(0x9e3779b97f4a7c15);

    *tag = (uint32_t)hash & ~GHOST_USES;
    return p->ghost[(hash >> 32) * p->ghost_sets >> 32];
}

static void ghost_put(struct policy *p, const struct block *b)
{
    uint32_t tag, *set = ghost_set(p, b, &tag);

    memmove(set + 1, set, (GHOST_WAYS - 1) * sizeof(*set));
    set[0] = tag | uses_of(b);
}

/* Takes out what is known of the block: its uses, or -1. */
static int ghost_take(struct policy *p, const struct block *b)
{
    uint32_t tag, *set = ghost_set(p, b, &tag);

    for (uint32_t i = 0; i < GHOST_WAYS; i++) {
        uint32_t word = set[i];

        if (word == 0 || (word & ~GHOST_USES) != tag)
            continue;
        memmove(set + i, set + i + 1, (GHOST_WAYS - 1 - i) * sizeof(*set));
        set[GHOST_WAYS - 1] = 0;
        return (int)(word & GHOST_USES);
    }
    return -1;
}

/* ---- what happens ---- */

void policy_insert(struct policy *p, block_ref ref)
{
    struct block *b = index_block(p->ix, ref);
    int before = ghost_take(p, b);
    uint32_t queue;
    block_ref behind = p->run;

    assert(!(b->flags & BLOCK_IN_POLICY));
    if (b->policy_data & DATA_KNOWN && (int)uses_of(b) > before)
        before = (int)uses_of(b);
    set_uses(b, (uint32_t)(before + 1));
    b->policy_data |= DATA_KNOWN;
    p->clock++;
    set_clock(p, b);
    queue = queue_now(p, b);
    if (behind && (p->run_n == RUN_MAX || queue_of(index_block(p->ix, behind)) != queue))
        behind = 0;
    link_behind(p, ref, b, queue, behind);
    p->run_n = behind ? p->run_n + 1 : 1;
    p->run = ref;
    b->flags |= BLOCK_IN_POLICY;
    p->count++;
}

void policy_touch(struct policy *p, const block_ref *refs, uint32_t n)
{
    uint32_t least = 0;

    p->run = 0;
    /* From the tail: what is moved to the front last stays longest. A request that uses a block
     * uses all before it, so none has fewer uses than those behind it. */
    while (n-- > 0) {
        struct block *b = refs[n] ? index_block(p->ix, refs[n]) : NULL;

        if (!b || !(b->flags & BLOCK_IN_POLICY))
            continue;
        if (((p->clock - (b->policy_data >> DATA_CLOCK_SHIFT)) & CLOCK_MASK) >= p->window) {
            set_uses(b, uses_of(b) + 1);
            set_clock(p, b);
        }
        least = uses_of(b) > least ? uses_of(b) : least;
        set_uses(b, least);
        unlink_block(p, b);
        link_behind(p, refs[n], b, queue_now(p, b), 0);
    }
}

void policy_remove(struct policy *p, block_ref ref, bool evicted)
{
    struct block *b = index_block(p->ix, ref);

    assert(b->flags & BLOCK_IN_POLICY);
    p->run = 0;
    unlink_block(p, b);
    b->flags &= (uint16_t)~BLOCK_IN_POLICY;
    p->count--;
    if (evicted)
        ghost_put(p, b);
}

static struct queue *list_of(struct policy *p, unsigned list)
{
    if (list != POLICY_CANDIDATES)
        return &p->queue[QUEUES + list];
    while (p->candidates > 0 && !p->queue[p->floor % QUEUES].back)
        p->floor++;
    return &p->queue[p->floor % QUEUES];
}

unsigned policy_list(const struct policy *p, block_ref ref)
{
    const struct block *b = index_block(p->ix, ref);

    if (!(b->flags & BLOCK_IN_POLICY) || queue_of(b) < QUEUES)
        return POLICY_CANDIDATES;
    return queue_of(b) - QUEUES;
}

void policy_move(struct policy *p, block_ref ref, unsigned list)
{
    struct block *b = index_block(p->ix, ref);
    struct queue *q;

    p->run = 0;
    unlink_block(p, b);
    q = list_of(p, list);
    link_behind(p, ref, b, (uint32_t)(q - p->queue), list == POLICY_CANDIDATES ? q->back : 0);
}

block_ref policy_victim(struct policy *p, unsigned from,
                        unsigned (*judge)(void *ctx, block_ref ref), void *ctx, int64_t *looks)
{
    block_ref ref;

    p->run = 0;
    while (*looks > 0 && (ref = list_of(p, from)->back) != 0) {
        unsigned list = judge(ctx, ref);

        --*looks;
        if (list == POLICY_CANDIDATES)
            return ref;
        policy_move(p, ref, list);
    }
    return 0;
}

uint64_t policy_list_count(const struct policy *p, unsigned list)
{
    return list == POLICY_CANDIDATES ? p->candidates : p->queue[QUEUES + list].n;
}

block_ref policy_near(const struct policy *p, bool (*like)(void *ctx, block_ref ref), void *ctx,
                      uint32_t tries)
{
    for (uint32_t i = 0; i < QUEUES; i++) {
        block_ref ref = p->queue[(p->floor + i) % QUEUES].back;

        for (; ref != 0 && tries > 0; tries--) {
            if (like(ctx, ref))
                return ref;
            ref = index_block(p->ix, ref)->policy_prev;
        }
    }
    return 0;
}

static void queue_walk(const struct policy *p, const struct queue *q,
                       void (*visit)(void *ctx, block_ref ref, uint32_t uses), void *ctx)
{
    for (block_ref ref = q->front; ref; ref = index_block(p->ix, ref)->policy_next)
        visit(ctx, ref, uses_of(index_block(p->ix, ref)));
}

/* What is aside was colder than the candidates when it went there. */
void policy_walk(const struct policy *p, void (*visit)(void *ctx, block_ref ref, uint32_t uses),
                 void *ctx)
{
    for (uint32_t i = QUEUES; i-- > 0;)
        queue_walk(p, &p->queue[(p->floor + i) % QUEUES], visit, ctx);
    for (uint32_t i = 1; i < POLICY_LISTS; i++)
        queue_walk(p, &p->queue[QUEUES + i], visit, ctx);
}

void policy_restore(struct policy *p, block_ref ref, uint32_t uses)
{
    struct block *b = index_block(p->ix, ref);

    assert(!(b->flags & BLOCK_IN_POLICY));
    p->run = 0;
    set_uses(b, uses);
    b->policy_data |= DATA_KNOWN;
    set_clock(p, b);
    link_behind(p, ref, b, queue_now(p, b), p->queue[queue_now(p, b)].back);
    b->flags |= BLOCK_IN_POLICY;
    p->count++;
}

uint64_t policy_count(const struct policy *p)
{
    return p->count;
}

unsigned policy_heat(const struct policy *p, block_ref ref)
{
    static const unsigned heat[USES_MAX + 1] = {0, 1, 2, 2, 3, 3, 3, 3};

    return heat[uses_of(index_block(p->ix, ref))];
}

const char *policy_name(void)
{
    return "lfu-aged";
}
