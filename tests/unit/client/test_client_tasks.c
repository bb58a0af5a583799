/* Tasks of the client library, cancelled, freed and polled for. Each is reported once, in whatever
 * order answers come. */
/* Sanitizers: thread */
#include "tests/unit/client/client_rig.h"

TestSuite(client_tasks, .init = rig_setup, .fini = rig_teardown, .timeout = 60);

Test(client_tasks, a_load_is_reported_once)
{
    struct ucm_task *task = rig_load_held(4);
    struct ucm_result result;

    cr_expect_eq(ucm_task_check(task, &result), -UCM_EPENDING);
    cr_expect_eq(ucm_task_wait(task, 5, &result), -UCM_EDEADLINE);
    fake_answer_held(&rig.fake, 0, UCM_BLOCK_OK);
    cr_assert_eq(ucm_task_wait(task, -1, &result), 0);
    cr_expect_eq(result.n_keys, 4);
    cr_expect_eq(result.n_ok, 4);
    cr_expect_eq(result.bytes, 400);
    cr_expect_eq(result.result[3], UCM_BLOCK_IS_OK);
    cr_expect_eq(ucm_task_check(task, &result), -UCM_ECONSUMED);
    cr_expect_eq(ucm_task_wait(task, -1, &result), -UCM_ECONSUMED);
    ucm_task_free(task);
}

/* A wait that knows roughly when its answer comes is awake then. An answer that comes much later,
 * or never, is waited for all the same, but no longer than asked. */
Test(client_tasks, an_answer_that_comes_later_than_ever)
{
    struct ucm_task *task;
    struct ucm_result result;

    for (unsigned i = 0; i < 50; i++) {
        cr_assert_eq(rig_load(&rig, 4, 0, &task), 0);
        cr_assert_eq(rig_finish(task, &result), 0);
    }
    task = rig_load_held(4);
    cr_expect_eq(ucm_task_wait(task, 0, &result), -UCM_EDEADLINE);
    cr_expect_eq(ucm_task_wait(task, 1, &result), -UCM_EDEADLINE);
    cr_expect_eq(ucm_task_wait(task, 50, &result), -UCM_EDEADLINE);
    fake_answer_held(&rig.fake, 0, UCM_BLOCK_OK);
    cr_assert_eq(rig_finish(task, &result), 0);
    cr_expect_eq(result.n_ok, 4);
}

Test(client_tasks, dump_and_prefetch)
{
    struct ucm_transfer t = {.keys = rig.keys, .blocks = rig.blocks, .n_keys = 8};
    struct ucm_task *dump, *prefetch;
    struct ucm_result result;

    cr_assert_eq(ucm_dump(rig.region, &t, -1, &dump), 0);
    t.blocks = NULL;
    cr_assert_eq(ucm_prefetch(rig.ns, &t, -1, &prefetch), 0);
    cr_assert_eq(ucm_task_wait(prefetch, -1, &result), 0);
    cr_expect_eq(result.n_ok, 0);
    cr_expect_eq(result.result[7], UCM_BLOCK_IS_MISS);
    cr_assert_eq(rig_finish(dump, &result), 0);
    cr_expect_eq(result.n_ok, 8, "those that exist count");
    ucm_task_free(prefetch);
}

Test(client_tasks, answers_come_in_any_order)
{
    struct ucm_task *task[20];
    struct ucm_result result;

    rig.fake.hook = rig_hold_loads;
    for (unsigned i = 0; i < 20; i++)
        cr_assert_eq(rig_load(&rig, 1 + i % RIG_KEYS, 0, &task[i]), 0);
    fake_await(&rig.fake, &rig.fake.n_held, 20);
    for (unsigned i = 20; i-- > 0;)
        fake_answer_held(&rig.fake, i, (uint8_t)(i % 8));
    cr_expect_eq(rig_lookup(&rig, -1), 0, "a call between them");
    for (unsigned i = 0; i < 20; i++) {
        cr_assert_eq(ucm_task_wait(task[i], -1, &result), 0);
        cr_expect_eq(result.n_keys, 1 + i % RIG_KEYS);
        cr_expect_eq(result.result[0], i % 8);
        ucm_task_free(task[i]);
    }
}

static bool answer_short(struct fake *f, int conn, int method, struct proto_envelope *env)
{
    if (method == UCM_METHOD_LOAD)
        fake_reply_blocks(f, conn, env->msgid, 2, UCM_BLOCK_OK);
    else if (method == UCM_METHOD_LOOKUP)
        fake_reply(f, conn, env->msgid, &proto_lookup_r, &(struct msg_lookup_r){.hits = 5});
    else
        return false;
    return true;
}

