/* The lookup table: every order in which a writer's stores may take effect between a reader's
 * loads. Both use the real functions.
 *
 * There is one writer, its stores are releases, and all loads acquires. So a load that saw a store
 * has seen all stores before it, and later loads see at least as many. The model runs all of these
 * orders. */
#include <stdatomic.h>
#include <stdint.h>

static uint64_t model_load(const _Atomic uint64_t *p);
static void model_store(_Atomic uint64_t *p, uint64_t value);
#define UCM_LOOKUP_TABLE_LOAD(p) model_load(p)
#define UCM_LOOKUP_TABLE_STORE(p, value) model_store(p, value)
#include "proto/memory/lookup_table.h"

#include <criterion/criterion.h>
#include <string.h>

#define BUCKETS 8u
#define STORES 32u
#define LOADS 64u

static struct ucm_lookup_table_bucket table[BUCKETS], before[BUCKETS];

/* What the writer does, and where a run is in it. */
static struct {
    _Atomic uint64_t *at[STORES];
    uint64_t value[STORES];
    unsigned n, done;
    bool recording;
} writer;

/* How many of the writer's stores came before each load, since the one before. */
static struct {
    unsigned choice[LOADS], n, at;
    bool reading;
} reader;

static uint64_t model_load(const _Atomic uint64_t *p)
{
    if (reader.reading) {
        if (reader.at == reader.n) {
            cr_assert_lt(reader.n, LOADS);
            reader.choice[reader.n++] = 0;
        }
        for (unsigned i = 0; i < reader.choice[reader.at]; i++, writer.done++)
            atomic_store(writer.at[writer.done], writer.value[writer.done]);
        reader.at++;
    }
    return atomic_load(p);
}

static void model_store(_Atomic uint64_t *p, uint64_t value)
{
    if (writer.recording) {
        cr_assert_lt(writer.n, STORES);
        writer.at[writer.n] = p;
        writer.value[writer.n++] = value;
    }
    atomic_store(p, value);
}

static void set(uint64_t hash, uint64_t tier)
{
    (void)ucm_lookup_table_set(table, BUCKETS - 1, hash, tier, 5);
}

/* From now on what `set` does is the writer's program. */
static void record(void)
{
    memcpy(before, table, sizeof(table));
    writer.n = 0;
    writer.recording = true;
}

/* The next order; false: there is none. */
static bool next_order(void)
{
    while (reader.n > 0) {
        unsigned sum = 0;

        for (unsigned i = 0; i < reader.n; i++)
            sum += reader.choice[i];
        if (sum < writer.n) {
            reader.choice[reader.n - 1]++;
            return true;
        }
        reader.n--;
    }
    return false;
}

/* Two lookups of a key in each order. seen[a][b] counts the runs in which they saw tiers a and b.
 * Returns all runs. */
static unsigned explore(uint64_t hash, unsigned seen[4][4])
{
    const struct ucm_lookup_table_view view = {.bucket = table, .mask = BUCKETS - 1};
    unsigned runs = 0;

    writer.recording = false;
    memset(seen, 0, 16 * sizeof(seen[0][0]));
    reader.n = 0;
    do {
        uint64_t a, b;

        memcpy(table, before, sizeof(table));
        writer.done = reader.at = 0;
        reader.reading = true;
        a = ucm_lookup_table_find(&view, hash) & UCM_LOOKUP_TABLE_TIER_MASK;
        b = ucm_lookup_table_find(&view, hash) & UCM_LOOKUP_TABLE_TIER_MASK;
        reader.reading = false;
        seen[a][b]++;
        runs++;
        reader.n = reader.at;
    } while (next_order());
    return runs;
}

/* A hash whose own bucket is 2; keys of one `kind` have the same tag. */
static uint64_t key(uint64_t number, uint64_t kind)
{
    return 2 | kind << 57 | (number + 1) << 32;
}

static void only(const unsigned seen[4][4], unsigned allowed[][2], unsigned n)
{
    for (unsigned a = 0; a < 4; a++)
        for (unsigned b = 0; b < 4; b++) {
            bool may = false;

            for (unsigned i = 0; i < n; i++)
                may = may || (allowed[i][0] == a && allowed[i][1] == b);
            if (may)
                cr_expect_gt(seen[a][b], 0u, "%u then %u was never seen", a, b);
            else
                cr_expect_eq(seen[a][b], 0u, "%u then %u was seen", a, b);
        }
}

