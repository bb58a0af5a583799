/* The client library proves that CUDA IPC memory is its process's. The nonce is there when the
 * daemon looks. The memory has its own bytes before and afterwards, whatever happens in between. */
/* Sanitizers: thread */
#include "tests/unit/client/client_rig.h"

#include <pthread.h>

#define OWN 0x5A
#define PLACE 8192u /* of the lowest plane in the allocation */

/* The part of the worker's memory that is written. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint8_t memory[UCM_NONCE_BYTES], kept[8][UCM_NONCE_BYTES];
static unsigned depth, deepest, calls;
static bool fails;
/* Registrations at which the daemon found its nonce, and at which it did not. */
static unsigned right, wrong;

static int prove_cb(void *ctx, uint64_t offset, const uint8_t *nonce)
{
    int r = 0;

    pthread_mutex_lock(&lock);
    cr_assert_eq(ctx, memory);
    cr_assert_eq(offset, PLACE);
    calls++;
    if (!nonce) {
        cr_assert_gt(depth, 0);
        memcpy(memory, kept[--depth], sizeof memory);
    } else if (fails) {
        r = 1;
    } else {
        memcpy(kept[depth++], memory, sizeof memory);
        memcpy(memory, nonce, sizeof memory);
        deepest = depth > deepest ? depth : deepest;
    }
    pthread_mutex_unlock(&lock);
    return r;
}

static bool own(void)
{
    bool is = depth == 0;

    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < sizeof memory; i++)
        is &= memory[i] == OWN;
    pthread_mutex_unlock(&lock);
    return is;
}

/* As the daemon does when it opens the handle. */
static bool look(struct fake *f, int conn, int method, struct proto_envelope *env)
{
    bool same;

    (void)conn, (void)env;
    if (method != UCM_METHOD_REGION_REGISTER)
        return false;
    pthread_mutex_lock(&lock);
    same = memcmp(memory, f->nonce, sizeof memory) == 0;
    right += same;
    wrong += !same;
    pthread_mutex_unlock(&lock);
    return false;
}

static int ipc_register(struct ucm_namespace *ns, uint32_t n, ucm_prove_cb prove, int timeout_ms,
                        struct ucm_region **out)
{
    static const uint8_t gpu[UCM_UUID_BYTES] = {1};
    struct ucm_memory pieces[2] = {
        {.kind = UCM_MEMORY_CUDA_IPC, .offset = 4096, .bytes = 1u << 20, .ipc = {7}}};
    struct ucm_plane planes[4] = {{.offset = 65536, .stride = 2048, .block_bytes = 2048},
                                  {.offset = PLACE - 4096, .stride = 2048, .block_bytes = 2048},
                                  {.offset = 65536, .stride = 2048, .block_bytes = 2048},
                                  {.offset = PLACE - 4096, .stride = 2048, .block_bytes = 2048}};
    struct ucm_region_spec spec = {.blocks = 8,
                                   .device = "cuda",
                                   .gpu = gpu,
                                   .memory = pieces,
                                   .n_memory = n,
                                   .planes = planes,
                                   .n_planes = 2 * n};

    pieces[0].prove_cb = prove;
    pieces[0].prove_ctx = memory;
    pieces[1] = pieces[0];
    planes[2].memory = planes[3].memory = n - 1;
    return ucm_region_register(ns, &spec, timeout_ms, out);
}

static void setup(void)
{
    rig_setup();
    ucm_close(rig.client);
    memset(memory, OWN, sizeof memory);
    rig.client = rig_connect(&rig.fake);
    cr_assert_eq(rig_open(rig.client, &rig.ns), 0, "%s", ucm_errmsg());
    atomic_store(&rig.fake.hook, look);
}

static void teardown(void)
{
    rig_teardown();
    cr_expect(own());
}

TestSuite(client_prove, .init = setup, .fini = teardown, .timeout = 60);

/* The nonce stands where the lowest plane begins; prove_cb sees where. */
Test(client_prove, the_nonce_stands_there_while_the_daemon_looks)
{
    struct ucm_region *region;

    cr_assert_eq(ipc_register(rig.ns, 1, prove_cb, -1, &region), 0, "%s", ucm_errmsg());
    cr_expect(right == 1 && wrong == 0 && calls == 2);
    cr_expect(own(), "the bytes are back before the call returns");
    cr_assert_eq(ucm_region_unregister(region, -1), 0);
    cr_expect_eq(calls, 2);
}

/* Two ranges of one allocation begin at one place. They are restored in reverse order. */
Test(client_prove, bytes_that_are_written_twice_come_back)
{
    struct ucm_region *region;

    cr_assert_eq(ipc_register(rig.ns, 2, prove_cb, -1, &region), 0, "%s", ucm_errmsg());
    cr_expect(right == 1 && deepest == 2 && own());
}

Test(client_prove, without_a_callback_the_library_refuses)
{
    struct ucm_region *region;

    cr_assert_eq(ipc_register(rig.ns, 1, NULL, -1, &region), -UCM_EINVALID);
    cr_expect(strstr(ucm_errmsg(), "prove_cb"), "%s", ucm_errmsg());
    cr_expect_eq(fake_count(&rig.fake, UCM_METHOD_REGION_REGISTER), 1, "the rig's own");
}

Test(client_prove, what_can_not_be_written_is_not_registered)
{
    struct ucm_region *region;

    fails = true;
    cr_assert_eq(ipc_register(rig.ns, 2, prove_cb, -1, &region), -UCM_EDEVICE);
    cr_expect(strstr(ucm_errmsg(), "prove_cb"), "%s", ucm_errmsg());
    cr_expect_eq(calls, 1);
    fails = false;
    cr_assert_eq(ipc_register(rig.ns, 2, prove_cb, -1, &region), 0, "%s", ucm_errmsg());
}

