/* Sanitizers: thread */
#include "daemon/observe/published.h"
#include "proto/clock.h"

#include <criterion/criterion.h>
#include <pthread.h>
#include <string.h>

#define ROUNDS 20000

static struct published *p;

static void make(void)
{
    cr_assert_eq(published_new(&p), 0);
}

static void end(void)
{
    published_free(p);
}

TestSuite(published, .init = make, .fini = end);

static void publish(uint64_t value)
{
    struct observe_snapshot *s = published_begin(p);

    /* Far from each other, so that a torn one shows. */
    s->shown.uptime_ms = value;
    s->shown.tenant[EXPOSITION_TENANTS - 1].lookup_keys = value;
    memset(s->reason[OBSERVE_REASONS - 1], (int)(value & 0xff), sizeof(s->reason[0]));
    published_commit(p);
}

Test(published, nothing_is_number_0)
{
    struct published_view v = published_latest(p);

    cr_assert_eq(v.number, 0);
    cr_assert_not_null(v.snapshot);
    cr_assert_leq(v.at_ms, clock_ms());
}

Test(published, the_newest_is_read_and_stays_until_the_next_look)
{
    struct published_view first, second;
    uint64_t before_ms = clock_ms();

    publish(1);
    publish(2);
    first = published_latest(p);
    cr_assert_eq(first.number, 2);
    cr_assert_eq(first.snapshot->shown.uptime_ms, 2);
    cr_assert(first.at_ms >= before_ms && first.at_ms <= clock_ms());
    for (uint64_t i = 3; i < 10; i++)
        publish(i);
    cr_assert_eq(first.snapshot->shown.uptime_ms, 2);
    second = published_latest(p);
    cr_assert_eq(second.number, 9);
    cr_assert_eq(second.snapshot->shown.uptime_ms, 9);
    second = published_latest(p);
    cr_assert_eq(second.number, 9, "the newest is read again");
}

static void *publish_all(void *arg)
{
    (void)arg;
    for (uint64_t i = 1; i <= ROUNDS; i++)
        publish(i);
    return NULL;
}

Test(published, a_reader_alongside_the_loop_sees_whole_ones_in_order)
{
    uint64_t last = 0, different = 0;
    pthread_t loop;

    cr_assert_eq(pthread_create(&loop, NULL, publish_all, NULL), 0);
    while (last < ROUNDS) {
        struct published_view v = published_latest(p);
        const struct observe_snapshot *s = v.snapshot;

        cr_assert_geq(v.number, last);
        different += v.number != last;
        last = v.number;
        cr_assert_eq(s->shown.uptime_ms, last);
        cr_assert_eq(s->shown.tenant[EXPOSITION_TENANTS - 1].lookup_keys, last);
        for (size_t i = 0; i < sizeof(s->reason[0]); i++)
            cr_assert_eq((uint8_t)s->reason[OBSERVE_REASONS - 1][i], last & 0xff);
    }
    pthread_join(loop, NULL);
    cr_assert_gt(different, 0);
}
