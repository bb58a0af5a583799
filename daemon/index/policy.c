#include "daemon/index/policy.h"
#include "daemon/index/internal.h"
#include "daemon/index/learner.h"

#include <errno.h>
#include <stdlib.h>

/* LRU with bonuses. A block's time is up when as many blocks were inserted since its last use as DRAM
 * holds; with the bonus of its uses (learner.h), later or earlier. Blocks with as many uses are in one
 * list in the order of their last use, so that only the lists' ends are compared. */

/* What a block remembers: policy_data. */
#define DATA_USES 0x7u
#define DATA_ASIDE_SHIFT 3
#define DATA_KNOWN (1u << 6)    /* was in DRAM before: coming back is a use */
#define DATA_EXPECTED (1u << 7) /* and that is counted */
#define DATA_STAMP_SHIFT 8      /* when it was inserted or a use was counted, wrapping */
#define STAMP_MASK 0xffffffu

/* While as many blocks are inserted as DRAM holds, 2^STAMPS_LOG2 stamps pass, or up to twice as many.
 * So a stamp wraps after 128 times the capacity at the earliest. */
#define STAMPS_LOG2 16

/* Lookup, load and what follows are one use: another counts only when this fraction of the capacity
 * has been inserted since. */
#define WINDOW_FRACTION 64

/* Inserts without a touch between them are taken for one chain, head first, up to this many. */
#define RUN_MAX 1024

/* A ghost has the uses of a block that left: a word of 13 bits of hash above 3 bits of uses, in a set of
 * GHOST_WAYS, newest first. The first table has SOON_FACTOR ghosts for each block in DRAM. The second
 * remembers longer where DRAM holds few blocks: LATE_FACTOR for each, but LATE_GHOSTS at most. */
#define GHOST_WAYS 8u
#define GHOST_USES 0x7u
#define SOON_FACTOR 2
#define LATE_FACTOR 32
#define LATE_GHOSTS 131072u

struct ghosts {
    uint32_t sets; /* 0: nothing was evicted yet, or there is no memory */
    uint16_t (*set)[GHOST_WAYS];
};

struct policy {
    struct index *ix;
    struct learner *learner;
    struct block_list list[USES_CLASSES]; /* the candidates, by uses */
    struct block_list aside[POLICY_LISTS];
    uint64_t clock; /* inserts */
    unsigned stamp_shift;
    block_ref run; /* the last of the present run of inserts, or 0 */
    uint32_t run_n;
    uint32_t chain_stamp; /* of blocks that are inserted now */
    uint32_t chain_n;     /* that have got it */
    bool full;            /* something was evicted */
    uint64_t count, candidates, restored;
    uint64_t ghost_for; /* blocks in DRAM when the number of ghosts was chosen */
    struct ghosts soon, late;
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
    free(p->soon.set);
    free(p->late.set);
    free(p);
}

/* ---- what a block remembers ---- */

static uint32_t uses_of(const struct block *b)
{
    return b->policy_data & DATA_USES;
}

static uint32_t aside_of(const struct block *b)
{
    return b->policy_data >> DATA_ASIDE_SHIFT & (POLICY_LISTS - 1);
}

static void set_aside(struct block *b, uint32_t list)
{
    b->policy_data =
        (b->policy_data & ~((POLICY_LISTS - 1u) << DATA_ASIDE_SHIFT)) | list << DATA_ASIDE_SHIFT;
}

static void set_stamp(struct block *b, uint32_t stamp)
{
    b->policy_data = (b->policy_data & ((1u << DATA_STAMP_SHIFT) - 1)) | stamp << DATA_STAMP_SHIFT;
}

static void set_uses(struct block *b, uint32_t uses)
{
    b->policy_data = (b->policy_data & ~DATA_USES) | (uses < USES_MAX ? uses : USES_MAX);
}

static uint32_t stamp_now(const struct policy *p)
{
    return (uint32_t)(p->clock >> p->stamp_shift & STAMP_MASK);
}

