#include "daemon/learn/learn.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A ghost is a word of 13 bits of hash above 3 bits of uses, in a set of 8, newest first. The first
 * table of ghosts has SOON_FACTOR for each block in DRAM. The second remembers longer where DRAM
 * holds few blocks: LATE_FACTOR for each, but LATE_GHOSTS at most. */
#define GHOST_WAYS 8u
#define GHOST_USES 0x7u
#define SOON_FACTOR 2
#define LATE_FACTOR 32
#define LATE_GHOSTS 131072u

struct ghosts {
    uint32_t sets; /* 0: nothing was evicted yet, or there is no memory */
    uint16_t (*set)[GHOST_WAYS];
};

/* The simulated DRAM of a trial holds this many blocks, or up to twice as many. */
#define SAMPLE_BLOCKS 512u
#define SAMPLE_SHIFT_MAX 16u
#define ENTRIES 4096u
#define BUCKETS 4096u
#define NONE UINT16_MAX

/* A hit fades while HORIZON times as many sampled blocks are referenced as a trial holds, and no
 * sooner than HORIZON_LEAST blocks of the whole traffic: in a small DRAM a few requests make all
 * hits. A trial takes over when it has ADVANTAGE times the hits of the best one. */
#define HORIZON 16
#define HORIZON_LEAST 32768
#define ADVANTAGE 1.005f
#define COMPARE_EVERY 64

/* Bonuses that are tried: of a block with u uses, factor * sqrt(u); of one that was not used again,
 * minus the penalty. The root, since each further use says less than the one before. A block that
 * was in DRAM long ago is tried as one of each kind. */
static const float factors[] = {0, 0.1f, 0.3f, 1, 3, 10};
static const float penalties[] = {0, 0.9f};
#define FACTORS (sizeof(factors) / sizeof(factors[0]))
#define PENALTIES (sizeof(penalties) / sizeof(penalties[0]))
#define LATES 2u
#define TRIALS (FACTORS * PENALTIES * LATES)

/* A sampled block that some trial has in its DRAM. Uses and the order of last use are the same in
 * all trials, so that one list for each number of uses serves all: a trial holds the newer end of
 * each, from `oldest` on. */
struct entry {
    uint64_t hash, sequence;
    uint16_t newer, older; /* in its list, a ring through the list's head: ENTRIES + uses */
    uint16_t next;         /* in its bucket or among the free */
    uint8_t uses;
    uint32_t inserted[TRIALS]; /* the trial's clock when the block was last used */
};

struct trial {
    int32_t bonus[USES_CLASSES];
    uint16_t oldest[USES_CLASSES]; /* the list's head: it holds none of them */
    uint32_t count;                /* blocks that it holds */
    uint32_t clock;                /* blocks that it has inserted, wrapping */
    float hits;
};

struct learner {
    struct ghosts soon, late;
    bool remembers;     /* something was evicted */
    uint64_t ghost_for; /* blocks in DRAM when the number of ghosts was chosen */
    struct trial trial[TRIALS];
    unsigned best;
    unsigned shift; /* one block in 1 << shift is sampled */
    uint64_t references;
    uint16_t free;  /* first of the entries that were given back, or NONE */
    uint16_t fresh; /* entries from here on were never in use: they take no memory yet */
    uint16_t bucket[BUCKETS];
    struct entry entry[ENTRIES + USES_CLASSES];
};

/* In capacities. */
static float trial_bonus(unsigned trial, unsigned uses)
{
    bool late_is_used = trial % LATES;

    if (uses < USES_LATE || (uses == USES_LATE && !late_is_used))
        return -penalties[trial / LATES % PENALTIES];
    return factors[trial / LATES / PENALTIES] *
           sqrtf(uses < USES_ONE ? 1 : (float)(uses - USES_LATE));
}

static void trials_init(struct learner *l)
{
    for (unsigned i = 0; i < TRIALS; i++)
        for (unsigned u = 0; u < USES_CLASSES; u++) {
            l->trial[i].bonus[u] = (int32_t)lrintf(trial_bonus(i, u) * BONUS_ONE);
            l->trial[i].oldest[u] = (uint16_t)(ENTRIES + u);
        }
}

int learner_new(struct learner **out)
{
    struct learner *l = calloc(1, sizeof(*l));

    if (!l)
        return -ENOMEM;
    trials_init(l);
    memset(l->bucket, 0xff, sizeof(l->bucket));
    l->free = NONE;
    for (unsigned i = ENTRIES; i < ENTRIES + USES_CLASSES; i++)
        l->entry[i].newer = l->entry[i].older = (uint16_t)i;
    *out = l;
    return 0;
}

void learner_free(struct learner *l)
{
    if (!l)
        return;
    free(l->soon.set);
    free(l->late.set);
    free(l);
}

