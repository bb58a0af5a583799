/* The choice among scores, by keys that order as scores do. It is a radix selection, or for top k
 * with vectors a bisection of the keys' range. Both are O(n) for any scores. */
#include "kernels/sparse/choose.h"

#include "kernels/sparse/spec.h"

#include <assert.h>
#include <string.h>

/* The arrays and the sums lie in the scratch memory. Loops over them have no branches that depend
 * on scores, since nothing could predict those. */
struct choice {
    const float *scores;
    const struct ucm_score_ops *ops;
    uint32_t begin, end;     /* between the windows */
    uint32_t *keys;          /* by block, begin..end - 1 */
    const uint32_t *weights; /* by block; NULL: top k */
    struct choose_sums *sums;
    uint32_t *left, *left_weights; /* keys of candidates, and their weights */
};

void ucm_choose_defaults(struct ucm_choose_spec *spec)
{
    *spec = (struct ucm_choose_spec){
        .policy = UCM_CHOOSE_TOPK,
        .block_tokens = 16,
        .min_blocks = 4,
        .sink_blocks = 1,
        .recent_blocks = 2,
        .beta = 1.0f,
        .sparse_ratio = 0.3,
        .eps = 0.95,
    };
}

int ucm_choose_check(const struct ucm_choose_spec *spec, char why[UCM_SPARSE_WHY])
{
    if (spec->policy > UCM_CHOOSE_MASS)
        return sparse_refuse(why, "policy %u is none of 0 (top k), 1 (mass)", spec->policy);
    if (spec->sink_blocks > UCM_SCORE_BLOCKS_MAX || spec->recent_blocks > UCM_SCORE_BLOCKS_MAX)
        return sparse_refuse(why, "sink_blocks and recent_blocks are at most %u blocks",
                             UCM_SCORE_BLOCKS_MAX);
    if (spec->policy == UCM_CHOOSE_MASS) {
        if (!(spec->eps >= 0 && spec->eps <= 1))
            return sparse_refuse(why, "eps is %g; 0 to 1 are allowed", spec->eps);
        if (!(spec->beta > 0) || ucm_not_finite(spec->beta))
            return sparse_refuse(why, "beta is %g; it must be above 0 and finite",
                                 (double)spec->beta);
        return 0;
    }
    if (spec->topk_tokens > 0 && spec->block_tokens == 0)
        return sparse_refuse(why, "topk_tokens needs block_tokens, which is 0");
    if (!(spec->sparse_ratio >= 0 && spec->sparse_ratio <= 1))
        return sparse_refuse(why, "sparse_ratio is %g; 0 to 1 are allowed", spec->sparse_ratio);
    return 0;
}

int ucm_choose_for(const struct ucm_summary_spec *summary, struct ucm_choose_spec *spec,
                   char why[UCM_SPARSE_WHY])
{
    spec->block_tokens = summary->shape.tokens;
    spec->beta = ucm_score_beta(summary, spec->beta);
    return ucm_choose_check(spec, why);
}

/* ---- how many ---- */

uint32_t ucm_choose_limit(const struct ucm_choose_spec *spec, uint32_t n)
{
    return spec->limit > 0 ? choose_least(spec->limit, n) : n;
}

uint32_t choose_windows(const struct ucm_choose_spec *spec, uint32_t n)
{
    return choose_least((uint64_t)spec->sink_blocks + spec->recent_blocks, n);
}

uint32_t choose_most(const struct ucm_choose_spec *spec, uint32_t n)
{
    uint64_t k;

    if (spec->policy == UCM_CHOOSE_MASS)
        return n;
    if (spec->topk_tokens > 0)
        k = ((uint64_t)spec->topk_tokens + spec->block_tokens - 1) / spec->block_tokens;
    else
        k = (uint64_t)((double)n * spec->sparse_ratio);
    return choose_least(k > spec->min_blocks ? k : spec->min_blocks, n);
}

uint32_t ucm_choose_room(const struct ucm_choose_spec *spec, uint32_t n)
{
    uint32_t most = choose_most(spec, n), windows = choose_windows(spec, n);

    return choose_least(most > windows ? most : windows, ucm_choose_limit(spec, n));
}

size_t ucm_choose_scratch_bytes(const struct ucm_choose_spec *spec, uint32_t n)
{
    size_t lists = spec->policy == UCM_CHOOSE_MASS ? 4 : 2;

    return sizeof(struct choose_sums) + lists * n * sizeof(uint32_t);
}

