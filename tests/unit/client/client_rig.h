/* What the tests of the client library share: a fake daemon, a client, a namespace, a region. */
#ifndef UCM_TESTS_CLIENT_RIG_H
#define UCM_TESTS_CLIENT_RIG_H

#include "client/include/ucmclient.h"
#include "tests/unit/client/fake_daemon.h"

#include <fcntl.h>
#include <sys/mman.h>

#define RIG_KEYS 8

struct rig {
    struct fake fake;
    struct ucm_client *client;
    struct ucm_namespace *ns;
    struct ucm_region *region;
    int fd; /* of the region */
    void *memory;
    uint8_t keys[RIG_KEYS][16];
    uint32_t blocks[RIG_KEYS];
};

static struct rig rig;

FAKE_FN struct ucm_client *rig_connect(struct fake *f)
{
    struct ucm_options o = {.socket = f->path, .name = "test", .default_timeout_ms = 10000};
    struct ucm_client *c = NULL;

    cr_assert_eq(ucm_connect(&o, -1, &c), 0, "%s", ucm_errmsg());
    return c;
}

FAKE_FN int rig_open(struct ucm_client *c, struct ucm_namespace **ns)
{
    static const uint32_t layers[] = {2};
    struct ucm_identity id = {
        .model = "m",
        .dtype = "bf16",
        .layout = "nhd/1",
        .block_tokens = 16,
        .key_bytes = 16,
        .parts = 1,
        .layers = layers,
        .n_layers = 1,
        .layer_bytes = 4096,
    };

    return ucm_namespace_open(c, &id, -1, ns);
}

FAKE_FN int rig_register(struct rig *r, int timeout_ms, struct ucm_region **out)
{
    struct ucm_memory memory = {.kind = UCM_MEMORY_MEMFD, .bytes = 65536, .fd = r->fd};
    struct ucm_plane planes[2] = {
        {.stride = 4096, .block_bytes = 4096},
        {.offset = 32768, .stride = 4096, .block_bytes = 4096, .layer = 1}};
    struct ucm_region_spec spec = {
        .blocks = 8,
        .device = "cpu",
        .memory = &memory,
        .n_memory = 1,
        .planes = planes,
        .n_planes = 2,
    };

    return ucm_region_register(r->ns, &spec, timeout_ms, out);
}

FAKE_FN void rig_setup(void)
{
    struct rig *r = &rig;

    memset(r, 0, sizeof *r);
    fake_init(&r->fake);
    fake_up(&r->fake);
    for (uint8_t i = 0; i < RIG_KEYS; i++) {
        memset(r->keys[i], i + 1, 16);
        r->blocks[i] = i;
    }
    r->client = rig_connect(&r->fake);
    cr_assert_eq(rig_open(r->client, &r->ns), 0, "%s", ucm_errmsg());
    cr_assert_eq(ucm_shared_memory(65536, &r->fd, &r->memory), 0, "%s", ucm_errmsg());
    cr_assert_eq(rig_register(r, -1, &r->region), 0, "%s", ucm_errmsg());
}

FAKE_FN void rig_teardown(void)
{
    ucm_close(rig.client);
    fake_down(&rig.fake);
    fake_close(&rig.fake);
    munmap(rig.memory, 65536);
    close(rig.fd);
}

/* A lookup of one key: found. */
FAKE_FN int rig_lookup(struct rig *r, int timeout_ms)
{
    struct ucm_lookup l = {.keys = r->keys, .n_keys = 1};
    uint32_t hits = 99;
    int rc = ucm_lookup_prefix(r->ns, &l, timeout_ms, &hits, NULL, NULL);

    cr_expect_eq(hits, rc ? 99u : 1u);
    return rc;
}

FAKE_FN int rig_load(struct rig *r, uint32_t n_keys, uint32_t lease, struct ucm_task **out)
{
    struct ucm_transfer t = {
        .keys = r->keys, .blocks = r->blocks, .n_keys = n_keys, .lease = lease};

    return ucm_load(r->region, &t, -1, out);
}

FAKE_FN uint32_t rig_leased_lookup(void)
{
    struct ucm_lookup l = {.keys = rig.keys, .n_keys = 1, .lease_ms = 1000};
    uint32_t hits, lease = 0;

    cr_assert_eq(ucm_lookup_prefix(rig.ns, &l, -1, &hits, NULL, &lease), 0);
    cr_assert(lease != 0);
    return lease;
}

/* A hook: keeps loads, to be answered by the test. */
FAKE_FN bool rig_hold_loads(struct fake *f, int conn, int method, struct proto_envelope *env)
{
    struct msg_load m;
    struct ucm_error e;

    if (method != UCM_METHOD_LOAD)
        return false;
    cr_assert_eq(proto_decode(&proto_load, env, &m, &e), 0);
    fake_hold(f, conn, env->msgid, m.keys.n / 16);
    return true;
}

/* The method that a hook takes over: refused with this error, or held without one. */
static struct {
    int method, code;
    const char *text;
} rig_taken;

