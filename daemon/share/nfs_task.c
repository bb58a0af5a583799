#include "daemon/share/nfs_task.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define WRITE_STEP_OF 16u

static struct list *task_queue(struct nfs_task *t)
{
    return t->writes ? &t->b->writes : &t->b->reads;
}

void nfs_task_next(struct nfs_task *t, nfs_step *step)
{
    t->step = step;
    list_push_front(task_queue(t), &t->link);
}

void nfs_task_begin(struct nfs_task *t)
{
    t->over = false;
    t->status = 0;
    t->op->mtime_ns = 0;
    t->folder.n = t->file.n = 0;
    t->temp_made = t->verifier_known = t->verifier_changed = false;
    t->at = t->moved = t->cookie = 0;
    t->pages = t->blank = 0;
    memset(t->cookie_verifier, 0, sizeof(t->cookie_verifier));
    share_listing_free(&t->listing);
    t->step = t->op->verb == SHARE_CHECK ? nfs_check_step : nfs_folder_step;
    list_push_back(task_queue(t), &t->link);
}

void nfs_task_free(struct nfs_task *t)
{
    share_listing_free(&t->listing);
    free(t);
}

static void retry_cb(struct deadline *d)
{
    struct share_backend *b = LIST_ENTRY(d, struct share_backend, retry);

    for (struct list *node; (node = list_pop_front(&b->later));)
        nfs_task_begin(LIST_ENTRY(node, struct nfs_task, link));
    nfs_pump(b);
}

static bool task_again(struct nfs_task *t)
{
    struct share_backend *b = t->b;

    if (t->status == -EAGAIN && t->turns < NFS_LATER_TURNS) {
        t->turns++;
        list_push_back(&b->later, &t->link);
        if (!deadline_armed(&b->retry))
            deadline_arm(b->deadlines, &b->retry, uv_now(b->loop) + NFS_LATER_MS, retry_cb);
        return true;
    }
    if ((t->status != -ESTALE && t->status != -ECONNRESET) || ++t->attempts >= NFS_ATTEMPTS)
        return false;
    if (t->status == -ESTALE) {
        nfs_folder_stale(t);
        if (t->attempts > 1) /* fresh folders did not help: the export's own handle is stale */
            nfs_conn_drop(&b->conn, -ESTALE);
    }
    nfs_task_begin(t);
    return true;
}

static void report_cb(struct deadline *d)
{
    struct share_backend *b = LIST_ENTRY(d, struct share_backend, report);
    struct list ended;

    list_init(&ended);
    list_splice_front(&ended, &b->ended);
    for (struct list *node; (node = list_pop_front(&ended));) {
        struct share_op *op = LIST_ENTRY(node, struct share_op, link);

        b->under_way--;
        op->done_cb(op, op->status); /* may close the backend */
    }
}

void nfs_op_ended(struct share_backend *b, struct share_op *op, int status)
{
    op->status = status;
    op->state = SHARE_OP_ENDED;
    list_push_back(&b->ended, &op->link);
    if (!deadline_armed(&b->report))
        deadline_arm(b->deadlines, &b->report, uv_now(b->loop), report_cb);
}

static void task_report(struct nfs_task *t)
{
    if (t->status == -ESTALE)
        t->status = -ENODEV; /* with fresh handles too: no answer about a part */
    if (t->status == 0 && t->op->verb == SHARE_LIST) {
        t->op->listing = t->listing;
        t->listing = (struct share_listing){0};
    }
    nfs_op_ended(t->b, t->op, t->status);
    nfs_task_free(t);
}

void nfs_task_settle(struct nfs_task *t)
{
    if (t->awaiting || !list_empty(&t->link) || (t->op && !t->over))
        return;
    if (t->temp_made && t->b->conn.state == NFS_UP) {
        nfs_task_next(t, nfs_unlink_temp_step);
        return;
    }
    if (!t->op)
        nfs_task_free(t);
    else if (!task_again(t))
        task_report(t);
}

void nfs_task_end(struct nfs_task *t, int status)
{
    if (!t->over) {
        t->over = true;
        t->status = status;
    }
    list_remove(&t->link);
}

static void tasks_fail(struct list *queue, int error)
{
    for (struct list *node; (node = list_pop_front(queue));) {
        struct nfs_task *t = LIST_ENTRY(node, struct nfs_task, link);

        t->over = true;
        t->status = error;
        t->attempts = NFS_ATTEMPTS;
        t->turns = NFS_LATER_TURNS;
        nfs_task_settle(t);
    }
}

void nfs_tasks_fail(struct share_backend *b, int error)
{
    tasks_fail(&b->reads, error);
    tasks_fail(&b->writes, error);
}

/* ---- calls ---- */

