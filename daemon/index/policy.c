#include "daemon/index/policy.h"
#include "daemon/index/internal.h"

#include <errno.h>
#include <stdlib.h>

/* LRU with bonuses. A block's time is up when as many blocks were inserted since its last use as
 * DRAM holds; with the bonus of its uses (daemon/learn), later or earlier. Blocks with as many uses
 * are in one list in the order of their last use, so that only the lists' ends are compared. */

/* What a block remembers: policy_data. As bit fields it made a lookup of 8,192 keys 7 % slower:
 * compilers write bytes of what they read as a word. */
#define DATA_USES 0x7u          /* then 3 bits of POLICY_ASIDE */
#define DATA_KNOWN (1u << 6)    /* was in DRAM before: coming back is a use */
#define DATA_EXPECTED (1u << 7) /* and that is counted */
#define DATA_STAMP_SHIFT 8      /* when it was inserted or a use was counted, wrapping */
#define DATA_BELOW_STAMP ((1u << DATA_STAMP_SHIFT) - 1)
#define STAMP_MASK 0xffffffu

/* While as many blocks are inserted as DRAM holds, 2^STAMPS_LOG2 stamps pass, or up to twice as
 * many. So a stamp wraps after 128 times the capacity at the earliest. */
#define STAMPS_LOG2 16

/* Lookup, load and what follows are one use: another counts only when this fraction of the capacity
 * has been inserted since. */
#define WINDOW_FRACTION 64

/* Inserts without a touch between them are taken for one chain, head first, up to this many. */
#define RUN_MAX 1024

#define LIST_BACK UINT32_MAX /* for block_link */

struct policy {
    struct index *ix;
    struct learner *learner;
    struct policy_group common;
    bool grouped;   /* some tenant has a group */
    uint64_t clock; /* inserts */
    uint32_t now;   /* the stamp of that */
    unsigned stamp_shift;
    block_ref run; /* the last of the present run of inserts, or 0 */
    uint32_t run_n;
    uint32_t chain_stamp; /* of blocks that are inserted now */
    uint32_t chain_n;     /* that have got it */
    bool full;            /* something was evicted */
    uint64_t count, restored;
};

static unsigned log2_of(uint64_t n)
{
    unsigned bits = 0;

    while (n >>= 1)
        bits++;
    return bits;
}