Test(client_prove, a_refusal_puts_the_bytes_back)
{
    struct ucm_region *region;

    rig_refuse(UCM_METHOD_REGION_REGISTER, UCM_WIRE_DENIED, "it is not yours");
    cr_assert_eq(ipc_register(rig.ns, 1, prove_cb, -1, &region), -UCM_EDENIED);
    cr_expect_str_eq(ucm_errmsg(), "it is not yours");
    cr_expect(own());
}

/* ---- what does not answer, or goes ---- */

static bool hold(struct fake *f, int conn, int method, struct proto_envelope *env)
{
    (void)look(f, conn, method, env);
    if (method != UCM_METHOD_REGION_REGISTER)
        return false;
    fake_hold(f, conn, env->msgid, 0);
    return true;
}

Test(client_prove, a_deadline_puts_the_bytes_back)
{
    struct ucm_region *region;

    rig_hold(UCM_METHOD_REGION_CHALLENGE);
    cr_assert_eq(ipc_register(rig.ns, 1, prove_cb, 20, &region), -UCM_EDEADLINE);
    cr_expect(strstr(ucm_errmsg(), "region.challenge"), "%s", ucm_errmsg());
    cr_expect_eq(calls, 0);
    atomic_store(&rig.fake.hook, hold);
    cr_assert_eq(ipc_register(rig.ns, 1, prove_cb, 100, &region), -UCM_EDEADLINE);
    cr_expect(right == 1 && calls == 2 && own());
    atomic_store(&rig.fake.hook, look);
    cr_assert_eq(ipc_register(rig.ns, 1, prove_cb, -1, &region), 0, "%s", ucm_errmsg());
    cr_expect_eq(wrong, 0);
}

static void *lose_soon(void *arg)
{
    fake_await(&rig.fake, &rig.fake.n_held, *(const unsigned *)arg);
    fake_hang_up(&rig.fake);
    return NULL;
}

static void broken_at(unsigned held)
{
    struct ucm_region *region;
    pthread_t thread;

    cr_assert_eq(pthread_create(&thread, NULL, lose_soon, &held), 0);
    cr_assert_eq(ipc_register(rig.ns, 1, prove_cb, -1, &region), -UCM_EDISCONNECTED, "%s",
                 ucm_errmsg());
    pthread_join(thread, NULL);
    cr_expect(own());
}

Test(client_prove, a_break_puts_the_bytes_back)
{
    struct ucm_region *region;

    rig_hold(UCM_METHOD_REGION_CHALLENGE);
    broken_at(1);
    atomic_store(&rig.fake.hook, hold);
    broken_at(2);
    atomic_store(&rig.fake.hook, look);
    cr_assert_eq(ipc_register(rig.ns, 1, prove_cb, -1, &region), 0, "%s", ucm_errmsg());
    cr_expect(right == 2 && wrong == 0);
}

/* ---- reconnects ---- */

/* Regions that share memory: one after the other. */
Test(client_prove, a_reconnect_proves_all_again)
{
    struct ucm_region *region[3];

    for (unsigned i = 0; i < 3; i++)
        cr_assert_eq(ipc_register(rig.ns, 1, prove_cb, -1, &region[i]), 0, "%s", ucm_errmsg());
    rig_restart();
    cr_assert_eq(rig_lookup(&rig, -1), 0);
    for (unsigned i = 0; i < 3; i++)
        cr_assert_eq(ucm_region_unregister(region[i], -1), 0, "%s", ucm_errmsg());
    cr_expect(right == 6 && wrong == 0 && deepest == 1 && own(), "%u %u", right, wrong);
}

Test(client_prove, short_deadlines_lose_nothing)
{
    struct ucm_region *region[2];
    int64_t end = fake_now_ms() + 20000;

    for (unsigned i = 0; i < 2; i++)
        cr_assert_eq(ipc_register(rig.ns, 1, prove_cb, -1, &region[i]), 0, "%s", ucm_errmsg());
    rig_restart();
    while (FAKE_GET(&rig.fake, n_regions) < 2) {
        (void)rig_lookup(&rig, 0);
        cr_assert(fake_now_ms() < end, "%s", ucm_errmsg());
    }
    cr_assert_eq(rig_lookup(&rig, -1), 0);
    cr_expect(wrong == 0 && own());
}

/* ---- threads ---- */

#define ROUNDS 20u

static void *register_often(void *arg)
{
    struct ucm_namespace *ns = arg;
    struct ucm_region *region;

    for (unsigned i = 0; i < ROUNDS; i++) {
        cr_assert_eq(ipc_register(ns, 1, prove_cb, -1, &region), 0, "%s", ucm_errmsg());
        cr_assert_eq(ucm_region_unregister(region, -1), 0, "%s", ucm_errmsg());
    }
    return NULL;
}

/* Threads of one client, and of two, that all use one memory. */
Test(client_prove, threads_take_turns)
{
    struct ucm_client *second = rig_connect(&rig.fake);
    struct ucm_namespace *ns;
    pthread_t threads[4];

    cr_assert_eq(rig_open(second, &ns), 0, "%s", ucm_errmsg());
    for (unsigned i = 0; i < 4; i++)
        cr_assert_eq(pthread_create(&threads[i], NULL, register_often, i % 2 ? ns : rig.ns), 0);
    for (unsigned i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    cr_expect(right == 4 * ROUNDS && wrong == 0 && deepest == 1 && own(), "%u %u", right, wrong);
    ucm_close(second);
}
