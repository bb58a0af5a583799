/* Limits: the rule, its messages, and that everything is returned. */
#include "daemon/base/limit.h"

#include "tests/unit/random.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

enum { ALL = 1024 };

static struct limits *limits;

static void setup(void)
{
    limits = limits_new();
    cr_assert(limits);
    limits_set(limits, LIMIT_CONNECTIONS, ALL);
}

static void teardown(void)
{
    cr_expect_eq(limits_used(limits, LIMIT_CONNECTIONS), 0u);
    limits_free(limits);
}

TestSuite(limit, .init = setup, .fini = teardown);

static struct limit_owner *user(const char *tenant, uid_t uid)
{
    struct limit_owner *o = limits_uid(limits, tenant, uid, false);

    cr_assert(o);
    return o;
}

static struct limit_owner *numbered(uid_t uid)
{
    char name[32];

    snprintf(name, sizeof(name), "uid:%u", uid);
    return user(name, uid);
}

/* Takes one by one until it is refused. */
static uint64_t take_all(struct limit_owner *o)
{
    uint64_t n = 0;

    while (limit_take(o, LIMIT_CONNECTIONS, 1, NULL) == 0)
        n++;
    cr_expect_eq(limit_room(o, LIMIT_CONNECTIONS), 0u);
    return n;
}

static void drop(struct limit_owner *o)
{
    limit_give(o, LIMIT_CONNECTIONS, limit_has(o, LIMIT_CONNECTIONS));
    limit_owner_unref(o);
}

static void expect_refused(struct limit_owner *o, uint64_t n, const char *word)
{
    struct ucm_error e = {0};

    cr_expect_eq(limit_take(o, LIMIT_CONNECTIONS, n, &e), -UCM_WIRE_BUSY);
    cr_expect_eq(e.code, UCM_WIRE_BUSY);
    cr_expect(strstr(e.text, word), "%s", e.text);
    cr_expect(strstr(e.text, "limits.connections"), "%s", e.text);
}

Test(limit, one_alone_gets_three_quarters)
{
    struct limit_owner *o = user("uid:1000", 1000);

    cr_expect_eq(take_all(o), 756u, "of 1,008: 16 are for operators");
    cr_expect_eq(limit_most(o, LIMIT_CONNECTIONS), 756u);
    expect_refused(o, 1, "tenant \"uid:1000\" has 756 of 1024 connections");
    drop(o);
}

Test(limit, who_comes_later_finds_some)
{
    struct limit_owner *o[4];
    static const uint64_t least[] = {756, 189, 47, 15};

    for (uid_t i = 0; i < 4; i++) {
        o[i] = numbered(1000 + i);
        cr_expect_geq(take_all(o[i]), least[i]);
    }
    for (unsigned i = 0; i < 4; i++)
        drop(o[i]);
}

/* Owners that take in turns get equal shares. */
Test(limit, those_who_come_together_get_equal_shares)
{
    enum { N = 5 };
    struct limit_owner *o[N];
    bool more = true;

    for (uid_t i = 0; i < N; i++)
        o[i] = numbered(1000 + i);
    while (more) {
        more = false;
        for (unsigned i = 0; i < N; i++)
            more = limit_take(o[i], LIMIT_CONNECTIONS, 1, NULL) == 0 || more;
    }
    for (unsigned i = 0; i < N; i++) {
        cr_expect_geq(limit_has(o[i], LIMIT_CONNECTIONS), 1008u * 3 / (3 * N + 1) - 1);
        cr_expect_leq(limit_has(o[i], LIMIT_CONNECTIONS), 1008u * 3 / (3 * N + 1) + 1);
    }
    for (unsigned i = 0; i < N; i++)
        drop(o[i]);
}