FAKE_FN bool rig_take_over(struct fake *f, int conn, int method, struct proto_envelope *env)
{
    if (method != rig_taken.method)
        return false;
    while (f->n_fds[0] > 0)
        close(f->fds[0][--f->n_fds[0]]);
    if (rig_taken.code)
        fake_error(f, conn, env->msgid, rig_taken.code, rig_taken.text);
    else
        fake_hold(f, conn, env->msgid, 1);
    return true;
}

FAKE_FN void rig_refuse(int method, int code, const char *text)
{
    rig_taken.method = method;
    rig_taken.code = code;
    rig_taken.text = text;
    atomic_store(&rig.fake.hook, rig_take_over);
}

FAKE_FN void rig_hold(int method)
{
    rig_refuse(method, 0, NULL);
}

static atomic_bool rig_go;

/* A hook: the second registration of a region waits for rig_go. */
FAKE_FN bool rig_late_region(struct fake *f, int conn, int method, struct proto_envelope *env)
{
    (void)conn, (void)env;
    while (method == UCM_METHOD_REGION_REGISTER && fake_count(f, method) == 2 &&
           !atomic_load(&rig_go))
        fake_sleep_ms(1);
    return false;
}

/* A thread's main. */
FAKE_FN void *rig_up_soon(void *fake)
{
    fake_sleep_ms(50);
    fake_up(fake);
    return NULL;
}

FAKE_FN void rig_restart(void)
{
    fake_down(&rig.fake);
    fake_up(&rig.fake);
}

/* The connection breaks. The library finds out with an answer that it waits for. */
FAKE_FN void rig_reconnect(void)
{
    uint64_t epoch = ucm_connection_epoch(rig.client);

    fake_hang_up(&rig.fake);
    while (ucm_connection_epoch(rig.client) == epoch)
        (void)rig_lookup(&rig, -1);
}

/* Waits for a task and frees it, so the result's blocks are gone. */
FAKE_FN int rig_finish(struct ucm_task *task, struct ucm_result *result)
{
    int rc = ucm_task_wait(task, -1, result);

    ucm_task_free(task);
    return rc;
}

FAKE_FN int rig_memfd(uint64_t bytes, bool sealed, void **p)
{
    int fd = memfd_create("rig", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    cr_assert(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
    if (p) {
        *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        cr_assert(*p != MAP_FAILED);
    }
    if (sealed)
        cr_assert_eq(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
    return fd;
}

/* How the descriptors of an answer are spoiled. A test's own ways begin with SPOIL_FDS. */
enum rig_spoil {
    SPOIL_NOTHING,
    SPOIL_NO_FD,
    SPOIL_TWO_FDS,
    SPOIL_SHORT,
    SPOIL_UNSEALED,
    SPOIL_PIPE,
    SPOIL_FDS,
};

/* Copies of a descriptor of so many bytes, or what takes their place. Returns how many. */
FAKE_FN uint32_t rig_spoil_fds(unsigned spoil, int fd, uint64_t bytes, int fds[2])
{
    if (spoil == SPOIL_PIPE) {
        cr_assert_eq(pipe2(fds, O_CLOEXEC), 0);
        close(fds[1]);
    } else if (spoil == SPOIL_SHORT || spoil == SPOIL_UNSEALED) {
        fds[0] = rig_memfd(spoil == SPOIL_SHORT ? 4096 : bytes, spoil == SPOIL_SHORT, NULL);
    } else if (spoil != SPOIL_NO_FD) {
        fds[0] = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    }
    if (spoil == SPOIL_TWO_FDS)
        fds[1] = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    return spoil == SPOIL_NO_FD ? 0 : spoil == SPOIL_TWO_FDS ? 2 : 1;
}

FAKE_FN int rig_open_fds(void)
{
    int n = 0;

    for (int fd = 0; fd < 1024; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

/* The fake runs in this process. It closes what it sent or accepted a little after the client. */
FAKE_FN void rig_expect_fds(int n, const char *when)
{
    int64_t end = fake_now_ms() + 5000;

    while (rig_open_fds() > n && fake_now_ms() < end)
        fake_sleep_ms(1);
    cr_expect_leq(rig_open_fds(), n, "descriptors leak: %s", when);
}

/* The first load that is held. */
FAKE_FN struct ucm_task *rig_load_held(uint32_t n_keys)
{
    struct ucm_task *task = NULL;

    atomic_store(&rig.fake.hook, rig_hold_loads);
    cr_assert_eq(rig_load(&rig, n_keys, 0, &task), 0, "%s", ucm_errmsg());
    fake_await(&rig.fake, &rig.fake.n_held, 1);
    return task;
}

/* Reports layers of the load that is held at that place. */
FAKE_FN void rig_tell_layers(unsigned held, uint32_t layers, const uint8_t *status, uint32_t n)
{
    struct msg_progress m = {
        .msgid = FAKE_GET(&rig.fake, held[held].msgid), .layers = layers, .status = {status, n}};
    struct proto_buf b;
    struct ucm_error e;

    proto_buf_init(&b, 4096);
    cr_assert_eq(proto_notification(&b, UCM_PROGRESS, &proto_progress, &m, &e), 0);
    fake_raw(&rig.fake, (int)FAKE_GET(&rig.fake, held[held].conn), b.p, b.n);
    proto_buf_free(&b);
}

#endif
