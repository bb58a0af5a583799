/* The client library's calls: what each sends, and what it makes of the answer. */
/* Sanitizers: thread */
#include "tests/unit/client/client_rig.h"

#include <errno.h>
#include <sys/wait.h>

TestSuite(client, .init = rig_setup, .fini = rig_teardown, .timeout = 60);

Test(client, lookup_per_key)
{
    struct ucm_lookup l = {.keys = rig.keys[1], .n_keys = 4};
    uint8_t found[4] = {9, 9, 9, 9};
    uint32_t hits = 0;

    cr_assert_eq(ucm_lookup_per_key(rig.ns, &l, -1, found, &hits, NULL), 0);
    cr_expect_eq(hits, 2);
    cr_expect_eq(found[1], UCM_FOUND_DRAM);
    cr_expect_eq(found[2], UCM_FOUND_NOT);
}

/* The daemon may take as long as the caller allows, and half of the time that the caller has
 * itself. */
Test(client, a_lookup_says_how_long_the_daemon_may_wait)
{
    static const struct {
        uint32_t wait_ms;
        int timeout_ms;
        uint64_t least, most;
    } rows[] = {{50, -1, 50, 50}, {0, 40000, 1, 20000}, {UINT32_MAX, 40000, 1, 20000}};

    for (unsigned i = 0; i < 3; i++) {
        struct ucm_lookup l = {.keys = rig.keys[2], .n_keys = 5, .wait_ms = rows[i].wait_ms};
        uint32_t hits = 0, in_dram = 7, lease = 7;
        uint64_t told;

        cr_assert_eq(ucm_lookup_prefix(rig.ns, &l, rows[i].timeout_ms, &hits, &in_dram, &lease), 0);
        cr_expect(hits == 3 && in_dram == 0 && lease == 0, "none was asked for");
        told = FAKE_GET(&rig.fake, last_wait_ms);
        cr_expect(told >= rows[i].least && told <= rows[i].most, "%u: %lu ms", i,
                  (unsigned long)told);
    }
}

static uint64_t looked_up_for(const char *id)
{
    cr_assert_eq(ucm_set_request_id(id), 0, "%s", ucm_errmsg());
    cr_assert_eq(rig_lookup(&rig, -1), 0, "%s", ucm_errmsg());
    return FAKE_GET(&rig.fake, last_request);
}

static void *other_thread(void *done)
{
    return rig_lookup(&rig, -1) == 0 ? done : NULL;
}

Test(client, a_request_id_goes_with_the_threads_requests)
{
    struct ucm_transfer t = {.keys = rig.keys, .n_keys = 1, .blocks = rig.blocks};
    char end[UCM_MAX_REQUEST_BYTES + 8];
    uint64_t cmpl_1 = 0, sent;
    struct ucm_task *task;
    struct ucm_result result;
    pthread_t thread;
    void *done;

    memcpy(&cmpl_1, "cmpl-1", 6);
    cr_expect_eq(looked_up_for("cmpl-1"), cmpl_1);
    cr_assert_eq(ucm_prefetch(rig.ns, &t, -1, &task), 0);
    cr_assert_eq(ucm_task_wait(task, -1, &result), 0);
    cr_expect_eq(FAKE_GET(&rig.fake, last_request), cmpl_1);
    cr_assert_eq(pthread_create(&thread, NULL, other_thread, rig.ns), 0);
    cr_assert_eq(pthread_join(thread, &done), 0);
    cr_assert_not_null(done);
    cr_expect_eq(FAKE_GET(&rig.fake, last_request), 0, "another thread has none");
    cr_expect_eq(looked_up_for(NULL), 0);

    memset(end, 'x', sizeof(end));
    memcpy(end + UCM_MAX_REQUEST_BYTES - 1, "\xc3\xa9", 3); /* its last byte would be the 65th */
    memcpy(&sent, end, 8);
    cr_expect_eq(looked_up_for(end), sent, "it is cut before the character");
    cr_expect_eq(ucm_set_request_id("a\nb"), -UCM_EINVALID);
    cr_expect_eq(ucm_set_request_id("\xff"), -UCM_EINVALID);
    cr_assert_eq(pthread_create(&thread, NULL, other_thread, rig.ns), 0);
    cr_assert_eq(pthread_join(thread, NULL), 0);
}

