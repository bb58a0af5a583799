/* How the client library copes with a daemon that is absent, breaks off, sends nonsense or does not
 * read; and with many threads at once. */
/* Sanitizers: thread */
#include "client/lib/internal.h"
#include "tests/unit/client/client_rig.h"

#include <poll.h>

TestSuite(client_faults, .init = rig_setup, .fini = rig_teardown, .timeout = 120);

/* ---- absent ---- */

Test(client_absent, nobody_listens, .timeout = 20)
{
    struct ucm_options o = {.socket = "/nonexistent/ucmd.sock"};
    struct ucm_client *c = NULL;
    int64_t start = fake_now_ms();

    cr_expect_eq(ucm_connect(&o, 60, &c), -UCM_ENODAEMON);
    cr_expect(fake_now_ms() - start >= 60, "it tries as long as it may");
    cr_expect(strstr(ucm_errmsg(), "/nonexistent/ucmd.sock: No such file"), "%s", ucm_errmsg());
    cr_expect_eq(ucm_connect(&o, 0, &c), -UCM_ENODAEMON);
    cr_expect_null(c);
    ucm_close(NULL);
}

Test(client_absent, a_path_too_long, .timeout = 20)
{
    char path[200];
    struct ucm_options o = {.socket = path};
    struct ucm_client *c;

    memset(path, 'x', sizeof path - 1);
    path[sizeof path - 1] = '\0';
    cr_expect_eq(ucm_connect(&o, 5000, &c), -UCM_EINVALID);
    o.default_timeout_ms = -1;
    cr_expect_eq(ucm_connect(&o, 5000, &c), -UCM_EINVALID);
}

Test(client_absent, the_daemon_starts_meanwhile, .timeout = 20)
{
    static struct fake f;
    struct ucm_client *c;
    pthread_t t;

    fake_init(&f);
    cr_assert_eq(pthread_create(&t, NULL, rig_up_soon, &f), 0);
    c = rig_connect(&f);
    pthread_join(t, NULL);
    cr_expect_eq(ucm_connection_epoch(c), 1);
    ucm_close(c);
    fake_down(&f);
    fake_close(&f);
}

static bool no_answer(struct fake *f, int conn, int method, struct proto_envelope *env)
{
    (void)f, (void)conn, (void)env;
    return method == UCM_METHOD_HELLO || method == UCM_METHOD_LOOKUP;
}

Test(client_faults, hello_is_refused_or_unanswered)
{
    struct ucm_options o = {.socket = rig.fake.path};
    struct ucm_client *c = NULL;
    unsigned before = fake_count(&rig.fake, UCM_METHOD_HELLO);

    rig_refuse(UCM_METHOD_HELLO, UCM_WIRE_DENIED, "uid 7 may not");
    cr_expect_eq(ucm_connect(&o, 20000, &c), -UCM_EDENIED);
    cr_expect_str_eq(ucm_errmsg(), "uid 7 may not");
    cr_expect_eq(fake_count(&rig.fake, UCM_METHOD_HELLO), before + 1, "no use in trying again");
    rig.fake.hook = no_answer;
    cr_expect_eq(ucm_connect(&o, 30, &c), -UCM_EDEADLINE);
    cr_expect_null(c);
}

/* ---- breaking off ---- */

static void *hang_up_soon(void *arg)
{
    fake_sleep_ms(30);
    fake_hang_up(arg);
    return NULL;
}

Test(client_faults, disconnect_in_the_middle)
{
    struct ucm_task *task;
    struct ucm_result result;
    pthread_t t;

    rig.fake.hook = rig_hold_loads;
    cr_assert_eq(rig_load(&rig, 1, 0, &task), 0);
    cr_assert_eq(pthread_create(&t, NULL, hang_up_soon, &rig.fake), 0);
    cr_expect_eq(ucm_task_wait(task, -1, &result), -UCM_EDISCONNECTED);
    cr_expect(strstr(ucm_errmsg(), "hung up"), "%s", ucm_errmsg());
    cr_expect_eq(ucm_task_check(task, &result), -UCM_ECONSUMED);
    ucm_task_free(task);
    pthread_join(t, NULL);

    cr_expect_eq(rig_lookup(&rig, -1), 0);
    rig.fake.hook = no_answer;
    cr_assert_eq(pthread_create(&t, NULL, hang_up_soon, &rig.fake), 0);
    cr_expect_eq(rig_lookup(&rig, -1), -UCM_EDISCONNECTED);
    pthread_join(t, NULL);
    rig.fake.hook = FAKE_NO_HOOK;
    cr_expect_eq(rig_lookup(&rig, -1), 0);
}

