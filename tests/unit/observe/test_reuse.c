/* Compares the estimate with an exact LRU stack, on the workloads of the eviction study. -v prints
 * both. */
#include "daemon/trace/reuse.h"
#include "tests/reference/policy_workloads.h"

#include <criterion/criterion.h>
#include <stdio.h>

#define BLOCK_BYTES (1u << 20)
#define ERROR_MAX 2.5 /* percent of the references, the mean of all sizes and samples */
#define SEEDS 4       /* samples, each of other keys */

static const double halves[] = REUSE_HALVES;

static void key_of(uint32_t id, uint8_t key[32])
{
    uint64_t v = id;

    for (unsigned i = 0; i < 4; i++) {
        v = (v + UINT64_C(0x9e3779b97f4a7c15)) * UINT64_C(0xbf58476d1ce4e5b9);
        v ^= v >> 29;
        memcpy(key + 8 * i, &v, 8);
    }
}

/* ---- exact: distances of all references, by a Fenwick tree over them ---- */

static uint32_t *tree, tree_n;

static void tree_add(uint32_t at, uint32_t v)
{
    for (at++; at <= tree_n; at += at & -at)
        tree[at] += v;
}

static uint32_t tree_sum(uint32_t until) /* below `until` */
{
    uint32_t n = 0;

    for (; until > 0; until &= until - 1)
        n += tree[until];
    return n;
}

/* Hit rates of LRU caches of so many blocks. */
static void exact(const double *blocks, double *hit, unsigned n)
{
    uint32_t *last = zeroed(n_ids, sizeof(*last)), at = 0;

    tree_n = (uint32_t)n_references;
    tree = zeroed(tree_n + 1, sizeof(*tree));
    for (unsigned k = 0; k < n; k++)
        hit[k] = 0;
    for (uint32_t r = 0; r < n_requests; r++)
        for (uint32_t i = 0; i < requests[r].n; i++, at++) {
            uint32_t id = requests[r].id[i];

            if (last[id] > 0) {
                double distance = tree_sum(at) - tree_sum(last[id]) + 1;

                for (unsigned k = 0; k < n; k++)
                    hit[k] += distance <= blocks[k];
                tree_add(last[id] - 1, (uint32_t)-1);
            }
            tree_add(at, 1);
            last[id] = at + 1;
        }
    for (unsigned k = 0; k < n; k++)
        hit[k] /= (double)n_references;
    free(last);
    free(tree);
}

static void estimated(uint64_t seed, const uint64_t bytes[REUSE_TIERS], struct metrics_reuse *out)
{
    static uint8_t keys[CHAIN_MAX * 32];
    struct reuse *r;

    cr_assert_eq(reuse_new(seed, &r), 0);
    reuse_sizes(r, bytes);
    for (uint32_t i = 0; i < n_requests; i++) {
        for (uint32_t k = 0; k < requests[i].n; k++)
            key_of(requests[i].id[k], keys + 32 * k);
        reuse_lookup(r, 1, keys, 32, requests[i].n, BLOCK_BYTES, i * 50);
    }
    reuse_read(r, out);
    reuse_free(r);
}

/* Mean error of the eight points, in percent of the references. */
static double error_of(const char *workload, double hit[REUSE_TIERS][REUSE_POINTS],
                       const uint64_t bytes[REUSE_TIERS], uint64_t seed)
{
    struct metrics_reuse m;
    double sum = 0;

    estimated(seed, bytes, &m);
    printf("%-8s %4lu keys sampled; exact/estimated, %%:", workload, (unsigned long)m.sampled);
    for (unsigned t = 0; t < REUSE_TIERS; t++)
        for (unsigned k = 0; k < REUSE_POINTS; k++) {
            sum += fabs(100 * hit[t][k] - m.hit_permille[t][k] / 10.0);
            printf(" %.1f/%.1f", 100 * hit[t][k], m.hit_permille[t][k] / 10.0);
        }
    printf("; error %.2f\n", sum / (REUSE_TIERS * REUSE_POINTS));
    return sum / (REUSE_TIERS * REUSE_POINTS);
}

