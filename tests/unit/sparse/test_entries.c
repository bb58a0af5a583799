/* kernels/entries: shapes and memory, lists of sequences, replays. test_entries_random.c checks
 * steps against a model. */
#include "kernels/entries/entries.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static struct ucm_entries_shape small(void)
{
    return (struct ucm_entries_shape){
        .layer_heads = 3, .numbers = 40, .entries = 70, .requests = 4, .misses = 256};
}

static struct ucm_entries make(struct ucm_entries_shape shape)
{
    char why[UCM_ENTRIES_WHY] = "";
    struct ucm_entries s;

    cr_assert_eq(ucm_entries_check(&shape, why), 0, "%s", why);
    ucm_entries_layout(&s, &shape, aligned_alloc(64, ucm_entries_bytes(&shape)));
    ucm_entries_init(&s);
    return s;
}

static void drop(struct ucm_entries *s)
{
    free(s->stamp); /* where the memory begins */
}

static void whole(const struct ucm_entries *s)
{
    char why[UCM_ENTRIES_WHY] = "";

    cr_assert_eq(ucm_entries_verify(s, why), 0, "%s", why);
}

/* All bytes arrive. */
static void serve(struct ucm_entries *s)
{
    uint8_t arrived[256];

    memset(arrived, 1, sizeof(arrived));
    ucm_entries_take(s);
    whole(s);
    ucm_entries_publish(s, arrived);
    whole(s);
}

static uint32_t resident(const struct ucm_entries *s, uint32_t layer, uint32_t first, uint32_t n)
{
    uint32_t there = 0;

    for (uint32_t i = first; i < first + n; i++)
        there += s->entry_of[ucm_entries_key(&s->shape, layer, i)] >= 0;
    return there;
}

/* ---- shapes ---- */

static void refused(struct ucm_entries_shape shape, const char *field)
{
    char why[UCM_ENTRIES_WHY] = "";

    cr_assert_eq(ucm_entries_check(&shape, why), -EINVAL, "%s", field);
    cr_assert_eq(strncmp(why, field, strlen(field)), 0, "%s", why);
}

Test(entries, a_shape_that_does_not_fit_is_refused)
{
    struct ucm_entries_shape good = small(), bad;

    bad = good, bad.layer_heads = 0, refused(bad, "layer_heads is 0");
    bad = good, bad.layer_heads = UCM_ENTRIES_LAYER_HEADS_MAX + 1,
    refused(bad, "layer_heads is 65537");
    bad = good, bad.numbers = 0, refused(bad, "numbers is 0");
    bad = good, bad.entries = 0, refused(bad, "entries is 0");
    bad = good, bad.entries = UINT32_MAX, refused(bad, "entries is 4294967295");
    bad = good, bad.requests = 0, refused(bad, "requests is 0");
    bad = good, bad.misses = 0, refused(bad, "misses is 0");
    bad = good, bad.layer_heads = 512, bad.numbers = 1u << 23,
    refused(bad, "layer_heads times numbers is");
}

/* Each array lies in the memory, aligned and after the one before. */
static void check_layout(struct ucm_entries_shape n)
{
    struct ucm_entries s;
    char *base = (char *)(uintptr_t)(1ull << 40), *end = base;
    struct {
        void *at;
        uint64_t bytes;
    } array[] = {
        {&s.stamp, 8ull * n.entries},
        {&s.step, sizeof(struct ucm_entries_step)},
        {&s.entry_of, 4ull * n.layer_heads * n.numbers},
        {&s.key, 4ull * n.entries},
        {&s.request, 4ull * n.entries},
        {&s.held, 4ull * n.requests},
        {&s.floor, 4ull * n.requests},
        {&s.miss, 12ull * n.misses},
        {&s.unserved, 4ull * n.misses},
    };

    ucm_entries_layout(&s, &n, base);
    for (size_t i = 0; i < sizeof(array) / sizeof(array[0]); i++) {
        char *at;

        memcpy(&at, array[i].at, sizeof(at));
        cr_assert(at >= end && (uintptr_t)at % 64 == 0);
        end = at + array[i].bytes;
    }
    cr_assert(end <= base + ucm_entries_bytes(&n));
    cr_assert(base + ucm_entries_bytes(&n) < end + 64);
}

