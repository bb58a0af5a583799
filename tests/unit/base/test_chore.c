/* Chores: in which iteration each runs, in which order, and that the event loop rests when none is
 * due. */
#include "daemon/base/chore.h"

#include <criterion/criterion.h>
#include <string.h>

static struct {
    uv_loop_t loop;
    struct chores all;
    struct chore a, b, c;
    char ran[32];
    int more;     /* iterations for which `a` stays due */
    bool ready;   /* there is something for c */
    bool wake[3]; /* b wakes a, b, c */
} rig;

static bool a_run(void *ctx)
{
    strcat(ctx, "a");
    return rig.more-- > 0;
}

static bool b_run(void *ctx)
{
    struct chore *all[] = {&rig.a, &rig.b, &rig.c};

    strcat(ctx, "b");
    cr_expect(rig.b.due, "while it runs, too");
    for (int i = 0; i < 3; i++)
        if (rig.wake[i])
            chore_wake(all[i]);
    memset(rig.wake, 0, sizeof(rig.wake));
    return false;
}

static bool c_run(void *ctx)
{
    strcat(ctx, "c");
    rig.ready = false;
    return false;
}

static bool c_ready(const void *ctx)
{
    (void)ctx;
    return rig.ready;
}

static void open_chores(void)
{
    cr_assert_eq(uv_loop_init(&rig.loop), 0);
    cr_assert_eq(chores_init(&rig.all, &rig.loop), 0);
    chore_add(&rig.all, &rig.a, a_run, NULL, rig.ran);
    chore_add(&rig.all, &rig.b, b_run, NULL, rig.ran);
    chore_add(&rig.all, &rig.c, c_run, c_ready, rig.ran);
}

static void close_chores(void)
{
    chores_close(&rig.all, NULL);
    chore_wake(&rig.a);
    cr_expect_eq(uv_run(&rig.loop, UV_RUN_DEFAULT), 0);
    cr_expect_eq(uv_loop_close(&rig.loop), 0);
}

TestSuite(chore, .init = open_chores, .fini = close_chores);

/* What one iteration ran. */
static const char *turn(void)
{
    rig.ran[0] = 0;
    uv_run(&rig.loop, UV_RUN_NOWAIT);
    return rig.ran;
}

static bool rests(void)
{
    return !uv_is_active((uv_handle_t *)&rig.all.idle);
}

Test(chore, what_is_due_runs_once_in_its_place)
{
    cr_expect(rests());
    chore_wake(&rig.c);
    chore_wake(&rig.a);
    chore_wake(&rig.a);
    cr_expect_str_eq(turn(), "ac");
    cr_expect(rests());
}

Test(chore, what_has_more_to_do_stays_due)
{
    rig.more = 2;
    chore_wake(&rig.a);
    cr_expect_str_eq(turn(), "a");
    cr_expect_str_eq(turn(), "a");
    cr_expect_not(rests());
    cr_expect_str_eq(turn(), "a");
    cr_expect(rests());
}

Test(chore, what_a_chore_wakes_comes_in_its_place)
{
    memset(rig.wake, true, sizeof(rig.wake));
    chore_wake(&rig.b);
    cr_expect_str_eq(turn(), "bc");
    cr_expect_str_eq(turn(), "ab");
    cr_expect(rests());
}

Test(chore, what_is_ready_after_a_turn_is_due)
{
    cr_expect_null(chore_asleep(&rig.all));
    rig.ready = true;
    cr_expect_eq(chore_asleep(&rig.all), &rig.c, "nobody woke it");
    chore_wake(&rig.a);
    cr_expect_str_eq(turn(), "a");
    cr_expect_null(chore_asleep(&rig.all));
    cr_expect_str_eq(turn(), "c");
    cr_expect(rests());
}

Test(chore, what_is_removed_runs_no_more)
{
    chore_wake(&rig.a);
    chore_wake(&rig.b);
    chore_remove(&rig.a);
    cr_expect_str_eq(turn(), "b");
    cr_expect(rests());
}
