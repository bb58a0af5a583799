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

    if (n_keys > UCM_MAX_KEYS)
        return client_fail(UCM_EINVALID, "a request has at most %d keys, not %u", UCM_MAX_KEYS,
                           n_keys);
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

struct transfer {
    enum ucm_method method;
    struct ucm_namespace *ns;
    struct ucm_region *region; /* NULL: prefetch */
    const struct ucm_transfer *asked;
};

static int request_load(struct ucm_task *task, const struct transfer *t, struct proto_bin keys,
                        struct proto_bin blocks, int64_t deadline_ns)
{
    const struct ucm_transfer *a = t->asked;
    struct msg_load m = {
        .region = t->region->handle.id,
        .keys = keys,
        .blocks = blocks,
        .shard = a->shard,
        .shards = a->n_shards,
        .lease = client_lease_find(task->call.client, a->lease),
        .priority = a->priority,
        .deadline_ms = a->deadline_ms,
        .step = a->step,
    };
    int r;

    task->call.progress_cb = a->step ? task_progress_cb : NULL;
    r = client_request(&task->call, t->method, &proto_load, &m, NULL, 0, deadline_ns);

    if (r == 0)
        client_lease_end(task->call.client, a->lease);
    return r;
}

static int request_dump(struct ucm_task *task, const struct transfer *t, struct proto_bin keys,
                        struct proto_bin blocks, int64_t deadline_ns)
{
    const struct ucm_transfer *a = t->asked;
    struct msg_dump m = {
        .region = t->region->handle.id,
        .keys = keys,
        .blocks = blocks,
        .shard = a->shard,
        .shards = a->n_shards,
        .event = {a->event, a->event ? UCM_MAX_HANDLE_BYTES : 0},
        .priority = a->priority,
        .deadline_ms = a->deadline_ms,
        .durability = a->durability,
    };

    return client_request(&task->call, t->method, &proto_dump, &m, NULL, 0, deadline_ns);
}

static int request_prefetch(struct ucm_task *task, const struct transfer *t, struct proto_bin keys,
                            int64_t deadline_ns)
{
    struct msg_prefetch m = {
        .ns = t->ns->handle.id,
        .keys = keys,
        .part = t->asked->part,
        .priority = t->asked->priority,
        .deadline_ms = t->asked->deadline_ms,
    };

    return client_request(&task->call, t->method, &proto_prefetch, &m, NULL, 0, deadline_ns);
}

static int transfer_send(struct ucm_task *task, const struct transfer *t, int64_t deadline_ns)
{
    struct ucm_client *c = task->call.client;
    struct proto_bin keys, blocks = {(const uint8_t *)t->asked->blocks, t->asked->n_keys * 4};
    int r;

    r = client_begin(c, t->region ? &t->region->handle : &t->ns->handle, deadline_ns);
    if (r)
        return r;
    r = client_keys_check(c, t->ns, t->asked->keys, t->asked->n_keys, &keys);
    if (r) {
        client_writer_release(c);
        return r;
    }
    if (t->method == UCM_METHOD_LOAD)
        return request_load(task, t, keys, blocks, deadline_ns);
    if (t->method == UCM_METHOD_DUMP)
        return request_dump(task, t, keys, blocks, deadline_ns);
    return request_prefetch(task, t, keys, deadline_ns);
}

static int transfer(const struct transfer *t, int timeout_ms, struct ucm_task **out)
{
    struct ucm_client *c = t->ns->handle.client;
    struct ucm_task *task = NULL;
    int64_t deadline_ns;
    int r = client_enter(c);

    if (r)
        return r;
    r = task_new(c, t->asked->n_keys, &task);
    if (r)
        return client_leave(c, r);
    deadline_ns = client_deadline(c, timeout_ms);
    do
        r = transfer_send(task, t, deadline_ns);
    while (r == CLIENT_AGAIN);
    if (r) {
        task_delete(task);
        return client_leave(c, r);
    }
    if (t->region) {
        task->spin = &c->spin[t->method == UCM_METHOD_DUMP];
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
                           const struct ucm_transfer *asked, int timeout_ms, struct ucm_task **out)
{
    if (!region || !asked || !out)
        return client_fail(UCM_EINVALID, "region, transfer or out is NULL");
    if (!asked->blocks)
        return client_fail(UCM_EINVALID, "blocks is NULL; load and dump need one id for each key");
    return transfer(&(struct transfer){method, region->ns, region, asked}, timeout_ms, out);
}

int ucm_load(struct ucm_region *region, const struct ucm_transfer *asked, int timeout_ms,
             struct ucm_task **out)
{
    return region_transfer(UCM_METHOD_LOAD, region, asked, timeout_ms, out);
}

int ucm_dump(struct ucm_region *region, const struct ucm_transfer *asked, int timeout_ms,
             struct ucm_task **out)
{
    return region_transfer(UCM_METHOD_DUMP, region, asked, timeout_ms, out);
}

int ucm_prefetch(struct ucm_namespace *ns, const struct ucm_transfer *asked, int timeout_ms,
                 struct ucm_task **out)
{
    if (!ns || !asked || !out)
        return client_fail(UCM_EINVALID, "namespace, transfer or out is NULL");
    return transfer(&(struct transfer){UCM_METHOD_PREFETCH, ns, NULL, asked}, timeout_ms, out);
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

static int cancel_take_cb(struct client_call *call, struct proto_envelope *env, struct ucm_error *e)
{
    struct msg_cancel_r m;

    (void)call;
    return client_take(&proto_cancel_r, env, &m, e);
}

int ucm_task_cancel(struct ucm_task *task, int timeout_ms)
{
    struct client_call call;
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
    while (!task->call.done && c->writing && r == 0)
        r = client_writer_wait(c, deadline_ns);
    if (r || task->call.done)
        return client_leave(c, task->call.done ? 0 : r);
    r = client_call_init(&call, c, cancel_take_cb, NULL);
    if (r)
        return client_leave(c, r);
    c->writing = true;
    r = client_request_wait(&call, UCM_METHOD_CANCEL, &proto_cancel,
                            &(struct msg_cancel){.msgid = task->call.msgid}, deadline_ns);
    client_call_close(&call);
    /* Its answer came first, or the link broke, which ends it. */
    if (r == -UCM_ENOTFOUND || r == CLIENT_AGAIN || task->call.done)
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
