/* One root. Each operation is reported by its deadline, and released when the backend lets go. The
 * breaker spares a root that fails. Operations begin in the right order, and queues are bounded. */
#include "tests/unit/shared/shared_rig.h"

#define DEPTH 8u

static struct shared_root *root;
static struct rig_server *server;
static unsigned readies;

struct item {
    struct shared_task task;
    uint8_t data[RIG_BYTES];
    int status;
    bool released;
};

static void ready_cb(void *ctx)
{
    (void)ctx;
    readies++;
}

static void setup(void)
{
    struct shared_root_config config = {.loop = &rig.loop,
                                        .deadlines = &rig.deadlines,
                                        .metrics = &rig.metrics,
                                        .ops = &rig_backend,
                                        .target = "/0",
                                        .host = "h",
                                        .depth = DEPTH,
                                        .timeout_ms = 50,
                                        .ready_cb = ready_cb};

    rig_setup();
    server = &rig.servers[0];
    readies = 0;
    cr_assert_eq(shared_root_open(&config, &root), 0);
}

static void teardown(void)
{
    shared_root_stop(root);
    rig_run(NULL, 100);
    cr_assert_eq(shared_root_busy(root), 0);
    shared_root_close(root);
    rig_teardown();
}

TestSuite(shared_root, .init = setup, .fini = teardown, .timeout = 30);

static void released_cb(struct shared_task *t)
{
    struct item *it = LIST_ENTRY(t, struct item, task);

    cr_assert_not(it->released, "released twice");
    it->released = true;
    it->status = t->status;
}

static struct fair_who who;
static uint64_t bytes = RIG_BYTES; /* that it says it has */

static int submit(struct item *it, enum shared_verb verb, enum shared_class class, uint32_t number,
                  uint64_t ms)
{
    *it = (struct item){.task = {.class = class,
                                 .who = who,
                                 .deadline_ms = uv_now(&rig.loop) + ms,
                                 .released_cb = released_cb}};
    it->task.op.verb = verb;
    it->task.op.id = rig_id(number);
    it->task.op.data = it->data;
    it->task.op.bytes = bytes;
    if (verb == SHARED_WRITE)
        rig_fill(it->data, number);
    return shared_root_submit(root, &it->task);
}

/* The status with which it ends, once it is released. */
static int outcome(struct item *it, enum shared_verb verb, enum shared_class class, uint32_t number,
                   uint64_t ms)
{
    cr_assert_eq(submit(it, verb, class, number, ms), 0);
    cr_assert(rig_run(&it->released, 20000));
    return it->status;
}

Test(shared_root, answers_are_passed_on_and_never_from_inside)
{
    struct item it;

    rig_put(server, 7);
    cr_assert_eq(submit(&it, SHARED_READ, SHARED_LOAD, 7, 1000), 0);
    cr_assert_not(it.released);
    cr_assert(rig_run(&it.released, 20000));
    cr_assert_eq(it.status, 0);
    cr_assert_eq(memcmp(it.data, server->files[7].data, RIG_BYTES), 0);
    cr_assert_eq(outcome(&it, SHARED_FIND, SHARED_LOOKUP, 8, 1000), -ENOENT);
    cr_assert_eq(shared_root_health(root), SHARED_UP);
    cr_assert_eq(root->stats.reads, 1);
}

Test(shared_root, what_can_be_taken_back_ends_at_its_deadline)
{
    struct item it;

    server->hangs = true;
    rig_put(server, 1);
    cr_assert_eq(outcome(&it, SHARED_READ, SHARED_LOAD, 1, 20), -ETIMEDOUT);
    rig_let_go(server);
    rig_run(NULL, 20);
    cr_assert_eq(it.data[1], 0, "its memory was written to after it had been given back");
    cr_assert_eq(root->stats.timeouts, 1);
}