#define ONLY(seen, ...)                                                                            \
    do {                                                                                           \
        unsigned allowed[][2] = {__VA_ARGS__};                                                     \
        only((const unsigned(*)[4])(seen), allowed, sizeof(allowed) / sizeof(allowed[0]));         \
    } while (0)

static void begin(unsigned own)
{
    memset(table, 0, sizeof(table));
    writer.recording = false;
    for (unsigned i = 0; i < own; i++)
        set(key(i, i), 1);
}

Test(lookup_table_model, what_comes_is_seen_once_it_is_there)
{
    unsigned seen[4][4];

    for (unsigned own = 0; own <= 7; own += 7) { /* in its own bucket, and in the next */
        begin(own);
        record();
        set(key(9, 9), 2);
        cr_expect_geq(explore(key(9, 9), seen), 6u);
        ONLY(seen, {0, 0}, {0, 2}, {2, 2});
    }
}

Test(lookup_table_model, what_changes_its_tier_is_always_seen)
{
    unsigned seen[4][4];

    for (unsigned own = 0; own <= 7; own += 7) {
        begin(own);
        set(key(9, 9), 1);
        record();
        set(key(9, 9), 2);
        set(key(9, 9), 3);
        explore(key(9, 9), seen);
        ONLY(seen, {1, 1}, {1, 2}, {1, 3}, {2, 2}, {2, 3}, {3, 3});
    }
}

Test(lookup_table_model, what_goes_is_not_seen_again)
{
    unsigned seen[4][4];

    for (unsigned own = 0; own <= 7; own += 7) {
        begin(own);
        set(key(9, 9), 1);
        record();
        set(key(9, 9), 0);
        set(key(10, 9), 2); /* takes its place, with the same tag */
        explore(key(9, 9), seen);
        ONLY(seen, {1, 1}, {1, 0}, {0, 0});
    }
}

/* Other entries come and go around it, in its own bucket or after. */
Test(lookup_table_model, what_stays_is_always_seen)
{
    unsigned seen[4][4], runs = 0;

    for (unsigned own = 6; own <= 8; own++) {
        begin(own);
        set(key(9, 9), 3);
        record();
        set(key(0, 0), 0);
        set(key(10, 9), 1); /* with the same tag */
        set(key(11, 9), 2); /* after */
        set(key(11, 9), 0);
        runs += explore(key(9, 9), seen);
        ONLY(seen, {3, 3});
    }
    cr_expect_gt(runs, 200u);
}

/* The entry lies two buckets after its own. Another one, as far away or further, goes. */
Test(lookup_table_model, what_stays_far_behind_is_always_seen)
{
    unsigned seen[4][4], runs = 0;

    for (unsigned first = 0; first < 2; first++) {
        begin(7);
        for (unsigned i = 0; i < 7; i++) /* of the next bucket */
            set(key(20 + i, i) + 1, 1);
        for (unsigned i = 0; i < 8; i++) /* until one of its own entries lies three after it */
            set(key(10 + i, 9), i == first ? 3 : 1);
        cr_assert_eq(
            ucm_lookup_table_find(
                &(struct ucm_lookup_table_view){.bucket = table, .mask = BUCKETS - 1}, key(17, 9)) &
                UCM_LOOKUP_TABLE_TIER_MASK,
            1u);
        record();
        set(key(17, 9), 0); /* the furthest one */
        set(key(16, 9), 0);
        set(key(12, 9), 0);
        runs += explore(key(10 + first, 9), seen);
        ONLY(seen, {3, 3});
    }
    cr_expect_gt(runs, 100u);
}

Test(lookup_table_model, what_never_was_is_never_seen)
{
    unsigned seen[4][4];

    begin(7);
    record();
    set(key(10, 9), 1);
    set(key(10, 9), 0);
    set(key(11, 9), 2);
    explore(key(9, 9), seen);
    ONLY(seen, {0, 0});
}

/* A tag that comes before its entry would show the block that had the place before. */
Test(lookup_table_model, the_model_finds_a_wrong_order)
{
    unsigned seen[4][4];
    _Atomic uint64_t *at;
    uint64_t value;

    begin(0);
    set(key(9, 9), 1);
    set(key(9, 9), 0);
    record();
    set(key(10, 9), 2);
    cr_assert_eq(writer.n, 2u);
    at = writer.at[0];
    value = writer.value[0];
    writer.at[0] = writer.at[1];
    writer.value[0] = writer.value[1];
    writer.at[1] = at;
    writer.value[1] = value;
    explore(key(9, 9), seen);
    cr_expect_gt(seen[0][1] + seen[1][0] + seen[1][1], 0u, "the block that went is seen again");
}
