/* The prefetcher of the client library, over a fake daemon. Its queue by itself: test_client_prefetch.c. */
/* Sanitizers: thread */
#include "tests/unit/client/sparse_rig.h"

TestSuite(client_prefetcher, .init = sparse_up, .fini = sparse_down);

static struct ucm_prefetcher *prefetcher(uint32_t pending, uint32_t ahead, uint64_t bytes)
{
    struct ucm_prefetcher_options o = {pending, ahead, bytes};
    struct ucm_prefetcher *p = NULL;

    cr_assert_eq(ucm_prefetcher_open(rig.client, &o, &p), 0, "%s", ucm_errmsg());
    return p;
}

static const uint32_t some[] = {0, 2, 3};

static struct ucm_prefetch *submit(struct ucm_prefetcher *f, struct ucm_chain *chain,
                                   uint32_t place, uint64_t batch)
{
    struct ucm_prefetch_blocks b = {
        .chain = chain, .index = some, .n = 3, .place = place, .batch = batch};
    struct ucm_prefetch *p = NULL;

    cr_assert_eq(ucm_prefetcher_submit(f, &b, -1, &p), 0, "%s", ucm_errmsg());
    return p;
}

enum { BLOCK = 2 * 4096 }; /* of client_rig.h's namespace */

Test(client_prefetcher, a_prefetch_says_what_came)
{
    struct ucm_prefetcher *f = prefetcher(0, 0, 0);
    struct ucm_prefetch *p = submit(f, chain_of(5), 3, 0);
    struct ucm_prefetcher_stats stats;
    struct ucm_prefetched got;

    cr_assert_eq(ucm_prefetch_wait(p, -1, &got), 0, "%s", ucm_errmsg());
    cr_expect_eq(got.n, 3);
    cr_expect_eq(got.came, 3);
    cr_expect_eq(got.missing, 0);
    cr_expect_eq(got.result[2], UCM_BLOCK_IS_OK);
    cr_expect_eq(GET(last_priority), 2, "place 3 is HIGH");
    cr_expect_eq(GET(last_prefetch_n), 3);
    cr_expect(GET(last_deadline_ms) > 9000 && GET(last_deadline_ms) <= 10000);
    cr_assert_eq(ucm_prefetch_check(p, &got), 0, "again");
    cr_expect_eq(ucm_process(rig.client), 1);
    ucm_prefetcher_stats(f, &stats);
    cr_expect_eq(stats.held_bytes, 3 * BLOCK);
    cr_expect_eq(stats.pending, 0);
    ucm_prefetch_free(p, 2);
    ucm_prefetcher_stats(f, &stats);
    cr_expect_eq(stats.held_bytes, 0);
    cr_expect_eq(stats.submitted, 1);
    cr_expect_eq(stats.ended, 1);
    cr_expect_eq(stats.came, 3);
    cr_expect_eq(stats.useful, 2);
    cr_expect_eq(stats.useless, 1);
    cr_expect_eq(stats.bytes, 300);
    ucm_prefetcher_close(f);
}

Test(client_prefetcher, bytes_hold_a_prefetch_back_until_one_is_freed)
{
    struct ucm_prefetcher *f = prefetcher(0, 0, 5 * BLOCK);
    struct ucm_chain *chain = chain_of(5);
    struct ucm_prefetch *first = submit(f, chain, 0, 0), *second = submit(f, chain, 0, 0);
    struct ucm_prefetched got;

    cr_assert_eq(ucm_prefetch_wait(first, -1, &got), 0);
    cr_expect_eq(ucm_prefetch_check(second, &got), -UCM_EPENDING);
    cr_expect_eq(ucm_prefetch_wait(second, 1, &got), -UCM_EDEADLINE);
    cr_expect_eq(fake_count(&rig.fake, UCM_METHOD_CHAIN_PREFETCH), 1);
    ucm_prefetch_free(first, 3);
    cr_assert_eq(ucm_prefetch_wait(second, -1, &got), 0, "%s", ucm_errmsg());
    cr_expect_eq(got.came, 3);
}