Test(shared_root, what_is_copied_at_its_deadline_ends_when_it_has_been)
{
    struct item it;

    server->hangs = server->stuck = true;
    rig_put(server, 1);
    cr_assert_eq(submit(&it, SHARED_READ, SHARED_LOAD, 1, 20), 0);
    cr_assert_not(rig_run(&it.released, 50), "a thread still writes to its memory");
    cr_assert_eq(shared_root_busy(root), 1);
    rig_let_go(server);
    cr_assert(rig_run(&it.released, 20000));
    cr_assert_eq(it.status, 0);
}

Test(shared_root, a_root_that_hangs_holds_no_more_than_its_depth)
{
    static struct item items[DEPTH * 4];
    bool all = false;

    server->hangs = true;
    for (unsigned i = 0; i < DEPTH * 4; i++)
        (void)submit(&items[i], SHARED_READ, SHARED_LOAD, i, 30 + i % 2);
    rig_run(&all, 200);
    for (unsigned i = 0; i < DEPTH * 4; i++)
        cr_assert(items[i].released, "%u is not released", i);
    cr_assert_lt(server->busy_max, DEPTH + 2, "and one check");
    cr_assert_eq(shared_root_health(root), SHARED_DOWN);
}

Test(shared_root, given_up_it_holds_nothing)
{
    static struct item items[DEPTH * 4];

    server->hangs = true;
    for (unsigned i = 0; i < DEPTH * 4; i++)
        cr_assert_eq(submit(&items[i], i % 4 ? SHARED_READ : SHARED_REMOVE,
                            i % 4 ? SHARED_LOAD : SHARED_BACKGROUND, i, 60000),
                     0);
    rig_run(NULL, 20);
    shared_root_give_up(root);
    cr_assert_eq(shared_root_busy(root), 0);
    for (unsigned i = 0; i < DEPTH * 4; i++)
        cr_assert(items[i].released && items[i].status < 0, "%u", i);
}

Test(shared_root, failures_in_a_row_close_it_and_a_check_opens_it)
{
    static struct item items[40];
    struct item last;
    uint64_t from;

    server->fails[SHARED_READ] = server->fails[SHARED_CHECK] = -EIO;
    for (unsigned i = 0; i < 40; i++)
        cr_assert_eq(submit(&items[i], SHARED_READ, SHARED_LOAD, i, 5000), 0);
    from = uv_now(&rig.loop);
    cr_assert(rig_run(&items[39].released, 20000));
    cr_assert_eq(items[0].status, -EIO);
    cr_assert_eq(items[39].status, -EHOSTDOWN, "what waits is ended at once");
    cr_assert_lt(uv_now(&rig.loop) - from, 2500);
    cr_assert_eq(submit(&last, SHARED_READ, SHARED_LOAD, 1, 100), -EHOSTDOWN);
    cr_assert_not(shared_root_up(root));
    cr_assert_eq(rig.metrics.shared_roots_down, 1);
    rig_run(NULL, 700);
    cr_assert_eq(server->asked[SHARED_CHECK], 1, "one check after a pause, not %u",
                 server->asked[SHARED_CHECK]);
    cr_assert_not(shared_root_up(root));
    server->fails[SHARED_READ] = server->fails[SHARED_CHECK] = 0;
    rig_run(NULL, 1400);
    cr_assert(shared_root_up(root), "nobody noticed that it is back");
    cr_assert_eq(rig.metrics.shared_roots_down, 0);
    cr_assert_eq(root->stats.breaks, 1);
    (void)outcome(&last, SHARED_READ, SHARED_LOAD, 1, 100);
}

Test(shared_root, what_began_before_it_failed_does_not_open_it)
{
    static struct item items[DEPTH + 8];
    struct item slow;

    rig_put(server, 1);
    server->hangs = server->stuck = true;
    cr_assert_eq(submit(&slow, SHARED_READ, SHARED_LOAD, 1, 5000), 0);
    rig_run(NULL, 20);
    server->hangs = false;
    server->fails[SHARED_WRITE] = server->fails[SHARED_CHECK] = -EIO;
    for (unsigned i = 0; i < DEPTH + 8; i++)
        cr_assert_eq(submit(&items[i], SHARED_WRITE, SHARED_STORE, 2 + i, 5000), 0);
    cr_assert(rig_run(&items[DEPTH + 7].released, 20000));
    cr_assert_not(shared_root_up(root));
    rig_let_go(server);
    cr_assert(rig_run(&slow.released, 20000));
    cr_assert_eq(slow.status, 0, "its bytes count all the same");
    cr_assert_not(shared_root_up(root));
}

