/* The order, bounds and accounts of a prefetcher, without a client and with a clock of the test's. */
#include "client/lib/sparse/prefetch_queue.h"

#include <criterion/criterion.h>
#include <stdlib.h>

#define ITEMS 64
#define NEVER INT64_MAX

static struct prefetch_queue queue;
static struct prefetch_item items[ITEMS];

static void fresh(uint32_t max_pending, uint64_t bytes_max, uint32_t ahead)
{
    prefetch_queue_init(&queue, max_pending, bytes_max, ahead);
}

static struct prefetch_item *add(unsigned i, enum ucm_prefetch_priority priority, uint64_t bytes)
{
    struct prefetch_item *displaced = NULL;

    cr_assert_eq(prefetch_queue_make_room(&queue, priority, &displaced), 0);
    items[i] = (struct prefetch_item){.priority = priority, .bytes = bytes, .deadline_ns = NEVER};
    prefetch_queue_add(&queue, &items[i]);
    return &items[i];
}

/* The place of the next one among the items; -1: none. */
static int next(void)
{
    struct prefetch_item *item = prefetch_queue_next(&queue);

    return item ? (int)(item - items) : -1;
}

Test(prefetch, places_have_the_seeds_priorities)
{
    const struct {
        uint32_t place;
        enum ucm_prefetch_priority priority;
    } table[] = {
        {0, UCM_PREFETCH_URGENT}, {1, UCM_PREFETCH_HIGH},         {4, UCM_PREFETCH_HIGH},
        {5, UCM_PREFETCH_NORMAL}, {16, UCM_PREFETCH_NORMAL},      {17, UCM_PREFETCH_LOW},
        {1000, UCM_PREFETCH_LOW}, {UINT32_MAX, UCM_PREFETCH_LOW},
    };

    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        cr_expect_eq(ucm_prefetch_priority(table[i].place), table[i].priority, "place %u",
                     table[i].place);
}

Test(prefetch, the_most_urgent_goes_first_then_the_oldest)
{
    fresh(64, 1000, 2);
    add(0, UCM_PREFETCH_LOW, 1);
    add(1, UCM_PREFETCH_NORMAL, 1);
    add(2, UCM_PREFETCH_HIGH, 1);
    add(3, UCM_PREFETCH_HIGH, 1);
    add(4, UCM_PREFETCH_URGENT, 1);
    cr_expect_eq(next(), 4);
    cr_expect_eq(next(), 2);
    cr_expect_eq(next(), 3);
    cr_expect_eq(next(), 1);
    cr_expect_eq(next(), 0);
    cr_expect_eq(next(), -1);
}

Test(prefetch, bytes_count_from_the_sending_to_the_removal)
{
    fresh(64, 100, 2);
    add(0, UCM_PREFETCH_NORMAL, 60);
    add(1, UCM_PREFETCH_NORMAL, 40);
    add(2, UCM_PREFETCH_NORMAL, 1);
    cr_expect_eq(queue.bytes_used, 0);
    cr_expect_eq(next(), 0);
    cr_expect_eq(next(), 1);
    cr_expect_eq(queue.bytes_used, 100);
    cr_expect_eq(next(), -1);
    prefetch_queue_end(&queue, &items[1]);
    cr_expect_eq(next(), -1, "what came still lies in DRAM");
    prefetch_queue_remove(&queue, &items[1]);
    cr_expect_eq(queue.bytes_used, 60);
    cr_expect_eq(next(), 2);
    prefetch_queue_remove(&queue, &items[0]);
    prefetch_queue_remove(&queue, &items[2]);
    cr_expect_eq(queue.bytes_used, 0);
    cr_expect_eq(queue.n_pending, 0);
}

Test(prefetch, a_large_one_is_not_overtaken_for_ever)
{
    fresh(64, 100, 2);
    add(0, UCM_PREFETCH_NORMAL, 50);
    cr_expect_eq(next(), 0);
    add(1, UCM_PREFETCH_HIGH, 80);
    add(2, UCM_PREFETCH_HIGH, 10);
    add(3, UCM_PREFETCH_LOW, 10);
    cr_expect_eq(next(), -1);
    prefetch_queue_remove(&queue, &items[0]);
    cr_expect_eq(next(), 1);
    cr_expect_eq(next(), 2);
    cr_expect_eq(next(), 3);
}

