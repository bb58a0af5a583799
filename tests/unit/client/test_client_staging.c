/* Rings in the client library. A registration lives and dies with its connection. When that breaks,
 * no call reports a failure before the copies that a copy agent had begun have ended. */
/* Sanitizers: thread */
#include "tests/unit/client/client_rig.h"

static struct ucm_ring_registration *ring;
static struct ucm_staging *memory;

/* What the library has written over the entries' first bytes; all 0: their own bytes. */
static uint8_t proof[UCM_NONCE_BYTES];

static int prove_cb(void *ctx, uint64_t offset, const uint8_t *nonce)
{
    cr_assert_eq(ctx, proof);
    cr_assert_eq(offset, 512);
    if (nonce)
        memcpy(proof, nonce, sizeof proof);
    else
        memset(proof, 0, sizeof proof);
    return 0;
}

static int ring_register(int timeout_ms, struct ucm_ring_registration **out,
                         struct ucm_staging **at)
{
    static const uint8_t gpu[UCM_UUID_BYTES] = {1}, ipc[UCM_MAX_HANDLE_BYTES] = {2};
    struct ucm_ring_spec spec = {.gpu = gpu,
                                 .ipc = ipc,
                                 .offset = 512,
                                 .entry_bytes = 1u << 20,
                                 .entries = 4,
                                 .prove_cb = prove_cb,
                                 .prove_ctx = proof};
    void *p = NULL;
    int rc = ucm_ring_register(rig.client, &spec, timeout_ms, out, &p);

    if (rc == 0)
        *at = p;
    return rc;
}

static void setup(void)
{
    rig_setup();
    cr_assert_eq(ring_register(-1, &ring, &memory), 0, "%s", ucm_errmsg());
}

static void teardown(void)
{
    ucm_ring_free(ring);
    rig_teardown();
}

TestSuite(client_staging, .init = setup, .fini = teardown, .timeout = 60);

static enum ucm_staging_phase phase(uint32_t entry)
{
    return ucm_staging_phase_of(atomic_load(&memory->words.entries[entry].state));
}

/* A copy agent claims an order of the first connection; the next function ends it. */
static void order_claim(uint32_t entry)
{
    ucm_staging_post(memory, entry, ucm_staging_tag(1, 1));
    cr_assert(
        ucm_staging_move(memory, entry, ucm_staging_tag(1, 1), STAGING_POSTED, STAGING_CLAIMED));
}

static void order_end(uint32_t entry)
{
    cr_assert(
        ucm_staging_move(memory, entry, ucm_staging_tag(1, 1), STAGING_CLAIMED, STAGING_DONE));
}

Test(client_staging, both_sides_see_one_memory)
{
    struct ucm_staging *theirs = rig.fake.rings.maps[0];

    cr_assert_eq(ucm_ring_alive(ring), 1);
    cr_assert_eq(atomic_load(&memory->words.generation), 1, "it is set before the answer");
    cr_assert_eq(atomic_load(&memory->words.dead), 0);
    ucm_staging_post(theirs, 3, ucm_staging_tag(1, 7));
    cr_assert(ucm_staging_move(memory, 3, ucm_staging_tag(1, 7), STAGING_POSTED, STAGING_CLAIMED));
    cr_assert(ucm_staging_move(theirs, 3, ucm_staging_tag(1, 7), STAGING_CLAIMED, STAGING_DONE));
    cr_assert_eq(phase(3), STAGING_DONE);
    cr_assert_eq(ucm_ring_unregister(ring, -1), 0);
    cr_assert_eq(ucm_ring_alive(ring), 0);
    cr_assert_eq(ucm_ring_unregister(ring, -1), -UCM_EDISCONNECTED, "nothing is there any more");
}

Test(client_staging, what_can_not_be_a_ring_is_refused_here)
{
    static const uint8_t gpu[UCM_UUID_BYTES], ipc[UCM_MAX_HANDLE_BYTES];
    struct ucm_ring_registration *none = NULL;
    void *p = NULL;

    for (uint32_t entries = 0; entries < 12; entries++) {
        struct ucm_ring_spec spec = {.gpu = gpu,
                                     .ipc = ipc,
                                     .entry_bytes = 1u << 20,
                                     .entries = entries,
                                     .prove_cb = prove_cb};

        if (entries >= 2 && entries <= UCM_MAX_STAGING_ENTRIES)
            continue;
        cr_assert_eq(ucm_ring_register(rig.client, &spec, -1, &none, &p), -UCM_EINVALID);
    }
    cr_assert_eq(
        ucm_ring_register(rig.client, &(struct ucm_ring_spec){.entries = 4}, -1, &none, &p),
        -UCM_EINVALID);
    cr_assert_eq(ucm_ring_alive(NULL), -UCM_EINVALID);
    cr_assert_eq(ucm_ring_unregister(NULL, -1), -UCM_EINVALID);
    ucm_ring_free(NULL);
    cr_assert(none == NULL && p == NULL);
}

