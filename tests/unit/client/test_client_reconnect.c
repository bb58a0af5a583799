/* The client library over restarts of the daemon. */
/* Sanitizers: thread */
#include "tests/unit/client/client_rig.h"

TestSuite(client_reconnect, .init = rig_setup, .fini = rig_teardown, .timeout = 120);

static ino_t inode(int fd)
{
    struct stat st;

    cr_assert_eq(fstat(fd, &st), 0);
    return st.st_ino;
}

Test(client_reconnect, registers_again_with_the_same_memory)
{
    struct ucm_task *task;
    struct ucm_result result;
    uint64_t id = FAKE_GET(&rig.fake, regions[0].id);

    cr_expect_eq(FAKE_GET(&rig.fake, regions[0].ino), inode(rig.fd));
    rig_restart();
    cr_expect_eq(FAKE_GET(&rig.fake, n_regions), 0);
    cr_assert_eq(rig_load(&rig, 2, 0, &task), 0, "%s", ucm_errmsg());
    cr_assert_eq(rig_finish(task, &result), 0);
    cr_assert_eq(FAKE_GET(&rig.fake, n_regions), 1);
    cr_expect_eq(FAKE_GET(&rig.fake, regions[0].n_fds), 1);
    cr_expect_eq(FAKE_GET(&rig.fake, regions[0].ino), inode(rig.fd));
    cr_expect(FAKE_GET(&rig.fake, regions[0].id) != id,
              "the daemon counts on; the handle is mapped");
    cr_expect_eq(ucm_connection_epoch(rig.client), 2);
}

/* A call that needs no region brings all of them back all the same. */
Test(client_reconnect, everything_is_registered_again)
{
    struct ucm_region *other;
    struct ucm_namespace *ns;

    cr_assert_eq(rig_register(&rig, -1, &other), 0);
    cr_assert_eq(rig_open(rig.client, &ns), 0);
    rig_restart();
    cr_assert_eq(rig_lookup(&rig, -1), 0);
    cr_expect_eq(FAKE_GET(&rig.fake, n_regions), 2);
    cr_expect_eq(fake_count(&rig.fake, UCM_METHOD_NS_OPEN), 4);
    cr_expect_eq(FAKE_GET(&rig.fake, regions[0].ns), FAKE_GET(&rig.fake, regions[1].ns));

    /* What was closed stays so. */
    cr_assert_eq(ucm_region_unregister(other, -1), 0);
    ucm_namespace_close(ns);
    rig_restart();
    cr_assert_eq(rig_lookup(&rig, -1), 0);
    cr_expect_eq(FAKE_GET(&rig.fake, n_regions), 1);
    cr_expect_eq(fake_count(&rig.fake, UCM_METHOD_NS_OPEN), 5);
}

Test(client_reconnect, a_call_waits_for_the_daemon)
{
    pthread_t t;

    fake_down(&rig.fake);
    cr_expect_eq(rig_lookup(&rig, 20), -UCM_ENODAEMON);
    cr_expect_eq(rig_lookup(&rig, 0), -UCM_ENODAEMON);
    cr_assert_eq(pthread_create(&t, NULL, rig_up_soon, &rig.fake), 0);
    cr_expect_eq(rig_lookup(&rig, -1), 0);
    pthread_join(t, NULL);
}

Test(client_reconnect, old_leases_mean_nothing)
{
    uint32_t old = rig_leased_lookup(), fresh;
    struct ucm_task *task;
    struct ucm_result result;

    fake_hang_up(&rig.fake);
    /* Numbers from the beginning, as a new daemon's. */
    FAKE_SET(&rig.fake, rig.fake.next_lease, 1000);
    while (ucm_connection_epoch(rig.client) == 1)
        rig_lookup(&rig, -1);
    fresh = rig_leased_lookup();
    cr_assert_eq(ucm_release(rig.client, old, -1), 0);
    cr_expect_eq(fake_count(&rig.fake, UCM_METHOD_RELEASE), 0);
    FAKE_SET(&rig.fake, rig.fake.last_lease, 77);
    cr_assert_eq(rig_load(&rig, 1, old, &task), 0);
    cr_assert_eq(rig_finish(task, &result), 0);
    cr_expect_eq(FAKE_GET(&rig.fake, last_lease), 0);
    cr_assert_eq(ucm_release(rig.client, fresh, -1), 0);
    cr_expect_eq(FAKE_GET(&rig.fake, last_lease), 1000);
}

