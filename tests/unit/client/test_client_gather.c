/* ucm_gather: what is sent, what is refused here, and restarts of the daemon. */
#include "tests/unit/client/sparse_rig.h"

#include <string.h>

/* The last gather, under the fake's lock. */
static struct {
    struct msg_gather m;
    struct ucm_gather_item items[4];
    bool short_of_one, pool; /* pool: of the last registration */
} seen;

static bool gather_hook(struct fake *f, int conn, int method, struct proto_envelope *env)
{
    static const uint8_t status[UCM_GATHER_ITEMS_MAX] = {UCM_BLOCK_OK, UCM_BLOCK_MISS};
    struct msg_gather_r r = {.bytes = 4096};
    union proto_any m;
    struct ucm_error e;
    bool known;
    uint32_t n;

    if (method != UCM_METHOD_GATHER && method != UCM_METHOD_REGION_REGISTER)
        return sparse_hook(f, conn, method, env);
    cr_assert_eq(proto_decode(proto_methods[method].params, env, &m, &e), 0, "%s", e.text);
    if (method == UCM_METHOD_REGION_REGISTER) {
        FAKE_SET(f, seen.pool, m.region_register.block_pool);
        return false;
    }
    n = m.gather.items.n;
    pthread_mutex_lock(&f->lock);
    seen.m = m.gather;
    memcpy(seen.items, m.gather.items.p, n < sizeof seen.items ? n : sizeof seen.items);
    known = seen.m.sequence == 0 || sparse_sequence((uint32_t)seen.m.sequence, conn) >= 0;
    pthread_mutex_unlock(&f->lock);
    r.status = (struct proto_bin){status, n / UCM_GATHER_ITEM_BYTES - seen.short_of_one};
    fake_reply_if(f, conn, env->msgid, known, &proto_gather_r, &r);
    return true;
}

static void setup(void)
{
    memset(&seen, 0, sizeof seen);
    sparse_up();
    rig.fake.hook = gather_hook;
}

TestSuite(client_gather, .init = setup, .fini = rig_teardown, .timeout = 60);

static const struct ucm_gather_item items[3] = {{7, 1, 5}, {0, 0, 2}, {7, 0, 0}};

static int gather(const struct ucm_gather_spec *spec, struct ucm_result *result)
{
    struct ucm_task *task;
    int r = ucm_gather(rig.region, spec, -1, &task);

    return r == 0 ? rig_finish(task, result) : r;
}

Test(client_gather, what_is_sent_and_what_comes)
{
    struct ucm_gather_spec spec = {.keys = rig.keys,
                                   .n_keys = RIG_KEYS,
                                   .items = items,
                                   .n_items = 3,
                                   .priority = 7,
                                   .daemon_timeout_ms = 250};
    struct ucm_task *task;
    struct ucm_result result;

    cr_assert_eq(ucm_gather(rig.region, &spec, -1, &task), 0, "%s", ucm_errmsg());
    cr_assert_eq(ucm_task_wait(task, -1, &result), 0, "%s", ucm_errmsg());
    cr_expect_eq(result.bytes, 4096);
    cr_expect_eq(result.n_keys, 3);
    cr_expect_eq(result.n_ok, 2);
    cr_expect_eq(result.result[1], UCM_BLOCK_IS_MISS);
    ucm_task_free(task);
    cr_expect_eq(seen.m.region, FAKE_GET(&rig.fake, regions[0].id));
    cr_expect_eq(seen.m.priority, 7);
    cr_expect_eq(seen.m.timeout_ms, 250);
    cr_expect_eq(seen.m.keys.n, RIG_KEYS * 16);
    cr_expect_eq(seen.m.items.n, 36);
    cr_expect_arr_eq(seen.items, items, sizeof items);
}