Test(shared_root, nothing_runs_while_it_is_well)
{
    struct item it;

    (void)outcome(&it, SHARED_FIND, SHARED_LOOKUP, 1, 5000);
    uv_run(&rig.loop, UV_RUN_DEFAULT);
    cr_assert_not(uv_loop_alive(&rig.loop), "an idle root wakes the daemon up");
}

Test(shared_root, what_is_not_there_says_nothing_against_it)
{
    static const int answers[] = {-ENOENT, -ESTALE, -EBADMSG};
    struct item it;

    for (unsigned i = 0; i < 60; i++) {
        server->fails[SHARED_READ] = answers[i % 3];
        (void)outcome(&it, SHARED_READ, SHARED_LOAD, 1, 1000);
    }
    cr_assert_eq(shared_root_health(root), SHARED_UP);
}

Test(shared_root, full_stops_writes_only_and_is_tried_again)
{
    struct item it;

    rig_put(server, 3);
    server->fails[SHARED_WRITE] = -ENOSPC;
    cr_assert_eq(outcome(&it, SHARED_WRITE, SHARED_STORE, 1, 1000), -ENOSPC);
    cr_assert_eq(shared_root_health(root), SHARED_FULL);
    cr_assert_eq(submit(&it, SHARED_WRITE, SHARED_STORE, 1, 1000), -EROFS);
    cr_assert_eq(outcome(&it, SHARED_READ, SHARED_LOAD, 3, 1000), 0);
    server->fails[SHARED_WRITE] = 0;
    rig_run(NULL, 650);
    cr_assert(shared_root_takes_writes(root));
    cr_assert_eq(outcome(&it, SHARED_WRITE, SHARED_STORE, 1, 1000), 0);
    cr_assert_eq(shared_root_health(root), SHARED_UP);
}

Test(shared_root, lookups_go_first_and_no_write_passes_a_read)
{
    static struct item items[64];
    static const enum shared_verb verbs[] = {SHARED_TOUCH, SHARED_WRITE, SHARED_READ, SHARED_FIND};
    static const enum shared_class classes[] = {SHARED_BACKGROUND, SHARED_STORE, SHARED_LOAD,
                                                SHARED_LOOKUP};
    unsigned first[SHARED_CHECK + 1] = {0}, last[SHARED_CHECK + 1] = {0}, from;

    server->latency_ms = 3;
    for (unsigned i = 0; i < DEPTH; i++) /* busy, so that the rest waits */
        cr_assert_eq(submit(&items[i], SHARED_FIND, SHARED_LOOKUP, 100 + i, 5000), 0);
    from = server->n_log;
    for (unsigned i = 0; i < 40; i++)
        cr_assert_eq(submit(&items[DEPTH + i], verbs[i / 10], classes[i / 10], i, 5000), 0);
    cr_assert(rig_run(&items[DEPTH + 9].released, 20000));
    rig_run(NULL, 20);
    for (unsigned i = from; i < server->n_log; i++) {
        last[server->log[i]] = i;
        if (first[server->log[i]] == 0)
            first[server->log[i]] = i;
    }
    cr_assert_lt(last[SHARED_FIND], first[SHARED_READ]);
    cr_assert_lt(last[SHARED_READ], first[SHARED_WRITE]);
    cr_assert_lt(last[SHARED_WRITE], first[SHARED_TOUCH]);
    cr_assert_leq(server->busy_max, DEPTH);
}

