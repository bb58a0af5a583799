/* The nfs backend: one connection, no thread. Requests of all operations are under way at once, up to
 * `depth`; FIND is one round trip, READ two, WRITE four and one for its data. Operations whose
 * connection is lost begin anew. Checksums are computed on the loop. */

#include "daemon/share/nfs_task.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

static void conn_changed_cb(void *ctx, int status)
{
    struct share_backend *b = ctx;

    if (status == 0)
        nfs_folders_forget(b);
    nfs_pump(b);
}

static int backend_open(const struct share_backend_config *config, struct share_backend **out)
{
    struct share_backend *b;
    struct nfs_target target;
    const char *why = NULL;

    if (nfs_target_parse(config->target, &target, &why) < 0)
        return -EINVAL; /* which the configuration's check says before, with `why` */
    b = calloc(1, sizeof(*b));
    if (!b)
        return -ENOMEM;
    b->loop = config->loop;
    b->deadlines = config->deadlines;
    b->depth = config->depth;
    b->write_calls_max = b->depth > 1 ? b->depth - (b->depth + 3) / 4 : 1;
    share_temp_init(&b->temps, config->host);
    list_init(&b->reads);
    list_init(&b->writes);
    list_init(&b->ended);
    list_init(&b->later);
    nfs_conn_init(&b->conn, b->loop, b->deadlines, &target, conn_changed_cb, b);
    *out = b;
    return 0;
}

static void list_free_tasks(struct list *tasks)
{
    for (struct list *node; (node = list_pop_front(tasks));)
        nfs_task_free(LIST_ENTRY(node, struct nfs_task, link));
}

static void backend_close(struct share_backend *b)
{
    if (!b)
        return;
    assert(b->under_way == 0);
    nfs_conn_close(&b->conn);
    list_free_tasks(&b->reads); /* of cancelled operations: their temporary files stay */
    list_free_tasks(&b->writes);
    deadline_disarm(b->deadlines, &b->report);
    deadline_disarm(b->deadlines, &b->retry);
    free(b);
}

static struct nfs_task *task_new(struct share_backend *b, struct share_op *op)
{
    struct nfs_task *t = calloc(1, sizeof(*t));

    if (!t)
        return NULL;
    t->b = b;
    t->op = op;
    t->bucket = op->bucket;
    list_init(&t->link);
    list_init(&t->payloads);
    t->writes = op->verb == SHARE_WRITE || op->verb == SHARE_REMOVE;
    return t;
}

static void backend_start(struct share_backend *b, struct share_op *op)
{
    int err = share_op_resolve(op);
    struct nfs_task *t = NULL;

    b->under_way++;
    op->state = SHARE_OP_BUSY;
    if (err == 0) {
        t = task_new(b, op);
        err = t ? 0 : -ENOMEM;
    }
    op->backend = t;
    if (err < 0) {
        nfs_op_ended(b, op, err);
        return;
    }
    if (op->verb == SHARE_CHECK) /* the root's back-off paces health checks */
        b->conn.refused_until = 0;
    nfs_task_begin(t);
    nfs_pump(b);
}

static bool backend_cancel(struct share_backend *b, struct share_op *op)
{
    struct nfs_task *t = op->backend;

    b->under_way--;
    if (op->state == SHARE_OP_ENDED) {
        list_remove(&op->link);
        return true;
    }
    nfs_task_let_go(t);
    list_remove(&t->link);
    nfs_task_settle(t);
    nfs_pump(b);
    return true;
}

const struct share_backend_ops share_nfs = {
    .name = "nfs",
    .open = backend_open,
    .close = backend_close,
    .start = backend_start,
    .cancel = backend_cancel,
};