Test(client_staging, a_refusal_leaves_nothing)
{
    struct ucm_ring_registration *none = NULL;
    struct ucm_staging *at = NULL;

    rig_refuse(UCM_METHOD_RING_REGISTER, UCM_WIRE_BUSY, "its entries are in use");
    cr_assert_eq(ring_register(-1, &none, &at), -UCM_EBUSY);
    cr_assert_str_not_empty(ucm_errmsg());
    cr_assert(none == NULL && at == NULL);
    atomic_store(&rig.fake.hook, FAKE_NO_HOOK);
    cr_assert_eq(ring_register(-1, &none, &at), 0, "and the next one is taken");
    ucm_ring_free(none);
}

/* ---- deadlines ---- */

Test(client_staging, a_registration_that_comes_too_late_is_undone)
{
    struct ucm_ring_registration *late = NULL;
    struct ucm_staging *at = NULL;

    rig_hold(UCM_METHOD_RING_REGISTER);
    cr_assert_eq(ring_register(50, &late, &at), -UCM_EDEADLINE);
    fake_await(&rig.fake, &rig.fake.n_held, 1);
    atomic_store(&rig.fake.hook, FAKE_NO_HOOK);
    fake_reply(&rig.fake, (int)FAKE_GET(&rig.fake, held[0].conn),
               (uint32_t)FAKE_GET(&rig.fake, held[0].msgid), &proto_ring, &(struct msg_ring){77});
    while (fake_count(&rig.fake, UCM_METHOD_RING_UNREGISTER) == 0)
        cr_assert_eq(rig_lookup(&rig, -1), 0);
    cr_assert(late == NULL && at == NULL);
    cr_assert_eq(ucm_ring_alive(ring), 1, "the other one is not touched");
}

/* Its entries are the daemon's until it says otherwise. */
Test(client_staging, unregister_waits_for_the_daemon)
{
    rig_hold(UCM_METHOD_RING_UNREGISTER);
    cr_assert_eq(ucm_ring_unregister(ring, 50), -UCM_EDEADLINE);
    cr_assert_eq(ucm_ring_alive(ring), 1, "orders are to be served");
    cr_assert_eq(atomic_load(&memory->words.dead), 0);
    fake_await(&rig.fake, &rig.fake.n_held, 1);
    atomic_store(&rig.fake.hook, FAKE_NO_HOOK);
    FAKE_SET(&rig.fake, rig.fake.rings.ids[0], 0);
    cr_assert_eq(ucm_ring_unregister(ring, -1), 0, "the first call did it after all");
    cr_assert_eq(ucm_ring_alive(ring), 0);
}

/* ---- a connection that breaks ---- */

Test(client_staging, a_broken_connection_kills_it)
{
    ucm_staging_post(memory, 0, ucm_staging_tag(1, 1));
    rig_reconnect();
    cr_assert_eq(atomic_load(&memory->words.dead), 1);
    cr_assert_eq(phase(0), STAGING_REVOKED);
    cr_assert_eq(ucm_ring_alive(ring), 0);
    cr_assert_eq(ucm_ring_unregister(ring, -1), -UCM_EDISCONNECTED);
    cr_assert_eq(fake_count(&rig.fake, UCM_METHOD_RING_UNREGISTER), 0);
}

static void *copy_agent(void *arg)
{
    (void)arg;
    while (atomic_load(&memory->words.dead) == 0)
        fake_sleep_ms(1);
    fake_sleep_ms(60); /* a kernel that had begun */
    ucm_staging_move(memory, 2, ucm_staging_tag(1, 1), STAGING_CLAIMED, STAGING_DONE);
    return NULL;
}

Test(client_staging, no_task_fails_before_what_was_claimed_has_ended)
{
    struct ucm_result result;
    struct ucm_task *task = rig_load_held(2);
    pthread_t thread;

    order_claim(2);
    cr_assert_eq(pthread_create(&thread, NULL, copy_agent, NULL), 0);
    fake_hang_up(&rig.fake);
    cr_assert_eq(ucm_task_wait(task, -1, &result), -UCM_EDISCONNECTED);
    cr_assert_eq(phase(2), STAGING_DONE);
    ucm_task_free(task);
    pthread_join(thread, NULL);
}

static void *wait_for_task(void *task)
{
    struct ucm_result result;

    return (void *)(intptr_t)ucm_task_wait(task, 60000, &result);
}