static void call_count_down(struct nfs_call *call)
{
    struct nfs_task *t = call->task;

    list_remove(&call->of_task);
    t->awaiting--;
    t->b->calls--;
    t->b->write_calls -= t->writes;
}

/* A reply that can't be decoded loses the connection, and with it all other replies. */
static int call_done_cb(struct nfs_rpc_call *rpc, int status, struct nfs_xdr *x)
{
    struct nfs_call *call = LIST_ENTRY(rpc, struct nfs_call, rpc);
    struct nfs_task *t = call->task;
    struct share_backend *b = t->b;
    struct nfs_reply reply;
    int lost = x ? 0 : status;

    call_count_down(call);
    if (x && status == 0)
        lost = nfs_reply_decode(call->proc, x, &reply);
    reply.args = &call->args;
    if (lost < 0) {
        nfs_task_end(t, -ECONNRESET);
    } else {
        nfs_conn_heard(&b->conn);
        if (status < 0)
            nfs_task_end(t, status);
        else if (t->op && !t->over && call->replied_cb)
            call->replied_cb(t, &reply);
    }
    free(call);
    nfs_task_settle(t);
    if (lost == 0)
        nfs_pump(b);
    return lost;
}

struct nfs_call *nfs_call_new(struct nfs_task *t, enum nfs_proc proc, const struct nfs_args *args,
                              nfs_replied_cb *replied_cb)
{
    struct nfs_call *call = malloc(sizeof(*call));

    if (!call) {
        nfs_task_end(t, -ENOMEM);
        nfs_task_settle(t);
        return NULL;
    }
    list_init(&call->of_task);
    call->task = t;
    call->proc = proc;
    call->replied_cb = replied_cb;
    call->args = *args;
    nfs_rpc_begin(nfs_conn_rpc(&t->b->conn), &call->rpc, proc);
    nfs_put_args(&call->rpc.out, proc, args);
    call->rpc.done_cb = call_done_cb;
    return call;
}

void nfs_call_send(struct nfs_call *call)
{
    struct nfs_task *t = call->task;
    int err = nfs_rpc_send(nfs_conn_rpc(&t->b->conn), &call->rpc);

    if (err < 0) {
        list_remove(&call->of_task);
        free(call);
        nfs_task_end(t, err);
        nfs_task_settle(t);
        return;
    }
    t->awaiting++;
    t->b->calls++;
    t->b->write_calls += t->writes;
}

void nfs_request(struct nfs_task *t, enum nfs_proc proc, const struct nfs_args *args,
                 nfs_replied_cb *replied_cb)
{
    struct nfs_call *call = nfs_call_new(t, proc, args, replied_cb);

    if (call)
        nfs_call_send(call);
}

void nfs_ask(struct nfs_task *t, enum nfs_proc proc, const struct nfs_handle *h, const char *name,
             nfs_replied_cb *replied_cb)
{
    nfs_request(t, proc, &(struct nfs_args){.handle = h, .name = name}, replied_cb);
}

void nfs_task_let_go(struct nfs_task *t)
{
    struct nfs_conn *c = &t->b->conn;

    t->op = NULL;
    for (struct list *node; (node = list_pop_front(&t->payloads));) {
        struct nfs_call *call = LIST_ENTRY(node, struct nfs_call, of_task);
        int unsent = nfs_rpc_payload_gone(&call->rpc);

        if (unsent > 0) {
            call_count_down(call);
            free(call);
        } else if (unsent < 0) {
            nfs_conn_drop(c, unsent);
        }
    }
}

/* Reads go first; one step in WRITE_STEP_OF is a write's, so that writes do not starve. */
static struct nfs_task *pump_next(struct share_backend *b)
{
    bool may_write = b->write_calls < b->write_calls_max;
    struct list *node = NULL;

    if (may_write && ++b->steps % WRITE_STEP_OF == 0)
        node = list_pop_front(&b->writes);
    if (!node)
        node = list_pop_front(&b->reads);
    if (!node && may_write)
        node = list_pop_front(&b->writes);
    return node ? LIST_ENTRY(node, struct nfs_task, link) : NULL;
}

void nfs_pump(struct share_backend *b)
{
    while (nfs_conn_up(&b->conn) && b->calls < b->depth) {
        struct nfs_task *t = pump_next(b);

        if (!t)
            break;
        t->step(t);
    }
    if (b->conn.state == NFS_DOWN && !(list_empty(&b->reads) && list_empty(&b->writes))) {
        int err = nfs_conn_want(&b->conn);

        if (err < 0)
            nfs_tasks_fail(b, err);
    }
    nfs_conn_send(&b->conn);
    nfs_conn_await(&b->conn, b->calls || !list_empty(&b->reads) || !list_empty(&b->writes));
}