Test(prefetch, a_batch_too_far_ahead_waits_and_holds_nobody_up)
{
    fresh(64, 100, 2);
    add(0, UCM_PREFETCH_URGENT, 1)->batch = 3;
    add(1, UCM_PREFETCH_LOW, 1)->batch = 2;
    cr_expect_eq(next(), 1);
    cr_expect_eq(next(), -1);
    queue.batch = 1;
    cr_expect_eq(next(), 0);
}

Test(prefetch, batches_are_compared_without_wrapping)
{
    fresh(64, 100, 2);
    queue.batch = UINT64_MAX - 1;
    add(0, UCM_PREFETCH_HIGH, 1)->batch = UINT64_MAX;
    add(1, UCM_PREFETCH_HIGH, 1)->batch = 0;
    cr_expect_eq(prefetch_queue_expire(&queue, 0), &items[1]);
    cr_expect_eq(next(), 0);
}

Test(prefetch, what_waits_expires_with_its_deadline_or_its_batch)
{
    fresh(64, 100, 2);
    add(0, UCM_PREFETCH_HIGH, 1)->deadline_ns = 50;
    add(1, UCM_PREFETCH_LOW, 1)->batch = 4;
    add(2, UCM_PREFETCH_LOW, 1)->batch = 9;
    cr_expect_null(prefetch_queue_expire(&queue, 49));
    cr_expect_eq(prefetch_queue_expire(&queue, 50), &items[0]);
    cr_expect_eq(items[0].state, PREFETCH_ENDED);
    cr_expect_null(prefetch_queue_expire(&queue, 50));
    queue.batch = 5;
    cr_expect_eq(prefetch_queue_expire(&queue, 50), &items[1]);
    cr_expect_null(prefetch_queue_expire(&queue, 50));
    cr_expect_eq(queue.n_pending, 1);
}

Test(prefetch, what_was_sent_does_not_expire_here)
{
    fresh(64, 100, 2);
    add(0, UCM_PREFETCH_HIGH, 1)->deadline_ns = 50;
    cr_expect_eq(next(), 0);
    cr_expect_null(prefetch_queue_expire(&queue, 100));
}

Test(prefetch, a_full_queue_gives_the_newest_least_urgent_place_away)
{
    struct prefetch_item *out = NULL;

    fresh(3, 100, 2);
    add(0, UCM_PREFETCH_NORMAL, 1);
    add(1, UCM_PREFETCH_LOW, 1);
    add(2, UCM_PREFETCH_LOW, 1);
    cr_expect_eq(prefetch_queue_make_room(&queue, UCM_PREFETCH_LOW, &out), -UCM_EBUSY);
    cr_expect_eq(prefetch_queue_make_room(&queue, UCM_PREFETCH_HIGH, &out), 1);
    cr_expect_eq(out, &items[2]);
    cr_expect_eq(items[2].state, PREFETCH_ENDED);
    add(3, UCM_PREFETCH_HIGH, 1);
    cr_expect_eq(prefetch_queue_make_room(&queue, UCM_PREFETCH_URGENT, &out), 1);
    cr_expect_eq(out, &items[1]);
    add(4, UCM_PREFETCH_URGENT, 1);
    cr_expect_eq(prefetch_queue_make_room(&queue, UCM_PREFETCH_NORMAL, &out), -UCM_EBUSY);
}

Test(prefetch, what_was_sent_keeps_its_place)
{
    struct prefetch_item *out = NULL;

    fresh(1, 100, 2);
    add(0, UCM_PREFETCH_LOW, 1);
    cr_expect_eq(next(), 0);
    cr_expect_eq(prefetch_queue_make_room(&queue, UCM_PREFETCH_URGENT, &out), -UCM_EBUSY);
    cr_expect_null(out);
}

