#include "daemon/base/fair.h"

#include <criterion/criterion.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define N 100u
#define KIB (1ull << 10)
#define MIB (1ull << 20)
#define BURST (16 * MIB)

static struct fair_queue q;
static struct list node[N]; /* what a flow has queued: one request that never ends */
static uint32_t weight[N];
static uint64_t largest[N];     /* what a flow is charged at once, at most */
static uint64_t since[N];       /* when it came; 0: it has nothing waiting */
static uint64_t snapshot[N][N]; /* [i]: what all flows together had been served when i came */
static uint64_t steps;
static struct fair_got got[N];

static uint64_t random_to(uint64_t n)
{
    return 1 + ((uint64_t)rand() << 15 ^ (uint64_t)rand()) % n;
}

static struct fair_who who(unsigned i)
{
    return (struct fair_who){.tenant = i + 1, .weight = weight[i]};
}

static struct fair_flow *flow(unsigned i)
{
    return &q.lanes[i + 1].flow;
}

static void begin(uint64_t burst, unsigned seed)
{
    memset(&q, 0, sizeof(q));
    fair_queue_init(&q, burst);
    memset(since, 0, sizeof(since));
    memset(got, 0, sizeof(got));
    for (unsigned i = 0; i < N; i++) {
        weight[i] = 100;
        largest[i] = 2 * MIB;
    }
    steps = 0;
    srand(seed);
}

static void come(unsigned i)
{
    struct fair_who w = who(i);

    fair_queue_push(&q, &w, 0, &node[i], false);
    since[i] = ++steps;
    for (unsigned j = 0; j < N; j++)
        snapshot[i][j] = flow(j)->bytes;
}

static void go(unsigned i)
{
    list_remove(&node[i]);
    since[i] = 0;
}

/* The flow that is next; N: none. */
static unsigned first(void)
{
    struct list *at = fair_queue_first(&q);

    return at ? (unsigned)(at - node) : N;
}

static void charge(unsigned i, uint64_t bytes, struct fair_got *to)
{
    struct fair_who w = who(i);

    fair_queue_charge(&q, &w, bytes, to);
}

/* Serves one flow once. Returns its number. */
static unsigned serve(void)
{
    unsigned i = first();

    charge(i, random_to(largest[i]), &got[i]);
    return i;
}

/* The promise for two flows, over the whole time in which both had requests queued. */
static void check_pair(unsigned i, unsigned j, uint64_t burst)
{
    unsigned later = since[i] > since[j] ? i : j;
    double wi = weight[i], wj = weight[j];
    double had_i = (double)(flow(i)->bytes - snapshot[later][i]) / wi;
    double had_j = (double)(flow(j)->bytes - snapshot[later][j]) / wj;
    double bound = (double)(burst + largest[i]) / wi + (double)(burst + largest[j]) / wj + 2 + 1e-6;

    cr_assert(had_i - had_j <= bound && had_j - had_i <= bound,
              "flows %u and %u have %f and %f, bound %f", i, j, had_i, had_j, bound);
}

static void check_all(unsigned n, uint64_t burst)
{
    for (unsigned i = 0; i < n; i++)
        for (unsigned j = i + 1; j < n; j++)
            if (since[i] && since[j])
                check_pair(i, j, burst);
}

static void make(unsigned n)
{
    for (unsigned i = 0; i < n; i++) {
        weight[i] = 50 + (uint32_t)random_to(950);
        largest[i] = i % 3 == 0 ? 16 * KIB : i % 3 == 1 ? 256 * KIB : 2 * MIB;
    }
}

/* By how much a flow may exceed or miss its share when all bursts are over. */
static double slack(unsigned n, unsigned i)
{
    double most = 0;

    for (unsigned j = 0; j < n; j++)
        if ((double)largest[j] / weight[j] > most)
            most = (double)largest[j] / weight[j];
    return (double)largest[i] + weight[i] * most;
}

/* All flows want as much as they can get. Each gets its part of the total, whatever the sizes, over
 * an interval in which the promise allows 1 percent. */