/* Writes only: three quarters of the places. With a read among them: half. */
Test(shared_root, writes_leave_places_to_who_comes_to_read)
{
    static struct item writes[2 * DEPTH];
    struct item reads[2];
    bool never = false;

    server->hangs = true;
    for (unsigned i = 0; i < 2 * DEPTH; i++)
        cr_assert_eq(submit(&writes[i], SHARED_WRITE, SHARED_STORE, i, 5000), 0);
    rig_run(&never, 20);
    cr_assert_eq(server->busy, DEPTH * 3 / 4);
    cr_assert_eq(submit(&reads[0], SHARED_READ, SHARED_LOAD, 0, 5000), 0);
    rig_run(&never, 20);
    cr_assert_eq(server->busy, DEPTH * 3 / 4 + 1, "it did not wait for a write");
    rig_let_go(server);
    cr_assert(rig_run(&writes[2 * DEPTH - 1].released, 20000));

    server->hangs = true;
    cr_assert_eq(submit(&reads[1], SHARED_READ, SHARED_LOAD, 0, 5000), 0);
    for (unsigned i = 0; i < 2 * DEPTH; i++)
        cr_assert_eq(submit(&writes[i], SHARED_WRITE, SHARED_STORE, 2 * DEPTH + i, 5000), 0);
    rig_run(&never, 20);
    cr_assert_eq(server->busy, 1 + DEPTH / 2);
    rig_let_go(server);
    cr_assert(rig_run(&writes[2 * DEPTH - 1].released, 20000));
}

static void load_as(struct item *items, unsigned n, uint32_t tenant, uint32_t weight)
{
    who = (struct fair_who){.tenant = tenant, .weight = weight};
    bytes = 1 << 20;
    for (unsigned i = 0; i < n; i++)
        cr_assert_eq(submit(&items[i], SHARED_READ, SHARED_LOAD, i, 60000), 0);
}

static unsigned released(const struct item *items, unsigned n)
{
    unsigned sum = 0;

    for (unsigned i = 0; i < n; i++)
        sum += items[i].released;
    return sum;
}

Test(shared_root, tenants_share_it_by_their_weights)
{
    static struct item light[120], heavy[120];
    unsigned had;

    server->latency_ms = 3;
    load_as(light, 120, 1, 100);
    load_as(heavy, 120, 2, 300);
    for (unsigned i = 0; i < 120; i++)
        cr_assert(rig_run(&heavy[i].released, 60000));
    had = released(light, 120);
    /* a third, and the reads begun before the other tenant came, and its burst */
    cr_assert(had >= 40 - 5 && had <= 40 + DEPTH + 5, "%u of 120", had);
    cr_assert(rig_run(&light[119].released, 60000));
}

/* Once several tenants load, few loads are under way at a time. A tenant that loads little waits
 * only for these. */
Test(shared_root, a_load_goes_before_what_another_tenant_has_queued)
{
    static struct item flood[200];
    struct item one;

    server->latency_ms = 3;
    load_as(flood, 200, 1, 100);
    for (unsigned i = 0; i < 10; i++) {
        unsigned before;

        cr_assert(rig_run(&flood[20 + 10 * i].released, 60000));
        before = released(flood, 200);
        load_as(&one, 1, 2, 100);
        cr_assert(rig_run(&one.released, 60000));
        /* loads that were under way, and those that began and ended with it */
        cr_assert_leq(released(flood, 200) - before, i == 0 ? 2 * DEPTH : 10, "%u: %u", i,
                      released(flood, 200) - before);
    }
    cr_assert(rig_run(&flood[199].released, 60000));
}

Test(shared_root, a_write_is_refused_while_reads_wait_and_told_when_not)
{
    static struct item items[DEPTH * 2 + 1];
    struct item *write = &items[DEPTH * 2];

    server->latency_ms = 3;
    for (unsigned i = 0; i < DEPTH * 2; i++)
        cr_assert_eq(submit(&items[i], SHARED_READ, SHARED_LOAD, i, 5000), 0);
    cr_assert_eq(submit(write, SHARED_WRITE, SHARED_STORE, 1, 5000), -EAGAIN);
    cr_assert_eq(readies, 0);
    cr_assert(rig_run(&items[DEPTH * 2 - 1].released, 20000));
    cr_assert_geq(readies, 1);
    cr_assert_eq(submit(write, SHARED_WRITE, SHARED_STORE, 1, 5000), 0);
    cr_assert(rig_run(&write->released, 20000));
}

