/* ucm_task_wait_layers: a load of which the daemon reports how far it has come. */
#include "tests/unit/client/client_rig.h"

static void setup(void)
{
    rig_setup();
    rig.fake.hook = rig_hold_loads;
}

TestSuite(client_layers, .init = setup, .fini = rig_teardown, .timeout = 60);

/* It is the load that is held at that place. */
static struct ucm_task *load_in_steps(uint32_t step, unsigned held)
{
    struct ucm_transfer t = {
        .keys = rig.keys, .blocks = rig.blocks, .n_keys = 3, .progress_interval = step};
    struct ucm_task *task = NULL;

    cr_assert_eq(ucm_load(rig.region, &t, -1, &task), 0, "%s", ucm_errmsg());
    fake_await(&rig.fake, &rig.fake.n_held, held + 1);
    return task;
}

Test(client_layers, land_one_after_another)
{
    static const uint8_t missed[3] = {UCM_BLOCK_OK, UCM_BLOCK_MISS, UCM_BLOCK_OK};
    struct ucm_task *task = load_in_steps(1, 0);
    uint8_t result[3] = {9, 9, 9};
    struct ucm_result whole;

    cr_expect_eq(ucm_task_wait_layers(task, 0, 0, NULL), 0, "nothing to wait for");
    cr_expect_eq(ucm_task_wait_layers(task, 1, 0, result), -UCM_EDEADLINE);
    cr_expect_eq(ucm_task_wait_layers(task, 1, 20, result), -UCM_EDEADLINE);
    cr_expect_eq(result[1], 9, "untouched");
    rig_tell_layers(0, 1, missed, 3);
    cr_expect_eq(ucm_task_wait_layers(task, 1, -1, result), 0, "%s", ucm_errmsg());
    cr_expect_arr_eq(result, missed, 3);
    cr_expect_eq(ucm_task_check(task, &whole), -UCM_EPENDING);
    rig_tell_layers(0, 7, NULL, 0);
    cr_expect_eq(ucm_task_wait_layers(task, 5, -1, result), 0);
    cr_expect_arr_eq(result, missed, 3, "as reported before");
    fake_answer_held(&rig.fake, 0, UCM_BLOCK_OK);
    cr_expect_eq(ucm_task_wait_layers(task, 1000, -1, result), 0, "done is all that will land");
    cr_expect_eq(result[1], UCM_BLOCK_IS_OK, "the answer's word is the last one");
    cr_expect_eq(ucm_task_wait(task, -1, &whole), 0, "the result is still to be taken");
    cr_expect_eq(ucm_task_wait_layers(task, 2, 0, NULL), 0);
    ucm_task_free(task);
}

Test(client_layers, the_descriptor_tells_of_them)
{
    struct ucm_task *task = load_in_steps(1, 0);
    int fd = ucm_fd(rig.client);
    struct pollfd p = {.fd = fd, .events = POLLIN};

    rig_tell_layers(0, 1, NULL, 0);
    cr_expect_eq(poll(&p, 1, 20000), 1);
    cr_expect_eq(ucm_process(rig.client), 0, "no task is done");
    cr_expect_eq(ucm_task_wait_layers(task, 1, 0, NULL), 0);
    ucm_task_free(task);
}

Test(client_layers, of_a_freed_task_are_dropped)
{
    ucm_task_free(load_in_steps(1, 0));
    rig_tell_layers(0, 1, NULL, 0);
    cr_expect_eq(rig_lookup(&rig, -1), 0);
    cr_expect_eq(ucm_connection_epoch(rig.client), 1);
}

Test(client_layers, that_do_not_fit_break_the_connection)
{
    static const uint8_t status[2] = {UCM_BLOCK_OK, UCM_BLOCK_OK};
    static const struct {
        const char *what;
        uint32_t step, reports, n;
    } rows[] = {
        {"that go back", 1, 2, 0}, {"of other blocks", 1, 1, 2}, {"not asked for", 0, 1, 0}};
    struct ucm_result whole;

    for (unsigned i = 0; i < 3; i++) {
        struct ucm_task *task = load_in_steps(rows[i].step, i);

        for (unsigned k = 0; k < rows[i].reports; k++)
            rig_tell_layers(i, 1, status, rows[i].n);
        cr_expect_eq(ucm_task_wait_layers(task, 5, -1, NULL), -UCM_EPROTOCOL, "%s", rows[i].what);
        cr_expect_eq(rig_finish(task, &whole), -UCM_EPROTOCOL, "%s", rows[i].what);
    }
}

Test(client_layers, end_with_the_connection)
{
    struct ucm_task *task = load_in_steps(1, 0);

    fake_down(&rig.fake);
    cr_expect_eq(ucm_task_wait_layers(task, 1, -1, NULL), -UCM_EDISCONNECTED);
    ucm_task_free(task);
    fake_up(&rig.fake);
}
