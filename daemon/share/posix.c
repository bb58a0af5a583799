/* The posix backend: block files below a folder of a mounted file system, in `depth` threads that run
 * one operation each. They are not libuv's: a mount that hangs holds its thread for as long as it
 * likes, and checksums must go on meanwhile. FIND, READ and CHECK come first, and a quarter of the
 * threads, at least one, does nothing else. Of TURNS operations one is another one, so that a write
 * does not miss its deadline behind reads. */
#include "daemon/share/posix_file.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define TURNS 16

struct share_backend {
    uv_loop_t *loop;
    uv_async_t ended_async;
    char *root;
    struct share_temp temp;
    unsigned under_way; /* operations whose done_cb has not run; the loop's */
    pthread_t *threads;
    unsigned n_threads, others_max;

    pthread_mutex_t lock; /* guards what follows, and op->state */
    pthread_cond_t work;
    struct list reads, others, ended; /* of share_op.link */
    unsigned others_busy;
    unsigned turns; /* of reads while others waited */
    bool stop;
};

static bool op_urgent(const struct share_op *op)
{
    return op->verb == SHARE_FIND || op->verb == SHARE_READ || op->verb == SHARE_CHECK;
}

/* Locked. */
static struct share_op *op_next(struct share_backend *b)
{
    bool other = !list_empty(&b->others) && b->others_busy < b->others_max;
    struct share_op *op;
    struct list *node;

    if (other && !list_empty(&b->reads) && ++b->turns < TURNS)
        other = false;
    node = list_pop_front(other ? &b->others : &b->reads);
    if (!node)
        return NULL;
    if (other) {
        b->others_busy++;
        b->turns = 0;
    }
    op = LIST_ENTRY(node, struct share_op, link);
    op->state = SHARE_OP_BUSY;
    return op;
}

/* Locked, so that the async can't be closed before this returns. */
static void op_ended(struct share_backend *b, struct share_op *op, int status)
{
    bool first = list_empty(&b->ended);

    op->status = status;
    op->state = SHARE_OP_ENDED;
    list_push_back(&b->ended, &op->link);
    if (first)
        uv_async_send(&b->ended_async);
}

/* Locked, except while the operation runs. */
static void op_run(struct share_backend *b, struct share_op *op)
{
    bool urgent = op_urgent(op);
    int status;

    pthread_mutex_unlock(&b->lock);
    status = posix_file_run(b->root, &b->temp, op);
    pthread_mutex_lock(&b->lock);
    op_ended(b, op, status);
    if (urgent)
        return;
    b->others_busy--;
    if (!list_empty(&b->others)) /* this thread may take something else */
        pthread_cond_signal(&b->work);
}

static void *thread_main(void *arg)
{
    struct share_backend *b = arg;

    pthread_mutex_lock(&b->lock);
    while (!b->stop) {
        struct share_op *op = op_next(b);

        if (op)
            op_run(b, op);
        else
            pthread_cond_wait(&b->work, &b->lock);
    }
    pthread_mutex_unlock(&b->lock);
    return NULL;
}

static void threads_end(struct share_backend *b)
{
    pthread_mutex_lock(&b->lock);
    b->stop = true;
    pthread_cond_broadcast(&b->work);
    pthread_mutex_unlock(&b->lock);
    for (unsigned i = 0; i < b->n_threads; i++)
        pthread_join(b->threads[i], NULL);
}

static void backend_free(struct share_backend *b)
{
    pthread_cond_destroy(&b->work);
    pthread_mutex_destroy(&b->lock);
    free(b->root);
    free(b->threads);
    free(b);
}

static void closed_cb(uv_handle_t *handle)
{
    backend_free(handle->data);
}

static void op_left(struct share_backend *b)
{
    if (--b->under_way == 0)
        uv_unref((uv_handle_t *)&b->ended_async);
}

static void ended_cb(uv_async_t *async)
{
    struct share_backend *b = async->data;
    struct list ended;

    list_init(&ended);
    pthread_mutex_lock(&b->lock);
    list_splice_front(&ended, &b->ended);
    pthread_mutex_unlock(&b->lock);
    for (struct list *node; (node = list_pop_front(&ended));) {
        struct share_op *op = LIST_ENTRY(node, struct share_op, link);

        op_left(b);
        op->done_cb(op, op->status); /* may close the backend */
    }
}

static int threads_begin(struct share_backend *b, unsigned depth)
{
    b->threads = calloc(depth, sizeof(*b->threads));
    if (!b->threads)
        return -ENOMEM;
    for (; b->n_threads < depth; b->n_threads++)
        if (pthread_create(&b->threads[b->n_threads], NULL, thread_main, b) != 0) {
            threads_end(b);
            return -ENOMEM;
        }
    return 0;
}

static struct share_backend *backend_new(const struct share_backend_config *config)
{
    struct share_backend *b = calloc(1, sizeof(*b));

    if (!b)
        return NULL;
    b->root = strdup(config->target);
    if (!b->root) {
        free(b);
        return NULL;
    }
    b->loop = config->loop;
    b->others_max = config->depth - (config->depth + 3) / 4;
    share_temp_init(&b->temp, config->host);
    list_init(&b->reads);
    list_init(&b->others);
    list_init(&b->ended);
    pthread_mutex_init(&b->lock, NULL);
    pthread_cond_init(&b->work, NULL);
    return b;
}

static int posix_open(const struct share_backend_config *config, struct share_backend **out)
{
    struct share_backend *b;
    int err;

    if (config->target[0] != '/' || config->depth < 2)
        return -EINVAL;
    b = backend_new(config);
    if (!b)
        return -ENOMEM;
    err = uv_async_init(b->loop, &b->ended_async, ended_cb);
    if (err < 0) {
        backend_free(b);
        return -ENOMEM;
    }
    b->ended_async.data = b;
    uv_unref((uv_handle_t *)&b->ended_async);
    err = threads_begin(b, config->depth);
    if (err < 0) {
        uv_close((uv_handle_t *)&b->ended_async, closed_cb);
        return err;
    }
    *out = b;
    return 0;
}

static void posix_close(struct share_backend *b)
{
    if (!b)
        return;
    assert(b->under_way == 0);
    threads_end(b);
    uv_close((uv_handle_t *)&b->ended_async, closed_cb);
}

static void posix_start(struct share_backend *b, struct share_op *op)
{
    int err = share_op_place(op);

    if (b->under_way++ == 0)
        uv_ref((uv_handle_t *)&b->ended_async);
    pthread_mutex_lock(&b->lock);
    if (err < 0) {
        op_ended(b, op, err);
    } else {
        op->state = SHARE_OP_QUEUED;
        list_push_back(op_urgent(op) ? &b->reads : &b->others, &op->link);
        pthread_cond_signal(&b->work);
    }
    pthread_mutex_unlock(&b->lock);
}

static bool posix_cancel(struct share_backend *b, struct share_op *op)
{
    bool queued;

    pthread_mutex_lock(&b->lock);
    queued = op->state == SHARE_OP_QUEUED;
    if (queued)
        list_remove(&op->link);
    pthread_mutex_unlock(&b->lock);
    if (queued)
        op_left(b);
    return queued;
}

const struct share_backend_ops share_posix = {
    .name = "posix",
    .open = posix_open,
    .close = posix_close,
    .start = posix_start,
    .cancel = posix_cancel,
};