Test(limit, the_last_are_for_operators)
{
    struct limit_owner *o = user("uid:1000", 1000), *root = limits_uid(limits, "uid:0", 0, true);

    cr_expect_eq(limit_take(root, LIMIT_CONNECTIONS, 1008, NULL), 0);
    expect_refused(o, 1, "left for operators");
    cr_expect_eq(take_all(root), 16u);
    expect_refused(root, 1, "1024 of 1024 connections");
    drop(root);
    drop(o);
}

/* Only the uids of a tenant share what that tenant gets. */
Test(limit, uids_share_what_their_tenant_is_given)
{
    struct limit_owner *a = user("team", 1), *b = user("team", 2), *only = user("uid:3", 3),
                       *root = limits_uid(limits, "team", 0, true);

    cr_expect_eq(limit_room_within(a, LIMIT_REFERENCED, 400), 300u);
    limit_add(a, LIMIT_REFERENCED, 300);
    limit_add(only, LIMIT_REFERENCED, 1000);
    cr_expect_eq(limit_room_within(a, LIMIT_REFERENCED, 400), 0u);
    cr_expect_eq(limit_room_within(b, LIMIT_REFERENCED, 400), 75u);
    cr_expect_eq(limit_room_within(b, LIMIT_REFERENCED, 200), 0u, "nothing is left");
    cr_expect_eq(limit_room_within(only, LIMIT_REFERENCED, 400), UINT64_MAX);
    cr_expect_eq(limit_room_within(root, LIMIT_REFERENCED, 400), UINT64_MAX);
    limit_give(a, LIMIT_REFERENCED, 300);
    limit_give(only, LIMIT_REFERENCED, 1000);
    limit_owner_unref(a);
    limit_owner_unref(b);
    limit_owner_unref(only);
    limit_owner_unref(root);
}

/* A tenant with many uids gets as much as one with one, and none of its uids takes all of it. */
Test(limit, uids_of_a_tenant_share_what_it_may_have)
{
    struct limit_owner *a = user("team", 1), *b = user("team", 2), *other = user("uid:3", 3);

    cr_expect_eq(take_all(a), 567u);
    expect_refused(a, 1, "uid 1 of tenant \"team\" has 567");
    cr_expect_geq(take_all(b), 140u);
    cr_expect_leq(limits_used(limits, LIMIT_CONNECTIONS), 756u);
    cr_expect_geq(take_all(other), 189u);
    drop(a);
    drop(b);
    drop(other);
}

Test(limit, what_belongs_to_no_uid_is_its_tenants)
{
    struct limit_owner *t = limits_tenant(limits, "team"), *a = user("team", 1);

    cr_assert(t);
    cr_expect_eq(take_all(t), 756u);
    expect_refused(a, 100, "tenant \"team\" has 756");
    drop(t);
    drop(a);
}

Test(limit, a_few_are_anybodys)
{
    struct limit_owner *a = user("uid:1", 1), *b = user("uid:2", 2);

    limits_set(limits, LIMIT_CONNECTIONS, 1);
    cr_expect_eq(take_all(a), 1u);
    drop(a);
    a = user("uid:1", 1);
    limits_set(limits, LIMIT_CONNECTIONS, 2);
    cr_expect_eq(take_all(a), 1u);
    cr_expect_eq(take_all(b), 1u);
    drop(a);
    drop(b);
}

/* A limit that falls takes nothing away. */
Test(limit, who_has_more_than_he_may_gets_no_more)
{
    struct limit_owner *a = user("uid:1", 1);

    cr_expect_eq(take_all(a), 756u);
    limits_set(limits, LIMIT_CONNECTIONS, 100);
    cr_expect_eq(limit_room(a, LIMIT_CONNECTIONS), 0u);
    expect_refused(a, 1, "756 of 100 connections");
    limit_give(a, LIMIT_CONNECTIONS, 700);
    cr_expect_gt(limit_room(a, LIMIT_CONNECTIONS), 0u);
    drop(a);
}

