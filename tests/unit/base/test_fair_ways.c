/* Tenants whose ways to the resource are full at times, as staging rings are. A ring has a few
 * places. A launch keeps its place until a copy agent has moved on what it brought. The resource
 * serves one launch after the other. Time counts in bytes that the resource could have served, so
 * there is no clock. */
#include "daemon/base/fair.h"
#include "daemon/base/list.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#define TENANTS 20u
#define LAUNCHES 64u
#define MIB (1ull << 20)
#define BURST (16 * MIB)
#define LAUNCH (4 * MIB) /* also what may be under way */
#define PLACES 3u
#define REQUESTS_A_LAUNCH 16u

static struct fair_queue q;

static struct tenant {
    struct list node;
    struct fair_who who;
    uint64_t bytes;         /* that it has had */
    uint64_t request, left; /* bytes; left: of the request at its queue's head, which never ends */
    unsigned under_way;
} tenants[TENANTS];
static unsigned n_tenants;

static struct launch {
    struct tenant *tenant;
    uint64_t bytes, served, free; /* when it has been served, and when its place is free; 0: none */
} launches[LAUNCHES];
static uint64_t now, busy_until, under_way, lag;

static void begin(unsigned n, const unsigned *weights, const uint64_t *requests, uint64_t lag_bytes)
{
    memset(&q, 0, sizeof(q));
    fair_queue_init(&q, BURST);
    memset(tenants, 0, sizeof(tenants));
    memset(launches, 0, sizeof(launches));
    now = busy_until = under_way = 0;
    lag = lag_bytes;
    n_tenants = n;
    for (unsigned i = 0; i < n; i++) {
        tenants[i].who = (struct fair_who){.tenant = i + 1, .weight = weights[i]};
        tenants[i].request = tenants[i].left = requests[i];
        fair_queue_push(&q, &tenants[i].who, 0, &tenants[i].node, false);
    }
}

static bool is_full_cb(void *ctx, struct list *node)
{
    (void)ctx;
    return LIST_ENTRY(node, struct tenant, node)->under_way == PLACES;
}

static uint64_t take(struct tenant *t, uint64_t room)
{
    uint64_t bytes = t->left < room ? t->left : room;

    t->left -= bytes;
    if (t->left == 0)
        t->left = t->request;
    t->bytes += bytes;
    fair_queue_charge(&q, &t->who, bytes, NULL);
    return bytes;
}

/* Small requests share the last free place, as in daemon/cuda/staging_entry.c. */
static void launch(struct tenant *t)
{
    struct launch *l = launches;

    while (l->free > 0)
        cr_assert_lt(++l, launches + LAUNCHES);
    t->under_way++;
    *l = (struct launch){.tenant = t, .bytes = take(t, LAUNCH)};
    for (unsigned n = 1; t->under_way == PLACES && n < REQUESTS_A_LAUNCH && t->left == t->request &&
                         t->request <= LAUNCH - l->bytes;
         n++)
        l->bytes += take(t, t->request);
    busy_until = (busy_until > now ? busy_until : now) + l->bytes;
    under_way += l->bytes;
    l->served = busy_until;
    l->free = busy_until + lag;
}

/* To the next moment at which a launch has been served, or a place is free. */
static void go_on(void)
{
    uint64_t next = UINT64_MAX;

    for (struct launch *l = launches; l < launches + LAUNCHES; l++) {
        uint64_t at = l->served > now ? l->served : l->free;

        if (l->free > 0 && at < next)
            next = at;
    }
    now = next;
    for (struct launch *l = launches; l < launches + LAUNCHES; l++) {
        if (l->free == 0)
            continue;
        if (l->served <= now && l->bytes > 0) {
            under_way -= l->bytes;
            l->bytes = 0;
        }
        if (l->free <= now) {
            l->tenant->under_way--;
            l->free = 0;
        }
    }
}

static void run_until(uint64_t end)
{
    struct list *node;

    while (now < end) {
        while (under_way < LAUNCH && (node = fair_queue_first_unless(&q, is_full_cb, NULL)))
            launch(LIST_ENTRY(node, struct tenant, node));
        go_on();
    }
}

static void expect_shares(void)
{
    uint64_t before[TENANTS], all = 0, weights = 0;

    run_until(2048 * MIB); /* bursts are over */
    for (unsigned i = 0; i < n_tenants; i++)
        before[i] = tenants[i].bytes;
    run_until(16384 * MIB);
    for (unsigned i = 0; i < n_tenants; i++) {
        all += tenants[i].bytes - before[i];
        weights += tenants[i].who.weight;
    }
    for (unsigned i = 0; i < n_tenants; i++) {
        double due = (double)all * tenants[i].who.weight / (double)weights;
        double had = (double)(tenants[i].bytes - before[i]);

        cr_expect(had > 0.9 * due && had < 1.1 * due,
                  "of %u tenants number %u, of weight %u and requests of %u KiB, lag %u KiB, had "
                  "%.2f of its due",
                  n_tenants, i, tenants[i].who.weight, (unsigned)(tenants[i].request >> 10),
                  (unsigned)(lag >> 10), had / due);
    }
}

/* Large and small requests in turn. With four tenants, one small tenant once got 0.75 of its due,
 * and another 1.12. */
Test(fair_ways, tenants_with_large_and_small_requests_have_their_shares)
{
    unsigned weights[TENANTS];
    uint64_t requests[TENANTS];

    for (unsigned i = 0; i < TENANTS; i++) {
        weights[i] = 100 * (1 + 3 * i % 4);
        requests[i] = i % 2 == 0 ? 16 * MIB : 1 * MIB;
    }
    for (unsigned n = 2; n <= TENANTS; n += 2)
        for (uint64_t lag_bytes = MIB / 4; lag_bytes <= 4 * MIB; lag_bytes *= 2) {
            begin(n, weights, requests, lag_bytes);
            expect_shares();
        }
}

Test(fair_ways, tenants_of_any_kind_have_their_shares)
{
    static const unsigned weight[] = {50, 100, 200, 300, 400, 1000};
    unsigned weights[TENANTS];
    uint64_t requests[TENANTS];

    srand(1);
    for (unsigned round = 0; round < 100; round++) {
        unsigned n = 2 + (unsigned)rand() % (TENANTS - 1);

        for (unsigned i = 0; i < n; i++) {
            weights[i] = weight[rand() % 6];
            requests[i] = (MIB / 4) << rand() % 7;
        }
        begin(n, weights, requests, (MIB / 4) << rand() % 4);
        expect_shares();
    }
}