const int32_t *learner_bonus(const struct learner *l)
{
    return l->trial[l->best].bonus;
}

/* ---- the sampled blocks ---- */

static uint16_t *bucket_of(struct learner *l, uint64_t hash)
{
    return &l->bucket[(hash >> 40) % BUCKETS];
}

static uint16_t entry_find(struct learner *l, uint64_t hash)
{
    uint16_t i = *bucket_of(l, hash);

    while (i != NONE && l->entry[i].hash != hash)
        i = l->entry[i].next;
    return i;
}

static bool trial_has(const struct learner *l, const struct trial *t, const struct entry *e)
{
    uint16_t oldest = t->oldest[e->uses];

    return oldest < ENTRIES && e->sequence >= l->entry[oldest].sequence;
}

/* As the newest of the blocks with as many uses. */
static void entry_link(struct learner *l, uint16_t i)
{
    struct entry *e = &l->entry[i];
    uint16_t head = (uint16_t)(ENTRIES + e->uses);

    e->newer = head;
    e->older = l->entry[head].older;
    l->entry[e->older].newer = i;
    l->entry[head].older = i;
    for (unsigned k = 0; k < TRIALS; k++)
        if (l->trial[k].oldest[e->uses] == head)
            l->trial[k].oldest[e->uses] = i;
}

static void entry_unlink(struct learner *l, uint16_t i)
{
    struct entry *e = &l->entry[i];

    for (unsigned k = 0; k < TRIALS; k++)
        if (l->trial[k].oldest[e->uses] == i)
            l->trial[k].oldest[e->uses] = e->newer;
    l->entry[e->newer].older = e->older;
    l->entry[e->older].newer = e->newer;
}

static void entry_drop(struct learner *l, uint16_t i)
{
    struct entry *e = &l->entry[i];
    uint16_t *at = bucket_of(l, e->hash);

    for (unsigned k = 0; k < TRIALS; k++)
        l->trial[k].count -= trial_has(l, &l->trial[k], e);
    entry_unlink(l, i);
    while (*at != i)
        at = &l->entry[*at].next;
    *at = e->next;
    e->next = l->free;
    l->free = i;
}

static uint16_t list_oldest(const struct learner *l, unsigned uses)
{
    return l->entry[ENTRIES + uses].newer;
}

/* The block that no one has used for longest, whatever trials would do. */
static void entry_drop_oldest(struct learner *l)
{
    uint16_t oldest = list_oldest(l, 0);

    for (unsigned u = 1; u < USES_CLASSES; u++) {
        uint16_t i = list_oldest(l, u);

        if (i < ENTRIES && (oldest >= ENTRIES || l->entry[i].sequence < l->entry[oldest].sequence))
            oldest = i;
    }
    entry_drop(l, oldest);
}

static uint16_t entry_new(struct learner *l, uint64_t hash)
{
    uint16_t i, *bucket = bucket_of(l, hash);

    if (l->free == NONE && l->fresh == ENTRIES)
        entry_drop_oldest(l);
    if (l->free != NONE) {
        i = l->free;
        l->free = l->entry[i].next;
    } else {
        i = l->fresh++;
    }
    l->entry[i].hash = hash;
    l->entry[i].next = *bucket;
    *bucket = i;
    return i;
}

static bool sampled(const struct learner *l, uint64_t hash)
{
    return (hash >> 16 & ((UINT64_C(1) << l->shift) - 1)) == 0;
}

/* Keeps the simulations small and the sample as large as they allow. */
static void sample_fit(struct learner *l, uint64_t in_dram)
{
    if (in_dram >> l->shift >= 2 * SAMPLE_BLOCKS && l->shift < SAMPLE_SHIFT_MAX) {
        l->shift++;
        for (unsigned u = 0; u < USES_CLASSES; u++)
            for (uint16_t i = list_oldest(l, u), next; i < ENTRIES; i = next) {
                next = l->entry[i].newer;
                if (!sampled(l, l->entry[i].hash))
                    entry_drop(l, i);
            }
    } else if (l->shift > 0 && in_dram >> l->shift < SAMPLE_BLOCKS / 2) {
        l->shift--;
    }
}

/* ---- trials ---- */

/* Evicts what would leave first, as the policy does; returns its uses. */
static unsigned trial_evict(struct learner *l, unsigned k, int64_t blocks)
{
    struct trial *t = &l->trial[k];
    unsigned coldest = USES_CLASSES;
    int64_t least = 0;

    for (unsigned u = 0; u < USES_CLASSES; u++) {
        const struct entry *e = &l->entry[t->oldest[u]];
        int64_t stays;

        if (t->oldest[u] >= ENTRIES)
            continue;
        stays = t->bonus[u] * blocks / BONUS_ONE - (int64_t)(t->clock - e->inserted[k]);
        if (coldest < USES_CLASSES && stays >= least)
            continue;
        coldest = u;
        least = stays;
    }
    assert(coldest < USES_CLASSES);
    t->oldest[coldest] = l->entry[t->oldest[coldest]].newer;
    t->count--;
    return coldest;
}