/* Several taken at once are refused or given by the same rule. Uid, tenant and total count them. */
Test(limit, whatever_is_taken_nobody_has_more_than_the_rule_says)
{
    struct limit_owner *o[6];

    for (unsigned i = 0; i < 6; i++)
        o[i] = user(i < 3 ? "team" : i < 5 ? "pair" : "uid:5", i);
    for (unsigned step = 0; step < 20000; step++) {
        struct limit_owner *who = o[below(6)];
        uint64_t n = 1 + below(200), room = limit_room(who, LIMIT_CONNECTIONS);
        uint64_t had = limit_has(who, LIMIT_CONNECTIONS);

        if (below(2) == 0) {
            limit_give(who, LIMIT_CONNECTIONS, n < had ? n : had);
            continue;
        }
        cr_assert_eq(limit_take(who, LIMIT_CONNECTIONS, n, NULL), n <= room ? 0 : -UCM_WIRE_BUSY);
        cr_assert_eq(limit_has(who, LIMIT_CONNECTIONS), n <= room ? had + n : had);
        cr_assert_leq(limits_used(limits, LIMIT_CONNECTIONS), 1008u);
        if (n <= room && had + n > 16)
            cr_assert_leq(had + n, 3 * (1008 - limits_used(limits, LIMIT_CONNECTIONS)));
    }
    for (unsigned i = 0; i < 6; i++)
        drop(o[i]);
}

static uint64_t ten_cb(void *ctx, const char *tenant, enum limit what)
{
    (void)ctx;
    (void)tenant;
    (void)what;
    return 10;
}

/* What limit_few() calls few without counting further is never more than the rule allows. While
 * much is left, a little is few. */
Test(limit, few_is_within_the_rule)
{
    struct limit_owner *o[] = {user("uid:1", 1), user("team", 2), user("team", 3), user("b", 4)};

    cr_expect(limit_few(o[1], LIMIT_CONNECTIONS, ALL / 16));
    for (int round = 0; round < 20000; round++) {
        struct limit_owner *who = o[below(4)];
        uint32_t n = below(below(4) ? 40 : 300);

        if (limit_few(who, LIMIT_CONNECTIONS, n))
            cr_assert_geq(limit_room(who, LIMIT_CONNECTIONS), n, "round %d", round);
        if (below(2))
            limit_add(who, LIMIT_CONNECTIONS, n); /* like requests that may not be refused */
        else
            limit_give(who, LIMIT_CONNECTIONS,
                       below((uint32_t)limit_has(who, LIMIT_CONNECTIONS) + 1));
        if (limits_used(limits, LIMIT_CONNECTIONS) > ALL)
            for (unsigned i = 0; i < 4; i++)
                limit_give(o[i], LIMIT_CONNECTIONS, limit_has(o[i], LIMIT_CONNECTIONS));
    }
    limit_add(o[1], LIMIT_CONNECTIONS, 5);
    for (uint64_t n = 1; n < 9; n++) /* a peer chooses sizes, so they may be huge */
        cr_expect_not(limit_few(o[1], LIMIT_CONNECTIONS, UINT64_MAX - n + 1));
    limit_give(o[1], LIMIT_CONNECTIONS, 5);
    limits_settings(limits, ten_cb, NULL);
    cr_expect_not(limit_few(o[1], LIMIT_CONNECTIONS, 1));
    for (unsigned i = 0; i < 4; i++)
        drop(o[i]);
}

Test(limit, who_sets_what_a_uid_may_have)
{
    struct limit_owner *first = user("team", 1), *second = user("team", 2);
    struct ucm_error e = {0};

    limits_settings(limits, ten_cb, NULL);
    cr_expect_eq(take_all(first), 7u);
    cr_expect_eq(limit_take(first, LIMIT_CONNECTIONS, 1, &e), -UCM_WIRE_BUSY);
    cr_expect(strstr(e.text,
                     "uid 1 of tenant \"team\" has 7 of the 10 connections that its tenant's "
                     "setting \"connections\" gives"),
              "%s", e.text);
    drop(first);
    drop(second);
}