static void flood(unsigned n)
{
    uint64_t weights = 0, all = 0, before[N];
    bool enough = false;

    begin(BURST, n);
    make(n);
    for (unsigned i = 0; i < n; i++) {
        weights += weight[i];
        come(i);
    }
    while (flow(first())->burst > 0)
        (void)serve();
    for (uint64_t even = q.fair.latest; q.fair.now < even;) /* each has paid for its burst */
        (void)serve();
    for (unsigned i = 0; i < n; i++)
        before[i] = flow(i)->bytes;
    while (!enough) {
        for (unsigned i = 0; i < 1000; i++)
            (void)serve();
        enough = true;
        for (unsigned i = 0; i < n; i++)
            enough = enough && (double)(flow(i)->bytes - before[i]) > 100 * slack(n, i);
    }
    check_all(n, BURST);
    for (unsigned i = 0; i < n; i++)
        all += flow(i)->bytes - before[i];
    for (unsigned i = 0; i < n; i++) {
        double due = (double)all * weight[i] / (double)weights;
        double had = (double)(flow(i)->bytes - before[i]);

        cr_assert(had > 0.98 * due && had < 1.02 * due, "flow %u of weight %u had %f, due %f", i,
                  weight[i], had, due);
        /* the flow's own figures say so, too: they include bursts */
        cr_assert_leq(llabs((long long)(got[i].contended - got[i].due)), BURST + 2 * slack(n, i));
        cr_assert_eq(got[i].contended, flow(i)->bytes);
    }
}

Test(fair, floods_have_their_shares)
{
    flood(2);
    flood(10);
    flood(40);
}

/* A flow with queued requests keeps to its share against each other flow, while others come and go.
 */
static void churn(unsigned n, uint64_t burst)
{
    begin(burst, 7 * n);
    make(n);
    for (unsigned step = 0; step < 200000; step++) {
        unsigned i = (unsigned)random_to(n) - 1;

        if (!since[i] && rand() % 4 == 0)
            come(i);
        else if (since[i] && rand() % 16 == 0)
            go(i);
        if (first() < N)
            (void)serve();
        if (step % 1000 == 0)
            check_all(n, burst);
    }
}

Test(fair, shares_hold_over_every_busy_interval)
{
    churn(2, 0);
    churn(2, BURST);
    churn(10, 0);
    churn(10, BURST);
    churn(100, 0);
    churn(100, BURST);
}

/* Nine neighbours flood the queue. A flow that returns with a small request waits for none of it.
 */
Test(fair, a_small_request_goes_before_what_others_queue)
{
    begin(BURST, 1);
    for (unsigned i = 1; i < 10; i++)
        come(i);
    for (unsigned i = 0; i < 1000; i++)
        (void)serve();
    for (unsigned round = 0; round < 1000; round++) {
        uint64_t left = BURST;

        come(0);
        while (left > 0) {
            uint64_t piece = left < 2 * MIB ? left : 2 * MIB;

            cr_assert_eq(first(), 0u, "round %u, left %" PRIu64, round, left);
            charge(0, piece, NULL);
            left -= piece;
        }
        go(0);
        /* a pause in which the others have more than it has had */
        for (unsigned i = 0; i < 9 * 20; i++)
            cr_assert_neq(serve(), 0);
    }
}

/* One request of 1 MiB after the other, without a pause. The flow is below its share, so each
 * request goes at once. */
Test(fair, small_requests_in_a_row_go_at_once)
{
    begin(BURST, 1);
    weight[0] = weight[1] = 1;
    come(1);
    while (flow(first())->burst > 0)
        (void)serve();
    for (unsigned round = 0; round < 1000; round++) {
        come(0);
        cr_assert_eq(first(), 0u);
        charge(0, 1 * MIB, NULL);
        go(0);
        charge(1, 2 * MIB, NULL); /* two are under way at a time: it is served */
    }
}

Test(fair, idle_saves_no_credit)
{
    uint64_t had, all;

    begin(BURST, 1);
    come(0);
    come(1);
    for (unsigned i = 0; i < 100000; i++)
        (void)serve();
    come(2); /* after all that */
    had = flow(2)->bytes;
    all = flow(0)->bytes + flow(1)->bytes + had;
    for (unsigned i = 0; i < 3000; i++)
        (void)serve();
    all = flow(0)->bytes + flow(1)->bytes + flow(2)->bytes - all;
    cr_assert_leq(flow(2)->bytes - had, all / 3 + BURST + 2 * MIB);
    cr_assert_geq(flow(2)->bytes - had, all / 3 - 2 * MIB);
}