static bool held_by_a_trial(const struct learner *l, unsigned uses, uint16_t oldest)
{
    for (unsigned k = 0; k < TRIALS; k++)
        if (l->trial[k].oldest[uses] == oldest)
            return true;
    return false;
}

static void trials_evict(struct learner *l, uint64_t blocks)
{
    unsigned from = 0; /* a bit for each number of uses */

    for (unsigned k = 0; k < TRIALS; k++)
        while (l->trial[k].count > blocks)
            from |= 1u << trial_evict(l, k, (int64_t)blocks);
    for (unsigned u = 0; u < USES_CLASSES; u++) {
        uint16_t i;

        while (from >> u & 1 && (i = list_oldest(l, u)) < ENTRIES && !held_by_a_trial(l, u, i))
            entry_drop(l, i);
    }
}

static void trials_compare(struct learner *l, uint64_t blocks)
{
    float least = (float)(HORIZON_LEAST >> l->shift), horizon = HORIZON * (float)blocks;
    float keep = 1 - (float)COMPARE_EVERY / (horizon > least ? horizon : least);
    unsigned most = l->best;

    for (unsigned k = 0; k < TRIALS; k++) {
        l->trial[k].hits *= keep > 0 ? keep : 0;
        if (l->trial[k].hits > l->trial[most].hits)
            most = k;
    }
    if (l->trial[most].hits > l->trial[l->best].hits * ADVANTAGE + 1)
        l->best = most;
}

void learner_reference(struct learner *l, uint64_t hash, uint32_t uses, uint64_t in_dram)
{
    uint64_t blocks;
    uint16_t i;

    sample_fit(l, in_dram);
    if (!sampled(l, hash))
        return;
    blocks = in_dram >> l->shift;
    blocks = blocks ? blocks : 1;
    i = entry_find(l, hash);
    for (unsigned k = 0; k < TRIALS; k++) {
        struct trial *t = &l->trial[k];

        if (i != NONE && trial_has(l, t, &l->entry[i])) {
            t->hits++;
        } else {
            t->count++;
            t->clock++;
        }
    }
    if (i != NONE)
        entry_unlink(l, i);
    else
        i = entry_new(l, hash);
    l->entry[i].uses = (uint8_t)(uses < USES_MAX ? uses : USES_MAX);
    l->entry[i].sequence = ++l->references;
    for (unsigned k = 0; k < TRIALS; k++)
        l->entry[i].inserted[k] = l->trial[k].clock;
    entry_link(l, i);
    trials_evict(l, blocks);
    if (l->references % COMPARE_EVERY == 0)
        trials_compare(l, blocks);
}

/* ---- ghosts ---- */

/* So many, all empty. */
static void ghosts_clear(struct ghosts *g, uint64_t ghosts)
{
    uint64_t sets = ghosts / GHOST_WAYS + 1;

    free(g->set);
    g->set = calloc(sets, sizeof(*g->set));
    g->sets = g->set ? (uint32_t)sets : 0;
}

static void ghost_put(struct ghosts *g, uint64_t hash, uint32_t uses)
{
    uint16_t *set;

    if (g->sets == 0)
        return;
    set = g->set[(hash >> 32) * g->sets >> 32];
    memmove(set + 1, set, (GHOST_WAYS - 1) * sizeof(*set));
    set[0] = (uint16_t)((hash & ~(uint64_t)GHOST_USES) | uses);
}

static int ghost_take(struct ghosts *g, uint64_t hash)
{
    uint16_t *set;

    if (g->sets == 0)
        return -1;
    set = g->set[(hash >> 32) * g->sets >> 32];
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

void learner_evicted(struct learner *l, uint64_t hash, uint32_t uses, uint64_t in_dram)
{
    if (!l->remembers || in_dram > 2 * l->ghost_for) {
        uint64_t late = in_dram * LATE_FACTOR;

        ghosts_clear(&l->soon, in_dram * SOON_FACTOR);
        ghosts_clear(&l->late, late < LATE_GHOSTS ? late : LATE_GHOSTS);
        l->ghost_for = in_dram;
        l->remembers = true;
    }
    ghost_put(&l->soon, hash, uses);
    ghost_put(&l->late, hash, 0);
}

int learner_back(struct learner *l, uint64_t hash, bool *late)
{
    *late = ghost_take(&l->late, hash) >= 0;
    return ghost_take(&l->soon, hash);
}
