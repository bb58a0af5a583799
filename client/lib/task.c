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
    const struct client_task_kind *kind; /* NULL: of keys alone */
    void *of;
    uint64_t bytes;
    uint32_t n_ok, n_keys; /* keys; of a gather, items */
    uint8_t result[];      /* n_keys */
};

static int task_take_cb(struct client_call *call, const union proto_any *any)
{
    struct ucm_task *task = (struct ucm_task *)call;
    bool gather = call->method == UCM_METHOD_GATHER;
    struct proto_bin status = gather ? any->gather_r.status : any->blocks_r.status;

    if (status.n != task->n_keys)
        return ucm_error_set(&call->error, UCM_EPROTOCOL, "ucmd answered for %u blocks of %u",
                             status.n, task->n_keys);
    memcpy(task->result, status.p, status.n);
    for (uint32_t i = 0; i < task->n_keys; i++)
        task->n_ok += task->result[i] == UCM_BLOCK_IS_OK || task->result[i] == UCM_BLOCK_IS_EXISTS;
    task->bytes = gather ? any->gather_r.bytes : any->blocks_r.bytes;
    if (task->spin && task->n_ok > 0)
        client_spin_learn(task->spin, task->n_keys, client_now_ns() - task->sent_ns);
    return 0;
}

static void task_done_cb(struct client_call *call)
{
    struct ucm_task *task = (struct ucm_task *)call;

    if (task->kind)
        task->kind->done_cb(task->of, call->status);
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

static struct ucm_task *task_new(struct ucm_client *c, uint32_t n_keys)
{
    struct ucm_task *task = calloc(1, sizeof *task + n_keys);

    if (!task)
        return NULL;
    client_call_init(&task->call, c, task_take_cb, task_done_cb);
    task->n_keys = n_keys;
    return task;
}

static void task_delete(struct ucm_task *task)
{
    client_call_unlink(&task->call);
    client_call_close(&task->call);
    if (task->kind)
        task->kind->free_cb(task->of);
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

/* load: NULL, or the parameters. Their lease is looked up when the connection is there, since a new
 * connection ends all leases. */
static int task_send(struct ucm_task *task, const struct client_request *q, struct msg_load *load,
                     uint32_t lease, int64_t deadline_ns)
{
    struct ucm_client *c = task->call.client;
    int r = task->kind ? task->kind->begin_cb(task->of, q, deadline_ns)
                       : client_begin(c, q->handle, deadline_ns);

    if (r)
        return r;
    if (load)
        load->lease = client_lease_find(c, lease);
    r = client_request(&task->call, q, deadline_ns);
    if (r == 0 && load)
        client_lease_end(c, lease);
    return r;
}

/* The task was sent: from now on it is the user's. */
static void task_sent(struct ucm_task *task, enum ucm_method method)
{
    struct ucm_client *c = task->call.client;
    int spin = method == UCM_METHOD_LOAD || method == UCM_METHOD_LOAD_PREFIX ? 0
               : method == UCM_METHOD_DUMP                                   ? 1
               : method == UCM_METHOD_GATHER                                 ? 2
                                                                             : -1;

    if (spin >= 0) {
        task->spin = &c->spin[spin];
        task->sent_ns = client_now_ns();
        task->call.expected_ns = client_spin_expect(task->spin, task->n_keys);
    }
    TAILQ_INSERT_TAIL(&c->tasks, task, node);
    task->counted = true;
    if (task->call.done) /* the sender read answers while the socket was full */
        task_done_cb(&task->call);
}

/* load, lease: as task_send. If it fails, the task is gone. */
static int task_run(struct ucm_task *task, const struct client_request *q, struct msg_load *load,
                    uint32_t lease, int64_t deadline_ns, struct ucm_task **out)
{
    int r;

    do
        r = task_send(task, q, load, lease, deadline_ns);
    while (r == CLIENT_AGAIN);
    if (r) {
        task_delete(task);
        return r;
    }
    task_sent(task, q->method);
    *out = task;
    return 0;
}

int client_task_run(struct ucm_client *c, const struct client_request *q, uint32_t n,
                    const struct client_task_kind *kind, void *of, int64_t deadline_ns,
                    struct ucm_task **out)
{
    struct ucm_task *task = task_new(c, n);

    if (!task) {
        if (kind)
            kind->free_cb(of);
        return client_fail(UCM_ENOMEMORY, "no memory for a task");
    }
    task->kind = kind;
    task->of = of;
    return task_run(task, q, NULL, 0, deadline_ns, out);
}

/* steps: it reports progress. */
static int task_start(const struct client_request *q, const struct ucm_namespace *ns,
                      struct proto_bin *keys, struct msg_load *load, bool steps,
                      const struct ucm_transfer *t, int timeout_ms, struct ucm_task **out)
{
    struct ucm_client *c = q->handle->client;
    struct ucm_task *task;
    int r = client_enter(c);

    if (r)
        return r;
    r = client_keys_check(c, ns, t->keys, t->n_keys, keys);
    if (r)
        return client_leave(c, r);
    task = task_new(c, t->n_keys);
    if (!task)
        return client_leave(c, client_fail(UCM_ENOMEMORY, "no memory for a task"));
    task->call.progress_cb = steps ? task_progress_cb : NULL;
    return client_leave(c, task_run(task, q, load, t->lease, client_deadline(c, timeout_ms), out));
}

int client_task_start(const struct client_request *q, const struct ucm_namespace *ns,
                      struct proto_bin *keys, const struct ucm_transfer *t, int timeout_ms,
                      struct ucm_task **out)
{
    return task_start(q, ns, keys, NULL, false, t, timeout_ms, out);
}

_Static_assert(sizeof(struct ucm_shift) == UCM_SHIFT_NUMBERS * sizeof(uint32_t) &&
                   (int)UCM_SHIFTS_MAX == (int)UCM_MAX_SHIFTS,
               "shifts are sent as they lie in memory");

static int transfer_check(const struct ucm_region *region, const struct ucm_transfer *t,
                          struct ucm_task **out)
{
    if (!region || !t || !out)
        return client_fail(UCM_EINVALID, "region, transfer or out is NULL");
    if (!t->blocks)
        return client_fail(UCM_EINVALID, "blocks is NULL; load and dump need one id for each key");
    return 0;
}

int ucm_load(struct ucm_region *region, const struct ucm_transfer *t, int timeout_ms,
             struct ucm_task **out)
{
    struct msg_load m;
    struct client_request q = {UCM_METHOD_LOAD, &m, .handle_id = &m.region,
                               .request_id = &m.request};
    int r = transfer_check(region, t, out);

    if (r == 0 && t->shifts && t->n_shifts > UCM_SHIFTS_MAX)
        r = client_fail(UCM_EINVALID, "%u shifts; a load has at most %d", t->n_shifts,
                        UCM_SHIFTS_MAX);
    if (r)
        return r;
    q.handle = &region->handle;
    m = (struct msg_load){
        .blocks = {(const uint8_t *)t->blocks, t->n_keys * 4},
        .layer = t->layer,
        .layers = t->n_layers,
        .priority = t->priority,
        .timeout_ms = t->daemon_timeout_ms,
        .progress_interval = t->progress_interval,
        .gpu_busy = atomic_load(&region->gpu_busy),
        .shifts = {(const uint32_t *)t->shifts, t->shifts ? t->n_shifts * UCM_SHIFT_NUMBERS : 0},
    };
    return task_start(&q, client_namespace_of(region), &m.keys, &m, m.progress_interval != 0, t,
                      timeout_ms, out);
}

int ucm_load_prefix(struct ucm_region *region, const struct ucm_transfer *t, uint32_t wait_ms,
                    int timeout_ms, struct ucm_task **out)
{
    struct msg_load_prefix m;
    struct client_request q = {UCM_METHOD_LOAD_PREFIX, &m, .handle_id = &m.region,
                               .request_id = &m.request};
    int r = transfer_check(region, t, out);

    if (r == 0 && t->lease != 0)
        r = client_fail(UCM_EINVALID, "lease is %u: a load of a prefix takes its own", t->lease);
    if (r)
        return r;
    q.handle = &region->handle;
    m = (struct msg_load_prefix){
        .blocks = {(const uint8_t *)t->blocks, t->n_keys * 4},
        .layer = t->layer,
        .layers = t->n_layers,
        .wait_ms = wait_ms,
        .priority = t->priority,
        .timeout_ms = t->daemon_timeout_ms,
        .progress_interval = t->progress_interval,
        .gpu_busy = atomic_load(&region->gpu_busy),
    };
    return task_start(&q, client_namespace_of(region), &m.keys, NULL, m.progress_interval != 0, t,
                      timeout_ms, out);
}

static int dump(struct ucm_region *region, const struct ucm_transfer *t, bool raw, int timeout_ms,
                struct ucm_task **out)
{
    struct msg_dump m;
    struct client_request q = {UCM_METHOD_DUMP, &m, .handle_id = &m.region,
                               .request_id = &m.request};
    int r = transfer_check(region, t, out);

    if (r)
        return r;
    q.handle = &region->handle;
    m = (struct msg_dump){
        .blocks = {(const uint8_t *)t->blocks, t->n_keys * 4},
        .layer = t->layer,
        .layers = t->n_layers,
        .cuda_event = {t->cuda_event, t->cuda_event ? UCM_MAX_HANDLE_BYTES : 0},
        .priority = t->priority,
        .timeout_ms = t->daemon_timeout_ms,
        .durability = t->durability,
        .raw = raw && client_namespace_of(region)->encoding,
        .gpu_busy = atomic_load(&region->gpu_busy),
    };
    return client_task_start(&q, client_namespace_of(region), &m.keys, t, timeout_ms, out);
}

int ucm_dump(struct ucm_region *region, const struct ucm_transfer *t, int timeout_ms,
             struct ucm_task **out)
{
    return dump(region, t, false, timeout_ms, out);
}

int ucm_dump_raw(struct ucm_region *region, const struct ucm_transfer *t, int timeout_ms,
                 struct ucm_task **out)
{
    return dump(region, t, true, timeout_ms, out);
}

int ucm_prefetch(struct ucm_namespace *ns, const struct ucm_transfer *t, int timeout_ms,
                 struct ucm_task **out)
{
    struct msg_prefetch m;
    struct client_request q = {UCM_METHOD_PREFETCH, &m, .handle_id = &m.ns,
                               .request_id = &m.request};

    if (!ns || !t || !out)
        return client_fail(UCM_EINVALID, "namespace, transfer or out is NULL");
    q.handle = &ns->handle;
    m = (struct msg_prefetch){.part = t->part,
                              .parts = t->n_parts,
                              .priority = t->priority,
                              .timeout_ms = t->daemon_timeout_ms};
    return client_task_start(&q, ns, &m.keys, t, timeout_ms, out);
}

static int task_report(struct ucm_task *task, struct ucm_result *out)
{
    if (task->reported)
        return client_fail(UCM_ECONSUMED, "the task's result was taken before");
    task->reported = true;
    if (task->call.status)
        return client_call_status(&task->call);
    *out = (struct ucm_result){task->bytes, task->n_ok, task->n_keys, task->result};
    return 0;
}

int ucm_task_check(struct ucm_task *task, struct ucm_result *out)
{
    struct ucm_client *c = task && out ? task->call.client : NULL;
    int r = client_enter_given(c, "task or out");

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
    struct ucm_client *c = task && out ? task->call.client : NULL;
    int r = client_enter_given(c, "task or out");

    if (r)
        return r;
    if (task->call.done || client_call_wait(&task->call, client_deadline(c, timeout_ms)) == 0)
        return client_leave(c, task_report(task, out));
    return client_leave(c, client_fail(UCM_EDEADLINE, "the task was not done in time"));
}

int ucm_task_wait_layers(struct ucm_task *task, uint32_t layers, int timeout_ms, uint8_t *result)
{
    struct ucm_client *c = task ? task->call.client : NULL;
    int r = client_enter_given(c, "task");

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

/* Asks the daemon to stop a request that was sent, or has ended. */
static int call_cancel(struct client_call *call, int64_t deadline_ns)
{
    struct ucm_client *c = call->client;
    int r;

    if (call->done)
        return 0;
    r = client_begin_same(c, deadline_ns);
    if (r == 0 && call->done)
        client_writer_release(c);
    else if (r == 0)
        r = client_exchange_same(c, UCM_METHOD_CANCEL, &(struct msg_cancel){.msgid = call->msgid},
                                 deadline_ns);
    /* Its answer came first, or the link broke, which ends it. */
    if (r == -UCM_ENOTFOUND || c->link != LINK_UP || call->done)
        r = 0;
    return r;
}

int ucm_task_cancel(struct ucm_task *task, int timeout_ms)
{
    struct ucm_client *c = task ? task->call.client : NULL;
    int r = client_enter_given(c, "task");

    if (r)
        return r;
    return client_leave(c, call_cancel(&task->call, client_deadline(c, timeout_ms)));
}

void ucm_task_free(struct ucm_task *task)
{
    struct ucm_client *c = task ? task->call.client : NULL;

    if (!c || client_enter(c) != 0)
        return;
    if (task->call.linked)
        client_followup(c, UCM_METHOD_CANCEL, task->call.msgid);
    TAILQ_REMOVE(&c->tasks, task, node);
    task_delete(task);
    client_leave(c, 0);
}
