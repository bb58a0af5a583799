/* The methods as a connection calls them, over a cache whose tier and shared tier a test plays. */
#ifndef UCMD_TESTS_REQUEST_RIG_H
#define UCMD_TESTS_REQUEST_RIG_H

#include "daemon/features.h"
#include "daemon/retrieval/summary.h"
#include "tests/unit/cache/cache_shared_rig.h"
#include "tests/unit/request/request_fakes.h"

static struct {
    struct conn conn;
    struct config config;
    struct deadlines deadlines;
    struct limits *limits;
    struct limit_owner *owner; /* the session's */
    struct requests *requests;
    struct front_handler handler;
    void *session;
    uint32_t msgid;
} door;

/* False: no job is under way. */
static inline bool pool_next(void)
{
    struct list *node = list_pop_front(&pool.jobs);
    struct summary_job *job;

    if (!node)
        return false;
    job = LIST_ENTRY(node, struct summary_job, link);
    while (job->pieces > 0) {
        for (uint32_t i = 0; i < job->pieces && !summary_job_stopped(job); i++)
            job->run_cb(job, i, 0);
        job->pieces = job->phase_cb && !summary_job_stopped(job) ? job->phase_cb(job) : 0;
    }
    job->done_cb(job);
    return true;
}

static inline void open_door(void)
{
    struct peer peer = {.admin = true, .tenant = "t"};
    struct request_modules modules = {.loop = &rig.loop,
                                      .config = &door.config,
                                      .metrics = &rig.metrics,
                                      .deadlines = &door.deadlines,
                                      .shared = &shared};

    open_shared();
    rig.cache->config.shared_blocks = 500;
    config_init(&door.config);
    door.config.shared_lookup_ms = 50;
    door.config.shared_timeout_ms = 2000;
    door.config.shared_negative_ms = 2000;
    cr_assert_eq(deadlines_init(&door.deadlines, &rig.loop), 0);
    door.limits = modules.limits = limits_new();
    cr_assert(door.limits);
    peer.owner = door.owner = limits_uid(door.limits, peer.tenant, 0, true);
    cr_assert(peer.owner);
    modules.features = daemon_features;
    modules.methods = daemon_methods;
    modules.index = rig.index;
    modules.arena = rig.arena;
    modules.cache = rig.cache;
    modules.policy = rig.policy;
    modules.tier_ops = &fake_ops;
    modules.tier = &rig.tier;
    cr_assert_eq(requests_new(&modules, &door.requests), 0);
    door.handler = requests_handler(door.requests);
    door.session = door.handler.open_cb(door.handler.ctx, &door.conn, &peer);
    cr_assert(door.session);
    ((struct session *)door.session)->hello = true;
    while (arena_bytes_ready(rig.arena) < arena_bytes_configured(rig.arena))
        iterate();
}

/* From now on the session is that of an operator, or of another user. */
static inline void become(bool admin)
{
    struct session *s = door.session;
    struct limit_owner *from = s->peer.owner, *to;

    to = limits_uid(door.limits, s->peer.tenant, 0, admin);
    cr_assert(to);
    for (unsigned i = 0; i < LIMIT_KINDS; i++) {
        uint64_t n =
            i == LIMIT_NAMESPACES ? 0 : limit_has(from, (enum limit)i); /* they keep theirs */

        limit_give(from, (enum limit)i, n);
        cr_assert_eq(limit_take(to, (enum limit)i, n, NULL), 0);
    }
    limit_owner_unref(from);
    s->peer.admin = admin;
    s->peer.owner = door.owner = to;
}

static inline uint64_t taken(enum limit what)
{
    return limits_used(door.limits, what);
}

/* What one tenant may have of it alone. */
static inline uint32_t most_of_tenant(enum limit what)
{
    struct limit_owner *t = limits_tenant(door.limits, "alone");
    uint64_t most = limit_most(t, what);

    limit_owner_unref(t);
    return (uint32_t)most;
}

static inline void hang_up(void)
{
    if (door.session)
        door.handler.close_cb(door.session);
    door.session = NULL;
}

