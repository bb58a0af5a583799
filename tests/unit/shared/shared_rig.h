/* What the shared tier's tests share: backends in memory. They are as slow, full, hung or broken as
 * a test wants, and note what they were asked. A part is named by a number: the first four bytes of
 * its key. */
#ifndef UCMD_TESTS_SHARED_RIG_H
#define UCMD_TESTS_SHARED_RIG_H

#include "daemon/shared/root.h"
#include "daemon/shared/shared_internal.h"
#include "tests/unit/shared/shared_clock.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define RIG_ROOTS 3
#define RIG_FILES 20000u
#define RIG_BYTES 64u /* of a part */
#define RIG_LOG 4096u

struct rig_file {
    bool there, damaged;
    uint8_t lacks; /* bit by part */
    uint64_t mtime_ns;
    uint8_t data[RIG_BYTES];
};

/* One "server". */
struct rig_server {
    struct rig_file *files;
    uint64_t latency_ms;
    int fails[SHARED_CHECK + 1]; /* of a verb; 0: it works */
    bool hangs;                  /* nothing ends, until rig_let_go */
    bool stuck;                  /* and nothing can be taken back */
    uint64_t now_ns;
    unsigned asked[SHARED_CHECK + 1], busy, busy_max, cancelled;
    enum shared_verb log[RIG_LOG];
    unsigned n_log;
    struct list under_way;
};

struct rig_op {
    struct list link;
    struct deadline deadline;
    struct rig_server *server;
    struct shared_op *op;
    unsigned round;
};

static struct rig {
    uv_loop_t loop;
    struct deadlines deadlines; /* the tier's */
    struct deadlines clock;     /* the servers' */
    struct metrics metrics;
    struct rig_server servers[RIG_ROOTS];
    unsigned round; /* the most operations that waited for each other */
} rig;

/* ---- servers ---- */

static inline uint32_t rig_number(const struct block_file_id *id)
{
    uint32_t n;

    memcpy(&n, id->key, sizeof(n));
    return n;
}

static inline struct block_file_id rig_id(uint32_t n)
{
    struct block_file_id id = {.key_bytes = 32, .part = 1};

    memcpy(id.key, &n, sizeof(n));
    memset(id.fingerprint, 0xf0, sizeof(id.fingerprint));
    return id;
}

static inline uint64_t rig_bytes_of(const struct shared_lookup *p, uint32_t part)
{
    cr_assert_leq(part, p->part);
    return RIG_BYTES;
}

static inline void rig_fill(uint8_t data[RIG_BYTES], uint32_t n)
{
    for (uint32_t i = 0; i < RIG_BYTES; i++)
        data[i] = (uint8_t)(n * 31 + i);
}

static inline void rig_put(struct rig_server *s, uint32_t n)
{
    s->files[n] = (struct rig_file){.there = true, .mtime_ns = s->now_ns};
    rig_fill(s->files[n].data, n);
}

static inline int rig_answer(struct rig_server *s, struct shared_op *op)
{
    struct rig_file *f = &s->files[rig_number(&op->id)];

    if (s->fails[op->verb])
        return s->fails[op->verb];
    switch (op->verb) {
    case SHARED_CHECK:
        op->now_ns = op->sync ? s->now_ns : 0;
        return 0;
    case SHARED_LIST:
        return 0;
    case SHARED_WRITE:
        if (f->there)
            return -EEXIST;
        f->there = true;
        f->damaged = false;
        f->mtime_ns = s->now_ns;
        memcpy(f->data, op->data, RIG_BYTES);
        return 0;
    default:
        break;
    }
    if (!f->there || f->lacks >> op->id.part & 1)
        return -ENOENT;
    if (op->verb == SHARED_REMOVE) {
        f->there = false;
    } else if (op->verb == SHARED_TOUCH) {
        f->mtime_ns = s->now_ns;
    } else if (op->verb == SHARED_READ) {
        memcpy(op->data, f->data, RIG_BYTES);
        op->mtime_ns = f->mtime_ns;
        return f->damaged ? -EBADMSG : 0;
    }
    return 0;
}

static inline void rig_op_end(struct rig_op *o)
{
    struct shared_op *op = o->op;
    struct rig_server *s = o->server;
    int status = rig_answer(s, op);

    if (o->round > rig.round)
        rig.round = o->round;
    list_remove(&o->link);
    deadline_disarm(&rig.clock, &o->deadline);
    s->busy--;
    free(o);
    op->done_cb(op, status);
}

static inline void rig_due_cb(struct deadline *d)
{
    rig_op_end(LIST_ENTRY(d, struct rig_op, deadline));
}

static inline void rig_start(struct shared_backend *b, struct shared_op *op)
{
    struct rig_server *s = (struct rig_server *)b;
    struct rig_op *o = calloc(1, sizeof(*o));

    cr_assert(o);
    *o = (struct rig_op){.server = s, .op = op, .round = rig.round + 1};
    op->backend = o;
    s->asked[op->verb]++;
    if (s->n_log < RIG_LOG)
        s->log[s->n_log++] = op->verb;
    if (++s->busy > s->busy_max)
        s->busy_max = s->busy;
    list_push_back(&s->under_way, &o->link);
    if (!s->hangs)
        deadline_arm(&rig.clock, &o->deadline, uv_now(&rig.loop) + s->latency_ms, rig_due_cb);
}

