#include "client/lib/internal.h"

#include <stdlib.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "the wire's block ids are little-endian and sent as they lie in memory");

struct ucm_task {
    struct client_call call;
    TAILQ_ENTRY(ucm_task) node;
    bool counted;             /* it was sent: ucm_process counts its end */
    bool reported;            /* the result was taken */
    struct client_spin *spin; /* learns how long it took; NULL: a prefetch */
    int64_t sent_ns;
    uint64_t bytes;
    uint32_t n_ok, n_keys;
    uint8_t result[]; /* n_keys */
};

static int task_take_cb(struct client_call *call, struct proto_envelope *env, struct ucm_error *e)
{
    struct ucm_task *task = (struct ucm_task *)call;
    struct msg_blocks_r m;
    int r = client_take(&proto_blocks_r, env, &m, e);

    if (r)
        return r;
    if (m.status.n != task->n_keys) {
        ucm_error_set(e, UCM_EPROTOCOL, "ucmd answered for %u blocks of %u", m.status.n,
                      task->n_keys);
        return -UCM_EPROTOCOL;
    }
    memcpy(task->result, m.status.p, m.status.n);
    for (uint32_t i = 0; i < task->n_keys; i++)
        task->n_ok += task->result[i] == UCM_BLOCK_IS_OK || task->result[i] == UCM_BLOCK_IS_EXISTS;
    task->bytes = m.bytes;
    if (task->spin && task->n_ok > 0)
        client_spin_learn(task->spin, task->n_keys, client_now_ns() - task->sent_ns);
    return 0;
}

static void task_done_cb(struct client_call *call)
{
    struct ucm_task *task = (struct ucm_task *)call;

    if (!task->counted)
        return;
    call->client->tasks_done++;
    client_signal(call->client);
}

static bool task_progress_cb(struct client_call *call, const struct msg_progress *m)
{
    struct ucm_task *task = (struct ucm_task *)call;

    if (m->status.n != 0 && m->status.n != task->n_keys)
        return false;
    if (m->status.n != 0)
        memcpy(task->result, m->status.p, m->status.n);
    return true;
}

static int task_new(struct ucm_client *c, uint32_t n_keys, struct ucm_task **out)
{
    struct ucm_task *task;
    int r;

    task = calloc(1, sizeof *task + n_keys);
    if (!task)
        return client_fail(UCM_ENOMEMORY, "no memory for a task");
    r = client_call_init(&task->call, c, task_take_cb, task_done_cb);
    if (r) {
        free(task);
        return r;
    }
    task->n_keys = n_keys;
    *out = task;
    return 0;
}

static void task_delete(struct ucm_task *task)
{
    client_call_unlink(&task->call);
    client_call_close(&task->call);
    free(task);
}

void client_task_free_all(struct ucm_client *c)
{
    struct ucm_task *task;

    while ((task = TAILQ_FIRST(&c->tasks)) != NULL) {
        TAILQ_REMOVE(&c->tasks, task, node);
        task_delete(task);
    }
}

static void load_fill(struct msg_load *m, const struct ucm_transfer *t, struct proto_bin keys,
                      struct ucm_client *c)
{
    *m = (struct msg_load){
        .keys = keys,
        .blocks = {(const uint8_t *)t->blocks, t->n_keys * 4},
        .shard = t->shard,
        .shards = t->n_shards,
        .lease = client_lease_find(c, t->lease),
        .priority = t->priority,
        .deadline_ms = t->deadline_ms,
        .step = t->step,
    };
}

static void dump_fill(struct msg_dump *m, const struct ucm_transfer *t, struct proto_bin keys)
{
    *m = (struct msg_dump){
        .keys = keys,
        .blocks = {(const uint8_t *)t->blocks, t->n_keys * 4},
        .shard = t->shard,
        .shards = t->n_shards,
        .event = {t->event, t->event ? UCM_MAX_HANDLE_BYTES : 0},
        .priority = t->priority,
        .deadline_ms = t->deadline_ms,
        .durability = t->durability,
    };
}