/* An answer that is sound but does not fit fails its call alone. */
Test(client_tasks, an_answer_that_does_not_fit)
{
    struct ucm_task *task;
    struct ucm_result result = {.n_keys = 77};

    rig.fake.hook = answer_short;
    cr_assert_eq(rig_load(&rig, 3, 0, &task), 0);
    cr_expect_eq(rig_finish(task, &result), -UCM_EPROTOCOL);
    cr_expect_eq(result.n_keys, 77, "untouched");
    cr_expect_eq(rig_lookup(&rig, -1), -UCM_EPROTOCOL);
    rig.fake.hook = FAKE_NO_HOOK;
    cr_expect_eq(rig_lookup(&rig, -1), 0);
    cr_expect_eq(ucm_connection_epoch(rig.client), 1);
}

Test(client_tasks, cancel)
{
    struct ucm_task *task;
    struct ucm_result result;

    rig.fake.hook = rig_hold_loads;
    cr_assert_eq(rig_load(&rig, 2, 0, &task), 0);
    cr_assert_eq(ucm_task_cancel(task, -1), 0);
    cr_expect_eq(FAKE_GET(&rig.fake, last_cancelled), FAKE_GET(&rig.fake, held[0].msgid));
    cr_expect_eq(ucm_task_check(task, &result), -UCM_EPENDING, "until the daemon has answered");
    fake_answer_held(&rig.fake, 0, UCM_BLOCK_CANCELLED);
    cr_assert_eq(ucm_task_wait(task, -1, &result), 0);
    cr_expect_eq(result.result[1], UCM_BLOCK_IS_CANCELLED);
    cr_expect_eq(ucm_task_cancel(task, -1), 0, "nothing left to cancel");
    cr_expect_eq(fake_count(&rig.fake, UCM_METHOD_CANCEL), 1);
    ucm_task_free(task);
}

Test(client_tasks, free_of_a_task_under_way_cancels_it)
{
    struct ucm_task *task = rig_load_held(2);

    ucm_task_free(task);
    fake_await(&rig.fake, &rig.fake.count[UCM_METHOD_CANCEL], 1);
    fake_answer_held(&rig.fake, 0, UCM_BLOCK_OK);
    cr_expect_eq(rig_lookup(&rig, -1), 0, "the answer to nobody is dropped");
    ucm_task_free(NULL);
}

/* ---- the descriptor to poll ---- */

static int readable(int fd, int timeout_ms)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};

    return poll(&p, 1, timeout_ms);
}

Test(client_tasks, polling)
{
    struct ucm_task *task[2];
    struct ucm_result result;
    int fd = ucm_fd(rig.client);

    cr_assert(fd >= 0);
    rig.fake.hook = rig_hold_loads;
    for (unsigned i = 0; i < 2; i++)
        cr_assert_eq(rig_load(&rig, 1, 0, &task[i]), 0);
    fake_await(&rig.fake, &rig.fake.n_held, 2);
    cr_expect_eq(readable(fd, 0), 0);
    cr_expect_eq(ucm_process(rig.client), 0);
    fake_answer_held(&rig.fake, 1, UCM_BLOCK_OK);
    cr_assert_eq(readable(fd, 5000), 1);
    cr_expect_eq(ucm_process(rig.client), 1);
    cr_expect_eq(readable(fd, 0), 0);
    cr_expect_eq(ucm_task_check(task[0], &result), -UCM_EPENDING);
    cr_expect_eq(ucm_task_check(task[1], &result), 0);

    /* Another call receives the answer. The poller wakes all the same. */
    fake_answer_held(&rig.fake, 0, UCM_BLOCK_OK);
    cr_expect_eq(rig_lookup(&rig, -1), 0);
    cr_assert_eq(readable(fd, 0), 1);
    cr_expect_eq(ucm_process(rig.client), 1);
    cr_expect_eq(readable(fd, 0), 0);
    cr_expect_eq(ucm_task_check(task[0], &result), 0);
    ucm_task_free(task[0]);
    ucm_task_free(task[1]);
}

Test(client_tasks, polling_sees_the_end)
{
    struct ucm_task *task = rig_load_held(1);
    struct ucm_result result;
    int fd = ucm_fd(rig.client);

    fake_hang_up(&rig.fake);
    cr_assert_eq(readable(fd, 5000), 1);
    cr_expect_eq(ucm_process(rig.client), 1);
    cr_expect_eq(ucm_task_check(task, &result), -UCM_EDISCONNECTED);
    ucm_task_free(task);
    cr_expect_eq(ucm_process(rig.client), 0, "said once");
    cr_expect_eq(readable(fd, 0), 0);
    cr_expect_eq(rig_lookup(&rig, -1), 0, "connects again");
    cr_expect_eq(ucm_fd(rig.client), fd);
    fake_hang_up(&rig.fake);
    cr_assert_eq(readable(fd, 5000), 1);
    cr_expect_eq(ucm_process(rig.client), -UCM_EDISCONNECTED, "and no task to tell it by");
}
