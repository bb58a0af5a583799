/* Many deadlines share one timer. Each expires once, in order, at its time, however they are armed
 * again and disarmed. */
#include "daemon/base/deadline.h"

#include "tests/unit/random.h"

#include <criterion/criterion.h>
#include <stdlib.h>

#define N 500

static uv_loop_t loop;
static struct deadlines ds;

static struct item {
    struct deadline d;
    uint64_t due_ms; /* 0: should not be armed */
    int calls;
} items[N];

static uint64_t last_at_ms;

static void setup(void)
{
    cr_assert_eq(uv_loop_init(&loop), 0);
    cr_assert_eq(deadlines_init(&ds, &loop), 0);
}

static void teardown(void)
{
    deadlines_close(&ds);
    uv_run(&loop, UV_RUN_DEFAULT);
    cr_expect_eq(uv_loop_close(&loop), 0);
}

TestSuite(deadline, .init = setup, .fini = teardown, .timeout = 20);

static void expired_cb(struct deadline *d)
{
    struct item *it = (struct item *)d;

    cr_assert_not(deadline_armed(d));
    cr_assert_neq(it->due_ms, 0u, "disarmed, yet it expired");
    cr_assert_eq(it->due_ms, d->at_ms);
    cr_assert_leq(it->due_ms, uv_now(&loop), "too early");
    cr_assert_geq(it->due_ms, last_at_ms, "out of order");
    last_at_ms = it->due_ms;
    it->due_ms = 0;
    it->calls++;
}

static void arm(struct item *it, uint64_t at_ms)
{
    deadline_arm(&ds, &it->d, at_ms, expired_cb);
    cr_assert(deadline_armed(&it->d));
    it->due_ms = at_ms;
}

static void disarm(struct item *it)
{
    deadline_disarm(&ds, &it->d);
    it->due_ms = 0;
}

/* How many are below and next to d, which is linked from `back`. */
static uint32_t heap_count(const struct deadline *d, const struct deadline *back, uint64_t least_ms)
{
    uint32_t n = 0;

    for (; d; back = d, d = d->next) {
        cr_assert(d->armed);
        cr_assert_eq(d->back, back);
        cr_assert_leq(least_ms, d->at_ms);
        n += 1 + heap_count(d->child, d, d->at_ms);
    }
    return n;
}

static void heap_check(void)
{
    uint32_t armed = 0;

    for (int i = 0; i < N; i++)
        armed += items[i].due_ms != 0;
    if (ds.first)
        cr_assert_null(ds.first->next);
    cr_assert_eq(heap_count(ds.first, ds.first ? ds.first->back : NULL, 0), armed);
}

Test(deadline, an_idle_loop_has_no_timer)
{
    arm(&items[0], uv_now(&loop) + 100000);
    cr_expect(uv_loop_alive(&loop));
    deadline_disarm(&ds, &items[0].d);
    disarm(&items[0]);
    cr_expect_not(uv_loop_alive(&loop));
}

Test(deadline, one_that_has_passed_expires_in_the_next_turn_and_not_at_once)
{
    arm(&items[0], 0);
    items[0].due_ms = items[0].d.at_ms = 0;
    cr_expect_eq(items[0].calls, 0);
    deadline_disarm(&ds, &items[0].d);
    arm(&items[1], 1);
    uv_run(&loop, UV_RUN_NOWAIT);
    cr_expect_eq(items[1].calls, 1);
}

Test(deadline, random_ops_against_a_model)
{
    for (int op = 0; op < 50000; op++) {
        struct item *it = &items[below(N)];

        if (below(3) > 0)
            arm(it, uv_now(&loop) + 1000000 + below(1000));
        else
            disarm(it);
        if (op % 64 == 0)
            heap_check();
    }
    for (int i = 0; i < N; i++)
        disarm(&items[i]);
    cr_expect_null(ds.first);
}

Test(deadline, each_expires_once_and_in_order)
{
    uint64_t start;

    uv_update_time(&loop);
    start = uv_now(&loop);
    for (int i = 0; i < N; i++)
        arm(&items[i], start + below(150));
    for (int i = 0; i < N; i += 3)
        arm(&items[i], start + below(150)); /* again: only the last counts */
    for (int i = 0; i < N; i += 7)
        disarm(&items[i]);
    heap_check();
    uv_run(&loop, UV_RUN_DEFAULT);
    for (int i = 0; i < N; i++)
        cr_expect_eq(items[i].calls, i % 7 != 0, "item %d", i);
}

/* A deadline that expires ends others and begins new ones, as requests do. */
static void meddle_cb(struct deadline *d)
{
    uint32_t i = (uint32_t)((struct item *)d - items);

    items[i].calls++;
    items[i].due_ms = 0;
    disarm(&items[i + 1]);
    if (items[i].calls < 3) {
        deadline_arm(&ds, d, uv_now(&loop) + 2, meddle_cb);
        items[i].due_ms = d->at_ms;
    }
}

Test(deadline, callbacks_may_arm_and_disarm)
{
    uint64_t now = uv_now(&loop);

    for (int i = 0; i < 100; i++) {
        deadline_arm(&ds, &items[i].d, now + 1 + (uint64_t)i % 2 * 1000000,
                     i % 2 ? expired_cb : meddle_cb);
        items[i].due_ms = items[i].d.at_ms;
    }
    uv_run(&loop, UV_RUN_DEFAULT); /* ends only because every second one was disarmed */
    for (int i = 0; i < 100; i++)
        cr_expect_eq(items[i].calls, i % 2 ? 0 : 3);
}

static int again;

static void again_cb(struct deadline *d)
{
    if (++again < 100)
        deadline_arm(&ds, d, uv_now(&loop), again_cb);
}

Test(deadline, one_that_arms_itself_for_now_leaves_the_loop_its_turn)
{
    struct deadline d = {0};

    deadline_arm(&ds, &d, uv_now(&loop), again_cb);
    uv_run(&loop, UV_RUN_NOWAIT);
    cr_expect_eq(again, 1);
    deadline_disarm(&ds, &d);
}

static unsigned turns, turns_at_first, turns_at_last;

static void turn_cb(uv_check_t *check)
{
    (void)check;
    turns++;
}

static void dear_cb(struct deadline *d)
{
    uint64_t begun_ns = uv_hrtime();

    (void)d;
    turns_at_first = turns_at_first ? turns_at_first : turns;
    turns_at_last = turns;
    while (uv_hrtime() - begun_ns < 2000000u) {
        /* it is expensive */
    }
}

Test(deadline, many_of_one_moment_leave_others_their_turn)
{
    static uv_check_t check; /* closed by teardown */

    cr_assert_eq(uv_check_init(&loop, &check), 0);
    cr_assert_eq(uv_check_start(&check, turn_cb), 0);
    uv_unref((uv_handle_t *)&check);
    turns = 1;
    for (unsigned i = 0; i < 10; i++)
        deadline_arm(&ds, &items[i].d, uv_now(&loop) + 1, dear_cb);
    uv_run(&loop, UV_RUN_DEFAULT);
    cr_expect_geq(turns_at_last - turns_at_first, 9u, "one in each turn");
    uv_close((uv_handle_t *)&check, NULL);
}
