/* The study of fleets (docs/scale.md) where the answer is known, and what it takes a lookup to ask beside what the daemon asks. */
#include "tests/bench/scale.h"
#include "tests/unit/share/share_rig.h"

#define PROMPT 5u
#define MANY (1u << 20)

static struct scale_traffic traffic;

static const struct scale_fleet endless = {.hosts = 1,
                                           .copies = 1,
                                           .dram = MANY,
                                           .noted = MANY,
                                           .capacity = SCALE_NO_SHARE,
                                           .waves = SCALE_NONE};

static void load(const char *workload, enum scale_common common)
{
    const struct scale_source source = {.what = workload, .seed = 1, .split = 1, .common = common};

    cr_assert_eq(scale_traffic_load(&source, &traffic), 0);
}

/* Prompts of PROMPT blocks, each asked `times` times, one request a second, by turns. */
static void ask_by_turns(uint32_t prompts, uint32_t times)
{
    const struct scale_source source = {.split = 1};

    for (uint32_t i = 0; i < prompts * times; i++) {
        uint32_t id[PROMPT];

        for (uint32_t k = 0; k < PROMPT; k++)
            id[k] = i % prompts * PROMPT + k;
        scale_traffic_add(i, id, PROMPT);
    }
    scale_traffic_make(&source, 0, &traffic);
    cr_assert_eq(traffic.n_runs, prompts);
    cr_assert_eq(traffic.blocks, prompts * PROMPT);
}

static struct scale_result replay(struct scale_fleet f)
{
    struct scale_result r;

    scale_replay(&traffic, &f, &r);
    cr_assert_eq(r.dram + r.nvme + r.shared + r.computed, r.references);
    cr_assert_eq(r.references, f.copies * traffic.references);
    return r;
}

static void done(void)
{
    scale_traffic_free(&traffic);
}

TestSuite(scale, .timeout = 60);

Test(scale, one_host_without_bound_misses_each_block_once)
{
    static const char *const workloads[] = {"chat", "rag", "sessions", "skew:1"};

    for (size_t i = 0; i < sizeof(workloads) / sizeof(workloads[0]); i++) {
        load(workloads[i], SCALE_COMMON_NONE);
        cr_assert_eq(replay(endless).computed, traffic.blocks, "%s", workloads[i]);
        done();
    }
}

Test(scale, runs_are_blocks_that_come_together)
{
    static const uint32_t asked[][4] = {{0, 1, 2, 3}, {0, 1, 4, 5}, {0, 1, 2, 3}, {0, 1, 4, 5}};
    const struct scale_source source = {.split = 3};

    for (unsigned i = 0; i < 4; i++)
        scale_traffic_add(i, asked[i], i == 2 ? 3 : 4);
    scale_traffic_make(&source, 0, &traffic);
    cr_assert_eq(traffic.n_runs, 4, "0 1, 2, 3, 4 5");
    cr_assert_eq(traffic.runs[0].blocks, 6);
    cr_assert_eq(traffic.runs[2].parent, 1);
    cr_assert_eq(traffic.requests[2].run, 1);
    cr_assert_eq(traffic.requests[3].session, traffic.requests[1].session);
    cr_assert_eq(traffic.blocks, 18);
    done();
}

Test(scale, lru_forgets_what_does_not_fit)
{
    struct scale_fleet f = endless;

    ask_by_turns(10, 7);
    f.dram = 9 * PROMPT;
    cr_assert_eq(replay(f).dram, 0, "a scan that is larger than the cache");
    f.dram = 10 * PROMPT;
    cr_assert_eq(replay(f).dram, 6 * 10 * PROMPT);
    f.dram = 5 * PROMPT;
    f.nvme = 10 * PROMPT;
    cr_assert_eq(replay(f).nvme, 6 * 10 * PROMPT);
    done();
}