Test(client_prefetcher, a_batch_ahead_waits_for_its_time)
{
    struct ucm_prefetcher *f = prefetcher(0, 1, 0);
    struct ucm_chain *chain = chain_of(5);
    struct ucm_prefetch *next = submit(f, chain, 0, 1), *later = submit(f, chain, 0, 3);
    struct ucm_prefetcher_stats stats;
    struct ucm_prefetched got;

    cr_assert_eq(ucm_prefetch_wait(next, -1, &got), 0);
    cr_expect_eq(ucm_prefetch_check(later, &got), -UCM_EPENDING);
    cr_assert_eq(ucm_prefetcher_advance(f, 2), 0);
    cr_assert_eq(ucm_prefetch_wait(later, -1, &got), 0);
    cr_expect_eq(got.came, 3);
    later = submit(f, chain, 0, 9);
    cr_assert_eq(ucm_prefetcher_advance(f, 10), 0);
    cr_assert_eq(ucm_prefetch_check(later, &got), 0, "its batch has run");
    cr_expect_eq(got.missing, 3);
    cr_expect_eq(got.result[0], UCM_BLOCK_IS_CANCELLED);
    ucm_prefetcher_stats(f, &stats);
    cr_expect_eq(stats.late, 1);
    cr_expect_eq(ucm_prefetcher_advance(f, 9), -UCM_EINVALID);
}

Test(client_prefetcher, one_that_cannot_leave_ends_with_its_deadline)
{
    struct ucm_prefetcher *f = prefetcher(0, 1, 0);
    struct ucm_prefetch_blocks b = {
        .chain = chain_of(5), .index = some, .n = 3, .batch = 9, .deadline_ms = 20};
    struct ucm_prefetch *p;
    struct ucm_prefetched got;

    cr_assert_eq(ucm_prefetcher_submit(f, &b, -1, &p), 0);
    cr_assert_eq(ucm_prefetch_wait(p, -1, &got), 0, "%s", ucm_errmsg());
    cr_expect_eq(got.missing, 3);
    cr_expect_eq(fake_count(&rig.fake, UCM_METHOD_CHAIN_PREFETCH), 0);
}

Test(client_prefetcher, a_full_queue_lets_the_urgent_in)
{
    struct ucm_prefetcher *f = prefetcher(2, 0, 3 * BLOCK);
    struct ucm_chain *chain = chain_of(5);
    struct ucm_prefetch_blocks b = {.chain = chain, .index = some, .n = 3, .place = 30};
    struct ucm_prefetch *sent, *guess, *urgent, *none;
    struct ucm_prefetcher_stats stats;
    struct ucm_prefetched got;

    SET(hold_prefetches, true);
    sent = submit(f, chain, 0, 0);
    guess = submit(f, chain, 20, 0);
    cr_expect_eq(ucm_prefetcher_submit(f, &b, -1, &none), -UCM_EBUSY);
    urgent = submit(f, chain, 0, 0);
    cr_assert_eq(ucm_prefetch_check(guess, &got), 0);
    cr_expect_eq(got.came, 0);
    ucm_prefetcher_stats(f, &stats);
    cr_expect_eq(stats.displaced, 1);
    cr_expect_eq(stats.pending, 2);
    fake_await(&rig.fake, &rig.fake.n_held, 1);
    fake_answer_held(&rig.fake, 0, UCM_BLOCK_MISS);
    cr_assert_eq(ucm_prefetch_wait(sent, -1, &got), 0);
    cr_expect_eq(got.missing, 3);
    cr_expect_eq(got.result[1], UCM_BLOCK_IS_MISS);
    SET(hold_prefetches, false);
    ucm_prefetch_free(sent, 0);
    cr_assert_eq(ucm_prefetch_wait(urgent, -1, &got), 0);
    cr_expect_eq(got.came, 3);
    cr_expect_eq(GET(last_priority), 3);
}