Test(entries, arrays_of_any_size_lie_after_one_another)
{
    char why[UCM_ENTRIES_WHY];
    struct ucm_entries_shape large = {.layer_heads = 80,
                                      .numbers = 1u << 20,
                                      .entries = 1u << 24,
                                      .requests = 1u << 16,
                                      .misses = 1u << 22};

    check_layout(small());
    cr_assert_eq(ucm_entries_check(&large, why), 0);
    check_layout(large);
    large.layer_heads = 63, large.numbers = 1u << 26, large.entries = UCM_ENTRIES_MAX;
    cr_assert_eq(ucm_entries_check(&large, why), 0);
    check_layout(large);
    cr_assert(ucm_entries_bytes(&large) > UINT32_MAX);
    cr_assert_eq(ucm_entries_key(&large, 62, (1u << 26) - 1), 63u * (1u << 26) - 1);
}

/* ---- one behaviour each ---- */

Test(entries, a_miss_is_listed_once_and_resident_when_published)
{
    struct ucm_entries s = make(small());
    uint32_t index[2][2][3] = {{{0, 1, 2}, {2, 1, UCM_ENTRIES_NO_INDEX}}, {{0, 3, 9}, {3, 9, 9}}};
    uint32_t count[2][2] = {{3, 3}, {2, 1}}, request[] = {0, 1};
    int32_t table[2][4] = {{30, 31, 32, -1}, {30, -1, -1, 33}}; /* 30 is in both */
    struct ucm_entries_lists lists = {.sequences = 2,
                                      .lists = 2,
                                      .room = 3,
                                      .index = &index[0][0][0],
                                      .count = &count[0][0],
                                      .table = &table[0][0],
                                      .table_stride = 4,
                                      .request = request};

    ucm_entries_begin(&s, 1);
    ucm_entries_resolve(&s, 2, &lists);
    whole(&s);
    cr_assert_eq(s.step->misses, 4);
    cr_assert_eq(resident(&s, 2, 30, 4), 0);
    cr_assert_eq(s.miss[0].request, 0); /* that wanted it first */
    serve(&s);
    cr_assert_eq(resident(&s, 2, 30, 4), 4);
    cr_assert_eq(resident(&s, 1, 30, 4) + resident(&s, 0, 30, 4), 0);
    cr_assert(s.held[0] == 3 && s.held[1] == 1);
    ucm_entries_begin(&s, 2);
    ucm_entries_resolve(&s, 2, &lists);
    cr_assert(s.step->misses == 0 && s.step->flags == 0 && s.step->missed == 4);
    for (uint32_t i = 30; i < 34; i++)
        cr_assert_eq(s.stamp[s.entry_of[ucm_entries_key(&s.shape, 2, i)]], 2);
    lists.apart = 1; /* the second list of each sequence is of the next layer head */
    ucm_entries_resolve(&s, 0, &lists);
    serve(&s);
    cr_assert(resident(&s, 0, 30, 4) == 4 && resident(&s, 1, 30, 4) == 3);
    cr_assert_eq(s.entry_of[ucm_entries_key(&s.shape, 1, 30)], UCM_ENTRIES_NONE);
    drop(&s);
}

Test(entries, a_step_that_never_ended_leaves_nothing_to_the_next)
{
    struct ucm_entries s = make(small());

    for (uint64_t step = 1; step < 4; step++) {
        ucm_entries_begin(&s, step);
        whole(&s);
        cr_assert(s.step->misses == 0 && s.step->unserved == 0 && s.step->flags == 0);
        cr_assert_eq(resident(&s, 2, 0, 5), 0);
        for (uint32_t i = 0; i < 5; i++)
            ucm_entries_want(&s, ucm_entries_key(&s.shape, 2, i), 0);
        cr_assert_eq(s.step->misses, 5);
        if (step == 2)
            ucm_entries_take(&s);
    }
    serve(&s);
    cr_assert(resident(&s, 2, 0, 5) == 5 && s.held[0] == 5);
    drop(&s);
}

Test(entries, a_block_without_a_number_spoils_the_step)
{
    struct ucm_entries s = make(small());
    uint32_t index[] = {0, 1, 2, 3}, count = 4, request = 0;
    int32_t table[] = {5, -1, 40, 6};
    struct ucm_entries_lists lists = {.sequences = 1,
                                      .lists = 1,
                                      .room = 4,
                                      .index = index,
                                      .count = &count,
                                      .table = table,
                                      .table_stride = 3, /* so the last one has no number either */
                                      .request = &request};

    ucm_entries_begin(&s, 1);
    ucm_entries_resolve(&s, 0, &lists);
    cr_assert_eq(s.step->flags, UCM_ENTRIES_UNSERVED | UCM_ENTRIES_STRAY);
    cr_assert_eq(s.step->misses, 1);
    serve(&s);
    ucm_entries_begin(&s, 2);
    cr_assert_eq(s.step->flags, 0);
    request = s.shape.requests; /* nobody */
    ucm_entries_resolve(&s, 0, &lists);
    cr_assert_eq(s.step->flags, UCM_ENTRIES_UNSERVED | UCM_ENTRIES_STRAY);
    cr_assert_eq(s.step->misses, 0);
    drop(&s);
}