Test(scale, hosts_that_share_nothing_compute_all_by_themselves)
{
    struct scale_fleet f = endless;
    struct scale_result r;

    ask_by_turns(1, 40);
    f.hosts = 8;
    r = replay(f);
    cr_assert_eq(r.computed, 8 * PROMPT);
    cr_assert_eq(r.dram, 32 * PROMPT);
    done();
}

Test(scale, a_shared_tier_has_each_block_computed_and_written_once)
{
    struct scale_fleet f = endless;
    struct scale_result r;

    ask_by_turns(1, 40);
    f.hosts = 8;
    f.capacity = 0;
    r = replay(f);
    cr_assert_eq(r.computed, PROMPT);
    cr_assert_eq(r.shared, 7 * PROMPT);
    cr_assert_eq(r.dram, 32 * PROMPT);
    cr_assert_eq(r.ops[SCALE_WRITE], PROMPT);
    cr_assert_eq(r.ops[SCALE_AGAIN], 0);
    cr_assert_eq(r.ops[SCALE_READ], 7 * PROMPT);
    cr_assert_eq(r.ops[SCALE_FIND], 8 * PROMPT);
    cr_assert_eq(r.lookups, 8);
    f.settle_ms = 3000;
    r = replay(f);
    cr_assert_eq(r.computed, 3 * PROMPT, "two more before the first had written");
    cr_assert_eq(r.ops[SCALE_AGAIN], 2 * PROMPT);
    cr_assert_eq(r.stored, PROMPT);
    f.waves = 0;
    r = replay(f);
    cr_assert_eq(r.shared, 0, "a lookup without time");
    cr_assert_eq(r.late, 5 * PROMPT);
    done();
}

Test(scale, reuse_writes_what_comes_again)
{
    struct scale_fleet f = endless;

    f.capacity = 0;
    f.admission = SCALE_REUSE;
    ask_by_turns(6, 1);
    cr_assert_eq(replay(f).ops[SCALE_WRITE], 0);
    done();
    ask_by_turns(6, 3);
    cr_assert_eq(replay(f).ops[SCALE_WRITE], 6 * PROMPT);
    done();
}

Test(scale, a_router_that_knows_all_makes_of_many_hosts_one)
{
    struct scale_fleet f = endless;
    struct scale_result r;

    load("chat", SCALE_COMMON_NONE);
    f.hosts = 16;
    f.copies = 4;
    f.place = SCALE_PREFIX;
    r = replay(f);
    cr_assert_eq(r.computed, 4 * traffic.blocks);
    f.place = SCALE_ROUND_ROBIN;
    cr_assert_gt(replay(f).computed, r.computed);
    done();
}

Test(scale, a_router_that_is_late_sends_elsewhere)
{
    struct scale_fleet f = endless;

    ask_by_turns(1, 40);
    f.hosts = 1000;
    f.place = SCALE_PREFIX;
    cr_assert_eq(replay(f).computed, PROMPT);
    f.stale_ms = 40000;
    cr_assert_geq(replay(f).computed, 36 * PROMPT, "it knows nothing, and two draws seldom agree");
    f.place = SCALE_SESSION;
    cr_assert_eq(replay(f).computed, PROMPT);
    done();
}

Test(scale, what_all_copies_have_is_computed_once)
{
    struct scale_fleet f = endless;

    load("few-shot", SCALE_COMMON_ALL);
    f.hosts = f.copies = 5;
    f.capacity = 0;
    cr_assert_eq(replay(f).computed, traffic.blocks);
    done();
    load("few-shot", SCALE_COMMON_NONE);
    cr_assert_eq(replay(f).computed, 5 * traffic.blocks);
    done();
}

Test(scale, collection_keeps_the_capacity)
{
    struct scale_fleet f = endless;
    struct scale_result r;

    load("chat", SCALE_COMMON_NONE);
    f.dram = 2000;
    f.noted = 0;
    f.capacity = traffic.blocks / 4;
    f.collect_s = 60;
    r = replay(f);
    cr_assert_eq(r.stored + r.removed, r.ops[SCALE_WRITE]);
    cr_assert_leq(r.stored, f.capacity + traffic.blocks / 20);
    cr_assert_gt(r.removed, traffic.blocks / 2);
    done();
}