static inline bool rig_cancel(struct shared_backend *b, struct shared_op *op)
{
    struct rig_server *s = (struct rig_server *)b;
    struct rig_op *o = op->backend;

    if (s->stuck)
        return false;
    s->cancelled++;
    s->busy--;
    list_remove(&o->link);
    deadline_disarm(&rig.clock, &o->deadline);
    free(o);
    return true;
}

/* All operations that hang end now, from inside the event loop as they should. */
static inline void rig_let_go(struct rig_server *s)
{
    s->hangs = s->stuck = false;
    for (struct list *node = s->under_way.next; node != &s->under_way; node = node->next) {
        struct rig_op *o = LIST_ENTRY(node, struct rig_op, link);

        deadline_arm(&rig.clock, &o->deadline, uv_now(&rig.loop), rig_due_cb);
    }
}

/* Targets are "/0", "/1" and so on. */
static inline int rig_open(const struct shared_backend_config *config, struct shared_backend **out)
{
    *out = (struct shared_backend *)&rig.servers[atoi(config->target + 1)];
    return 0;
}

static inline void rig_close(struct shared_backend *b)
{
    cr_assert_eq(((struct rig_server *)b)->busy, 0);
}

static const struct shared_backend_ops rig_backend = {
    .open = rig_open, .close = rig_close, .start = rig_start, .cancel = rig_cancel};

static inline void rig_setup(void)
{
    memset(&rig, 0, sizeof(rig));
    rig_clock_ns = 1000000000000u;
    cr_assert_eq(uv_loop_init(&rig.loop), 0);
    cr_assert_eq(deadlines_init(&rig.deadlines, &rig.loop), 0);
    cr_assert_eq(deadlines_init(&rig.clock, &rig.loop), 0);
    for (int i = 0; i < RIG_ROOTS; i++) {
        rig.servers[i].files = calloc(RIG_FILES, sizeof(struct rig_file));
        cr_assert(rig.servers[i].files);
        list_init(&rig.servers[i].under_way);
        rig.servers[i].now_ns = 1700000000000000000ull;
    }
}

static inline void rig_teardown(void)
{
    deadlines_close(&rig.deadlines);
    deadlines_close(&rig.clock);
    uv_run(&rig.loop, UV_RUN_DEFAULT);
    cr_assert_eq(uv_loop_close(&rig.loop), 0);
    for (int i = 0; i < RIG_ROOTS; i++)
        free(rig.servers[i].files);
}

static inline void rig_tick_cb(uv_timer_t *timer)
{
    (void)timer;
}

static inline void rig_closed_cb(uv_handle_t *handle)
{
    *(bool *)handle->data = true;
}

/* Runs the event loop until *flag, or for `ms`. */
static inline bool rig_run(const bool *flag, uint64_t ms)
{
    uint64_t until = uv_now(&rig.loop) + ms;
    bool closed = false;
    uv_timer_t tick;

    uv_timer_init(&rig.loop, &tick);
    uv_timer_start(&tick, rig_tick_cb, 1, 1);
    while (!(flag && *flag) && uv_now(&rig.loop) < until)
        uv_run(&rig.loop, UV_RUN_ONCE);
    tick.data = &closed;
    uv_close((uv_handle_t *)&tick, rig_closed_cb);
    while (!closed)
        uv_run(&rig.loop, UV_RUN_NOWAIT);
    return flag && *flag;
}

/* ---- the tier over them ---- */

static struct shared *shared;

static inline struct shared_settings settings_of(uint32_t roots)
{
    static const char *const targets[RIG_ROOTS] = {"/0", "/1", "/2"};
    struct shared_settings s = {.loop = &rig.loop,
                                .deadlines = &rig.deadlines,
                                .metrics = &rig.metrics,
                                .host = "h",
                                .negative_ms = 2000,
                                .timeout_ms = 200,
                                .collect_ms = 600000,
                                .touch_ms = 3600000,
                                .n = roots};

    for (uint32_t i = 0; i < roots; i++)
        s.roots[i] =
            (struct shared_root_config){.ops = &rig_backend, .target = targets[i], .depth = 16};
    return s;
}

static inline void open_with(struct shared_settings s)
{
    cr_assert_eq(shared_new(&s, &shared), 0);
}

static inline void close_it(void)
{
    shared_stop(shared);
    for (int i = 0; i < RIG_ROOTS; i++)
        rig_let_go(&rig.servers[i]);
    for (int i = 0; i < 50 && shared_busy(shared) > 0; i++)
        rig_run(NULL, 1);
    cr_assert_eq(shared_busy(shared), 0);
    shared_close(shared);
}

static inline void shared_teardown(void)
{
    close_it();
    rig_teardown();
}

#endif