Test(client_prefetcher, cancel_and_free_before_the_end)
{
    struct ucm_prefetcher *f = prefetcher(0, 1, 0);
    struct ucm_chain *chain = chain_of(5);
    struct ucm_prefetch *waits = submit(f, chain, 0, 9), *p;
    struct ucm_prefetcher_stats stats;
    struct ucm_prefetched got;

    cr_assert_eq(ucm_prefetch_cancel(waits, -1), 0);
    cr_assert_eq(ucm_prefetch_check(waits, &got), 0);
    cr_expect_eq(got.missing, 3);
    SET(hold_prefetches, true);
    p = submit(f, chain, 0, 0);
    cr_assert_eq(ucm_prefetch_cancel(p, -1), 0, "%s", ucm_errmsg());
    cr_expect_eq(fake_count(&rig.fake, UCM_METHOD_CANCEL), 1);
    fake_answer_held(&rig.fake, 0, UCM_BLOCK_CANCELLED);
    cr_assert_eq(ucm_prefetch_wait(p, -1, &got), 0);
    cr_expect_eq(got.came, 0);
    cr_assert_eq(ucm_prefetch_cancel(p, -1), 0, "it has ended");
    p = submit(f, chain, 0, 0);
    ucm_prefetch_free(p, 7);
    (void)rig_lookup(&rig, -1);
    cr_expect_eq(fake_count(&rig.fake, UCM_METHOD_CANCEL), 2);
    ucm_prefetcher_stats(f, &stats);
    cr_expect_eq(stats.pending, 0);
    cr_expect_eq(stats.ended, 3);
    (void)submit(f, chain, 0, 0);
    (void)submit(f, chain, 0, 5);
    ucm_prefetcher_close(f);
    ucm_prefetcher_close(NULL);
    ucm_prefetch_free(NULL, 0);
}

Test(client_prefetcher, a_break_ends_all_prefetches)
{
    struct ucm_prefetcher *f = prefetcher(0, 1, 0);
    struct ucm_chain *chain = chain_of(5);
    struct ucm_prefetch *sent, *waits;
    struct ucm_prefetched got;

    SET(hold_prefetches, true);
    sent = submit(f, chain, 0, 0);
    waits = submit(f, chain, 0, 4);
    fake_await(&rig.fake, &rig.fake.n_held, 1);
    fake_hang_up(&rig.fake);
    cr_expect_eq(ucm_prefetch_wait(sent, -1, &got), -UCM_EDISCONNECTED);
    cr_expect_eq(ucm_prefetch_wait(waits, -1, &got), -UCM_EDISCONNECTED);
    SET(hold_prefetches, false);
    ucm_prefetch_free(sent, 0);
    ucm_prefetch_free(waits, 0);
    sent = submit(f, chain, 0, 0);
    cr_assert_eq(ucm_prefetch_wait(sent, -1, &got), 0, "%s", ucm_errmsg());
    cr_expect_eq(got.came, 3);
}

Test(client_prefetcher, a_prefetch_of_a_closed_chain_ends)
{
    struct ucm_prefetcher *f = prefetcher(0, 1, 0);
    struct ucm_chain *chain = chain_of(5);
    struct ucm_prefetch *p = submit(f, chain, 0, 4);
    struct ucm_prefetched got;

    ucm_chain_close(chain);
    cr_assert_eq(ucm_prefetcher_advance(f, 4), 0);
    cr_assert_eq(ucm_prefetch_wait(p, -1, &got), 0);
    cr_expect_eq(got.missing, 3);
    cr_expect_eq(fake_count(&rig.fake, UCM_METHOD_CHAIN_PREFETCH), 0);
}

