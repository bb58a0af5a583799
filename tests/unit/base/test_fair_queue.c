#include "daemon/base/fair.h"

#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#define MIB (1ull << 20)

static struct fair_queue q;

static void begin(void)
{
    memset(&q, 0, sizeof(q));
    fair_queue_init(&q, 4 * MIB);
}

static struct fair_who who(uint32_t tenant)
{
    return (struct fair_who){.tenant = tenant, .weight = 100};
}

Test(fair_queue, a_lane_goes_by_class_and_age)
{
    struct list node[4];
    static const unsigned order[] = {3, 1, 0, 2};
    struct fair_who a = who(1);

    begin();
    cr_assert_null(fair_queue_first(&q));
    fair_queue_push(&q, &a, 2, &node[0], false);
    fair_queue_push(&q, &a, 1, &node[1], false);
    fair_queue_push(&q, &a, 2, &node[2], false);
    fair_queue_push(&q, &a, 1, &node[3], true);
    cr_assert_eq(fair_queue_next(&q, &a, 1, &node[3]), &node[1]);
    cr_assert_eq(fair_queue_next(&q, &a, 1, &node[1]), &node[0]);
    cr_assert_null(fair_queue_next(&q, &a, 2, &node[2]));
    for (unsigned i = 0; i < 4; i++) {
        cr_assert_eq(fair_queue_first(&q), &node[order[i]]);
        list_remove(&node[order[i]]);
        fair_queue_charge(&q, &a, MIB, NULL);
    }
    cr_assert_null(fair_queue_first(&q));
}

/* This holds however urgent one tenant calls its own requests. */
Test(fair_queue, classes_say_nothing_between_tenants)
{
    struct list urgent[64], lazy[64];
    struct fair_who a = who(1), b = who(2);
    unsigned served = 0;

    begin();
    for (unsigned i = 0; i < 64; i++) {
        fair_queue_push(&q, &a, 0, &urgent[i], false);
        fair_queue_push(&q, &b, 2, &lazy[i], false);
    }
    for (unsigned i = 0; i < 64; i++) {
        struct list *node = fair_queue_first(&q);
        bool of_a = node >= urgent && node < urgent + 64;

        served += of_a;
        list_remove(node);
        fair_queue_charge(&q, of_a ? &a : &b, MIB, NULL);
    }
    cr_assert(served >= 27 && served <= 37, "%u of 64", served);
    while (fair_queue_first(&q))
        list_remove(fair_queue_first(&q));
}

Test(fair_queue, what_cannot_go_lets_others_pass)
{
    struct list node[3];
    struct fair_who a = who(1), b = who(2), c = who(3);

    begin();
    fair_queue_push(&q, &a, 0, &node[0], false);
    fair_queue_push(&q, &b, 1, &node[1], false);
    fair_queue_push(&q, &c, 2, &node[2], false);
    cr_assert_eq(fair_queue_first(&q), &node[0]);
    cr_assert_eq(fair_queue_next(&q, &a, 0, &node[0]), &node[1]);
    list_remove(&node[1]);
    fair_queue_charge(&q, &b, MIB, NULL);
    cr_assert_eq(fair_queue_next(&q, &a, 0, &node[0]), &node[2]);
    list_remove(&node[0]);
    list_remove(&node[2]);
    cr_assert_null(fair_queue_first(&q), "what was taken out without a word is no turn of anybody");
    cr_assert_eq(q.fair.n, 0);
}

static struct fair_who weighed(uint32_t i)
{
    return (struct fair_who){.tenant = i + 1, .weight = 100 + i % 7 * 50};
}

/* As many tenants as there are lanes all want more than they get. Each gets its part. */
Test(fair_queue, each_of_all_lanes_has_its_part)
{
    enum { TENANTS = FAIR_LANES - 1, ROUNDS = 40 };
    static struct list node[TENANTS];
    static uint64_t had[TENANTS];
    uint64_t all = 0, weights = 0;

    memset(&q, 0, sizeof(q));
    fair_queue_init(&q, 0);
    for (uint32_t i = 0; i < TENANTS; i++) {
        struct fair_who t = weighed(i);

        weights += t.weight;
        fair_queue_push(&q, &t, 0, &node[i], false);
    }
    for (unsigned n = 0; n < ROUNDS * TENANTS; n++) {
        uint32_t i = (uint32_t)(fair_queue_first(&q) - node);
        struct fair_who t = weighed(i);

        fair_queue_charge(&q, &t, 4096, NULL);
        had[i] += 4096;
        all += 4096;
    }
    for (uint32_t i = 0; i < TENANTS; i++) {
        double due = (double)all * weighed(i).weight / (double)weights;

        cr_assert(fabs((double)had[i] - due) <= 0.1 * due + 4096, "tenant %u: %lu of %f", i + 1,
                  (unsigned long)had[i], due);
        list_remove(&node[i]);
    }
    cr_assert_null(fair_queue_first(&q));
}

/* More tenants than lanes: none is lost, and none shares the daemon's own lane. */
Test(fair_queue, many_tenants_share_lanes)
{
    enum { TENANTS = 3 * FAIR_LANES };
    static struct list node[TENANTS];
    unsigned served = 0;

    begin();
    for (uint32_t i = 0; i < TENANTS; i++) {
        struct fair_who t = who(i);

        fair_queue_push(&q, &t, 1, &node[i], false);
    }
    cr_assert_eq(q.fair.n, FAIR_LANES);
    cr_assert_eq(q.lanes[0].classes[1].next, &node[0]);
    cr_assert_eq(node[0].next, &q.lanes[0].classes[1]);
    for (struct list *next; (next = fair_queue_first(&q)); served++) {
        struct fair_who t = who((uint32_t)(next - node));

        list_remove(next);
        fair_queue_charge(&q, &t, MIB, NULL);
    }
    cr_assert_eq(served, TENANTS);
}

static unsigned seen;

static void take_cb(void *ctx, struct list *n)
{
    (void)ctx;
    list_remove(n);
    seen++;
}

Test(fair_queue, each_may_take_all_out)
{
    struct list node[12];

    begin();
    for (uint32_t i = 0; i < 12; i++) {
        struct fair_who t = who(i % 4);

        fair_queue_push(&q, &t, i % 3, &node[i], false);
    }
    fair_queue_each(&q, take_cb, NULL);
    cr_assert_eq(seen, 12);
    cr_assert_null(fair_queue_first(&q));
}