Test(client_gather, a_pool_is_registered_as_one)
{
    struct ucm_memory memory = {.kind = UCM_MEMORY_MEMFD, .bytes = 65536, .fd = rig.fd};
    struct ucm_plane plane = {.stride = 4096, .block_bytes = 4096};
    struct ucm_region_spec spec = {.blocks = 16,
                                   .device = "cpu",
                                   .memory = &memory,
                                   .n_memory = 1,
                                   .planes = &plane,
                                   .n_planes = 1,
                                   .block_pool = 1};
    struct ucm_region *pool;

    cr_expect_not(seen.pool);
    cr_assert_eq(ucm_region_register(rig.ns, &spec, -1, &pool), 0, "%s", ucm_errmsg());
    cr_expect(fake_read(&rig.fake, &seen.pool, sizeof seen.pool));
    rig_restart();
    cr_expect_eq(rig_lookup(&rig, -1), 0, "%s", ucm_errmsg());
    cr_expect_eq(FAKE_GET(&rig.fake, n_regions), 2);
    cr_expect(fake_read(&rig.fake, &seen.pool, sizeof seen.pool), "and after a restart");
    cr_expect_eq(ucm_region_unregister(pool, -1), 0, "%s", ucm_errmsg());
}

Test(client_gather, by_a_sequence_that_is_opened_again)
{
    struct ucm_sequence *sequence = sequence_of(8);
    struct ucm_gather_spec spec = {.sequence = sequence, .items = items, .n_items = 3};
    struct ucm_result result;

    cr_expect_eq(gather(&spec, &result), 0, "%s", ucm_errmsg());
    sparse_expire();
    cr_expect_eq(gather(&spec, &result), -UCM_ENOTFOUND, "a task can't be sent again");
    cr_expect_eq(gather(&spec, &result), 0, "%s", ucm_errmsg());
    rig_restart();
    cr_expect_eq(gather(&spec, &result), 0, "region and sequence are there again: %s",
                 ucm_errmsg());
    cr_expect_eq(fake_count(&rig.fake, UCM_METHOD_SEQUENCE_OPEN), 3);
    cr_expect_eq(FAKE_GET(&rig.fake, n_regions), 1);
    cr_expect_eq(seen.m.region, FAKE_GET(&rig.fake, regions[0].id));
    ucm_sequence_close(sequence);
}

Test(client_gather, wrong_arguments_and_answers)
{
    struct ucm_gather_spec good = {.keys = rig.keys,
                                   .n_keys = RIG_KEYS,
                                   .items = items,
                                   .n_items = 3},
                           bad;
    struct ucm_result result;
    struct ucm_task *task;

    cr_expect_eq(ucm_gather(NULL, &good, -1, &task), -UCM_EINVALID);
    cr_expect_eq(ucm_gather(rig.region, NULL, -1, &task), -UCM_EINVALID);
    cr_expect_eq(ucm_gather(rig.region, &good, -1, NULL), -UCM_EINVALID);
#define REFUSED(field, value)                                                                      \
    do {                                                                                           \
        bad = good;                                                                                \
        bad.field = (value);                                                                       \
        cr_expect_eq(gather(&bad, &result), -UCM_EINVALID, #field);                                \
    } while (0)
    REFUSED(n_items, 0);
    REFUSED(n_items, UCM_GATHER_ITEMS_MAX + 1);
    REFUSED(items, NULL);
    REFUSED(n_keys, 0);
    REFUSED(sequence, sequence_of(1));
    cr_expect_eq(fake_count(&rig.fake, UCM_METHOD_GATHER), 0);
    seen.short_of_one = true;
    cr_expect_eq(gather(&good, &result), -UCM_EPROTOCOL);
}

Test(client_gather, as_many_items_as_one_request_takes)
{
    struct ucm_gather_item *all = calloc(UCM_GATHER_ITEMS_MAX, sizeof *all);
    struct ucm_gather_spec spec = {
        .keys = rig.keys, .n_keys = RIG_KEYS, .items = all, .n_items = UCM_GATHER_ITEMS_MAX};
    struct ucm_result result;

    cr_assert_eq(gather(&spec, &result), 0, "%s", ucm_errmsg());
    cr_expect_eq(result.n_ok, UCM_GATHER_ITEMS_MAX - 1);
    free(all);
}
