/* Which keys are there: in few round trips, by the deadline, and without asking twice. */
#include "tests/unit/shared/shared_rig.h"

#define KEYS 8192u

static uint8_t keys[UCM_MAX_KEYS * 32], answers[UCM_MAX_KEYS];
static struct shared_lookup lookup;
static bool done;
static uint32_t highest; /* part */

static void open_roots(uint32_t roots)
{
    struct shared_settings s = settings_of(roots);

    s.timeout_ms = 300;
    for (uint32_t i = 0; i < roots; i++)
        s.roots[i].depth = 64;
    open_with(s);
}

TestSuite(shared_lookup, .init = rig_setup, .fini = shared_teardown, .timeout = 60);

static void done_cb(struct shared_lookup *p)
{
    cr_assert_eq(p, &lookup);
    cr_assert_not(done, "done_cb ran twice");
    done = true;
}

static int ask(uint32_t first, uint32_t n, bool per_key, uint64_t ms)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t number = first + i;

        memset(keys + i * 32, 0, 32);
        memcpy(keys + i * 32, &number, sizeof(number));
    }
    lookup = (struct shared_lookup){.key_bytes = 32,
                                    .keys = keys,
                                    .n = n,
                                    .part = highest,
                                    .bytes_of = rig_bytes_of,
                                    .per_key = per_key,
                                    .deadline_ms = uv_now(&rig.loop) + ms,
                                    .answers = answers,
                                    .done_cb = done_cb};
    memset(lookup.fingerprint, 0xf0, sizeof(lookup.fingerprint));
    done = false;
    rig.round = 0;
    return shared_lookup(shared, &lookup);
}

/* The prefix that was found; also 0 when there was no need to wait. */
static uint32_t prefix_of(uint32_t first, uint32_t n, uint64_t ms)
{
    int err = ask(first, n, false, ms);

    if (err == -ENOENT)
        return 0;
    cr_assert_eq(err, 0);
    cr_assert(rig_run(&done, ms + 20000));
    for (uint32_t i = 0; i < lookup.prefix; i++)
        cr_assert(answers[i] != SHARED_UNKNOWN && answers[i] != SHARED_MISSING, "%u of %u", i,
                  lookup.prefix);
    return lookup.prefix;
}

/* Runs until all questions have their answers. */
static void ask_all(uint32_t n, bool per_key, uint64_t ms)
{
    cr_assert_eq(ask(0, n, per_key, ms), 0);
    cr_assert(rig_run(&done, 20000));
}

static void put(unsigned server, uint32_t first, uint32_t n)
{
    memset(rig.servers[server].files, 0, RIG_FILES * sizeof(struct rig_file));
    for (uint32_t i = first; i < first + n; i++)
        rig_put(&rig.servers[server], i);
}

static void prefix_ends_at(uint32_t end)
{
    close_it();
    open_roots(1);
    put(0, 0, end);
    cr_assert_eq(prefix_of(0, KEYS, 2000), end);
    cr_assert_leq(rig.round, 4, "%u round trips to %u", rig.round, end);
}

Test(shared_lookup, a_long_prefix_takes_four_round_trips_at_most)
{
    static const uint32_t ends[] = {0,    1,    2,    3,    4,    5,    63,   64,
                                    65,   127,  128,  200,  1000, 4095, 4096, 4097,
                                    5000, 8000, 8127, 8128, 8190, 8191, 8192};

    open_roots(1);
    for (uint32_t end = 0; end <= KEYS; end += 97)
        prefix_ends_at(end);
    for (unsigned i = 0; i < sizeof(ends) / sizeof(ends[0]); i++)
        prefix_ends_at(ends[i]);
}

Test(shared_lookup, what_is_there_as_a_whole_takes_one_round_trip)
{
    open_roots(1);
    put(0, 0, KEYS);
    cr_assert_eq(prefix_of(0, KEYS, 2000), KEYS);
    cr_assert_eq(rig.round, 1);
    cr_assert_leq(rig.servers[0].asked[SHARED_FIND], 64);
}

Test(shared_lookup, at_a_millisecond_each_it_takes_some_milliseconds)
{
    uint64_t from;

    put(0, 0, 5001);
    rig.servers[0].latency_ms = 1;
    open_roots(1);
    from = uv_now(&rig.loop);
    cr_assert_eq(prefix_of(0, KEYS, 2000), 5001);
    cr_assert_leq(uv_now(&rig.loop) - from, 4, "%llu",
                  (unsigned long long)(uv_now(&rig.loop) - from));
}