int policy_new(struct index *ix, uint64_t capacity_hint, struct policy **out)
{
    unsigned bits = log2_of(capacity_hint);
    struct policy *p = calloc(1, sizeof(*p));

    if (!p)
        return -ENOMEM;
    p->ix = ix;
    p->stamp_shift = bits > STAMPS_LOG2 ? bits - STAMPS_LOG2 : 0;
    if (learner_new(&p->learner) != 0) {
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
    learner_free(p->learner);
    free(p);
}

/* ---- lists ---- */

/* Where the block belongs. One that is `grouped` is there already, the others are in the common
 * group. */
static struct policy_group *group_for(struct policy *p, const struct block *b)
{
    struct policy_group *g = p->grouped ? index_ns(p->ix, b->ns)->tenant->group : NULL;

    return g ? g : &p->common;
}

struct policy_group *policy_common(struct policy *p)
{
    return &p->common;
}

void policy_group_made(struct policy *p)
{
    p->grouped = true;
}

/* Into the list of the group that the block remembers: next to `behind`, on its colder side; 0: at
 * the front, LIST_BACK: at the back. */
static void block_link(struct policy *p, struct policy_group *g, block_ref ref, struct block *b,
                       block_ref behind)
{
    uint32_t aside = (b->policy_data & POLICY_ASIDE) >> POLICY_ASIDE_SHIFT;
    struct block_list *l = aside ? &g->aside[aside] : &g->list[b->policy_data & DATA_USES];

    block_list_insert(p->ix, l, ref, behind == LIST_BACK ? l->back : behind);
    g->candidates += !aside;
    b->grouped = g != &p->common;
}

static void block_unlink(struct policy *p, struct block *b)
{
    struct policy_group *g = b->grouped ? group_for(p, b) : &p->common;
    uint32_t aside = (b->policy_data & POLICY_ASIDE) >> POLICY_ASIDE_SHIFT;
    block_ref *came = &g->came[b->policy_data & DATA_USES];

    if (!aside && *came && index_block(p->ix, *came) == b)
        *came = b->list_next;
    block_list_remove(p->ix, aside ? &g->aside[aside] : &g->list[b->policy_data & DATA_USES], b);
    g->candidates -= !aside;
}

/* ---- what happens ---- */

static uint64_t hash_of(const struct policy *p, const struct block *b)
{
    return index_hash(p->ix, b->key, UCM_MAX_KEY_BYTES) + b->ns * UINT64_C(0x9e3779b97f4a7c15);
}

/* The block comes into DRAM. If it was there before, that is a use. Its uses before it left count
 * half; when it left long ago, nothing but that counts. */
static void count_return(struct policy *p, struct block *b)
{
    uint32_t uses = b->policy_data & DATA_USES;
    bool known = b->policy_data & DATA_KNOWN, late = false;

    if (!known && p->full) {
        int before = learner_back(p->learner, hash_of(p, b), &late);

        known = before >= 0;
        uses = known ? (uint32_t)before : 0;
    }
    known = known || b->whole_parts > b->dram_parts; /* an earlier run or another host stored it */
    uses = known ? USES_ONE + uses / 2 : late ? USES_LATE : 0;
    b->policy_data = (b->policy_data & ~DATA_USES) | uses | DATA_KNOWN | DATA_EXPECTED;
}

/* Once something was evicted: until then every block stays, and nothing can be learnt. */
static void refer(struct policy *p, const struct block *b)
{
    learner_reference(p->learner, hash_of(p, b), b->policy_data & DATA_USES, p->count);
}

void policy_insert(struct policy *p, block_ref ref)
{
    struct block *b = index_block(p->ix, ref), *before = p->run ? index_block(p->ix, p->run) : NULL;
    struct policy_group *g = p->grouped ? group_for(p, b) : &p->common;
    bool follows;

    assert(!(b->flags & BLOCK_IN_POLICY));
    if (!(b->policy_data & DATA_EXPECTED))
        count_return(p, b);
    p->now = (uint32_t)(++p->clock >> p->stamp_shift & STAMP_MASK);
    /* What a request finds and what it brings are of one time: then the head does not go first. */
    if (p->chain_n++ % RUN_MAX == 0 && p->chain_n > 1)
        p->chain_stamp = p->now;
    b->policy_data = (b->policy_data & DATA_BELOW_STAMP & ~DATA_EXPECTED) | p->chain_stamp
                                                                                << DATA_STAMP_SHIFT;
    follows = before && p->run_n < RUN_MAX &&
              ((before->policy_data ^ b->policy_data) & (POLICY_ASIDE | DATA_USES)) == 0 &&
              g == (before->grouped ? group_for(p, before) : &p->common);
    block_link(p, g, ref, b, follows ? p->run : 0);
    p->run_n = follows ? p->run_n + 1 : 1;
    p->run = ref;
    b->flags |= BLOCK_IN_POLICY;
    p->count++;
    if (p->full)
        refer(p, b);
}

/* From the tail, and each to the front: what comes there last stays longest. What a block remembers
 * is read once and written once. */
uint32_t policy_touch(struct policy *p, const block_ref *refs, uint32_t n, uint32_t *outside)
{
    uint32_t least = 0, again = 0, apart = p->count / WINDOW_FRACTION >> p->stamp_shift;

    *outside = 0;
    p->run = 0;
    p->chain_stamp = p->now;
    p->chain_n = 0;
    while (n-- > 0) {
        struct block *b = refs[n] ? index_block(p->ix, refs[n]) : NULL;
        uint32_t data, uses;
        bool used;

        if (!b)
            continue;
        if (!(b->flags & BLOCK_IN_POLICY)) {
            ++*outside;
            if (!(b->policy_data & DATA_EXPECTED)) {
                count_return(p, b);
                again += b->whole_parts > 0;
            }
            if ((b->policy_data & DATA_USES) < least)
                b->policy_data = (b->policy_data & ~DATA_USES) | least;
            least = b->policy_data & DATA_USES;
            continue;
        }
        data = b->policy_data & ~POLICY_ASIDE;
        uses = data & DATA_USES;
        used = ((p->now - (data >> DATA_STAMP_SHIFT)) & STAMP_MASK) >= apart;
        if (used) {
            uses = uses < USES_ONE ? USES_ONE : uses < USES_MAX ? uses + 1 : USES_MAX;
            data = (data & DATA_BELOW_STAMP) | p->now << DATA_STAMP_SHIFT;
        }
        least = uses > least ? uses : least;
        block_unlink(p, b);
        b->policy_data = (data & ~DATA_USES) | least;
        block_link(p, p->grouped ? group_for(p, b) : &p->common, refs[n], b, 0);
        again += used;
        if (used && p->full)
            refer(p, b);
    }
    return again;
}

void policy_remove(struct policy *p, block_ref ref, bool evicted)
{
    struct block *b = index_block(p->ix, ref);

    assert(b->flags & BLOCK_IN_POLICY);
    if (p->run == ref)
        p->run = 0;
    block_unlink(p, b);
    b->policy_data &= ~POLICY_ASIDE;
    b->flags &= (uint16_t)~BLOCK_IN_POLICY;
    p->count--;
    if (!evicted)
        return;
    p->full = true;
    learner_evicted(p->learner, hash_of(p, b), b->policy_data & DATA_USES, p->count);
}

/* ---- which goes ---- */

/* at[] has one block of each list, or 0. Chooses the block to evict first, or last; ties go to the
 * fewest uses. Returns its list, or -1. *when: stamps until the block's time is up, less what is
 * the same for all. */
static int list_choose(const struct policy *p, const block_ref *at, bool first, int64_t *when)
{
    const int32_t *bonus = learner_bonus(p->learner);
    int64_t best = 0, blocks = (int64_t)(p->count >> p->stamp_shift);
    int chosen = -1;

    for (int i = 0; i < (int)USES_CLASSES; i++) {
        uint32_t stamp, age; /* stamps since the block was used last */
        int64_t time;

        if (at[i] == 0)
            continue;
        stamp = index_block(p->ix, at[i])->policy_data >> DATA_STAMP_SHIFT;
        age = (p->now - stamp) & STAMP_MASK;
        time = bonus[i] * blocks / BONUS_ONE - age;
        if (chosen >= 0 && (first ? time >= best : time < best))
            continue;
        chosen = i;
        best = time;
    }
    *when = best;
    return chosen;
}

static void lists_ends(const struct policy_group *g, bool back, block_ref *at)
{
    for (uint32_t i = 0; i < USES_CLASSES; i++)
        at[i] = back ? g->list[i].back : g->list[i].front;
}

static block_ref coldest(const struct policy *p, const struct policy_group *g, unsigned list)
{
    block_ref at[USES_CLASSES];
    int64_t when;
    int from;

    if (list != POLICY_CANDIDATES)
        return g->aside[list].back;
    lists_ends(g, true, at);
    from = list_choose(p, at, true, &when);
    return from < 0 ? 0 : at[from];
}

int policy_coldest_group(const struct policy *p, struct policy_group *const *g, uint32_t n)
{
    int64_t best = 0, when;
    int found = -1;

    for (uint32_t i = 0; i < n; i++) {
        block_ref at[USES_CLASSES];

        lists_ends(g[i], true, at);
        if (list_choose(p, at, true, &when) < 0 || (found >= 0 && when >= best))
            continue;
        found = (int)i;
        best = when;
    }
    return found;
}

void policy_move(struct policy *p, block_ref ref, unsigned list)
{
    struct block *b = index_block(p->ix, ref);

    if (p->run == ref)
        p->run = 0;
    block_unlink(p, b);
    b->policy_data = (b->policy_data & ~POLICY_ASIDE) | list << POLICY_ASIDE_SHIFT;
    block_link(p, group_for(p, b), ref, b, list == POLICY_CANDIDATES ? LIST_BACK : 0);
}

/* From the common group into its tenant's. */
static void come_over(struct policy *p, block_ref ref)
{
    struct block *b = index_block(p->ix, ref);
    struct policy_group *g = group_for(p, b);
    block_ref *came = &g->came[b->policy_data & DATA_USES];

    if (b->policy_data & POLICY_ASIDE) {
        policy_move(p, ref, policy_list(b));
        return;
    }
    if (p->run == ref)
        p->run = 0;
    block_unlink(p, b);
    block_link(p, g, ref, b, *came ? index_block(p->ix, *came)->list_prev : LIST_BACK);
    *came = ref;
}

void policy_come_over(struct policy *p, block_ref ref)
{
    const struct block *b = index_block(p->ix, ref);

    if (p->grouped && b->flags & BLOCK_IN_POLICY && !b->grouped && group_for(p, b) != &p->common)
        come_over(p, ref);
}

block_ref policy_victim(struct policy *p, struct policy_group *g, unsigned from,
                        unsigned (*judge)(void *ctx, block_ref ref), void *ctx, int64_t *looks)
{
    block_ref ref;

    while (*looks > 0 && (ref = coldest(p, g, from)) != 0) {
        unsigned list;

        --*looks;
        if (p->grouped && group_for(p, index_block(p->ix, ref)) != g) {
            come_over(p, ref);
            continue;
        }
        list = judge(ctx, ref);
        if (list == POLICY_CANDIDATES)
            return ref;
        policy_move(p, ref, list);
    }
    return 0;
}

uint64_t policy_list_count(const struct policy_group *g, unsigned list)
{
    return list == POLICY_CANDIDATES ? g->candidates : g->aside[list].n;
}

block_ref policy_near(const struct policy *p, const struct policy_group *g,
                      bool (*like)(void *ctx, block_ref ref), void *ctx, uint32_t tries)
{
    block_ref at[USES_CLASSES];
    int64_t when;
    int from;

    lists_ends(g, true, at);
    while (tries-- > 0 && (from = list_choose(p, at, true, &when)) >= 0) {
        if (like(ctx, at[from]))
            return at[from];
        at[from] = index_block(p->ix, at[from])->list_prev;
    }
    return 0;
}

/* ---- over a restart ---- */

/* The candidates of a group that are not visited yet. */
struct walk {
    const struct policy_group *g;
    block_ref at[USES_CLASSES];
    int from; /* the list whose front should leave last; -1: none is left */
    int64_t when;
};

static void walk_begin(const struct policy *p, struct walk *w, const struct policy_group *g)
{
    w->g = g;
    lists_ends(g, false, w->at);
    w->from = list_choose(p, w->at, false, &w->when);
}

static block_ref walk_next(const struct policy *p, struct walk *w)
{
    block_ref ref = w->at[w->from];

    w->at[w->from] = index_block(p->ix, ref)->list_next;
    w->from = list_choose(p, w->at, false, &w->when);
    return ref;
}

/* Visits n groups. Blocks set aside were colder than the candidates at that time. */
static void groups_walk(const struct policy *p, struct walk *w, uint32_t n,
                        void (*visit)(void *ctx, block_ref ref, uint32_t uses), void *ctx)
{
    for (;;) {
        struct walk *last = NULL;
        block_ref ref;

        for (uint32_t i = 0; i < n; i++)
            if (w[i].from >= 0 && (!last || w[i].when > last->when))
                last = &w[i];
        if (!last)
            break;
        ref = walk_next(p, last);
        visit(ctx, ref, index_block(p->ix, ref)->policy_data & DATA_USES);
    }
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t list = 1; list < POLICY_LISTS; list++)
            for (block_ref ref = w[i].g->aside[list].front; ref;
                 ref = index_block(p->ix, ref)->list_next)
                visit(ctx, ref, index_block(p->ix, ref)->policy_data & DATA_USES);
}