/* Answers that came before the break count. */
Test(client_faults, answers_before_the_break_count)
{
    struct ucm_task *task;
    struct ucm_result result;

    cr_assert_eq(rig_load(&rig, 1, 0, &task), 0);
    fake_await(&rig.fake, &rig.fake.count[UCM_METHOD_LOAD], 1);
    fake_hang_up(&rig.fake);
    cr_expect_eq(rig_lookup(&rig, -1), 0);
    cr_expect_eq(ucm_task_check(task, &result), 0);
    ucm_task_free(task);
}

static bool farewell(struct fake *f, int conn, int method, struct proto_envelope *env)
{
    struct ucm_error e = {.code = UCM_WIRE_BUSY, .text = "descriptors ran out"};
    struct proto_buf b;

    (void)method, (void)env;
    proto_buf_init(&b, 4096);
    cr_assert_eq(proto_notification_error(&b, &e), 0);
    fake_raw(f, conn, b.p, b.n);
    proto_buf_free(&b);
    shutdown(conn, SHUT_RDWR);
    return true;
}

Test(client_faults, the_daemon_says_why_it_hangs_up)
{
    rig.fake.hook = farewell;
    cr_expect_eq(rig_lookup(&rig, -1), -UCM_EDISCONNECTED);
    cr_expect(strstr(ucm_errmsg(), "descriptors ran out"), "%s", ucm_errmsg());
    rig.fake.hook = FAKE_NO_HOOK;
}

/* ---- nonsense ---- */

static const char *garbage;
static size_t garbage_bytes;

static bool talk_garbage(struct fake *f, int conn, int method, struct proto_envelope *env)
{
    (void)env;
    if (method != UCM_METHOD_LOOKUP)
        return false;
    fake_raw(f, conn, garbage, garbage_bytes);
    return true;
}

Test(client_faults, garbage)
{
    static const struct {
        const char *p;
        size_t n;
    } cases[] = {
        {"\xff\xff\xff\xff", 4},                                       /* an impossible length */
        {"\0\0\0\0", 4},                                               /* none at all */
        {"\0\0\0\2\xc1\xc1", 6},                                       /* not MessagePack */
        {"\0\0\0\5\xdd\xff\xff\xff\xff", 9},                           /* an array of 4 billion */
        {"\0\0\0\1\xc0", 5},                                           /* not an envelope */
        {"\0\0\0\5\x94\0\1\xa1x\x80", 10},                             /* cut in the middle */
        {"\0\0\0\6\x94\0\1\xa1x\x80", 10},                             /* a request */
        {"\0\0\0\x0d\x94\1\1\x93\xcc\xc8\xa1x\xa2no\xc0\xc0\xc0", 17}, /* an error of code 200 */
    };
    struct ucm_task *task;
    struct ucm_result result;

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rig.fake.hook = rig_hold_loads;
        cr_assert_eq(rig_load(&rig, 1, 0, &task), 0);
        fake_await(&rig.fake, &rig.fake.n_held, (unsigned)i + 1);
        garbage = cases[i].p;
        garbage_bytes = cases[i].n;
        rig.fake.hook = talk_garbage;
        cr_expect_eq(rig_lookup(&rig, 2000), -UCM_EPROTOCOL, "case %zu", i);
        cr_expect_eq(ucm_task_check(task, &result), -UCM_EPROTOCOL, "case %zu", i);
        ucm_task_free(task);
        rig.fake.hook = FAKE_NO_HOOK;
        cr_expect_eq(rig_lookup(&rig, -1), 0, "case %zu: %s", i, ucm_errmsg());
    }
    cr_expect_eq(ucm_connection_epoch(rig.client), 1 + sizeof cases / sizeof *cases);
}