Test(shared_lookup, no_wait_for_what_is_known_to_be_missing)
{
    unsigned asked;

    open_roots(1);
    cr_assert_eq(prefix_of(0, 100, 5000), 0);
    rig_run(NULL, 20);
    asked = rig.servers[0].asked[SHARED_FIND];
    cr_assert_eq(ask(0, 100, false, 1000), -ENOENT);
    cr_assert_eq(rig.servers[0].asked[SHARED_FIND], asked);
    put(0, 0, 100);
    rig_run(NULL, 2100);
    cr_assert_eq(prefix_of(0, 100, 5000), 100, "it is remembered for a while only");
}

Test(shared_lookup, an_answer_is_not_asked_for_twice)
{
    unsigned asked;

    open_roots(1);
    put(0, 0, 3000);
    cr_assert_eq(prefix_of(0, KEYS, 1000), 3000);
    rig_run(NULL, 10);
    asked = rig.servers[0].asked[SHARED_FIND];
    cr_assert_eq(prefix_of(0, KEYS, 1000), 3000);
    cr_assert_eq(rig.servers[0].asked[SHARED_FIND], asked);
}

Test(shared_lookup, a_hole_ends_the_prefix_where_it_is_seen)
{
    open_roots(1);
    put(0, 0, 60);
    rig.servers[0].files[17].there = false;
    cr_assert_eq(prefix_of(0, 60, 1000), 17);
}

Test(shared_lookup, the_deadline_holds_and_late_answers_help_the_next)
{
    uint64_t from;

    open_roots(1);
    put(0, 0, 50);
    rig.servers[0].hangs = true;
    from = uv_now(&rig.loop);
    cr_assert_eq(prefix_of(0, 50, 40), 0);
    cr_assert_leq(uv_now(&rig.loop) - from, 41);
    cr_assert_eq(answers[0], SHARED_UNKNOWN);
    rig_let_go(&rig.servers[0]);
    rig_run(NULL, 20);
    rig.servers[0].hangs = true;
    cr_assert_eq(prefix_of(0, 50, 40), 50);
}

Test(shared_lookup, lookups_leave_a_root_alone_that_is_always_late)
{
    unsigned refused = 0;

    open_roots(1);
    put(0, 0, 2);
    rig.servers[0].latency_ms = 60;
    for (uint32_t i = 0; i < 40; i++)
        refused += ask(100 + i, 1, false, 15) == -ENOENT || !rig_run(&done, 1000);
    cr_assert_geq(refused, 5);
    cr_assert(shared_root_up(shared->roots[0]), "loads still ask it");
    rig.servers[0].latency_ms = 0;
    rig_run(NULL, 700);
    cr_assert_eq(prefix_of(0, 2, 5000), 2);
}

/* A root that is not asked, because its answer is known, has not been late. */
Test(shared_lookup, a_root_that_is_not_asked_is_not_slow)
{
    open_roots(2);
    put(0, 0, 0);
    rig.servers[1].latency_ms = 60;
    for (uint32_t i = 0; i < 16; i++) {
        struct block_file_id id = rig_id(100 + i);

        if (i == 8)
            rig_run(NULL, 700);
        shared_remember(shared, &id, 0, false, 60000);
        if (ask(100 + i, 1, false, 15) == 0)
            rig_run(&done, 100);
    }
    cr_assert_not(breaker_closed(&shared->roots[1]->lookups));
    cr_assert(breaker_closed(&shared->roots[0]->lookups));
}

static bool purge_over;

static void purged_cb(struct shared_purge *p, int status, uint64_t files)
{
    (void)p;
    cr_assert_eq(status, 0);
    cr_assert_eq(files, 0, "the listings of these servers are empty");
    purge_over = true;
}

Test(shared_lookup, what_was_there_before_a_purge_is_asked_for_again)
{
    struct shared_purge purge = {.done_cb = purged_cb};

    open_roots(1);
    put(0, 0, 50);
    cr_assert_eq(prefix_of(0, 50, 200), 50);
    memset(purge.fingerprint, 0xf0, sizeof(purge.fingerprint));
    purge_over = false;
    cr_assert_eq(shared_purge(shared, &purge), 0);
    ask_all(50, false, 200);
    cr_assert_eq(lookup.prefix, 50, "it is not gone yet");
    cr_assert(rig_run(&purge_over, 20000));
    put(0, 0, 0);
    cr_assert_eq(prefix_of(0, 50, 200), 0);
}

Test(shared_lookup, each_key_by_itself)
{
    open_roots(1);
    put(0, 0, 0);
    for (uint32_t i = 0; i < 1000; i += 3)
        rig_put(&rig.servers[0], i);
    ask_all(1000, true, 2000);
    for (uint32_t i = 0; i < 1000; i++)
        cr_assert_eq(answers[i], i % 3 == 0 ? 1 : SHARED_MISSING, "%u", i);
    cr_assert_eq(lookup.prefix, 1);
    cr_assert_leq(rig.servers[0].busy_max, 64);
}