void policy_walk(const struct policy *p, void (*visit)(void *ctx, block_ref ref, uint32_t uses),
                 void *ctx)
{
    const struct tenant_set *tenants = &p->ix->tenants;
    struct walk *w;
    uint32_t n = 1;

    for (const struct tenant *t = tenant_next(tenants, NULL); t; t = tenant_next(tenants, t))
        n += t->group != NULL;
    w = malloc(n * sizeof(*w));
    if (!w)
        return;
    walk_begin(p, &w[0], &p->common);
    n = 1;
    for (const struct tenant *t = tenant_next(tenants, NULL); t; t = tenant_next(tenants, t))
        if (t->group)
            walk_begin(p, &w[n++], t->group);
    groups_walk(p, w, n, visit, ctx);
    free(w);
}

/* As if they had been inserted one after the other before all that are there. */
void policy_restore(struct policy *p, block_ref ref, uint32_t uses)
{
    struct block *b = index_block(p->ix, ref);
    uint32_t stamp;

    assert(!(b->flags & BLOCK_IN_POLICY));
    stamp = (uint32_t)((p->clock - ++p->restored) >> p->stamp_shift);
    b->policy_data = (b->policy_data & DATA_BELOW_STAMP & ~DATA_USES) |
                     (uses < USES_MAX ? uses : USES_MAX) | DATA_KNOWN | stamp << DATA_STAMP_SHIFT;
    block_link(p, group_for(p, b), ref, b, LIST_BACK);
    b->flags |= BLOCK_IN_POLICY;
    p->count++;
}

uint64_t policy_count(const struct policy *p)
{
    return p->count;
}

unsigned policy_heat(const struct block *b)
{
    static const unsigned heat[USES_MAX + 1] = {0, HEAT_ONCE, HEAT_ONCE, 2, 2, 3, 3, 3};

    return heat[b->policy_data & DATA_USES];
}

const char *policy_name(void)
{
    return "lru-bonus";
}