Test(fair, a_short_pause_forgives_nothing)
{
    begin(BURST, 1);
    come(1);
    charge(1, 1 * MIB, NULL); /* of its burst, as it came first */
    charge(1, BURST, NULL);
    for (unsigned i = 0; i < 100; i++) {
        uint64_t had = flow(0)->bytes;

        come(0);
        while (first() == 0)
            charge(0, 1 * MIB, NULL);
        cr_assert_leq(flow(0)->bytes - had, BURST + 1 * MIB);
        cr_assert_leq(flow(0)->bytes, flow(1)->bytes + BURST + 1 * MIB);
        go(0);
        charge(1, 1 * MIB, NULL);
    }
}

Test(fair, weights_change_at_once)
{
    uint64_t before[2];

    begin(BURST, 1);
    come(0);
    come(1);
    largest[0] = largest[1] = 1 * MIB;
    for (unsigned i = 0; i < 1000; i++)
        (void)serve();
    weight[0] = 300;
    for (unsigned i = 0; i < 2; i++)
        before[i] = flow(i)->bytes;
    for (unsigned i = 0; i < 10000; i++)
        (void)serve();
    cr_assert_float_eq((double)(flow(0)->bytes - before[0]) / (double)(flow(1)->bytes - before[1]),
                       3.0, 0.05);
}

/* A flow that can't be served lets others pass. Later it gets what it missed, up to its credit. */
static void pass_over(uint64_t burst, unsigned times)
{
    uint64_t credit = FAIR_CREDIT * burst, missed = times * MIB < credit ? times * MIB : credit;
    uint64_t due = (100 * MIB + missed) / 2, had, before;

    begin(burst, 1);
    for (unsigned i = 0; i < 2; i++)
        come(i);
    while (flow(0)->burst > 0 || flow(1)->burst > 0)
        charge(first(), 1 * MIB, NULL);
    charge(0, 1 * MIB, NULL);
    for (unsigned i = 0; i < times; i++) {
        struct fair_who w = who(1);

        cr_assert_eq(fair_queue_next(&q, &w, 0, &node[1]), first() == 1 ? &node[0] : NULL);
        charge(0, 1 * MIB, NULL);
    }
    before = flow(1)->bytes;
    for (unsigned i = 0; i < 100; i++)
        charge(first(), 1 * MIB, NULL);
    had = flow(1)->bytes - before;
    cr_assert(had + 2 * MIB >= due && had <= due + 2 * MIB, "it had %u KiB of %u after %u",
              (unsigned)(had / KIB), (unsigned)(due / KIB), times);
}

Test(fair, who_is_passed_over_gets_what_it_missed_up_to_its_credit)
{
    pass_over(16 * MIB, 5);
    pass_over(16 * MIB, 60);
    pass_over(16 * MIB, 1000);
    pass_over(0, 1000);
}

/* A flow that withdraws its requests learns later what was due meanwhile. */
Test(fair, what_was_due_is_not_lost_with_what_is_taken_back)
{
    begin(0, 1);
    come(0);
    come(1);
    for (unsigned i = 0; i < 10; i++)
        charge(0, 1 * MIB, &got[0]);
    go(1);
    cr_assert_eq(got[1].due, 0);
    come(1);
    charge(1, 1 * MIB, &got[1]);
    cr_expect_eq(got[0].due, 5 * MIB);
    cr_expect_eq(got[1].due, 5 * MIB + MIB / 2);
    cr_expect_eq(got[1].contended, 1 * MIB);
}

Test(fair, one_alone_gets_all_and_contends_with_nobody)
{
    begin(BURST, 1);
    for (unsigned i = 0; i < 1000; i++) {
        cr_assert_not(fair_contended(&q.fair, UINT64_MAX));
        come(0);
        for (unsigned k = 0; k < 20; k++) {
            cr_assert_eq(first(), 0u);
            charge(0, 1 * MIB, NULL);
        }
        go(0);
    }
    cr_assert_eq(first(), N);
    cr_assert_eq(got[0].contended + got[0].due, 0);
}

Test(fair, others_contend_while_they_wait_and_a_while_after)
{
    begin(BURST, 1);
    come(0);
    charge(0, 1 * MIB, NULL);
    come(1);
    cr_assert(fair_contended(&q.fair, 1));
    go(1);
    charge(1, 1 * MIB, NULL);
    cr_assert(fair_contended(&q.fair, 10 * MIB), "the last one is not the flow that waits");
    charge(0, 9 * MIB, NULL);
    cr_assert(fair_contended(&q.fair, 10 * MIB));
    charge(0, 1 * MIB, NULL);
    cr_assert_not(fair_contended(&q.fair, 10 * MIB));
}