/* ---- the cut ---- */

static void clear_sums(const struct choice *c)
{
    memset(c->sums->count, 0, sizeof(c->sums->count));
    if (c->weights != NULL)
        memset(c->sums->mass, 0, sizeof(c->sums->mass));
}

/* The sums of keys' digits. weights: NULL for top k. */
static void add_digits(struct choose_sums *sums, const uint32_t *keys, const uint32_t *weights,
                       uint32_t n, uint32_t shift, uint32_t mask)
{
    for (uint32_t i = 0; i < n; i++)
        sums->count[keys[i] >> shift & mask]++;
    for (uint32_t i = 0; weights != NULL && i < n; i++)
        sums->mass[keys[i] >> shift & mask] += weights[i];
}

/* The sums of the keys' first digits, in which poisoned blocks are no candidates. */
static void sum_keys(struct choice *c)
{
    uint32_t *poisoned = &c->sums->count[POISON_KEY >> FIRST_SHIFT];

    clear_sums(c);
    add_digits(c->sums, c->keys + c->begin, c->weights != NULL ? c->weights + c->begin : NULL,
               c->end - c->begin, FIRST_SHIFT, DIGITS - 1);
    *poisoned = 0;
}

/* Those of n keys whose bits from `above` up are `prefix`. Returns how many. Works in place. */
static uint32_t keep_prefix(const uint32_t *keys, const uint32_t *weights, uint32_t n,
                            uint32_t above, uint32_t prefix, uint32_t *left, uint32_t *left_weights)
{
    uint32_t kept = 0;

    if (weights == NULL) {
        for (uint32_t i = 0; i < n; i++) {
            uint32_t key = keys[i];

            left[kept] = key;
            kept += key >> above == prefix;
        }
        return kept;
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t key = keys[i];

        left[kept] = key;
        left_weights[kept] = weights[i];
        kept += key >> above == prefix;
    }
    return kept;
}

/* The lowest digit of a run of eight that are empty, or `digit` itself. */
static int skip_empty(const struct choose_sums *sums, int digit)
{
    static const uint32_t none[8];

    while (digit >= 15 && memcmp(&sums->count[digit - 8], none, sizeof(none)) == 0)
        digit -= 8;
    return digit;
}

uint32_t choose_walk(const struct choose_sums *sums, bool weighed, struct choose_need *need)
{
    for (int digit = DIGITS - 1;; digit--) {
        uint64_t mass;

        assert(digit >= 0);
        if (sums->count[digit] == 0) {
            digit = skip_empty(sums, digit);
            continue;
        }
        mass = weighed ? sums->mass[digit] : 0;
        if (sums->count[digit] >= need->count || mass >= need->mass)
            return (uint32_t)digit;
        need->count -= sums->count[digit];
        need->mass -= mass;
    }
}

uint32_t choose_ties(uint32_t n, uint64_t mass, const struct choose_need *need)
{
    uint64_t weight = mass / n, ties = n;

    if (weight > 0)
        ties = (need->mass - 1) / weight + 1;
    return choose_least(choose_least(ties, need->count), n);
}

static struct choose_cut take(struct choice *c, struct choose_need need)
{
    static const uint32_t shift[] = {32, FIRST_SHIFT, 10, 0};
    const uint32_t *keys = c->keys + c->begin;
    const uint32_t *weights = c->weights != NULL ? c->weights + c->begin : NULL;
    uint32_t prefix = 0, n = c->end - c->begin, digit = 0;

    for (unsigned level = 1; level < 4; level++) {
        if (level > 1) {
            uint32_t above = shift[level - 1], mask = (1u << (above - shift[level])) - 1;

            n = keep_prefix(keys, weights, n, above, prefix >> above, c->left, c->left_weights);
            keys = c->left;
            weights = weights != NULL ? c->left_weights : NULL;
            clear_sums(c);
            add_digits(c->sums, keys, weights, n, shift[level], mask);
        }
        digit = choose_walk(c->sums, c->weights != NULL, &need);
        prefix |= digit << shift[level];
    }
    return (struct choose_cut){
        prefix,
        choose_ties(c->sums->count[digit], weights != NULL ? c->sums->mass[digit] : 0, &need)};
}

/* ---- the answer ---- */

struct answer {
    uint32_t *index;
    uint32_t n, room;
};