/* Until the turn ends, a call may run out of time, but none may report a failure. */
Test(client_staging, a_claimed_turn_holds_nobody_beyond_its_deadline)
{
    struct ucm_result result;
    struct ucm_task *task = rig_load_held(2);
    pthread_t thread;
    void *status;

    order_claim(2);
    cr_assert_eq(pthread_create(&thread, NULL, wait_for_task, task), 0);
    fake_hang_up(&rig.fake);
    while (atomic_load(&memory->words.dead) == 0) /* the thread has found the break */
        fake_sleep_ms(1);
    cr_assert_eq(ucm_process(rig.client), 0);
    cr_assert_eq(ucm_connection_epoch(rig.client), 1);
    cr_assert_eq(ucm_ring_alive(ring), 0);
    cr_assert_eq(ucm_task_check(task, &result), -UCM_EPENDING);
    cr_assert_eq(ucm_task_wait(task, 5, &result), -UCM_EDEADLINE);
    cr_assert_eq(rig_lookup(&rig, 5), -UCM_EDEADLINE);
    cr_assert_eq(ucm_task_cancel(task, 5), 0, "it ends anyway");
    cr_assert_eq(ucm_region_unregister(rig.region, 5), -UCM_EDEADLINE);
    cr_assert_eq(ucm_ring_unregister(ring, 5), -UCM_EDEADLINE);
    order_end(2);
    pthread_join(thread, &status);
    cr_assert_eq((intptr_t)status, -UCM_EDISCONNECTED);
    cr_assert_eq(ucm_ring_unregister(ring, -1), -UCM_EDISCONNECTED);
    cr_assert_eq(rig_lookup(&rig, -1), 0, "%s", ucm_errmsg());
    cr_assert_eq(ucm_region_unregister(rig.region, -1), 0, "it was registered again");
    ucm_task_free(task);
}

/* An event loop that never blocks notices the end, too. */
Test(client_staging, ucm_fd_reports_the_end_of_a_claimed_turn)
{
    struct pollfd p = {.fd = ucm_fd(rig.client), .events = POLLIN};
    struct ucm_result result;
    struct ucm_task *task = rig_load_held(2);

    order_claim(2);
    fake_hang_up(&rig.fake);
    cr_assert_eq(poll(&p, 1, 20000), 1);
    cr_assert_eq(ucm_process(rig.client), 0);
    order_end(2);
    cr_assert_eq(poll(&p, 1, 20000), 1);
    cr_assert_eq(ucm_process(rig.client), 1);
    cr_assert_eq(ucm_task_check(task, &result), -UCM_EDISCONNECTED);
    ucm_task_free(task);
}

/* After a look, the descriptor is not readable for a millisecond. */
Test(client_staging, ucm_fd_does_not_spin_while_a_claimed_turn_runs)
{
    struct pollfd p = {.fd = ucm_fd(rig.client), .events = POLLIN};
    struct timespec begin, now;
    unsigned looks = 0;

    order_claim(2);
    fake_hang_up(&rig.fake);
    cr_assert_eq(poll(&p, 1, 20000), 1);
    clock_gettime(CLOCK_MONOTONIC, &begin);
    do {
        cr_assert_eq(ucm_process(rig.client), 0);
        cr_assert_eq(poll(&p, 1, 20000), 1);
        looks++;
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((now.tv_sec - begin.tv_sec) * 1000 + (now.tv_nsec - begin.tv_nsec) / 1000000 < 100);
    cr_assert_leq(looks, 101);
    order_end(2);
    cr_assert_eq(poll(&p, 1, 20000), 1);
    cr_assert_eq(ucm_process(rig.client), -UCM_EDISCONNECTED);
    cr_assert_eq(poll(&p, 1, 0), 0, "a link that is down has nothing to do");
}

Test(client_staging, a_copy_agent_that_hangs_is_not_awaited_for_ever, .timeout = 30)
{
    order_claim(1);
    rig_reconnect(); /* returns */
    cr_assert_eq(atomic_load(&memory->words.dead), 1);
}

/* Whatever the daemon wrote there. */
Test(client_staging, hostile_words_hold_nobody_up)
{
    uint64_t seed = 1;

    for (size_t i = 0; i < sizeof *memory; i += 8) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        memcpy((uint8_t *)memory + i, &seed, 8);
    }
    rig_reconnect(); /* returns */
    cr_assert_neq(atomic_load(&memory->words.dead), 0);
    cr_assert_eq(ucm_ring_alive(ring), 0);
}

Test(client_staging, the_next_connection_gets_another)
{
    struct ucm_ring_registration *next;
    struct ucm_staging *at = NULL;

    rig_reconnect();
    cr_assert_eq(ring_register(-1, &next, &at), 0, "%s", ucm_errmsg());
    cr_assert_eq(FAKE_GET(&rig.fake, rings.n), 2);
    cr_assert_neq(at, memory);
    cr_assert_eq(atomic_load(&at->words.generation), 2);
    cr_assert_eq(atomic_load(&at->words.dead), 0);
    /* The previous daemon still writes to the old ring. */
    ucm_staging_post(rig.fake.rings.maps[0], 0, ucm_staging_tag(1, 9));
    atomic_store(&rig.fake.rings.maps[0]->words.dead, 1);
    cr_assert_eq(atomic_load(&at->words.entries[0].state), 0);
    cr_assert_eq(atomic_load(&at->words.dead), 0);
    cr_assert(ucm_ring_alive(next) == 1 && ucm_ring_alive(ring) == 0);
    cr_assert_eq(ucm_ring_unregister(next, -1), 0);
    ucm_ring_free(next);
}