static void prefetch_fill(struct msg_prefetch *m, const struct ucm_transfer *t,
                          struct proto_bin keys)
{
    *m = (struct msg_prefetch){
        .keys = keys,
        .part = t->part,
        .priority = t->priority,
        .deadline_ms = t->deadline_ms,
    };
}

/* A load's lease is looked up when the connection is there: a new one ends it. */
static int task_send(struct ucm_task *task, enum ucm_method method, struct client_handle *h,
                     const struct ucm_transfer *t, struct proto_bin keys, int64_t deadline_ns)
{
    struct ucm_client *c = task->call.client;
    union proto_any m;
    struct client_request q = {method, &m, h, .handle_id = &m.load.region};
    int r = client_begin(c, h, deadline_ns);

    if (r)
        return r;
    if (method == UCM_METHOD_LOAD) {
        load_fill(&m.load, t, keys, c);
    } else if (method == UCM_METHOD_DUMP) {
        dump_fill(&m.dump, t, keys);
        q.handle_id = &m.dump.region;
    } else {
        prefetch_fill(&m.prefetch, t, keys);
        q.handle_id = &m.prefetch.ns;
    }
    r = client_request(&task->call, &q, deadline_ns);
    if (r == 0 && method == UCM_METHOD_LOAD)
        client_lease_end(c, t->lease);
    return r;
}

static int task_start(enum ucm_method method, struct client_handle *h,
                      const struct ucm_namespace *ns, const struct ucm_transfer *t, int timeout_ms,
                      struct ucm_task **out)
{
    struct ucm_client *c = h->client;
    struct ucm_task *task = NULL;
    struct proto_bin keys;
    int64_t deadline_ns;
    int r = client_enter(c);

    if (r)
        return r;
    r = client_keys_check(c, ns, t->keys, t->n_keys, &keys);
    if (r == 0)
        r = task_new(c, t->n_keys, &task);
    if (r)
        return client_leave(c, r);
    if (method == UCM_METHOD_LOAD && t->step)
        task->call.progress_cb = task_progress_cb;
    deadline_ns = client_deadline(c, timeout_ms);
    do
        r = task_send(task, method, h, t, keys, deadline_ns);
    while (r == CLIENT_AGAIN);
    if (r) {
        task_delete(task);
        return client_leave(c, r);
    }
    if (method != UCM_METHOD_PREFETCH) {
        task->spin = &c->spin[method == UCM_METHOD_DUMP];
        task->sent_ns = client_now_ns();
        task->call.expected_ns = client_spin_expect(task->spin, task->n_keys);
    }
    TAILQ_INSERT_TAIL(&c->tasks, task, node);
    task->counted = true;
    if (task->call.done) /* the sender read answers while the socket was full */
        task_done_cb(&task->call);
    *out = task;
    return client_leave(c, 0);
}

static int region_transfer(enum ucm_method method, struct ucm_region *region,
                           const struct ucm_transfer *t, int timeout_ms, struct ucm_task **out)
{
    struct client_handle *h;

    if (!region || !t || !out)
        return client_fail(UCM_EINVALID, "region, transfer or out is NULL");
    h = &region->handle;
    if (!t->blocks)
        return client_fail(UCM_EINVALID, "blocks is NULL; load and dump need one id for each key");
    return task_start(method, h, (struct ucm_namespace *)h->request.handle, t, timeout_ms, out);
}

int ucm_load(struct ucm_region *region, const struct ucm_transfer *t, int timeout_ms,
             struct ucm_task **out)
{
    return region_transfer(UCM_METHOD_LOAD, region, t, timeout_ms, out);
}

int ucm_dump(struct ucm_region *region, const struct ucm_transfer *t, int timeout_ms,
             struct ucm_task **out)
{
    return region_transfer(UCM_METHOD_DUMP, region, t, timeout_ms, out);
}

