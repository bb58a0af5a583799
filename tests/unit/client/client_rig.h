/* What the tests of the client library share: a fake daemon, a client, a namespace, a region. */
#ifndef UCM_TESTS_CLIENT_RIG_H
#define UCM_TESTS_CLIENT_RIG_H

#include "client/include/ucmclient.h"
#include "tests/unit/client/fake_daemon.h"

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

FAKE_FN void rig_up(struct rig *r)
{
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

FAKE_FN void rig_down(struct rig *r)
{
    ucm_close(r->client);
    fake_down(&r->fake);
    fake_close(&r->fake);
    munmap(r->memory, 65536);
    close(r->fd);
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

FAKE_FN void rig_setup(void)
{
    rig_up(&rig);
}

FAKE_FN void rig_teardown(void)
{
    rig_down(&rig);
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
FAKE_FN void rig_tell_layers(struct rig *r, unsigned held, uint32_t layers, const uint8_t *status,
                             uint32_t n)
{
    struct msg_progress m = {
        .msgid = FAKE_GET(&r->fake, held[held].msgid), .layers = layers, .status = {status, n}};
    struct proto_buf b;
    struct ucm_error e;

    proto_buf_init(&b, 4096);
    cr_assert_eq(proto_notification(&b, UCM_PROGRESS, &proto_progress, &m, &e), 0);
    fake_raw(&r->fake, (int)FAKE_GET(&r->fake, held[held].conn), b.p, b.n);
    proto_buf_free(&b);
}

#endif