Test(shared_root, queues_have_an_end)
{
    static struct item items[5000];
    unsigned taken = 0, reported = 0;

    server->latency_ms = 1;
    for (unsigned i = 0; i < 5000; i++)
        taken += submit(&items[i], SHARED_READ, SHARED_LOAD, i, 20000) == 0;
    cr_assert_lt(taken, 5000);
    cr_assert_geq(taken, 4096);
    rig_run(&items[taken - 1].released, 20000);
    for (unsigned i = 0; i < taken; i++)
        reported += items[i].released;
    cr_assert_eq(reported, taken);
    cr_assert_geq(readies, 1);
}

Test(shared_root, a_task_can_be_taken_back)
{
    static struct item items[DEPTH + 1];

    server->hangs = true;
    for (unsigned i = 0; i < DEPTH; i++)
        cr_assert_eq(submit(&items[i], SHARED_FIND, SHARED_LOOKUP, i, 5000), 0);
    cr_assert_eq(submit(&items[DEPTH], SHARED_FIND, SHARED_LOOKUP, 9, 5000), 0);
    for (unsigned i = 0; i <= DEPTH; i++)
        cr_assert(shared_root_cancel(root, &items[i].task));
    cr_assert_eq(shared_root_busy(root), 0);
    rig_run(NULL, 20);
    for (unsigned i = 0; i <= DEPTH; i++)
        cr_assert_not(items[i].released);
}

static struct item takers[DEPTH];
static unsigned taken_back;

static void take_back_cb(struct shared_task *t)
{
    released_cb(t);
    cr_assert_eq(t->status, -EHOSTDOWN);
    for (unsigned i = 0; i < DEPTH; i++)
        taken_back += shared_root_cancel(root, &takers[i].task);
}

Test(shared_root, who_is_told_that_it_is_down_may_take_others_back)
{
    static struct item between[4]; /* begun in place of reads that end before */
    struct item last;

    server->hangs = true;
    for (unsigned i = 0; i < DEPTH - 1; i++)
        cr_assert_eq(submit(&takers[i], SHARED_READ, SHARED_LOAD, i, 10 + i * 10), 0);
    for (unsigned i = 0; i < 4; i++)
        cr_assert_eq(submit(&between[i], SHARED_READ, SHARED_LOAD, 10 + i, 5000), 0);
    cr_assert_eq(submit(&last, SHARED_READ, SHARED_LOAD, 20, 5000), 0);
    last.task.released_cb = take_back_cb;
    cr_assert(rig_run(&last.released, 20000));
    rig_run(NULL, 10);
    cr_assert_eq(taken_back, 2, "those that were under way, and not that which was ending");
    for (unsigned i = 0; i < DEPTH - 1; i++)
        cr_assert_eq(takers[i].released && takers[i].released, i < 5, "%u", i);
    rig_let_go(server);
    cr_assert(rig_run(&between[3].released, 20000));
}

Test(shared_root, a_silent_root_is_spared_lookups)
{
    struct item it;

    server->hangs = true;
    cr_assert(shared_root_takes_lookups(root));
    cr_assert_eq(submit(&it, SHARED_FIND, SHARED_LOOKUP, 1, 5000), 0);
    rig_run(NULL, 1100);
    cr_assert_not(shared_root_takes_lookups(root));
    rig_let_go(server);
    cr_assert(rig_run(&it.released, 20000));
    cr_assert(shared_root_takes_lookups(root));
}

Test(shared_root, the_servers_time_is_learned_once)
{
    uint64_t now = 0;

    cr_assert_eq(shared_root_time(root, &now), -EAGAIN);
    rig_run(NULL, 20);
    cr_assert_eq(shared_root_time(root, &now), 0);
    cr_assert_geq(now, server->now_ns);
    cr_assert_lt(now, server->now_ns + 5000000000ull);
    for (int i = 0; i < 10; i++)
        cr_assert_eq(shared_root_time(root, &now), 0);
    cr_assert_eq(server->asked[SHARED_CHECK], 1);
}