Test(client_reconnect, a_refused_region_fails_alone)
{
    struct ucm_task *task;

    rig_refuse(UCM_METHOD_REGION_REGISTER, UCM_WIRE_DEVICE, "the GPU is gone");
    rig_restart();
    cr_expect_eq(rig_lookup(&rig, -1), 0);
    cr_expect_eq(rig_load(&rig, 1, 0, &task), -UCM_EDEVICE);
    cr_expect_str_eq(ucm_errmsg(), "the GPU is gone");
    cr_expect_eq(rig_load(&rig, 1, 0, &task), -UCM_EDEVICE);
    cr_expect_eq(rig_lookup(&rig, -1), 0);
    cr_expect_eq(fake_count(&rig.fake, UCM_METHOD_REGION_REGISTER), 2, "asked once in all");
    rig.fake.hook = FAKE_NO_HOOK;
    rig_restart();
    cr_assert_eq(rig_load(&rig, 1, 0, &task), 0, "the next reconnect tries again: %s",
                 ucm_errmsg());
}

/* Of a region, and of a namespace where only its region is used. */
Test(client_reconnect, a_busy_refusal_is_tried_again)
{
    static const int methods[] = {UCM_METHOD_REGION_REGISTER, UCM_METHOD_NS_OPEN};
    struct ucm_task *task;

    for (unsigned i = 0; i < 2; i++) {
        rig_refuse(methods[i], UCM_WIRE_BUSY, "too many");
        rig_restart();
        cr_expect_eq(rig_load(&rig, 1, 0, &task), -UCM_EBUSY, "method %d", methods[i]);
        rig.fake.hook = FAKE_NO_HOOK;
        cr_expect_eq(rig_load(&rig, 1, 0, &task), 0, "method %d: %s", methods[i], ucm_errmsg());
    }
}

Test(client_reconnect, a_refused_namespace_takes_its_regions_along)
{
    struct ucm_task *task;

    rig_refuse(UCM_METHOD_NS_OPEN, UCM_WIRE_DENIED, "not this tenant");
    rig_restart();
    cr_expect_eq(rig_load(&rig, 1, 0, &task), -UCM_EDENIED);
    cr_expect_eq(rig_lookup(&rig, -1), -UCM_EDENIED);
    cr_expect_str_eq(ucm_errmsg(), "not this tenant");
    cr_expect_eq(ucm_release(rig.client, 5, -1), 0);
    /* the mapping of the connection before may be there still */
    cr_expect_eq(ucm_region_unregister(rig.region, -1), -UCM_EDISCONNECTED);
}

Test(client_reconnect, a_region_of_a_closed_namespace_is_not_registered_in_another)
{
    struct ucm_namespace *other;
    struct ucm_task *task;

    ucm_namespace_close(rig.ns);
    cr_assert_eq(rig_open(rig.client, &other), 0);
    rig_restart();
    cr_expect_eq(rig_load(&rig, 1, 0, &task), -UCM_ENOTFOUND);
    cr_expect_eq(fake_count(&rig.fake, UCM_METHOD_REGION_REGISTER), 1, "before the restart");
    rig.ns = other;
}

static void *go_soon(void *arg)
{
    fake_sleep_ms(50);
    atomic_store(&rig_go, true);
    return arg;
}

/* No single call has time for the whole, but together they finish it. */
Test(client_reconnect, short_deadlines_make_progress)
{
    struct ucm_task *task = NULL;
    unsigned tries = 0;

    rig.fake.hook = rig_late_region;
    rig_restart();
    while (!task && tries++ < 1000) {
        atomic_store(&rig_go, tries > 4);
        struct ucm_transfer t = {.keys = rig.keys, .blocks = rig.blocks, .n_keys = 1};
        int r = ucm_load(rig.region, &t, 10, &task);

        cr_expect(r == 0 || r == -UCM_EDEADLINE || r == -UCM_EDISCONNECTED, "%s", ucm_errmsg());
    }
    cr_assert_not_null(task);
    cr_expect(tries > 4, "%u", tries);
    cr_expect_eq(fake_count(&rig.fake, UCM_METHOD_REGION_REGISTER), 2);
    cr_expect_eq(ucm_connection_epoch(rig.client), 2);
}

