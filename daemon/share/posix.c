/* The posix backend: block files below a folder of a mounted file system, in threads that run one
 * operation each. They are not libuv's: a mount that hangs holds its thread for as long as it likes,
 * and checksums must go on meanwhile. The root decides which operation begins when, and has `depth`
 * of them under way at most, so each finds a thread free; one more thread is for its health check. */
#include "daemon/backend/folder.h"
#include "daemon/share/backend.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* A file's header moves its payload off every alignment: between them lies so much. A file system that is far away wants as much at a
 * time. */
#define BOUNCE_BYTES ((size_t)1 << 20)

#define LIST_ATTEMPTS 3u /* of a bucket that another host removes and makes anew */

struct share_backend {
    uv_loop_t *loop;
    uv_async_t ended_async;
    char *root;
    struct share_temp temp;
    unsigned under_way; /* operations whose done_cb has not run; the loop's */
    pthread_t *threads;
    unsigned n_threads;
    uint8_t *bounces; /* BOUNCE_BYTES of each thread */
    size_t bounces_bytes;

    pthread_mutex_t lock; /* guards what follows, and op->state */
    pthread_cond_t work;
    struct list queued, ended; /* of share_op.link */
    bool stop;
    unsigned begun; /* threads */
};

/* ---- one operation ---- */

struct writing {
    struct share_op *op;
    const struct share_temp *temps;
};

static void begin_cb(void *ctx)
{
    const struct writing *w = ctx;

    share_op_seal(w->op);
    share_temp_next(w->temps, w->op->temp);
}

static int add_cb(void *ctx, const char *name, uint64_t bytes, uint64_t mtime_ns)
{
    struct share_listing *l = ctx;
    int err = share_listing_add(l, name, bytes, mtime_ns);

    return err < 0 ? err : l->cut;
}

static int list(const char *root, const char *bucket, struct share_op *op)
{
    struct share_listing found = {0};
    struct folder_listing l = {.root = root,
                               .bucket = bucket,
                               .wants_cb = share_listing_wants,
                               .add_cb = add_cb,
                               .ctx = &found};
    int rc = -ESTALE;

    for (unsigned i = 0; i < LIST_ATTEMPTS && rc == -ESTALE; i++) {
        share_listing_free(&found);
        l.unread = 0;
        rc = folder_list(&l);
    }
    if (rc >= 0)
        rc = l.unread > SHARE_LISTING_UNREAD ? -EIO : 0;
    found.unread = l.unread;
    op->listing = found;
    if (rc < 0)
        share_listing_free(&op->listing);
    return rc;
}

static int check(struct folder_file *f, const struct share_temp *temps, struct share_op *op)
{
    int err;

    share_temp_next(temps, op->temp);
    err = folder_check(f);
    op->now_ns = f->mtime_ns;
    return err;
}

static int read_file(struct folder_file *f, struct share_op *op)
{
    int err = folder_read(f);

    if (err == 0)
        err = share_op_verify(op);
    if (err == 0)
        op->mtime_ns = f->mtime_ns;
    return err;
}

/* By blocking calls. After share_op_resolve; bounce: the thread's own. Returns the status for
 * op->done_cb. */
static int op_do(const char *root, const struct share_temp *temps,
                 const struct uncached_bounce *bounce, struct share_op *op)
{
    /* The header, or header and seal; the payload. */
    struct iovec pieces[2] = {{.iov_base = op->header, .iov_len = share_op_head_bytes(op)},
                              {.iov_base = op->data, .iov_len = op->bytes}};
    struct writing writing = {op, temps};
    char bucket[] = "blocks/00";
    struct folder_file f = {.root = root,
                            .bucket = bucket,
                            .name = op->name,
                            .temp = op->temp,
                            .bytes = share_op_file_bytes(op),
                            .pieces = pieces,
                            .n = 2,
                            .bounce = bounce,
                            .sync = op->sync,
                            .begin_cb = begin_cb,
                            .ctx = &writing};

    snprintf(bucket, sizeof(bucket), "blocks/%02x", op->bucket);
    switch (op->verb) {
    case SHARE_FIND:
        return folder_find(&f);
    case SHARE_READ:
        return read_file(&f, op);
    case SHARE_WRITE:
        return folder_write(&f);
    case SHARE_REMOVE:
        return folder_remove(&f);
    case SHARE_TOUCH:
        return folder_touch(&f);
    case SHARE_LIST:
        return list(root, bucket, op);
    default:
        return check(&f, temps, op);
    }
}

/* ---- threads ---- */

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
static void op_run(struct share_backend *b, const struct uncached_bounce *bounce,
                   struct share_op *op)
{
    int status;

    op->state = SHARE_OP_BUSY;
    pthread_mutex_unlock(&b->lock);
    status = op_do(b->root, &b->temp, bounce, op);
    pthread_mutex_lock(&b->lock);
    op_ended(b, op, status);
}

static void *thread_main(void *arg)
{
    struct share_backend *b = arg;
    struct uncached_bounce bounce = {.bytes = BOUNCE_BYTES};

    pthread_mutex_lock(&b->lock);
    bounce.memory = b->bounces + BOUNCE_BYTES * b->begun++;
    while (!b->stop) {
        struct list *node = list_pop_front(&b->queued);

        if (node)
            op_run(b, &bounce, LIST_ENTRY(node, struct share_op, link));
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
    if (b->bounces)
        munmap(b->bounces, b->bounces_bytes);
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

static int threads_begin(struct share_backend *b, unsigned n)
{
    void *bounces = mmap(NULL, n * BOUNCE_BYTES, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    b->threads = calloc(n, sizeof(*b->threads));
    if (bounces != MAP_FAILED) {
        b->bounces = bounces;
        b->bounces_bytes = n * BOUNCE_BYTES;
        (void)madvise(bounces, b->bounces_bytes, MADV_DONTDUMP); /* blocks, as they are */
    }
    if (!b->threads || !b->bounces)
        return -ENOMEM;
    for (; b->n_threads < n; b->n_threads++)
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
    share_temp_init(&b->temp, config->host);
    list_init(&b->queued);
    list_init(&b->ended);
    pthread_mutex_init(&b->lock, NULL);
    pthread_cond_init(&b->work, NULL);
    return b;
}

static int posix_open(const struct share_backend_config *config, struct share_backend **out)
{
    struct share_backend *b;
    int err;

    if (config->target[0] != '/')
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
    err = threads_begin(b, config->depth + 1);
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
    int err = share_op_resolve(op);

    if (b->under_way++ == 0)
        uv_ref((uv_handle_t *)&b->ended_async);
    pthread_mutex_lock(&b->lock);
    if (err < 0) {
        op_ended(b, op, err);
    } else {
        op->state = SHARE_OP_QUEUED;
        list_push_back(&b->queued, &op->link);
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