int ucm_prefetch(struct ucm_namespace *ns, const struct ucm_transfer *t, int timeout_ms,
                 struct ucm_task **out)
{
    if (!ns || !t || !out)
        return client_fail(UCM_EINVALID, "namespace, transfer or out is NULL");
    return task_start(UCM_METHOD_PREFETCH, &ns->handle, ns, t, timeout_ms, out);
}

static int task_report(struct ucm_task *task, struct ucm_result *out)
{
    if (task->reported)
        return client_fail(UCM_EREPORTED, "the task's result was taken before");
    task->reported = true;
    if (task->call.status)
        return client_call_status(&task->call);
    *out = (struct ucm_result){task->bytes, task->n_ok, task->n_keys, task->result};
    return 0;
}

int ucm_task_check(struct ucm_task *task, struct ucm_result *out)
{
    struct ucm_client *c;
    int r;

    if (!task || !out)
        return client_fail(UCM_EINVALID, "task or out is NULL");
    c = task->call.client;
    r = client_enter(c);
    if (r)
        return r;
    if (!task->call.done)
        client_read_ready(c);
    if (!task->call.done)
        return client_leave(c, client_fail(UCM_EPENDING, "the task is not done"));
    return client_leave(c, task_report(task, out));
}

int ucm_task_wait(struct ucm_task *task, int timeout_ms, struct ucm_result *out)
{
    struct ucm_client *c;
    int r;

    if (!task || !out)
        return client_fail(UCM_EINVALID, "task or out is NULL");
    c = task->call.client;
    r = client_enter(c);
    if (r)
        return r;
    if (task->call.done || client_call_wait(&task->call, client_deadline(c, timeout_ms)) == 0)
        return client_leave(c, task_report(task, out));
    return client_leave(c, client_fail(UCM_EDEADLINE, "the task was not done in time"));
}

int ucm_task_wait_layers(struct ucm_task *task, uint32_t layers, int timeout_ms, uint8_t *result)
{
    struct ucm_client *c;
    int r;

    if (!task)
        return client_fail(UCM_EINVALID, "task is NULL");
    c = task->call.client;
    r = client_enter(c);
    if (r)
        return r;
    if (client_call_wait_layers(&task->call, layers, client_deadline(c, timeout_ms)) != 0)
        return client_leave(c, client_fail(UCM_EDEADLINE, "the layers had not landed in time"));
    if (task->call.done && task->call.status)
        return client_leave(c, client_call_status(&task->call));
    if (result)
        memcpy(result, task->result, task->n_keys);
    return client_leave(c, 0);
}

int ucm_task_cancel(struct ucm_task *task, int timeout_ms)
{
    struct ucm_client *c;
    int64_t deadline_ns;
    int r;

    if (!task)
        return client_fail(UCM_EINVALID, "task is NULL");
    c = task->call.client;
    r = client_enter(c);
    if (r)
        return r;
    deadline_ns = client_deadline(c, timeout_ms);
    if (task->call.done)
        return client_leave(c, 0);
    r = client_begin_same(c, deadline_ns);
    if (r == 0 && task->call.done)
        client_writer_release(c);
    else if (r == 0)
        r = client_exchange_same(c, UCM_METHOD_CANCEL,
                                 &(struct msg_cancel){.msgid = task->call.msgid}, deadline_ns);
    /* Its answer came first, or the link broke, which ends it. */
    if (r == -UCM_ENOTFOUND || c->link != LINK_UP || task->call.done)
        r = 0;
    return client_leave(c, r);
}

void ucm_task_free(struct ucm_task *task)
{
    struct ucm_client *c;

    if (!task)
        return;
    c = task->call.client;
    if (client_enter(c) != 0)
        return;
    if (task->call.linked)
        client_followup(c, UCM_METHOD_CANCEL, task->call.msgid);
    TAILQ_REMOVE(&c->tasks, task, node);
    task_delete(task);
    client_leave(c, 0);
}