/* How many of a load and a dump said that the worker computes. */
static unsigned told_by_copies(struct ucm_region *region)
{
    struct ucm_transfer t = {.keys = rig.keys, .n_keys = 1, .blocks = rig.blocks};
    unsigned before = FAKE_GET(&rig.fake, computing);
    struct ucm_result result;
    struct ucm_task *task;

    for (unsigned i = 0; i < 2; i++) {
        cr_assert_eq((i ? ucm_dump : ucm_load)(region, &t, -1, &task), 0, "%s", ucm_errmsg());
        cr_assert_eq(rig_finish(task, &result), 0, "%s", ucm_errmsg());
    }
    return FAKE_GET(&rig.fake, computing) - before;
}

Test(client, copies_tell_whether_the_worker_computes)
{
    cr_expect_eq(told_by_copies(rig.region), 0);
    ucm_region_gpu_busy(rig.region, 1);
    cr_expect_eq(told_by_copies(rig.region), 2);
    ucm_region_gpu_busy(rig.region, 0);
    cr_expect_eq(told_by_copies(rig.region), 0);
    ucm_region_gpu_busy(NULL, 1);
}

Test(client, a_lease_is_released_once)
{
    uint32_t lease = rig_leased_lookup(), other = rig_leased_lookup();

    cr_expect(lease != other);
    cr_assert_eq(ucm_release(rig.client, lease, -1), 0);
    cr_expect_eq(FAKE_GET(&rig.fake, last_lease), 1000);
    cr_assert_eq(ucm_release(rig.client, lease, -1), 0);
    cr_expect_eq(fake_count(&rig.fake, UCM_METHOD_RELEASE), 1);
    cr_assert_eq(ucm_release(rig.client, 0, -1), 0);
}

Test(client, a_lease_is_released_without_a_wait)
{
    uint32_t lease = rig_leased_lookup();

    fake_pause(&rig.fake, true);
    cr_assert_eq(ucm_release_soon(rig.client, lease), 0, "%s", ucm_errmsg());
    cr_assert_eq(ucm_release_soon(rig.client, lease), 0);
    cr_assert_eq(ucm_release_soon(rig.client, 0), 0);
    fake_pause(&rig.fake, false);
    cr_assert_eq(rig_lookup(&rig, -1), 0);
    cr_expect_eq(fake_count(&rig.fake, UCM_METHOD_RELEASE), 1);
    cr_expect_eq(FAKE_GET(&rig.fake, last_lease), 1000);
    cr_expect_eq(ucm_release_soon(NULL, lease), -UCM_EINVALID);
}

Test(client, a_load_takes_its_lease_along)
{
    uint32_t lease = rig_leased_lookup();
    struct ucm_task *task;
    struct ucm_result result;

    cr_assert_eq(rig_load(&rig, 1, lease, &task), 0);
    cr_assert_eq(rig_finish(task, &result), 0);
    cr_expect_eq(FAKE_GET(&rig.fake, last_lease), 1000);
    cr_assert_eq(ucm_release(rig.client, lease, -1), 0);
    cr_expect_eq(fake_count(&rig.fake, UCM_METHOD_RELEASE), 0, "the load ended it");
}

/* More leases than the table has slots: the numbers stay apart, and old ones are forgotten. */
Test(client, many_leases)
{
    uint32_t lease[300];

    for (unsigned i = 0; i < 300; i++)
        lease[i] = rig_leased_lookup();
    cr_assert_eq(ucm_release(rig.client, lease[299], -1), 0);
    cr_expect_eq(FAKE_GET(&rig.fake, last_lease), 1299);
}

Test(client, a_refusal_has_code_and_sentence)
{
    rig_refuse(UCM_METHOD_LOOKUP, UCM_WIRE_BUSY, "too much to do; come again");
    cr_expect_eq(rig_lookup(&rig, -1), -UCM_EBUSY);
    cr_expect_str_eq(ucm_errmsg(), "too much to do; come again");
    cr_expect_str_eq(ucm_strerror(-UCM_EBUSY), "UCM_EBUSY");
    cr_expect_str_eq(ucm_strerror(77), "UCM_EUNKNOWN");
    rig.fake.hook = FAKE_NO_HOOK;
    cr_expect_eq(rig_lookup(&rig, -1), 0);
}