Test(prefetch, one_that_could_not_leave_is_next_again)
{
    fresh(64, 100, 2);
    add(0, UCM_PREFETCH_HIGH, 70);
    add(1, UCM_PREFETCH_HIGH, 1);
    cr_expect_eq(next(), 0);
    prefetch_queue_unsend(&queue, &items[0]);
    cr_expect_eq(queue.bytes_used, 0);
    cr_expect_eq(next(), 0);
    cr_expect_eq(next(), 1);
    cr_expect_eq(queue.n_pending, 2);
}

Test(prefetch, another_place_is_another_priority)
{
    fresh(64, 100, 2);
    add(0, UCM_PREFETCH_LOW, 1);
    add(1, UCM_PREFETCH_HIGH, 1);
    add(2, UCM_PREFETCH_LOW, 1);
    prefetch_queue_move(&queue, &items[2], UCM_PREFETCH_URGENT);
    prefetch_queue_move(&queue, &items[0], UCM_PREFETCH_HIGH);
    cr_expect_eq(next(), 2);
    prefetch_queue_move(&queue, &items[2], UCM_PREFETCH_LOW); /* sent: no effect */
    cr_expect_eq(next(), 1);
    cr_expect_eq(next(), 0);
}

Test(prefetch, ending_twice_counts_once)
{
    fresh(64, 100, 2);
    add(0, UCM_PREFETCH_LOW, 10);
    add(1, UCM_PREFETCH_LOW, 10);
    prefetch_queue_end(&queue, &items[0]);
    prefetch_queue_remove(&queue, &items[0]);
    prefetch_queue_remove(&queue, &items[0]);
    cr_expect_eq(queue.n_pending, 1);
    cr_expect_eq(queue.bytes_used, 0);
    cr_expect_eq(next(), 1);
}

/* Random calls: the bounds hold after each, and all accounts are 0 at the end. */
Test(prefetch, bounds_hold_whatever_is_called)
{
    unsigned seed = 7, used = 0;
    bool in[ITEMS] = {false};
    int64_t now = 0;

    fresh(16, 1000, 2);
    for (int round = 0; round < 20000; round++) {
        unsigned i = (unsigned)rand_r(&seed) % ITEMS, what = (unsigned)rand_r(&seed) % 8;
        struct prefetch_item *out = NULL;

        now++;
        if (what < 3 && !in[i]) {
            enum ucm_prefetch_priority priority = (unsigned)rand_r(&seed) % PREFETCH_PRIORITIES;

            if (prefetch_queue_make_room(&queue, priority, &out) >= 0) {
                items[i] = (struct prefetch_item){.priority = priority,
                                                  .bytes = (unsigned)rand_r(&seed) % 400,
                                                  .batch = queue.batch + rand_r(&seed) % 5,
                                                  .deadline_ns = now + rand_r(&seed) % 50};
                prefetch_queue_add(&queue, &items[i]);
                in[i] = true;
            }
        } else if (what < 5) {
            (void)prefetch_queue_next(&queue);
        } else if (what == 5 && in[i]) {
            prefetch_queue_remove(&queue, &items[i]);
            in[i] = false;
        } else if (what == 6) {
            queue.batch += (unsigned)rand_r(&seed) % 8 == 0;
            (void)prefetch_queue_expire(&queue, now);
        } else if (in[i]) {
            prefetch_queue_move(&queue, &items[i], (unsigned)rand_r(&seed) % PREFETCH_PRIORITIES);
        }
        cr_assert(queue.n_pending <= 16 && queue.bytes_used <= 1000);
        used = 0;
        for (unsigned k = 0; k < ITEMS; k++)
            used += in[k] && items[k].counted ? (unsigned)items[k].bytes : 0;
        cr_assert_eq(queue.bytes_used, used);
    }
    for (unsigned k = 0; k < ITEMS; k++)
        if (in[k])
            prefetch_queue_remove(&queue, &items[k]);
    cr_expect_eq(queue.n_pending, 0);
    cr_expect_eq(queue.bytes_used, 0);
}
