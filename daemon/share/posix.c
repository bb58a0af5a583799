/* Block files below a folder of a mounted file system: threads of its own, as many as `depth`,
 * which run one operation at a time. They are not libuv's: a mount that hangs holds its thread for
 * as long as it likes, and checksums must go on meanwhile. Looking for files and reading go before
 * writing, and one thread in four, at least one, is never writing. */
#include "daemon/share/posix_file.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct share_backend {
    uv_loop_t *loop;
    uv_async_t ended_async;
    char *root;
    struct share_temp temp;
    unsigned under_way; /* the loop's: started and not ended */
    pthread_t *threads;
    unsigned n_threads, writers_max;

    pthread_mutex_t lock; /* guards what follows, and op->state */
    pthread_cond_t work;
    struct list reads, writes, ended; /* of share_op.link */
    unsigned writers;
    bool stop;
};

static bool op_writes(const struct share_op *op)
{
    return op->verb == SHARE_WRITE || op->verb == SHARE_REMOVE;
}

/* Locked. */
static struct share_op *op_next(struct share_backend *b)
{
    struct list *node = list_pop_front(&b->reads);
    struct share_op *op;

    if (!node && b->writers < b->writers_max)
        node = list_pop_front(&b->writes);
    if (!node)
        return NULL;
    op = LIST_ENTRY(node, struct share_op, link);
    op->state = SHARE_OP_BUSY;
    b->writers += op_writes(op);
    return op;
}

/* Locked, but for the operation itself. */
static void op_run(struct share_backend *b, struct share_op *op)
{
    pthread_mutex_unlock(&b->lock);
    op->status = posix_file_run(b->root, &b->temp, op);
    pthread_mutex_lock(&b->lock);
    op->state = SHARE_OP_ENDED;
    list_push_back(&b->ended, &op->link);
    uv_async_send(&b->ended_async); /* locked: nobody can close it before this has returned */
    if (op_writes(op)) {
        b->writers--;
        pthread_cond_signal(&b->work);
    }
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
    free(b->threads);
    free(b->root);
    free(b);
}

static void closed_cb(uv_handle_t *handle)
{
    backend_free(handle->data);
}

static void one_gone(struct share_backend *b)
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
    for (struct list *node; (node = list_pop_front(&b->ended));)
        list_push_back(&ended, node);
    pthread_mutex_unlock(&b->lock);
    for (struct list *node; (node = list_pop_front(&ended));) {
        struct share_op *op = LIST_ENTRY(node, struct share_op, link);

        one_gone(b);
        op->done(op, op->status); /* the last one may close the backend */
    }
}

static int threads_begin(struct share_backend *b, unsigned depth)
{
    b->threads = calloc(depth, sizeof(*b->threads));
    if (!b->threads)
        return -ENOMEM;
    for (; b->n_threads < depth; b->n_threads++)
        if (pthread_create(&b->threads[b->n_threads], NULL, thread_main, b) != 0)
            break;
    return b->n_threads ? 0 : -EAGAIN;
}

static int posix_open(const struct share_backend_config *config, struct share_backend **out)
{
    struct share_backend *b;
    int err;

    if (config->target[0] != '/' || config->depth == 0)
        return -EINVAL;
    b = calloc(1, sizeof(*b));
    if (!b)
        return -ENOMEM;
    b->loop = config->loop;
    share_temp_init(&b->temp, config->host);
    list_init(&b->reads);
    list_init(&b->writes);
    list_init(&b->ended);
    pthread_mutex_init(&b->lock, NULL);
    pthread_cond_init(&b->work, NULL);
    b->writers_max = config->depth > 1 ? config->depth - (config->depth + 3) / 4 : 1;
    b->root = strdup(config->target);
    if (!b->root) {
        err = -ENOMEM;
        goto err_after_new;
    }
    err = uv_async_init(b->loop, &b->ended_async, ended_cb);
    if (err < 0)
        goto err_after_new;
    b->ended_async.data = b;
    uv_unref((uv_handle_t *)&b->ended_async);
    err = threads_begin(b, config->depth);
    if (err < 0)
        goto err_after_async;
    *out = b;
    return 0;

err_after_async:
    uv_close((uv_handle_t *)&b->ended_async, closed_cb);
    return err;
err_after_new:
    backend_free(b);
    return err;
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
    int err = op->verb == SHARE_CHECK ? 0 : share_op_place(op);

    if (b->under_way++ == 0)
        uv_ref((uv_handle_t *)&b->ended_async);
    op->backend = b;
    op->status = err;
    pthread_mutex_lock(&b->lock);
    op->state = err < 0 ? SHARE_OP_ENDED : SHARE_OP_QUEUED;
    list_push_back(err < 0 ? &b->ended : op_writes(op) ? &b->writes : &b->reads, &op->link);
    pthread_cond_signal(&b->work);
    pthread_mutex_unlock(&b->lock);
    if (err < 0)
        uv_async_send(&b->ended_async);
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
        one_gone(b);
    return queued;
}

const struct share_backend_ops share_posix = {
    .name = "posix",
    .open = posix_open,
    .close = posix_close,
    .start = posix_start,
    .cancel = posix_cancel,
};