Test(client_prefetcher, wrong_prefetches)
{
    struct ucm_prefetcher *f = prefetcher(0, 0, 2 * BLOCK), *g;
    struct ucm_prefetch_blocks good = {.chain = chain_of(5), .index = some, .n = 2}, b;
    struct ucm_client *client = rig_connect(&rig.fake);
    struct ucm_prefetcher_options many = {.max_pending_prefetch = 65};
    uint32_t far[] = {5};
    struct ucm_prefetch *p;

#define REFUSED(change)                                                                            \
    do {                                                                                           \
        b = good;                                                                                  \
        change;                                                                                    \
        cr_expect_eq(ucm_prefetcher_submit(f, &b, -1, &p), -UCM_EINVALID, #change);                \
    } while (0)
    REFUSED(b.n = 0);
    REFUSED(b.n = UINT32_MAX);
    REFUSED(b.n = 3); /* more bytes than the whole bound */
    REFUSED(b.index = NULL);
    REFUSED(b.index = far; b.n = 1);
    REFUSED(b.chain = NULL);
    REFUSED(b.deadline_ms = UINT32_MAX);
#undef REFUSED
    cr_expect_eq(ucm_prefetcher_open(rig.client, &many, &g), -UCM_EINVALID);
    cr_assert_eq(ucm_prefetcher_open(client, NULL, &g), 0);
    cr_expect_eq(ucm_prefetcher_submit(g, &good, -1, &p), -UCM_EINVALID, "another client's chain");
    cr_expect_eq(ucm_prefetch_wait(NULL, -1, NULL), -UCM_EINVALID);
    cr_expect_eq(ucm_prefetcher_advance(NULL, 0), -UCM_EINVALID);
    ucm_close(client);
}

struct prefetching {
    pthread_t thread;
    struct ucm_prefetcher *f;
    struct ucm_chain *chain;
    unsigned seed;
    uint64_t submitted;
    int failures;
};

static void end_one(struct prefetching *w, struct ucm_prefetch *p)
{
    struct ucm_prefetched got;
    int r = 0;

    switch (rand_r(&w->seed) % 4) {
    case 0:
        r = ucm_prefetch_cancel(p, -1);
        break;
    case 1:
        r = ucm_prefetch_move(p, (uint32_t)rand_r(&w->seed) % 20);
        break;
    case 2:
        r = ucm_prefetch_wait(p, 50, &got);
        break;
    default:
        r = ucm_prefetch_check(p, &got);
    }
    w->failures += r != 0 && r != -UCM_EDISCONNECTED && r != -UCM_EDEADLINE && r != -UCM_EPENDING;
    ucm_prefetch_free(p, 1);
}

static void *prefetch_many(void *arg)
{
    struct prefetching *w = arg;

    for (int i = 0; i < 300; i++) {
        struct ucm_prefetch_blocks b = {.chain = w->chain,
                                        .index = some,
                                        .n = 1 + (uint32_t)i % 3,
                                        .place = (uint32_t)rand_r(&w->seed) % 20,
                                        .batch = (uint32_t)rand_r(&w->seed) % 4,
                                        .deadline_ms = 1 + (uint32_t)rand_r(&w->seed) % 30};
        struct ucm_prefetch *p;
        int r = ucm_prefetcher_submit(w->f, &b, -1, &p);

        w->failures += r != 0 && r != -UCM_EDISCONNECTED && r != -UCM_EBUSY;
        w->submitted += r == 0;
        if (r == 0)
            end_one(w, p);
    }
    return NULL;
}

Test(client_prefetcher, threads_share_one_over_reconnects)
{
    struct ucm_prefetcher *f = prefetcher(8, 2, 9 * BLOCK);
    struct ucm_chain *chain = chain_of(5);
    struct ucm_prefetcher_stats stats;
    struct prefetching workers[4];
    uint64_t submitted = 0;

    for (unsigned i = 0; i < 4; i++) {
        workers[i] = (struct prefetching){.f = f, .chain = chain, .seed = i};
        pthread_create(&workers[i].thread, NULL, prefetch_many, &workers[i]);
    }
    for (int i = 0; i < 10; i++) {
        fake_sleep_ms(5);
        fake_hang_up(&rig.fake);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(workers[i].thread, NULL);
        cr_expect_eq(workers[i].failures, 0);
        submitted += workers[i].submitted;
    }
    cr_assert_eq(ucm_prefetcher_stats(f, &stats), 0);
    cr_expect_eq(stats.pending, 0);
    cr_expect_eq(stats.held_bytes, 0);
    cr_expect(stats.submitted >= submitted, "%llu of %llu", (unsigned long long)stats.submitted,
              (unsigned long long)submitted);
    cr_expect_eq(stats.ended, stats.submitted);
    cr_expect_eq(stats.useful + stats.useless, stats.came);
}