static void put_window(struct answer *a, uint32_t begin, uint32_t end)
{
    for (uint32_t b = begin; b < end && a->n < a->room; b++)
        a->index[a->n++] = b;
}

static uint64_t sum_weights(const uint32_t *weights, uint32_t begin, uint32_t end)
{
    uint64_t sum = 0;

    for (uint32_t b = begin; b < end; b++)
        sum += weights[b];
    return sum;
}

uint64_t choose_mass(const struct ucm_choose_spec *spec, uint64_t total, uint64_t have)
{
    double exact = spec->eps * (double)total;
    uint64_t need = (uint64_t)exact;

    need += (double)need < exact;
    return need > have ? need - have : 0;
}

struct choose_need choose_need(const struct ucm_choose_spec *spec, uint32_t n, uint32_t room,
                               uint32_t poisoned, uint64_t mass)
{
    uint32_t most = choose_least(choose_most(spec, n), room);
    uint64_t in = (uint64_t)choose_windows(spec, n) + poisoned;

    return (struct choose_need){.count = most > in ? most - (uint32_t)in : 0, .mass = mass};
}

/* The best `count` by bisection of the keys' range, bit by bit. A bit takes n comparisons, which
 * vectors do faster than the radix selection its part. */
static struct choose_cut bisect(const struct choice *c, uint32_t count)
{
    const uint32_t *keys = c->keys + c->begin;
    uint32_t n = c->end - c->begin, key = 0;

    for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
        uint32_t above = c->ops->count(keys, n, key | bit);

        if (above == count)
            return (struct choose_cut){(key | bit) - 1, 0};
        if (above > count)
            key |= bit;
    }
    return (struct choose_cut){key, count - c->ops->count(keys, n, key + 1)};
}

static struct choose_cut cut_of(const struct ucm_choose_spec *spec, struct choice *c, uint32_t n,
                                uint32_t room, uint64_t total)
{
    uint32_t between = c->end - c->begin, poisoned;
    struct choose_need need;
    uint64_t mass = UINT64_MAX;

    choose_keys(c->scores + c->begin, c->keys + c->begin, between);
    poisoned = choose_poisoned(c->keys + c->begin, between);
    if (c->weights != NULL)
        mass = choose_mass(spec, total, total - sum_weights(c->weights, c->begin, c->end));
    need = choose_need(spec, n, room, poisoned, mass);
    if (need.count == 0 || need.mass == 0)
        return (struct choose_cut){POISON_KEY, poisoned};
    if (c->weights == NULL && c->ops->count != NULL)
        return bisect(c, poisoned + need.count);
    sum_keys(c);
    return take(c, need);
}

uint32_t ucm_choose(const struct ucm_choose_spec *spec, const float *scores, uint32_t n,
                    void *scratch, uint32_t *index, float *chosen, uint32_t room)
{
    uint32_t windows = choose_windows(spec, n), init = choose_least(spec->sink_blocks, n);
    struct choice c = {
        .scores = scores, .ops = score_ops(), .begin = init, .end = n - (windows - init)};
    struct answer a = {.index = index, .room = choose_least(room, ucm_choose_limit(spec, n))};
    uint64_t total = 0;

    c.sums = scratch;
    c.keys = (uint32_t *)(c.sums + 1);
    c.left = c.keys + n;
    if (spec->policy == UCM_CHOOSE_MASS) {
        uint32_t *weights = c.left + n;

        c.left_weights = weights + n;
        total = c.ops->weigh(scores, n, c.ops->top(scores, n), spec->beta, weights);
        c.weights = weights;
    }
    put_window(&a, 0, c.begin);
    if (a.room > windows) {
        struct choose_cut cut = cut_of(spec, &c, n, a.room, total);

        a.n += c.ops->put(c.keys + c.begin, c.end - c.begin, cut.key, cut.ties, c.begin,
                          index + a.n, a.room - windows);
    }
    put_window(&a, c.end, n);
    for (uint32_t i = 0; chosen != NULL && i < a.n; i++)
        chosen[i] = scores[index[i]];
    return a.n;
}

void ucm_score_history(const uint32_t *uses, uint32_t n, float *scores)
{
    float last = n > 1 ? (float)(n - 1) : 1.0f;

    for (uint32_t b = 0; b < n; b++)
        scores[b] = 0.5f * (float)uses[b] + (0.1f + 0.9f * ((float)b / last));
}