Test(client, bad_arguments_are_refused_here)
{
    struct ucm_lookup l = {.keys = rig.keys, .n_keys = 0};
    struct ucm_transfer t = {.keys = rig.keys, .n_keys = 1};
    struct ucm_task *task = NULL;
    uint32_t hits;

    cr_expect_eq(ucm_lookup_prefix(rig.ns, &l, -1, &hits, NULL, NULL), -UCM_EINVALID);
    l.n_keys = UCM_MAX_KEYS + 1;
    cr_expect_eq(ucm_lookup_prefix(rig.ns, &l, -1, &hits, NULL, NULL), -UCM_EINVALID);
    l.n_keys = 1;
    l.lease_ms = 5;
    cr_expect_eq(ucm_lookup_prefix(rig.ns, &l, -1, &hits, NULL, NULL), -UCM_EINVALID);
    l.lease_ms = 0;
    l.wait_mode = UCM_WAIT_MODE_LATER;
    cr_expect_eq(ucm_lookup_prefix(rig.ns, &l, -1, &hits, NULL, NULL), -UCM_EINVALID, "no pending");
    cr_expect_eq(ucm_load(rig.region, &t, -1, &task), -UCM_EINVALID, "no blocks");
    t.blocks = rig.blocks;
    t.priority = 8;
    cr_expect_eq(ucm_load(rig.region, &t, -1, &task), -UCM_EINVALID);
    cr_expect(strstr(ucm_errmsg(), "priority"), "%s", ucm_errmsg());
    cr_expect_null(task);
    cr_expect_eq(ucm_connect(NULL, 0, NULL), -UCM_EINVALID);
    cr_expect_eq(rig_lookup(&rig, -1), 0, "and the client goes on");
}

/* The answer brings a lease that no caller knows. The library gives it back. */
Test(client, a_late_answer_is_dropped_and_undone)
{
    struct ucm_lookup l = {.keys = rig.keys, .n_keys = 1, .lease_ms = 60000};
    uint32_t hits = 5, lease = 6;

    rig_hold(UCM_METHOD_LOOKUP);
    cr_expect_eq(ucm_lookup_prefix(rig.ns, &l, 10, &hits, NULL, &lease), -UCM_EDEADLINE);
    cr_expect_eq(ucm_lookup_prefix(rig.ns, &l, 0, &hits, NULL, &lease), -UCM_EDEADLINE);
    cr_expect(hits == 5 && lease == 6, "untouched");
    fake_await(&rig.fake, &rig.fake.n_held, 2);
    for (unsigned i = 0; i < 2; i++)
        fake_reply(&rig.fake, (int)FAKE_GET(&rig.fake, held[i].conn),
                   (uint32_t)FAKE_GET(&rig.fake, held[i].msgid), &proto_lookup_r,
                   &(struct msg_lookup_r){.hits = 1, .lease = 4242 + i});
    rig.fake.hook = FAKE_NO_HOOK;
    cr_expect_eq(rig_lookup(&rig, -1), 0);
    fake_await(&rig.fake, &rig.fake.count[UCM_METHOD_RELEASE], 2);
    cr_expect_eq(FAKE_GET(&rig.fake, last_lease), 4243);
}