/* Closed while its registration is on its way again: nothing of it stays in the daemon. */
Test(client_reconnect, unregister_meanwhile)
{
    pthread_t t;

    rig.fake.hook = rig_late_region;
    rig_restart();
    cr_assert_eq(pthread_create(&t, NULL, go_soon, NULL), 0);
    cr_expect_eq(rig_lookup(&rig, -1), 0);
    cr_expect_eq(ucm_region_unregister(rig.region, -1), 0);
    cr_expect_eq(fake_count(&rig.fake, UCM_METHOD_REGION_UNREGISTER), 1);
    cr_expect_eq(FAKE_GET(&rig.fake, n_regions), 0);
    pthread_join(t, NULL);
}

Test(client_reconnect, unregister_without_a_daemon)
{
    fake_down(&rig.fake);
    cr_expect_eq(ucm_region_unregister(rig.region, -1), -UCM_EDISCONNECTED);
    ucm_namespace_close(rig.ns);
    fake_up(&rig.fake);
}

/* ---- threads over restarts ---- */

#define THREADS 6

static atomic_bool over;

static void *call_on(void *arg)
{
    unsigned *bad = arg;
    struct ucm_result result;
    struct ucm_task *task;

    while (!atomic_load(&over)) {
        int r = rig_lookup(&rig, -1);

        if (r == 0)
            r = rig_load(&rig, 3, 0, &task);
        if (r == 0) {
            r = rig_finish(task, &result);
            if (r == 0 && result.n_ok != 3)
                ++*bad;
        }
        if (r != 0 && r != -UCM_EDISCONNECTED)
            ++*bad;
    }
    return NULL;
}

Test(client_reconnect, threads_over_restarts)
{
    pthread_t t[THREADS];
    unsigned bad[THREADS] = {0};

    atomic_store(&over, false);
    for (unsigned i = 0; i < THREADS; i++)
        cr_assert_eq(pthread_create(&t[i], NULL, call_on, &bad[i]), 0);
    for (unsigned i = 0; i < 20 || (i < 2000 && ucm_connection_epoch(rig.client) <= 5); i++) {
        fake_sleep_ms(10);
        if (i % 2)
            rig_restart();
        else
            fake_hang_up(&rig.fake);
    }
    atomic_store(&over, true);
    for (unsigned i = 0; i < THREADS; i++) {
        pthread_join(t[i], NULL);
        cr_expect_eq(bad[i], 0, "thread %u", i);
    }
    cr_expect_eq(rig_lookup(&rig, -1), 0);
    cr_expect(ucm_connection_epoch(rig.client) > 5);
}

/* Handles come and go in one thread while another brings the connection back. */
static void *churn(void *arg)
{
    unsigned *bad = arg;
    struct ucm_namespace *ns;
    struct ucm_region *region;

    while (!atomic_load(&over)) {
        int r = rig_open(rig.client, &ns);

        if (r == 0) {
            fake_sleep_ms(1);
            ucm_namespace_close(ns);
            r = rig_register(&rig, -1, &region);
        }
        if (r == 0) {
            fake_sleep_ms(1);
            r = ucm_region_unregister(region, -1);
        }
        if (r != 0 && r != -UCM_EDISCONNECTED)
            ++*bad;
    }
    return NULL;
}

Test(client_reconnect, handles_come_and_go_over_restarts)
{
    pthread_t t[4];
    unsigned bad[4] = {0};

    atomic_store(&over, false);
    for (unsigned i = 0; i < 4; i++)
        cr_assert_eq(pthread_create(&t[i], NULL, i < 2 ? churn : call_on, &bad[i]), 0);
    for (unsigned i = 0; i < 20; i++) {
        fake_sleep_ms(10);
        rig_restart();
    }
    atomic_store(&over, true);
    for (unsigned i = 0; i < 4; i++) {
        pthread_join(t[i], NULL);
        cr_expect_eq(bad[i], 0, "thread %u", i);
    }
}