/* A block that lacks any part on its root is not a hit, and costs as little as a missing block. */
Test(shared_lookup, a_block_that_lacks_a_part_is_none)
{
    highest = 3;
    open_roots(2);
    put(0, 0, 60);
    put(1, 0, 0);
    for (uint32_t part = 0; part < 4; part++)
        rig.servers[0].files[20 + part].lacks = (uint8_t)(1u << part);
    rig.servers[0].files[7].lacks = 0x2; /* the other root has it */
    rig_put(&rig.servers[1], 7);
    rig.servers[1].files[7].lacks = 0xd;
    ask_all(60, true, 2000);
    for (uint32_t i = 0; i < 60; i++)
        cr_expect_eq(answers[i] == SHARED_MISSING, i >= 20 && i < 24, "%u", i);
    cr_expect_eq(prefix_of(0, 60, 2000), 20);
    cr_expect_eq(prefix_of(24, 30, 2000), 30);
}

Test(shared_lookup, parts_take_one_round_trip_more)
{
    highest = 7;
    open_roots(1);
    put(0, 0, 5000);
    cr_assert_eq(prefix_of(0, KEYS, 2000), 5000);
    cr_expect_leq(rig.round, 5);
    cr_expect_leq(rig.servers[0].asked[SHARED_FIND], 3 * 64 + 64 * 8);
    rig.servers[0].asked[SHARED_FIND] = 0;
    cr_assert_eq(prefix_of(9000, KEYS, 2000), 0);
    cr_expect_leq(rig.servers[0].asked[SHARED_FIND], 64, "what is not there costs one each");
    put(0, 0, KEYS);
    rig_run(NULL, 10000);
    cr_assert_eq(prefix_of(0, KEYS, 2000), KEYS);
    cr_expect_eq(rig.round, 1, "most of it is unverified anyway");
}

/* The other parts' answers come too late. So those parts are unverified, and the answers help the
 * next lookup. */
Test(shared_lookup, a_slow_root_costs_no_hit)
{
    highest = 1;
    for (unsigned way = 0; way < 2; way++) {
        open_roots(1);
        put(0, 0, 10);
        rig.servers[0].files[4].lacks = 1;
        rig.servers[0].latency_ms = 60;
        ask_all(10, way == 1, 100); /* the first answers come, the others do not */
        for (uint32_t i = 0; i < 10; i++)
            cr_expect_eq(answers[i], 1, "%u", i);
        cr_expect_eq(lookup.prefix, 10);
        rig_run(NULL, 100);
        ask_all(10, way == 1, 100);
        cr_expect_eq(answers[4], SHARED_MISSING);
        cr_expect_eq(lookup.prefix, 4);
        close_it();
        rig.servers[0].latency_ms = 0;
    }
    open_roots(1);
}

Test(shared_lookup, any_root_will_do)
{
    open_roots(3);
    rig.servers[1].latency_ms = 2;
    for (uint32_t i = 0; i < 3000; i++)
        rig_put(&rig.servers[i % 3], i);
    cr_assert_eq(prefix_of(0, KEYS, 10000), 3000);
    cr_assert_leq(rig.round, 8);
    for (uint32_t i = 0; i < 4; i++)
        cr_assert_eq(answers[i], 1 + i % 3);
}

Test(shared_lookup, a_root_that_hangs_hides_its_own_only)
{
    open_roots(2);
    put(0, 0, 40);
    rig.servers[1].hangs = true;
    cr_assert_eq(prefix_of(0, 80, 50), 40);
    cr_assert_eq(answers[40], SHARED_UNKNOWN, "the other root might have it");
}

Test(shared_lookup, cancelled_it_says_nothing_any_more)
{
    open_roots(1);
    put(0, 0, 100);
    rig.servers[0].latency_ms = 5;
    cr_assert_eq(ask(0, 100, false, 100), 0);
    shared_lookup_cancel(shared, &lookup);
    memset(answers, 0x77, sizeof(answers));
    rig_run(NULL, 150);
    cr_assert_not(done);
    cr_assert_eq(answers[0], 0x77);
}

Test(shared_lookup, nobody_is_asked_while_all_are_down)
{
    open_roots(1);
    rig.servers[0].fails[SHARED_FIND] = rig.servers[0].fails[SHARED_CHECK] = -EIO;
    for (uint32_t i = 0; i < 10; i++)
        (void)prefix_of(i * 10, 3, 100);
    cr_assert_eq(ask(500, 10, false, 100), -ENOENT);
}