/* Stamps since the block was used last. */
static uint32_t age_of(const struct policy *p, const struct block *b)
{
    return (stamp_now(p) - (b->policy_data >> DATA_STAMP_SHIFT)) & STAMP_MASK;
}

/* ---- lists ---- */

static struct block_list *list_of(struct policy *p, const struct block *b)
{
    uint32_t aside = aside_of(b);

    return aside ? &p->aside[aside] : &p->list[uses_of(b)];
}

/* Next to `behind`, on its colder side; 0: at the front. */
static void link_behind(struct policy *p, block_ref ref, struct block *b, block_ref behind)
{
    block_list_insert(p->ix, list_of(p, b), ref, behind);
    p->candidates += aside_of(b) == POLICY_CANDIDATES;
}

static void unlink_block(struct policy *p, struct block *b)
{
    block_list_remove(p->ix, list_of(p, b), b);
    p->candidates -= aside_of(b) == POLICY_CANDIDATES;
}

/* ---- ghosts ---- */

static uint64_t hash_of(const struct policy *p, const struct block *b)
{
    return index_hash(p->ix, b->key, UCM_MAX_KEY_BYTES) + b->ns * UINT64_C(0x9e3779b97f4a7c15);
}

/* All empty. Without memory for them the policy goes on without ghosts. */
static void ghosts_clear(struct ghosts *g, uint64_t ghosts)
{
    uint64_t sets = ghosts / GHOST_WAYS + 1;

    free(g->set);
    g->set = calloc(sets, sizeof(*g->set));
    g->sets = g->set ? (uint32_t)sets : 0;
}

/* As many as the blocks in DRAM call for. */
static void ghosts_renew(struct policy *p)
{
    uint64_t late = p->count * LATE_FACTOR;

    ghosts_clear(&p->soon, p->count * SOON_FACTOR);
    ghosts_clear(&p->late, late < LATE_GHOSTS ? late : LATE_GHOSTS);
    p->ghost_for = p->count;
}

static uint16_t *ghost_set(const struct ghosts *g, uint64_t hash)
{
    return g->set[(hash >> 32) * g->sets >> 32];
}

static void ghost_put(struct ghosts *g, uint64_t hash, uint32_t uses)
{
    uint16_t *set;

    if (g->sets == 0)
        return;
    set = ghost_set(g, hash);
    memmove(set + 1, set, (GHOST_WAYS - 1) * sizeof(*set));
    set[0] = (uint16_t)((hash & ~(uint64_t)GHOST_USES) | uses);
}

/* Takes out what is known of the block: its uses, or -1. */
static int ghost_take(struct ghosts *g, uint64_t hash)
{
    uint16_t *set;

    if (g->sets == 0)
        return -1;
    set = ghost_set(g, hash);
    for (uint32_t i = 0; i < GHOST_WAYS; i++) {
        uint16_t word = set[i];

        if (word == 0 || (word ^ (uint16_t)hash) > GHOST_USES)
            continue;
        memmove(set + i, set + i + 1, (GHOST_WAYS - 1 - i) * sizeof(*set));
        set[GHOST_WAYS - 1] = 0;
        return word & (int)GHOST_USES;
    }
    return -1;
}

/* ---- what happens ---- */

/* The block comes into DRAM. If it was there before, that is a use. Its uses before it left count half;
 * when it left long ago, nothing but that counts. */
static void count_return(struct policy *p, struct block *b)
{
    int before = (int)uses_of(b);
    bool late = false;

    if (!(b->policy_data & DATA_KNOWN)) {
        uint64_t hash = hash_of(p, b);

        before = ghost_take(&p->soon, hash);
        late = ghost_take(&p->late, hash) >= 0;
    }
    if (before < 0 && b->whole_parts > b->dram_parts)
        before = 0; /* an earlier run or another host stored it */
    if (before >= 0)
        set_uses(b, USES_ONE + (uint32_t)before / 2);
    else
        set_uses(b, late ? USES_LATE : 0);
    b->policy_data |= DATA_KNOWN | DATA_EXPECTED;
}