/* ---- replays ---- */

#define LAYERS 6u
#define CHOSEN 9u

/* A layer's choice depends on all layers before it. Attending a layer without its blocks leads to
 * other choices. */
static uint32_t choose(uint64_t *path, bool right, uint32_t i)
{
    *path = *path * 6364136223846793005u + 1442695040888963407u + !right;
    return (uint32_t)(*path >> 33) % 64 / (i % 2 + 1);
}

/* -> the layers that were served; the numbers that the last of them chose in *last. */
static uint32_t run_step(struct ucm_entries *s, uint64_t text, unsigned *seed, int lost_of_16)
{
    uint64_t path = text;
    uint32_t good = 0;
    bool right = true;
    uint8_t arrived[CHOSEN];

    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        uint32_t before = s->step->unserved;

        for (uint32_t i = 0; i < CHOSEN; i++)
            ucm_entries_want(s, ucm_entries_key(&s->shape, layer, choose(&path, right, i)), 0);
        ucm_entries_take(s);
        for (uint32_t i = 0; i < CHOSEN; i++)
            arrived[i] = rand_r(seed) % 16 >= lost_of_16;
        ucm_entries_publish(s, arrived);
        whole(s);
        right = right && s->step->unserved == before;
        good += right;
    }
    cr_assert_eq(right, s->step->flags == 0);
    return good;
}

/* What the host does between two runs: it brings the blocks on the list. */
static void bring(struct ucm_entries *s)
{
    uint32_t keys[256], n = s->step->unserved;

    memcpy(keys, s->unserved, n * sizeof(*keys));
    for (uint32_t i = 0; i < n; i++)
        ucm_entries_want(s, keys[i], 0);
    ucm_entries_take(s);
    memset(keys, 1, sizeof(keys));
    ucm_entries_publish(s, (uint8_t *)keys);
}

static struct ucm_entries make_for_steps(uint32_t steps)
{
    return make((struct ucm_entries_shape){.layer_heads = LAYERS,
                                           .numbers = 64,
                                           .entries = steps * LAYERS * CHOSEN,
                                           .requests = 1,
                                           .misses = 256});
}

Test(entries, a_replay_gets_further_each_time_in_a_pool_of_one_step)
{
    struct ucm_entries s = make_for_steps(1);
    unsigned seed = 17;
    uint64_t now = 0;

    for (uint64_t text = 1; text < 400; text++) {
        uint32_t good = 0, runs = 0, before;

        /* each run has a step number of its own, so blocks from a failed run are not in the way */
        do {
            before = good;
            ucm_entries_begin(&s, ++now);
            good = run_step(&s, text, &seed, text % 2 ? 2 : 12);
            cr_assert_not(s.step->flags & UCM_ENTRIES_FULL);
            cr_assert(runs == 0 || good > before);
            if (s.step->flags != 0)
                bring(&s);
            runs++;
        } while (good < LAYERS);
        cr_assert_leq(runs, LAYERS + 1);
    }
    drop(&s);
}

Test(entries, a_replay_under_the_same_number_keeps_everything)
{
    struct ucm_entries s = make_for_steps(3);
    size_t table = LAYERS * 64 * sizeof(int32_t), stamps = s.shape.entries * sizeof(uint64_t);
    int32_t *old = malloc(table);
    uint64_t *old_stamps = malloc(stamps);
    unsigned seed = 3;

    for (uint64_t text = 1; text < 100; text++) {
        uint64_t missed;

        ucm_entries_begin(&s, text);
        cr_assert_eq(run_step(&s, text, &seed, 0), LAYERS);
        memcpy(old, s.entry_of, table);
        memcpy(old_stamps, s.stamp, stamps);
        missed = s.step->missed;
        ucm_entries_begin(&s, text);
        cr_assert_eq(run_step(&s, text, &seed, 16),
                     LAYERS); /* nothing misses: nothing can be lost */
        cr_assert_eq(s.step->missed, missed);
        cr_assert_eq(memcmp(old, s.entry_of, table), 0);
        cr_assert_eq(memcmp(old_stamps, s.stamp, stamps), 0);
    }
    free(old);
    free(old_stamps);
    drop(&s);
}