Test(client, operators_calls)
{
    static const uint8_t params[] = {0x81, 0xa2, 'n', 's', 1}, array[] = {0x90};
    uint64_t changed = 0, busy = 0;
    uint8_t *result = NULL;
    size_t n = 0;

    cr_assert_eq(ucm_pin(rig.ns, rig.keys, 8, -1, &changed), 0);
    cr_expect_eq(changed, 8);
    cr_assert_eq(ucm_unpin(rig.ns, rig.keys, 2, -1, NULL), 0);
    cr_assert_eq(ucm_evict(rig.ns, NULL, 0, -1, &changed, &busy), 0);
    cr_expect(changed == 3 && busy == 2);
    cr_expect_eq(ucm_evict(rig.ns, NULL, 1, -1, NULL, NULL), -UCM_EINVALID);

    cr_assert_eq(ucm_call(rig.client, "unpin", params, sizeof params, -1, &result, &n), 0);
    cr_assert(n > 1 && result[0] == 0x81, "a map of one");
    free(result);
    result = NULL;
    cr_expect_eq(ucm_call(rig.client, "dance", NULL, 0, -1, &result, &n), -UCM_EUNSUPPORTED);
    cr_expect_eq(ucm_call(rig.client, "stats", "\xc1", 1, -1, &result, &n), -UCM_EINVALID);
    cr_expect_eq(ucm_call(rig.client, "stats", array, 1, -1, &result, &n), -UCM_EINVALID);
    cr_expect_null(result);
    cr_expect_eq(rig_lookup(&rig, -1), 0);
}

Test(client, a_region_lets_go)
{
    int fd = dup(rig.fd);
    struct ucm_region *region;

    close(fd);
    cr_expect_eq(FAKE_GET(&rig.fake, n_regions), 1);
    cr_assert_eq(ucm_region_unregister(rig.region, -1), 0);
    cr_expect_eq(FAKE_GET(&rig.fake, n_regions), 0);
    rig.fd = fd; /* closed */
    cr_expect_eq(rig_register(&rig, -1, &region), -UCM_EINVALID);
    rig.fd = -1;
}

/* The daemon may already have unregistered what a timed-out call asked for. */
static bool forget_regions(struct fake *f, int conn, int method, struct proto_envelope *env)
{
    if (method != UCM_METHOD_REGION_UNREGISTER)
        return false;
    if (fake_count(f, UCM_METHOD_REGION_UNREGISTER) > 1)
        fake_error(f, conn, env->msgid, UCM_WIRE_NOT_FOUND, "no such region");
    return true;
}

Test(client, unregister_can_be_asked_again)
{
    rig.fake.hook = forget_regions;
    cr_expect_eq(ucm_region_unregister(rig.region, 10), -UCM_EDEADLINE);
    cr_expect_eq(ucm_region_unregister(rig.region, -1), 0);
}

Test(client, a_late_registration_is_undone)
{
    struct ucm_region *region = NULL;

    rig.fake.hook = rig_late_region;
    cr_expect_eq(rig_register(&rig, 10, &region), -UCM_EDEADLINE);
    cr_expect_null(region);
    atomic_store(&rig_go, true);
    cr_expect_eq(rig_lookup(&rig, -1), 0);
    fake_await(&rig.fake, &rig.fake.count[UCM_METHOD_REGION_UNREGISTER], 1);
    cr_expect_eq(rig_lookup(&rig, -1), 0);
    cr_expect_eq(FAKE_GET(&rig.fake, n_regions), 1, "only the first is left");
}

Test(client, a_fork_is_told_so)
{
    int fd = ucm_fd(rig.client), status;
    pid_t pid = fork();

    cr_assert(pid >= 0);
    if (pid == 0) {
        int r = rig_lookup(&rig, -1);

        ucm_close(rig.client);
        if (r != -UCM_EINVALID || !strstr(ucm_errmsg(), "fork"))
            _exit(1);
        /* The child keeps nothing open from which the daemon would take the worker for alive. */
        _exit(fcntl(fd, F_GETFD) < 0 && errno == EBADF ? 0 : 2);
    }
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    cr_expect_eq(rig_lookup(&rig, -1), 0);
}

/* Descriptors that a child opens stay open, even when that child forks again. */
Test(client, a_fork_of_a_fork_keeps_its_descriptors)
{
    int pipes[2], status;
    pid_t pid = fork(), second;

    cr_assert(pid >= 0);
    if (pid == 0) {
        if (pipe(pipes) != 0 || (second = fork()) < 0)
            _exit(1);
        if (second == 0)
            _exit(fcntl(pipes[0], F_GETFD) < 0 || fcntl(pipes[1], F_GETFD) < 0 ? 2 : 0);
        _exit(waitpid(second, &status, 0) == second && WIFEXITED(status) ? WEXITSTATUS(status) : 3);
    }
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