static void refer(struct policy *p, const struct block *b)
{
    learner_reference(p->learner, hash_of(p, b), uses_of(b), p->count, p->full);
}

void policy_insert(struct policy *p, block_ref ref)
{
    struct block *b = block_at(p->ix, ref), *before = p->run ? block_at(p->ix, p->run) : NULL;
    bool follows = before && p->run_n < RUN_MAX && aside_of(before) == POLICY_CANDIDATES;

    assert(!(b->flags & BLOCK_IN_POLICY));
    if (!(b->policy_data & DATA_EXPECTED))
        count_return(p, b);
    b->policy_data &= ~DATA_EXPECTED;
    p->clock++;
    /* What a request finds and what it brings are of one time: then the head does not go first. */
    if (p->chain_n++ % RUN_MAX == 0 && p->chain_n > 1)
        p->chain_stamp = stamp_now(p);
    set_stamp(b, p->chain_stamp);
    follows = follows && uses_of(before) == uses_of(b);
    link_behind(p, ref, b, follows ? p->run : 0);
    p->run_n = follows ? p->run_n + 1 : 1;
    p->run = ref;
    b->flags |= BLOCK_IN_POLICY;
    p->count++;
    refer(p, b);
}

/* A use, unless the last one was just now. */
static bool use(const struct policy *p, struct block *b)
{
    if (age_of(p, b) < p->count / WINDOW_FRACTION >> p->stamp_shift)
        return false;
    set_uses(b, uses_of(b) < USES_ONE ? USES_ONE : uses_of(b) + 1);
    set_stamp(b, stamp_now(p));
    return true;
}

uint32_t policy_touch(struct policy *p, const block_ref *refs, uint32_t n)
{
    uint32_t least = 0, again = 0;

    p->run = 0;
    p->chain_stamp = stamp_now(p);
    p->chain_n = 0;
    /* From the tail: what is moved to the front last stays longest. */
    while (n-- > 0) {
        struct block *b = refs[n] ? block_at(p->ix, refs[n]) : NULL;
        bool in_dram = b && b->flags & BLOCK_IN_POLICY, used = false;

        if (!b)
            continue;
        if (in_dram) {
            unlink_block(p, b);
            set_aside(b, POLICY_CANDIDATES);
            used = use(p, b);
        } else if (!(b->policy_data & DATA_EXPECTED)) {
            count_return(p, b);
            again += b->whole_parts > 0;
        }
        least = uses_of(b) > least ? uses_of(b) : least;
        set_uses(b, least);
        if (in_dram)
            link_behind(p, refs[n], b, 0);
        if (used)
            refer(p, b);
        again += used;
    }
    return again;
}

void policy_remove(struct policy *p, block_ref ref, bool evicted)
{
    struct block *b = block_at(p->ix, ref);
    uint64_t hash;

    assert(b->flags & BLOCK_IN_POLICY);
    if (p->run == ref)
        p->run = 0;
    unlink_block(p, b);
    set_aside(b, POLICY_CANDIDATES);
    b->flags &= (uint16_t)~BLOCK_IN_POLICY;
    p->count--;
    if (!evicted)
        return;
    if (!p->full || p->count > 2 * p->ghost_for)
        ghosts_renew(p);
    p->full = true;
    hash = hash_of(p, b);
    ghost_put(&p->soon, hash, uses_of(b));
    ghost_put(&p->late, hash, 0);
}

/* ---- which goes ---- */

/* Of the blocks at[], one of each list or 0, the one that goes first, or the one that goes last;
 * among equals the one with the fewest uses goes first. Returns the list, or -1. Time is what is left
 * until a block's time is up, in stamps, less what is the same for all. */
static int list_choose(const struct policy *p, const block_ref *at, bool first)
{
    const int32_t *bonus = learner_bonus(p->learner);
    int64_t best = 0, blocks = (int64_t)(p->count >> p->stamp_shift);
    int chosen = -1;

    for (int i = 0; i < (int)USES_CLASSES; i++) {
        int64_t time;

        if (at[i] == 0)
            continue;
        time = bonus[i] * blocks / BONUS_ONE - age_of(p, block_at(p->ix, at[i]));
        if (chosen >= 0 && (first ? time >= best : time < best))
            continue;
        chosen = i;
        best = time;
    }
    return chosen;
}