/* ---- what a lookup asks ---- */

static struct share *share;
static uint8_t keys[UCM_MAX_KEYS * 32], answers[UCM_MAX_KEYS];
static bool ended;

static void done_cb(struct share_lookup *p)
{
    (void)p;
    ended = true;
}

/* By the daemon's own code, over a server that answers in no time. */
static struct scale_probe daemon_asks(uint32_t n, uint32_t there)
{
    struct share_settings s = {
        .loop = &rig.loop,
        .deadlines = &rig.deadlines,
        .metrics = &rig.metrics,
        .host = "h",
        .deadline_ms = 300,
        .collect_ms = 600000,
        .n = 1,
        .roots[0] = {.ops = &rig_backend, .target = "/0", .depth = 1024},
    };
    struct share_lookup lookup = {.key_bytes = 32,
                                  .keys = keys,
                                  .n = n,
                                  .bytes_of = rig_bytes_of,
                                  .answers = answers,
                                  .done_cb = done_cb};
    struct scale_probe p;
    int rc;

    memset(rig.servers[0].files, 0, RIG_FILES * sizeof(struct rig_file));
    for (uint32_t i = 0; i < there; i++)
        rig_put(&rig.servers[0], i);
    cr_assert_eq(share_new(&s, &share), 0);
    rig_run(NULL, 5);
    rig.round = rig.servers[0].asked[SHARE_FIND] = 0;
    lookup.deadline_ms = uv_now(&rig.loop) + 2000;
    memset(lookup.fingerprint, 0xf0, sizeof(lookup.fingerprint));
    ended = false;
    rc = share_lookup(share, &lookup);
    cr_assert_eq(rc, 0);
    cr_assert(rig_run(&ended, 20000));
    p = (struct scale_probe){rig.servers[0].asked[SHARE_FIND], rig.round, lookup.prefix};
    share_stop(share);
    rig_run(NULL, 20);
    share_close(share);
    return p;
}

Test(scale_lookup, asks_what_the_daemon_asks, .init = rig_setup, .fini = rig_teardown,
     .timeout = 60)
{
    static const uint32_t sizes[] = {1, 3, 24, 64, 65, 200, 1000, 8192};

    for (uint32_t i = 0; i < UCM_MAX_KEYS; i++)
        memcpy(keys + (size_t)i * 32, &i, sizeof(i));
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
        for (uint32_t part = 0; part <= 7; part++) {
            uint32_t n = sizes[i], there = (uint32_t)((uint64_t)n * part / 7);
            struct scale_probe ours = scale_probe(n, there, SCALE_NONE, 0),
                               theirs = daemon_asks(n, there);

            cr_assert_eq(ours.found, there);
            cr_assert_eq(theirs.found, there);
            cr_assert_eq(ours.finds, theirs.finds, "%u of %u: %u keys, the daemon %u", there, n,
                         ours.finds, theirs.finds);
            cr_assert_eq(ours.rounds, theirs.rounds, "%u of %u: %u round trips, the daemon %u",
                         there, n, ours.rounds, theirs.rounds);
        }
}

Test(scale_lookup, few_keys_first_spare_a_miss_the_others)
{
    cr_assert_eq(scale_probe(64, 0, SCALE_NONE, 0).finds, 64);
    cr_assert_eq(scale_probe(64, 0, SCALE_NONE, 1).finds, 1);
    cr_assert_eq(scale_probe(64, 64, SCALE_NONE, 1).rounds, 2);
    cr_assert_eq(scale_probe(64, 64, 1, 4).found, 4, "one round trip");
    for (uint32_t there = 0; there <= 300; there++)
        cr_assert_eq(scale_probe(300, there, SCALE_NONE, 4).found, there);
}