static inline void close_door(void)
{
    hang_up();
    cr_expect(door.conn.freed, "the session has ended");
    while (pool_next())
        ;
    cr_expect_eq(requests_active(door.requests), 0u);
    requests_free(door.requests);
    limit_owner_unref(door.owner);
    deadlines_close(&door.deadlines);
    close_shared();
    for (unsigned i = 0; i < LIMIT_KINDS; i++)
        cr_expect_eq(limits_used(door.limits, (enum limit)i), 0u);
    limits_free(door.limits);
    config_free(&door.config);
    for (unsigned i = 0; i < door.conn.n; i++)
        free(door.conn.answer[i].frame);
}

static inline uint32_t call(enum ucm_method method, const struct proto_message *m,
                            const void *params)
{
    struct proto_buf b;
    struct proto_envelope env;
    struct ucm_error e = {0};
    bool answerable;

    proto_buf_init(&b, 1 << 20);
    cr_assert_eq(proto_request(&b, ++door.msgid, method, m, params, &e), 0, "%s", e.text);
    cr_assert_eq(proto_envelope_open(&env, b.p + PROTO_HEADER_BYTES, b.n - PROTO_HEADER_BYTES,
                                     &answerable, &e),
                 0, "%s", e.text);
    door.handler.frame_cb(door.session, &env, NULL, 0);
    proto_envelope_close(&env);
    memset(b.p, 0xAA, b.n); /* a frame dies with the call */
    proto_buf_free(&b);
    return door.msgid;
}

static inline struct answer *answer_of(uint32_t msgid)
{
    for (unsigned i = 0; i < door.conn.n; i++)
        if (door.conn.answer[i].msgid == msgid)
            return &door.conn.answer[i];
    return NULL;
}

static inline void answer_open(uint32_t msgid, struct proto_envelope *env)
{
    struct answer *a = answer_of(msgid);
    struct ucm_error e = {0};
    bool answerable;

    cr_assert(a, "no answer to %u", msgid);
    cr_assert_eq(proto_envelope_open(env, a->frame + PROTO_HEADER_BYTES,
                                     a->bytes - PROTO_HEADER_BYTES, &answerable, &e),
                 0);
}

/* An error's code; 0: a result. */
static inline int answer_code(uint32_t msgid)
{
    struct proto_envelope env;
    int code;

    answer_open(msgid, &env);
    code = env.error.code;
    proto_envelope_close(&env);
    return code;
}

/* Decodes a result; its views point into the answer's frame. */
static inline void result_of(uint32_t msgid, const struct proto_message *m, void *out)
{
    struct proto_envelope env;
    struct ucm_error e = {0};

    answer_open(msgid, &env);
    cr_assert_eq(env.error.code, 0, "%s", env.error.text);
    cr_assert_eq(proto_decode(m, &env, out, &e), 0, "%s", e.text);
    proto_envelope_close(&env);
}

/* A result has just these statuses of n blocks. */
static inline bool statuses(uint32_t msgid, uint32_t n, ...)
{
    struct msg_blocks_r r;
    va_list args;
    bool same = true;

    result_of(msgid, &proto_blocks_r, &r);
    cr_assert_eq(r.status.n, n);
    va_start(args, n);
    for (uint32_t i = 0; i < n; i++)
        same = same && r.status.p[i] == va_arg(args, int);
    va_end(args);
    return same;
}

/* ---- keys ---- */

#define KEYS_MAX 64
#define CHAIN_MAX 600

static uint8_t keys[CHAIN_MAX * 16];

/* Keys of rig.one: numbers from `first` on. */
static inline struct proto_bin chain(uint64_t first, uint32_t n)
{
    memset(keys, 0, sizeof(keys));
    for (uint32_t i = 0; i < n; i++) {
        uint64_t number = first + i;

        memcpy(keys + 16 * (size_t)i, &number, sizeof(number));
    }
    return (struct proto_bin){keys, 16 * n};
}

#endif
