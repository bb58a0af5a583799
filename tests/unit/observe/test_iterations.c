#include "daemon/observe/iterations.h"

#include <criterion/criterion.h>
#include <unistd.h>

#define SLOW_US 3000

static struct histogram histogram;
static unsigned rounds;

static void work_cb(uv_idle_t *idle)
{
    usleep(SLOW_US);
    if (--rounds == 0)
        uv_close((uv_handle_t *)idle, NULL);
}

static void rung_cb(uv_timer_t *timer)
{
    uv_close((uv_handle_t *)timer, NULL);
}

Test(iterations, work_counts_and_sleep_does_not)
{
    uv_loop_t loop;
    struct iterations iterations;
    uv_idle_t idle;
    uv_timer_t timer;
    uint64_t began_ns = uv_hrtime(), all_ns, slept_ns;

    rounds = 5;
    cr_assert_eq(uv_loop_init(&loop), 0);
    cr_assert_eq(iterations_begin(&iterations, &loop, &histogram), 0);
    uv_idle_init(&loop, &idle);
    uv_idle_start(&idle, work_cb);
    cr_assert_eq(uv_run(&loop, UV_RUN_DEFAULT), 0,
                 "the handle of the iterations keeps no loop running");
    cr_assert_geq(histogram_total(&histogram), 5);
    cr_assert_geq(histogram.sum_ns, 5 * SLOW_US * 1000u);

    uv_timer_init(&loop, &timer);
    uv_timer_start(&timer, rung_cb, 50, 0);
    cr_assert_eq(uv_run(&loop, UV_RUN_DEFAULT), 0);
    all_ns = uv_hrtime() - began_ns;
    slept_ns = uv_metrics_idle_time(&loop);
    cr_assert_gt(slept_ns, 0);
    cr_assert_leq(histogram.sum_ns + slept_ns, all_ns, "what was slept is in no iteration");

    iterations_end(&iterations);
    cr_assert_eq(uv_run(&loop, UV_RUN_DEFAULT), 0);
    cr_assert_eq(uv_loop_close(&loop), 0);
}