/* The library ignores answers that no call awaits, and unknown notifications. */
Test(client_faults, unknown_is_not_garbage)
{
    static const char frames[] = "\0\0\0\5\x94\1\x7f\xc0\x80"
                                 "\0\0\0\5\x93\2\xa1x\x80";

    pthread_mutex_lock(&rig.fake.lock);
    fake_raw(&rig.fake, rig.fake.conns[0], frames, sizeof frames - 1);
    pthread_mutex_unlock(&rig.fake.lock);
    cr_expect_eq(rig_lookup(&rig, -1), 0);
    cr_expect_eq(ucm_connection_epoch(rig.client), 1);
}

static bool drip(struct fake *f, int conn, int method, struct proto_envelope *env)
{
    struct msg_lookup_r m = {.hits = 1};
    struct proto_buf b;
    struct ucm_error e;

    if (method != UCM_METHOD_LOOKUP)
        return false;
    proto_buf_init(&b, 4096);
    cr_assert_eq(proto_response(&b, env->msgid, &proto_lookup_r, &m, &e), 0);
    for (size_t i = 0; i < b.n; i++) {
        fake_raw(f, conn, b.p + i, 1);
        fake_sleep_ms(1);
    }
    proto_buf_free(&b);
    return true;
}

Test(client_faults, an_answer_byte_by_byte)
{
    rig.fake.hook = drip;
    cr_expect_eq(rig_lookup(&rig, -1), 0);
    rig.fake.hook = FAKE_NO_HOOK;
}

/* ---- a full socket ---- */

#define BIG 16384

static uint8_t big_keys[BIG][16];
static uint32_t big_blocks[BIG];

static int load_big(int timeout_ms, struct ucm_task **out)
{
    struct ucm_transfer t = {.keys = big_keys, .blocks = big_blocks, .n_keys = BIG};

    return ucm_load(rig.region, &t, timeout_ms, out);
}

Test(client_faults, a_daemon_that_does_not_read)
{
    struct ucm_task *task[2] = {NULL};
    struct ucm_result result;
    unsigned n = 0;
    int r = 0;

    fake_pause(&rig.fake, true);
    /* A small one goes whole or not at all, and then nothing has happened. */
    while (n < 100000 && (r = rig_lookup(&rig, 0)) == -UCM_EDEADLINE &&
           !strstr(ucm_errmsg(), "read the request"))
        n++;
    cr_assert_eq(r, -UCM_EDEADLINE);
    cr_assert(n > 0 && n < 100000);
    cr_expect_eq(ucm_connection_epoch(rig.client), 1);
    fake_pause(&rig.fake, false);
    cr_expect_eq(rig_lookup(&rig, -1), 0);
    cr_expect_eq(ucm_connection_epoch(rig.client), 1);

    /* One that is cut short ends the connection. */
    fake_pause(&rig.fake, true);
    cr_expect_eq(load_big(20, &task[0]), -UCM_EDISCONNECTED);
    cr_expect_null(task[0]);
    fake_pause(&rig.fake, false);
    cr_assert_eq(load_big(-1, &task[0]), 0, "%s", ucm_errmsg());
    cr_assert_eq(load_big(-1, &task[1]), 0);
    cr_expect_eq(rig_finish(task[1], &result), 0);
    cr_expect_eq(result.n_ok, BIG);
    cr_expect_eq(rig_finish(task[0], &result), 0);
    cr_expect_eq(ucm_connection_epoch(rig.client), 2);
}

/* The daemon sends before it reads on. Both buffers are full, and no other thread reads. */
Test(client_faults, both_directions_full)
{
    struct ucm_task *task[100];
    struct ucm_result result;

    for (unsigned i = 0; i < 100; i++)
        cr_assert_eq(load_big(-1, &task[i]), 0, "%u: %s", i, ucm_errmsg());
    for (unsigned i = 0; i < 100; i++) {
        cr_assert_eq(rig_finish(task[i], &result), 0);
        cr_expect_eq(result.n_ok, BIG);
    }
    cr_expect_eq(ucm_connection_epoch(rig.client), 1);
}

