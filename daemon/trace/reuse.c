#include "daemon/trace/reuse.h"

#include <assert.h>
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* A quarter of them lie within today's size: the estimate's error is about 1 % of the
 * references. */
#define SAMPLES 1024u
#define BUCKETS 1024u
#define NONE UINT16_MAX
/* Places in the order of last use, of which SAMPLES at most are taken; in groups whose sums are in
 * a Fenwick tree. */
#define PLACES 4096u
#define GROUP 16u
#define GROUPS (PLACES / GROUP)
/* So many of 2^32 hashes are sampled at first: one in 16. */
#define THRESHOLD_MAX (UINT32_C(1) << 28)
/* A sample that is full, or costs too much, loses this fraction. */
#define SHRINK_FRACTION 8
#define HALVING 5 /* losses that leave a half */
/* It costs too much when so many references are sampled within a second. A sample this small
 * stays. */
#define SAMPLED_MOST 16384u
#define WINDOW_MS 1000u
#define SAMPLES_LEAST 128u
/* Sums are halved this often, so that the curve is of the last hours. */
#define HALF_LIFE_MS (3600 * 1000u)
/* When no second of this time cost too much, a sample far below its bounds may grow. */
#define CALM_MS (60 * 1000u)
/* To about half of the bounds, and not by less than this factor. */
#define GROW_LEAST 2
/* Fewer say nothing. */
#define SAMPLED_LEAST 64

struct sample {
    uint64_t key;
    uint32_t chosen; /* below the threshold */
    uint16_t place, next;
};

/* One LRU stack, for the sizes of one set of tiers. Weights are of sampled blocks; divided by the
 * rate they are those of all. */
struct stack {
    uint64_t bytes; /* today's size */
    uint32_t threshold;
    uint32_t count, end; /* samples; the place of the next reference */
    uint32_t oldest;     /* no place below is taken */
    uint16_t free, fresh;
    uint64_t weight; /* of all samples */
    bool expired;    /* some have left it: it reaches as far back as the largest size */
    /* Counts of references so far, with decay: expected to be sampled, sampled, and hits. */
    double expected, sampled, hits[REUSE_POINTS];
    uint64_t expected_until;       /* reuse.references that `expected` is for */
    uint64_t group[GROUPS + 1];    /* Fenwick tree */
    uint64_t place_weight[PLACES]; /* 0: not taken */
    uint16_t place_sample[PLACES];
    uint16_t bucket[BUCKETS];
    struct sample sample[SAMPLES];
};

/* A larger sample that will take the place of a stack's. Keys that come in by a higher rate were
 * last used at a time that nobody noted: counted at once, they would be misses, whatever they are.
 * So the larger sample fills from nothing alongside the other one, which goes on to answer, and
 * what it counts meanwhile is forgotten. It takes over when it reaches as far back as the largest
 * size, or else an hour, of which references count half anyway. What the smaller one has counted
 * stays, scaled to the higher rate. */
struct growth {
    struct stack next; /* threshold 0: there is none */
    uint64_t begun_ms, not_before_ms;
};

#define KEY_WORDS 4 /* the first two and the last two: all of a key */

struct reuse {
    uint64_t factor[KEY_WORDS];   /* secret: a client that knew them could choose what is sampled */
    uint32_t threshold;           /* the highest of the stacks' */
    uint64_t faded_ms, window_ms; /* when the sums were halved; when the second began */
    uint32_t window_sampled;
    uint64_t calm_ms;      /* when a second last cost too much */
    uint32_t most_sampled; /* in a second since then, or since the last growth */
    uint64_t references, sampled;
    /* The last sampled key, the first in every stack's order, and how often it was used again,
     * which is not yet counted. A client that waits for a block looks the same keys up
     * repeatedly. */
    struct {
        uint32_t ns, chosen, n;
        uint64_t weight;
    } again;
    struct stack stack[REUSE_TIERS];
    struct growth growth[REUSE_TIERS];
};

static const double halves[] = REUSE_HALVES;
static_assert(SAMPLES < NONE && PLACES <= UINT16_MAX, "places and samples have 16 bits");