static void lists_ends(const struct policy *p, bool back, block_ref *at)
{
    for (uint32_t i = 0; i < USES_CLASSES; i++)
        at[i] = back ? p->list[i].back : p->list[i].front;
}

static block_ref coldest(const struct policy *p, unsigned list)
{
    block_ref at[USES_CLASSES];
    int from;

    if (list != POLICY_CANDIDATES)
        return p->aside[list].back;
    lists_ends(p, true, at);
    from = list_choose(p, at, true);
    return from < 0 ? 0 : at[from];
}

unsigned policy_list(const struct policy *p, block_ref ref)
{
    const struct block *b = block_at(p->ix, ref);

    return b->flags & BLOCK_IN_POLICY ? aside_of(b) : POLICY_CANDIDATES;
}

void policy_move(struct policy *p, block_ref ref, unsigned list)
{
    struct block *b = block_at(p->ix, ref);

    if (p->run == ref)
        p->run = 0;
    unlink_block(p, b);
    set_aside(b, list);
    link_behind(p, ref, b, list == POLICY_CANDIDATES ? list_of(p, b)->back : 0);
}

block_ref policy_victim(struct policy *p, unsigned from,
                        unsigned (*judge)(void *ctx, block_ref ref), void *ctx, int64_t *looks)
{
    block_ref ref;

    while (*looks > 0 && (ref = coldest(p, from)) != 0) {
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
    return list == POLICY_CANDIDATES ? p->candidates : p->aside[list].n;
}

block_ref policy_near(const struct policy *p, bool (*like)(void *ctx, block_ref ref), void *ctx,
                      uint32_t tries)
{
    block_ref at[USES_CLASSES];
    int from;

    lists_ends(p, true, at);
    while (tries-- > 0 && (from = list_choose(p, at, true)) >= 0) {
        if (like(ctx, at[from]))
            return at[from];
        at[from] = block_at(p->ix, at[from])->list_prev;
    }
    return 0;
}

/* ---- over a restart ---- */

/* What is aside was colder than the candidates when it went there. */
void policy_walk(const struct policy *p, void (*visit)(void *ctx, block_ref ref, uint32_t uses),
                 void *ctx)
{
    block_ref at[USES_CLASSES];
    int from;

    lists_ends(p, false, at);
    while ((from = list_choose(p, at, false)) >= 0) {
        visit(ctx, at[from], uses_of(block_at(p->ix, at[from])));
        at[from] = block_at(p->ix, at[from])->list_next;
    }
    for (uint32_t i = 1; i < POLICY_LISTS; i++)
        for (block_ref ref = p->aside[i].front; ref; ref = block_at(p->ix, ref)->list_next)
            visit(ctx, ref, uses_of(block_at(p->ix, ref)));
}

/* As if they had been inserted one after the other before all that are there. */
void policy_restore(struct policy *p, block_ref ref, uint32_t uses)
{
    struct block *b = block_at(p->ix, ref);

    assert(!(b->flags & BLOCK_IN_POLICY));
    set_uses(b, uses);
    b->policy_data |= DATA_KNOWN;
    set_stamp(b, (uint32_t)((p->clock - ++p->restored) >> p->stamp_shift));
    link_behind(p, ref, b, p->list[uses_of(b)].back);
    b->flags |= BLOCK_IN_POLICY;
    p->count++;
}

uint64_t policy_count(const struct policy *p)
{
    return p->count;
}

unsigned policy_heat(const struct policy *p, block_ref ref)
{
    static const unsigned heat[USES_MAX + 1] = {0, HEAT_ONCE, HEAT_ONCE, 2, 2, 3, 3, 3};

    return heat[uses_of(block_at(p->ix, ref))];
}

const char *policy_name(void)
{
    return "lru-bonus";
}