/* A task freed while the socket is full: its cancel goes out later. */
Test(client_faults, a_cancel_waits_for_room)
{
    struct ucm_task *task = rig_load_held(1);

    rig.fake.hook = FAKE_NO_HOOK;
    fake_pause(&rig.fake, true);
    while (rig_lookup(&rig, 0), !strstr(ucm_errmsg(), "read the request"))
        ;
    ucm_task_free(task);
    fake_pause(&rig.fake, false);
    cr_expect_eq(rig_lookup(&rig, -1), 0);
    cr_expect_eq(rig_lookup(&rig, -1), 0);
    fake_await(&rig.fake, &rig.fake.count[UCM_METHOD_CANCEL], 1);
}

/* ---- threads ---- */

#define THREADS 8

struct worker {
    pthread_t thread;
    unsigned n;
    struct ucm_task *task;
    int status;
};

static void run(struct worker *w, void *(*fn)(void *))
{
    for (unsigned i = 0; i < THREADS; i++) {
        w[i].n = i;
        cr_assert_eq(pthread_create(&w[i].thread, NULL, fn, &w[i]), 0);
    }
}

static void join(struct worker *w)
{
    for (unsigned i = 0; i < THREADS; i++)
        pthread_join(w[i].thread, NULL);
}

static void *many_lookups(void *arg)
{
    struct worker *w = arg;
    uint8_t keys[16 * RIG_KEYS];
    struct ucm_lookup l = {.keys = keys, .n_keys = RIG_KEYS};

    memset(keys, (int)w->n + 1, sizeof keys);
    for (unsigned i = 0; i < 1000; i++) {
        uint32_t hits = 0;

        if (ucm_lookup_prefix(rig.ns, &l, -1, &hits, NULL, NULL) != 0 || hits != w->n + 1)
            w->status++;
    }
    return NULL;
}

Test(client_faults, each_thread_gets_its_own_answer)
{
    struct worker w[THREADS] = {{0}};

    run(w, many_lookups);
    join(w);
    for (unsigned i = 0; i < THREADS; i++)
        cr_expect_eq(w[i].status, 0, "thread %u", i);
    cr_expect_eq(fake_count(&rig.fake, UCM_METHOD_LOOKUP), 1000 * THREADS);
}

static void *many_loads(void *arg)
{
    struct worker *w = arg;
    struct ucm_result result;

    for (unsigned i = 0; i < 300; i++) {
        struct ucm_task *task[4];

        for (unsigned k = 0; k < 4; k++)
            if (rig_load(&rig, 1 + w->n, 0, &task[k]) != 0)
                abort();
        for (unsigned k = 4; k-- > 1;) {
            int r = i % 2 ? ucm_task_wait(task[k], -1, &result) : -UCM_EPENDING;

            while (r == -UCM_EPENDING)
                r = ucm_task_check(task[k], &result);
            if (r != 0 || result.n_ok != 1 + w->n)
                w->status++;
        }
        for (unsigned k = 0; k < 4; k++) /* the first perhaps not done */
            ucm_task_free(task[k]);
    }
    return NULL;
}

Test(client_faults, loads_from_many_threads)
{
    struct worker w[THREADS] = {{0}};
    struct pollfd answers = {.fd = ucm_fd(rig.client), .events = POLLIN};

    run(w, many_loads);
    while (ucm_process(rig.client) >= 0 &&
           fake_count(&rig.fake, UCM_METHOD_LOAD) < 4 * 300 * THREADS)
        (void)poll(&answers, 1, 1);
    join(w);
    for (unsigned i = 0; i < THREADS; i++)
        cr_expect_eq(w[i].status, 0, "thread %u", i);
}

static void *wait_for_task(void *arg)
{
    struct worker *w = arg;
    struct ucm_result result;

    w->status = ucm_task_wait(w->task, -1, &result);
    return NULL;
}

/* Each waits for a load of its own, which is held. */
static void run_waiters(struct worker *w)
{
    rig.fake.hook = rig_hold_loads;
    for (unsigned i = 0; i < THREADS; i++)
        cr_assert_eq(rig_load(&rig, 1, 0, &w[i].task), 0);
    run(w, wait_for_task);
    fake_await(&rig.fake, &rig.fake.n_held, THREADS);
}