/* SplitMix64's. */
static uint64_t mixed(uint64_t v)
{
    v = (v ^ v >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    v = (v ^ v >> 27) * UINT64_C(0x94d049bb133111eb);
    return v ^ v >> 31;
}

static void stack_clear(struct stack *s, uint32_t threshold)
{
    memset(s, 0, sizeof(*s));
    memset(s->bucket, 0xff, sizeof(s->bucket));
    s->free = NONE;
    s->threshold = threshold;
}

int reuse_new(uint64_t seed, struct reuse **out)
{
    struct reuse *r = calloc(1, sizeof(*r));

    if (!r)
        return -ENOMEM;
    for (unsigned i = 0; i < KEY_WORDS; i++)
        r->factor[i] = mixed(seed + i * UINT64_C(0x9e3779b97f4a7c15));
    for (unsigned t = 0; t < REUSE_TIERS; t++)
        stack_clear(&r->stack[t], THRESHOLD_MAX);
    *out = r;
    return 0;
}

void reuse_free(struct reuse *r)
{
    free(r);
}

static double rate(const struct stack *s)
{
    return s->threshold / 4294967296.0;
}

static void threshold_set(struct reuse *r)
{
    r->threshold = 0;
    for (unsigned t = 0; t < REUSE_TIERS; t++) {
        uint32_t next = r->growth[t].next.threshold;
        uint32_t highest = next > r->stack[t].threshold ? next : r->stack[t].threshold;

        if (r->stack[t].bytes > 0 && highest > r->threshold)
            r->threshold = highest;
    }
}

/* Before the rate changes. */
static void expect(const struct reuse *r, struct stack *s)
{
    s->expected += (double)(r->references - s->expected_until) * rate(s);
    s->expected_until = r->references;
}

static void sums_scale(const struct reuse *r, struct stack *s, double scale)
{
    expect(r, s);
    s->expected *= scale;
    s->sampled *= scale;
    for (unsigned i = 0; i < REUSE_POINTS; i++)
        s->hits[i] *= scale;
}

static void again_count(const struct reuse *r, struct stack *s)
{
    if (s->bytes == 0 || r->again.chosen >= s->threshold)
        return;
    s->sampled += r->again.n;
    for (unsigned k = 0; k < REUSE_POINTS; k++)
        s->hits[k] += (double)r->again.weight <= halves[k] / 2 * (double)s->bytes ? r->again.n : 0;
}

/* Before anything changes that it depends on. */
static void again_end(struct reuse *r)
{
    for (unsigned t = 0; r->again.n > 0 && t < REUSE_TIERS; t++) {
        again_count(r, &r->stack[t]);
        again_count(r, &r->growth[t].next);
    }
    r->again.n = 0;
    r->again.weight = 0;
}

void reuse_sizes(struct reuse *r, const uint64_t bytes[REUSE_TIERS])
{
    again_end(r);
    for (unsigned t = 0; t < REUSE_TIERS; t++)
        r->stack[t].bytes = r->growth[t].next.bytes = bytes[t];
    threshold_set(r);
}

/* ---- weights in the order of last use ---- */

static void group_add(struct stack *s, uint32_t place, uint64_t weight)
{
    for (uint32_t g = place / GROUP + 1; g <= GROUPS; g += g & -g)
        s->group[g] += weight; /* modulo 2^64: a negative one subtracts */
}

static void place_take(struct stack *s, uint16_t sample, uint64_t weight)
{
    uint32_t place = s->end++;

    s->sample[sample].place = (uint16_t)place;
    s->place_sample[place] = sample;
    s->place_weight[place] = weight;
    s->weight += weight;
    group_add(s, place, weight);
}

static void place_leave(struct stack *s, uint32_t place)
{
    uint64_t weight = s->place_weight[place];

    s->place_weight[place] = 0;
    s->weight -= weight;
    group_add(s, place, -weight);
}

/* The weight of all samples used after that place's. */
static uint64_t weight_after(const struct stack *s, uint32_t place)
{
    uint64_t until = 0;

    for (uint32_t g = place / GROUP; g > 0; g &= g - 1)
        until += s->group[g];
    for (uint32_t i = place / GROUP * GROUP; i <= place; i++)
        until += s->place_weight[i];
    return s->weight - until;
}

/* Closes the gaps. */
static void places_compact(struct stack *s)
{
    uint32_t to = 0;

    memset(s->group, 0, sizeof(s->group));
    s->weight = 0;
    for (uint32_t from = s->oldest; from < s->end; from++) {
        uint64_t weight = s->place_weight[from];

        if (weight == 0)
            continue;
        s->place_weight[from] = 0;
        s->place_weight[to] = weight;
        s->place_sample[to] = s->place_sample[from];
        s->sample[s->place_sample[to]].place = (uint16_t)to;
        s->weight += weight;
        group_add(s, to++, weight);
    }
    s->end = to;
    s->oldest = 0;
}

/* ---- samples ---- */

static uint16_t *bucket_of(struct stack *s, uint64_t key)
{
    return &s->bucket[key % BUCKETS];
}

static uint16_t sample_find(struct stack *s, uint64_t key)
{
    uint16_t i = *bucket_of(s, key);

    while (i != NONE && s->sample[i].key != key)
        i = s->sample[i].next;
    return i;
}

static void sample_drop(struct stack *s, uint16_t i)
{
    uint16_t *at = bucket_of(s, s->sample[i].key);

    while (*at != i)
        at = &s->sample[*at].next;
    *at = s->sample[i].next;
    s->sample[i].next = s->free;
    s->free = i;
    s->count--;
    place_leave(s, s->sample[i].place);
}

/* A lower threshold for a sample that is full; what was counted is scaled to it. */
static void sample_shrink(struct reuse *r, struct stack *s)
{
    uint32_t smaller = s->threshold - s->threshold / SHRINK_FRACTION;

    sums_scale(r, s, (double)smaller / s->threshold);
    s->threshold = smaller;
    for (uint32_t place = s->oldest; place < s->end; place++)
        if (s->place_weight[place] > 0 && s->sample[s->place_sample[place]].chosen >= s->threshold)
            sample_drop(s, s->place_sample[place]);
    threshold_set(r);
}

static uint16_t sample_new(struct stack *s, uint64_t key, uint32_t chosen)
{
    uint16_t i = s->free, *bucket = bucket_of(s, key);

    if (i != NONE)
        s->free = s->sample[i].next;
    else
        i = s->fresh++;
    s->sample[i] = (struct sample){.key = key, .chosen = chosen, .next = *bucket};
    *bucket = i;
    s->count++;
    return i;
}

static uint16_t oldest_sample(struct stack *s)
{
    while (s->place_weight[s->oldest] == 0)
        s->oldest++;
    return s->place_sample[s->oldest];
}

/* Those that even the largest size would have lost. */
static void samples_expire(struct stack *s)
{
    double most = halves[REUSE_POINTS - 1] / 2 * (double)s->bytes * rate(s);

    while (s->count > 0) {
        uint16_t i = oldest_sample(s);

        if ((double)(s->weight - s->place_weight[s->oldest]) <= most)
            return;
        sample_drop(s, i);
        s->expired = true;
    }
}

static void reference(struct reuse *r, struct stack *s, uint64_t key, uint32_t chosen,
                      uint64_t weight)
{
    uint16_t i = sample_find(s, key);

    s->sampled++;
    if (i != NONE) {
        double distance = (double)weight_after(s, s->sample[i].place) / rate(s) + (double)weight;

        for (unsigned k = 0; k < REUSE_POINTS; k++)
            s->hits[k] += distance <= halves[k] / 2 * (double)s->bytes;
        place_leave(s, s->sample[i].place);
    } else {
        if (s->count == SAMPLES)
            sample_shrink(r, s);
        if (s->count == SAMPLES) /* none was chosen so late: a lower threshold may never drop any */
            sample_drop(s, oldest_sample(s));
        if (chosen >= s->threshold)
            return;
        i = sample_new(s, key, chosen);
    }
    if (s->end == PLACES)
        places_compact(s);
    place_take(s, i, weight);
    samples_expire(s);
}

/* ---- growth ---- */

static void growth_end(struct reuse *r, unsigned t, uint64_t not_before_ms)
{
    r->growth[t].next.threshold = 0;
    r->growth[t].not_before_ms = not_before_ms;
    threshold_set(r);
}

static void growth_take_over(struct reuse *r, unsigned t)
{
    struct stack *s = &r->stack[t], *next = &r->growth[t].next;

    sums_scale(r, s, (double)next->threshold / s->threshold);
    next->expected = s->expected;
    next->expected_until = s->expected_until;
    next->sampled = s->sampled;
    memcpy(next->hits, s->hits, sizeof(next->hits));
    *s = *next;
}

static void growth_begin(struct reuse *r, unsigned t, uint64_t now_ms)
{
    struct stack *s = &r->stack[t];
    uint64_t by_count = SAMPLES / 2 / (s->count + 1),
             by_cost = SAMPLED_MOST / 2 / (r->most_sampled + 1);
    uint64_t threshold = s->threshold * (by_count < by_cost ? by_count : by_cost);

    if (threshold > THRESHOLD_MAX)
        threshold = THRESHOLD_MAX;
    if (threshold / GROW_LEAST < s->threshold)
        return;
    stack_clear(&r->growth[t].next, (uint32_t)threshold);
    r->growth[t].next.bytes = s->bytes;
    r->growth[t].begun_ms = now_ms;
    threshold_set(r);
}

/* Once a second. */
static void growth_step(struct reuse *r, uint64_t now_ms)
{
    for (unsigned t = 0; t < REUSE_TIERS; t++) {
        struct growth *g = &r->growth[t];

        if (g->next.threshold == 0 && r->stack[t].bytes > 0 && now_ms - r->calm_ms >= CALM_MS &&
            now_ms >= g->not_before_ms)
            growth_begin(r, t, now_ms);
        if (g->next.threshold == 0 || (!g->next.expired && now_ms - g->begun_ms < HALF_LIFE_MS))
            continue;
        growth_take_over(r, t);
        growth_end(r, t, now_ms);
        r->most_sampled = 0;
        r->calm_ms = now_ms;
    }
}

/* The rate that the sample has is right if a larger one overflows. */
static void growth_reference(struct reuse *r, unsigned t, uint64_t key, uint32_t chosen,
                             uint64_t weight)
{
    struct stack *next = &r->growth[t].next;

    if (next->count == SAMPLES)
        growth_end(r, t, r->window_ms + HALF_LIFE_MS);
    else if (chosen < next->threshold)
        reference(r, next, key, chosen, weight);
}

/* ---- lookups ---- */

/* Which keys are sampled. Every word has a factor of its own, so that nobody can make keys that are
 * all chosen alike. */
static inline uint32_t choose(const uint64_t factor[KEY_WORDS], const uint8_t *key,
                              uint32_t key_bytes)
{
    uint64_t word[KEY_WORDS], sum = 0;

    memcpy(word, key, 16);
    memcpy(word + 2, key + key_bytes - 16, 16);
    for (unsigned i = 0; i < KEY_WORDS; i++)
        sum += word[i] * factor[i];
    return (uint32_t)(sum >> 32);
}

static uint64_t identify(uint32_t ns, const uint8_t *key, uint32_t key_bytes)
{
    uint64_t word[KEY_WORDS], h = ns;

    memcpy(word, key, 16);
    memcpy(word + 2, key + key_bytes - 16, 16);
    for (unsigned i = 0; i < KEY_WORDS; i++) {
        h = (h ^ word[i]) * UINT64_C(0x9e3779b97f4a7c15);
        h ^= h >> 32;
    }
    return h;
}

static void key_sampled(struct reuse *r, uint32_t ns, const uint8_t *key, uint32_t key_bytes,
                        uint64_t block_bytes)
{
    uint32_t chosen = choose(r->factor, key, key_bytes);
    uint64_t id;

    r->sampled++;
    r->window_sampled++;
    if (chosen == r->again.chosen && ns == r->again.ns && block_bytes == r->again.weight) {
        r->again.n++;
        return;
    }
    again_end(r);
    r->again.ns = ns;
    r->again.chosen = chosen;
    r->again.weight = block_bytes;
    id = identify(ns, key, key_bytes);
    for (unsigned t = 0; t < REUSE_TIERS; t++)
        if (r->stack[t].bytes > 0 && chosen < r->stack[t].threshold)
            reference(r, &r->stack[t], id, chosen, block_bytes);
    for (unsigned t = 0; t < REUSE_TIERS; t++)
        if (r->growth[t].next.threshold > 0)
            growth_reference(r, t, id, chosen, block_bytes);
}

/* Apart from what follows it: this loop is all that most keys cost. */
static __attribute__((noinline)) const uint8_t *
next_sampled(const struct reuse *r, const uint8_t *key, uint32_t key_bytes, const uint8_t *end)
{
    const uint64_t factor[KEY_WORDS] = {r->factor[0], r->factor[1], r->factor[2], r->factor[3]};
    const uint32_t threshold = r->threshold;

    while (key < end && choose(factor, key, key_bytes) >= threshold)
        key += key_bytes;
    return key;
}

static void fade(struct reuse *r, uint64_t now_ms)
{
    again_end(r);
    r->faded_ms = now_ms;
    for (unsigned t = 0; t < REUSE_TIERS; t++)
        sums_scale(r, &r->stack[t], 0.5);
}

/* A second is over, or before that so many were sampled. */
static void cost_bound(struct reuse *r, uint64_t now_ms)
{
    bool soon = now_ms - r->window_ms < WINDOW_MS;

    again_end(r);
    if (soon)
        r->calm_ms = now_ms;
    for (unsigned t = 0; soon && t < REUSE_TIERS; t++) {
        growth_end(r, t, now_ms);
        for (unsigned i = 0; i < HALVING && r->stack[t].count >= SAMPLES_LEAST; i++)
            sample_shrink(r, &r->stack[t]);
    }
    if (soon)
        r->most_sampled = 0;
    else if (r->window_sampled > r->most_sampled)
        r->most_sampled = r->window_sampled;
    r->window_ms = now_ms;
    r->window_sampled = 0;
    growth_step(r, now_ms);
}

void reuse_lookup(struct reuse *r, uint32_t ns, const uint8_t *keys, uint32_t key_bytes, uint32_t n,
                  uint64_t block_bytes, uint64_t now_ms)
{
    const uint8_t *end = keys + (size_t)n * key_bytes;

    if (now_ms - r->faded_ms >= HALF_LIFE_MS)
        fade(r, now_ms);
    if (now_ms - r->window_ms >= WINDOW_MS || r->window_sampled >= SAMPLED_MOST)
        cost_bound(r, now_ms);
    r->references += n;
    while ((keys = next_sampled(r, keys, key_bytes, end)) < end) {
        key_sampled(r, ns, keys, key_bytes, block_bytes);
        keys += key_bytes;
    }
}

void reuse_read(struct reuse *r, struct metrics_reuse *out)
{
    again_end(r);
    *out = (struct metrics_reuse){.references = r->references, .sampled = r->sampled};
    for (unsigned t = 0; t < REUSE_TIERS; t++) {
        const struct stack *s = &r->stack[t];
        double expected = s->expected + (double)(r->references - s->expected_until) * rate(s);

        out->bytes[t] = expected >= SAMPLED_LEAST ? s->bytes : 0;
        for (unsigned k = 0; k < REUSE_POINTS && expected >= SAMPLED_LEAST; k++) {
            /* Keys that are in the sample by chance and used all the time, or out of it, would
             * count too much: the difference are hits at any size (SHARDS-adj). */
            double hit = (s->hits[k] + expected - s->sampled) / expected;

            out->hit_permille[t][k] = hit <= 0 ? 0 : hit >= 1 ? 1000 : (uint32_t)(1000 * hit + 0.5);
        }
    }
}