/* DRAM holds 5 % of the workload's blocks, DRAM and NVMe 20 %. */
static void compare(const char *workload)
{
    double blocks[REUSE_TIERS][REUSE_POINTS], hit[REUSE_TIERS][REUSE_POINTS], sum = 0;
    uint64_t bytes[REUSE_TIERS], seed = UINT64_C(0x1234567890abcdef);

    cr_assert_eq(workload_make(workload, 1), 0);
    printf("%lu references, %u blocks\n", (unsigned long)n_references, n_ids);
    for (unsigned t = 0; t < REUSE_TIERS; t++) {
        uint32_t now = n_ids / (t == REUSE_DRAM ? 20 : 5);

        bytes[t] = (uint64_t)now * BLOCK_BYTES;
        for (unsigned k = 0; k < REUSE_POINTS; k++)
            blocks[t][k] = now * halves[k] / 2;
        exact(blocks[t], hit[t], REUSE_POINTS);
    }
    for (int i = 0; i < SEEDS; i++, seed += UINT64_C(0x9e3779b97f4a7c16))
        sum += error_of(workload, hit, bytes, seed);
    cr_assert_leq(sum / SEEDS, ERROR_MAX, "%s: %.2f", workload, sum / SEEDS);
    trace_free();
}

#define NEAR(name, workload)                                                                       \
    Test(reuse, it_is_near_an_exact_stack_on_##name)                                               \
    {                                                                                              \
        compare(workload);                                                                         \
    }
NEAR(chat, "chat")
NEAR(agents, "agents")
NEAR(few_shot, "few-shot")
NEAR(rag, "rag")
NEAR(batch, "batch")
NEAR(sessions, "sessions")
NEAR(shift, "shift")
NEAR(tenants, "tenants")

/* A million keys a second, each of them new or from a small set. The clock stands or goes on. */
static uint64_t sampled_in_a_second(bool anew, uint64_t *all)
{
    static uint8_t keys[4096 * 32];
    const uint64_t bytes[REUSE_TIERS] = {(uint64_t)BLOCK_BYTES << 20, (uint64_t)BLOCK_BYTES << 23};
    struct metrics_reuse m;
    struct reuse *r;
    uint32_t id = 0;
    uint64_t before = 0;

    cr_assert_eq(reuse_new(UINT64_C(0x1234567890abcdef), &r), 0);
    reuse_sizes(r, bytes);
    for (uint64_t ms = 0; ms < 5000; ms += 4) {
        for (uint32_t k = 0; k < 4096; k++)
            key_of(anew ? id++ : k, keys + (size_t)32 * k);
        reuse_lookup(r, 1, keys, 32, 4096, BLOCK_BYTES, ms);
        reuse_read(r, &m);
        before = ms < 4000 ? m.sampled : before;
    }
    reuse_free(r);
    *all = m.sampled;
    return m.sampled - before;
}

Test(reuse, what_it_samples_in_a_second_is_bounded)
{
    uint64_t all, last = sampled_in_a_second(true, &all);

    printf("%lu of 1,024,000 keys in the last second, %lu of 5,120,000 in all\n",
           (unsigned long)last, (unsigned long)all);
    cr_assert_leq(last, 16384 + 4096);
    cr_assert_leq(all, 16384 * 30);
}

Test(reuse, a_small_sample_stays)
{
    uint64_t all, last = sampled_in_a_second(false, &all);

    cr_assert_geq(last, 250 * 60, "%lu", (unsigned long)last); /* 250 lookups, 60 keys of each */
}

/* Each key is used ten times in a row, and never again. Nine of ten uses are hits in a cache of any
 * size. */
Test(reuse, what_is_used_again_at_once_is_a_hit)
{
    const uint64_t bytes[REUSE_TIERS] = {(uint64_t)BLOCK_BYTES << 10, 0};
    struct metrics_reuse m;
    struct reuse *r;
    uint8_t key[32];

    cr_assert_eq(reuse_new(UINT64_C(0x1234567890abcdef), &r), 0);
    reuse_sizes(r, bytes);
    for (uint32_t i = 0; i < 100000; i++) {
        key_of(i / 10, key);
        reuse_lookup(r, 1, key, 32, 1, BLOCK_BYTES, i);
    }
    reuse_read(r, &m);
    reuse_free(r);
    cr_expect_eq(m.sampled % 10, 0u);
    for (unsigned k = 0; k < REUSE_POINTS; k++)
        cr_expect(m.hit_permille[REUSE_DRAM][k] >= 890 && m.hit_permille[REUSE_DRAM][k] <= 910,
                  "%u", m.hit_permille[REUSE_DRAM][k]);
}

/* Any of 16,384 keys, each as likely, so an LRU cache's hit rate is the share of keys that it
 * holds. Only the burst uses its keys. */
#define HOUR_S 3600u
#define UNIFORM_KEYS 16384u

struct day {
    struct reuse *r;
    uint64_t ms, random;
};

static void burst(struct day *d)
{
    static uint8_t keys[16384 * 32];
    uint64_t until = d->ms + 3000;

    for (uint32_t id = 1u << 24; d->ms < until; d->ms += 2) {
        for (uint32_t k = 0; k < 16384; k++)
            key_of(id++, keys + (size_t)32 * k);
        reuse_lookup(d->r, 1, keys, 32, 16384, BLOCK_BYTES, d->ms);
    }
}

/* 1,000 keys a second. Returns how many of them were sampled in the last 30 seconds. */
static uint64_t uniform(struct day *d, unsigned seconds)
{
    static uint8_t keys[1000 * 32];
    struct metrics_reuse m;
    uint64_t before = 0;

    for (unsigned s = 0; s < seconds; s++, d->ms += 1000) {
        for (unsigned k = 0; k < 1000; k++) {
            d->random = d->random * UINT64_C(6364136223846793005) + 1442695040888963407u;
            key_of(d->random >> 33 & (UNIFORM_KEYS - 1), keys + (size_t)32 * k);
        }
        if (s == seconds - 30) {
            reuse_read(d->r, &m);
            before = m.sampled;
        }
        reuse_lookup(d->r, 1, keys, 32, 1000, BLOCK_BYTES, d->ms);
    }
    reuse_read(d->r, &m);
    return m.sampled - before;
}

static double uniform_error(struct reuse *r)
{
    static const double hit[REUSE_TIERS][REUSE_POINTS] = {{12.5, 25, 50, 100}, {25, 50, 100, 100}};
    struct metrics_reuse m;
    double sum = 0;

    reuse_read(r, &m);
    for (unsigned t = 0; t < REUSE_TIERS; t++)
        for (unsigned k = 0; k < REUSE_POINTS; k++) {
            sum += fabs(hit[t][k] - m.hit_permille[t][k] / 10.0);
            printf(" %.1f/%.1f", hit[t][k], m.hit_permille[t][k] / 10.0);
        }
    printf("\n");
    return sum / (REUSE_TIERS * REUSE_POINTS);
}

Test(reuse, a_sample_that_a_burst_shrank_grows_again, .timeout = 120)
{
    const uint64_t bytes[REUSE_TIERS] = {UNIFORM_KEYS / 4 * (uint64_t)BLOCK_BYTES,
                                         UNIFORM_KEYS / 2 * (uint64_t)BLOCK_BYTES};
    struct day d = {.ms = 1000000, .random = 1};
    uint64_t before, after, grown = 0;
    double least, worst = 0;

    cr_assert_eq(reuse_new(UINT64_C(0x1234567890abcdef), &d.r), 0);
    reuse_sizes(d.r, bytes);
    before = uniform(&d, HOUR_S);
    least = uniform_error(d.r);
    burst(&d);
    after = uniform(&d, 30);
    uniform(&d, 9 * HOUR_S); /* until the burst's own misses have faded */
    for (unsigned hour = 0; hour < 3; hour++) {
        double error;

        grown = uniform(&d, HOUR_S);
        error = uniform_error(d.r);
        worst = error > worst ? error : worst;
    }
    printf(
        "sampled in 30 s: %lu before, %lu after the burst, %lu in the end; error %.2f and %.2f\n",
        (unsigned long)before, (unsigned long)after, (unsigned long)grown, least, worst);
    cr_assert_lt(after, before / 4);
    cr_assert_geq(grown, before / 4, "%lu", (unsigned long)grown);
    cr_assert_leq(worst, 2.5);
    reuse_free(d.r);
}

/* Keys whose first eight bytes follow from the last eight, or that differ only in the middle. A
 * peer may send any keys. */
static void keys_alike(bool middle, uint8_t *keys, uint32_t n)
{
    memset(keys, 0, (size_t)n * 32);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t v = (i + 1) * UINT64_C(0x9e3779b97f4a7c15), turned = v << 32 | v >> 32;

        memcpy(keys + (size_t)32 * i + (middle ? 8 : 0), &v, 8);
        if (!middle)
            memcpy(keys + (size_t)32 * i + 24, &turned, 8);
    }
}

Test(reuse, no_peer_chooses_what_is_sampled, .timeout = 20)
{
    static uint8_t keys[16384 * 32];
    const uint64_t bytes[REUSE_TIERS] = {(uint64_t)BLOCK_BYTES << 20, 0};

    for (uint64_t seed = 0; seed < 64; seed++) {
        struct metrics_reuse m;
        struct reuse *r;

        cr_assert_eq(reuse_new(seed * UINT64_C(0xbf58476d1ce4e5b9), &r), 0);
        reuse_sizes(r, bytes);
        keys_alike(seed % 2, keys, 16384);
        reuse_lookup(r, 1, keys, 32, 16384, BLOCK_BYTES, 0);
        reuse_read(r, &m);
        cr_assert(m.sampled > 512 && m.sampled < 2048, "%lu", (unsigned long)m.sampled);
        reuse_free(r);
    }
}