static unsigned count_status(const struct worker *w, int status)
{
    unsigned n = 0;

    for (unsigned i = 0; i < THREADS; i++)
        n += w[i].status == status;
    return n;
}

static void await_users(struct ucm_client *c, unsigned n)
{
    for (unsigned users = 0; users < n; fake_sleep_ms(1)) {
        pthread_mutex_lock(&c->lock);
        users = c->users;
        pthread_mutex_unlock(&c->lock);
    }
}

Test(client_faults, one_of_several_waiters_gets_the_result)
{
    struct worker w[THREADS] = {{0}};
    struct ucm_task *task;

    rig.fake.hook = rig_hold_loads;
    cr_assert_eq(rig_load(&rig, 1, 0, &task), 0);
    for (unsigned i = 0; i < THREADS; i++)
        w[i].task = task;
    run(w, wait_for_task);
    fake_await(&rig.fake, &rig.fake.n_held, 1);
    await_users(rig.client, THREADS);
    fake_answer_held(&rig.fake, 0, UCM_BLOCK_OK);
    join(w);
    cr_expect_eq(count_status(w, 0), 1);
    cr_expect_eq(count_status(w, -UCM_ECONSUMED), THREADS - 1);
    ucm_task_free(task);
}

/* Each thread waits for its own answer. Answers come in an order that makes another thread the
 * reader. */
Test(client_faults, the_reading_is_passed_on)
{
    struct worker w[THREADS] = {{0}};

    run_waiters(w);
    for (unsigned i = 0; i < THREADS; i++) {
        fake_sleep_ms(5);
        fake_answer_held(&rig.fake, (i * 3) % THREADS, UCM_BLOCK_OK);
    }
    join(w);
    cr_expect_eq(count_status(w, 0), THREADS);
    for (unsigned i = 0; i < THREADS; i++)
        ucm_task_free(w[i].task);
}

Test(client_faults, close_ends_what_is_under_way)
{
    struct worker w[THREADS] = {{0}};

    run_waiters(w);
    await_users(rig.client, THREADS); /* a thread that called later would use a freed client */
    ucm_close(rig.client);            /* frees the tasks, namespaces and regions too */
    rig.client = NULL;
    join(w);
    cr_expect_eq(count_status(w, -UCM_EDISCONNECTED), THREADS);
}

/* Threads that begin a call after it still have their handles. */
Test(client_faults, disconnect_ends_what_is_under_way_and_frees_nothing)
{
    struct worker w[THREADS] = {{0}};
    struct ucm_result result;
    struct ucm_task *task;
    unsigned accepted;

    run_waiters(w);
    accepted = rig.fake.accepted;
    ucm_disconnect(rig.client);
    join(w);
    cr_expect_eq(count_status(w, -UCM_EDISCONNECTED), THREADS);
    cr_expect_eq(ucm_task_wait(w[0].task, -1, &result), -UCM_EDISCONNECTED);
    cr_expect_eq(rig_load(&rig, 1, 0, &task), -UCM_EDISCONNECTED);
    cr_expect_eq(ucm_region_unregister(rig.region, -1), -UCM_EDISCONNECTED);
    cr_expect_eq(ucm_fd(rig.client), -UCM_EDISCONNECTED);
    ucm_task_free(w[0].task);
    ucm_disconnect(rig.client);
    cr_expect_eq(rig.fake.accepted, accepted, "it does not connect again");
    ucm_disconnect(NULL);
}

/* ---- nothing is left over ---- */

Test(client_faults, no_descriptor_leaks)
{
    int before = rig_open_fds();
    struct ucm_client *c;
    struct ucm_region *region;

    for (unsigned i = 0; i < 20; i++) {
        c = rig_connect(&rig.fake);
        ucm_close(c);
        cr_assert_eq(rig_register(&rig, -1, &region), 0);
        cr_assert_eq(ucm_region_unregister(region, -1), 0);
    }
    rig_expect_fds(before, "clients and regions that came and went");
    cr_expect_eq(rig_open_fds(), before);
}
