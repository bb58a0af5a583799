#include "daemon/retrieval/pool.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <uv.h>

#define THREADS_MAX 64

struct summary_pool {
    uv_async_t async;
    uv_mutex_t mutex;
    uv_cond_t cond; /* signalled with pieces, and with quit */
    /* Under the mutex. */
    struct list urgent;          /* struct summary_turns */
    struct summary_queue others; /* the queue of jobs that have none */
    unsigned urgent_in_a_row;
    unsigned slow, slow_most; /* slow pieces that run, and may */
    struct list done;
    bool quit;
    /* Loop only. */
    unsigned n_threads;
    uint32_t under_way;
    struct thread {
        struct summary_pool *pool;
        unsigned number;
        uv_thread_t thread;
    } threads[THREADS_MAX];
};

/* ---- threads; the mutex is held ---- */

/* The queue's first job whose pieces may run now, or NULL. */
static struct summary_job *job_of(const struct summary_pool *p, const struct summary_queue *queue)
{
    for (struct list *n = queue->jobs.next; n != &queue->jobs; n = n->next) {
        struct summary_job *job = LIST_ENTRY(n, struct summary_job, link);

        if (!job->slow || p->slow < p->slow_most)
            return job;
    }
    return NULL;
}

/* The first queue of the tenant with a job that may run, which goes to the end of the list; or
 * NULL. */
static struct summary_job *turns_take(const struct summary_pool *p, struct summary_turns *turns,
                                      struct summary_queue **queue)
{
    for (struct list *n = turns->queues.next; n != &turns->queues; n = n->next) {
        struct summary_queue *q = LIST_ENTRY(n, struct summary_queue, link);
        struct summary_job *job = job_of(p, q);

        if (!job)
            continue;
        list_remove(&q->link);
        list_push_back(&turns->queues, &q->link);
        *queue = q;
        return job;
    }
    return NULL;
}

/* The next job; NULL: no piece may run now. Its tenant, if it is urgent, goes to the end of the
 * list. */
static struct summary_job *job_take(struct summary_pool *p, struct summary_queue **queue)
{
    struct summary_job *other = job_of(p, &p->others), *job;

    *queue = &p->others;
    if (other && p->urgent_in_a_row >= POOL_OTHERS_TURN - 1) {
        p->urgent_in_a_row = 0;
        return other;
    }
    for (struct list *n = p->urgent.next; n != &p->urgent; n = n->next) {
        struct summary_turns *turns = LIST_ENTRY(n, struct summary_turns, link);

        job = turns_take(p, turns, queue);
        if (!job)
            continue;
        list_remove(&turns->link);
        list_push_back(&p->urgent, &turns->link);
        p->urgent_in_a_row++;
        return job;
    }
    p->urgent_in_a_row = 0;
    return other;
}

/* A job that has pieces left goes to the end of its queue. */
static struct summary_job *piece_take(struct summary_pool *p, uint32_t *piece)
{
    struct summary_queue *queue;
    struct summary_job *job = job_take(p, &queue);

    if (!job)
        return NULL;
    list_remove(&job->link);
    *piece = job->next++;
    p->slow += job->slow;
    if (job->next < job->pieces) {
        list_push_back(&queue->jobs, &job->link);
    } else if (queue->turns && list_empty(&queue->jobs)) {
        list_remove(&queue->link);
        if (list_empty(&queue->turns->queues))
            list_remove(&queue->turns->link);
    }
    return job;
}

static void phase_queue(struct summary_pool *p, struct summary_job *job, uint32_t pieces)
{
    struct summary_queue *queue;

    job->pieces = pieces;
    job->next = job->ended = 0;
    if (pieces == 0) {
        list_push_back(&p->done, &job->link);
        uv_async_send(&p->async);
        return;
    }
    queue = job->queue ? job->queue : &p->others;
    list_push_back(&queue->jobs, &job->link);
    if (queue->turns && list_empty(&queue->link))
        list_push_back(&queue->turns->queues, &queue->link);
    if (queue->turns && list_empty(&queue->turns->link))
        list_push_back(&p->urgent, &queue->turns->link);
    if (pieces > 1)
        uv_cond_broadcast(&p->cond);
    else
        uv_cond_signal(&p->cond);
}

static void piece_run(struct summary_pool *p, struct summary_job *job, uint32_t piece,
                      unsigned thread)
{
    uint32_t pieces = 0;
    bool slow = job->slow;

    uv_mutex_unlock(&p->mutex);
    if (!summary_job_stopped(job))
        job->run_cb(job, piece, thread);
    uv_mutex_lock(&p->mutex);
    if (slow && p->slow-- == p->slow_most)
        uv_cond_signal(&p->cond); /* another one may run */
    if (++job->ended < job->pieces)
        return;
    uv_mutex_unlock(&p->mutex);
    if (job->phase_cb && !summary_job_stopped(job))
        pieces = job->phase_cb(job);
    uv_mutex_lock(&p->mutex);
    phase_queue(p, job, pieces);
}

static void thread_cb(void *arg)
{
    struct thread *t = arg;
    struct summary_pool *p = t->pool;
    struct summary_job *job;
    uint32_t piece;

    uv_mutex_lock(&p->mutex);
    while (!p->quit) {
        job = piece_take(p, &piece);
        if (job)
            piece_run(p, job, piece, t->number);
        else
            uv_cond_wait(&p->cond, &p->mutex);
    }
    uv_mutex_unlock(&p->mutex);
}

/* ---- the event loop ---- */

static void async_cb(uv_async_t *async)
{
    struct summary_pool *p = async->data;
    struct list done, *node;

    list_init(&done);
    uv_mutex_lock(&p->mutex);
    while ((node = list_pop_front(&p->done)) != NULL)
        list_push_back(&done, node);
    uv_mutex_unlock(&p->mutex);
    while ((node = list_pop_front(&done)) != NULL) {
        struct summary_job *job = LIST_ENTRY(node, struct summary_job, link);

        p->under_way--;
        job->done_cb(job);
    }
}

static void closed_cb(uv_handle_t *handle)
{
    struct summary_pool *p = handle->data;

    uv_cond_destroy(&p->cond);
    uv_mutex_destroy(&p->mutex);
    free(p);
}

void summary_pool_free(struct summary_pool *p)
{
    if (!p)
        return;
    assert(p->under_way == 0);
    uv_mutex_lock(&p->mutex);
    p->quit = true;
    uv_cond_broadcast(&p->cond);
    uv_mutex_unlock(&p->mutex);
    for (unsigned i = 0; i < p->n_threads; i++)
        uv_thread_join(&p->threads[i].thread);
    uv_close((uv_handle_t *)&p->async, closed_cb);
}

static int locks_init(struct summary_pool *p)
{
    int rc = uv_mutex_init(&p->mutex);

    if (rc != 0)
        return rc;
    rc = uv_cond_init(&p->cond);
    if (rc != 0)
        uv_mutex_destroy(&p->mutex);
    return rc;
}

int summary_pool_new(uv_loop_t *loop, unsigned threads, struct summary_pool **out)
{
    struct summary_pool *p = calloc(1, sizeof(*p));
    int rc;

    if (!p)
        return -ENOMEM;
    list_init(&p->urgent);
    summary_queue_init(&p->others, NULL);
    list_init(&p->done);
    rc = locks_init(p);
    if (rc != 0) {
        free(p);
        return rc;
    }
    rc = uv_async_init(loop, &p->async, async_cb);
    if (rc != 0) {
        uv_cond_destroy(&p->cond);
        uv_mutex_destroy(&p->mutex);
        free(p);
        return rc;
    }
    p->async.data = p;
    threads = threads < 1 ? 1 : threads > THREADS_MAX ? THREADS_MAX : threads;
    p->slow_most = threads > 1 ? threads - 1 : 1;
    while (rc == 0 && p->n_threads < threads) {
        struct thread *t = &p->threads[p->n_threads];

        *t = (struct thread){.pool = p, .number = p->n_threads};
        rc = uv_thread_create(&t->thread, thread_cb, t);
        p->n_threads += rc == 0;
    }
    if (rc != 0) {
        summary_pool_free(p);
        return rc;
    }
    *out = p;
    return 0;
}

void summary_turns_init(struct summary_turns *turns)
{
    list_init(&turns->link);
    list_init(&turns->queues);
}

void summary_queue_init(struct summary_queue *queue, struct summary_turns *turns)
{
    queue->turns = turns;
    list_init(&queue->link);
    list_init(&queue->jobs);
}

unsigned summary_pool_threads(const struct summary_pool *p)
{
    return p->n_threads;
}

void summary_pool_submit(struct summary_pool *p, struct summary_job *job, uint32_t pieces)
{
    assert(pieces > 0);
    p->under_way++;
    atomic_store_explicit(&job->stop, false, memory_order_relaxed);
    list_init(&job->link);
    uv_mutex_lock(&p->mutex);
    phase_queue(p, job, pieces);
    uv_mutex_unlock(&p->mutex);
}

void summary_job_stop(struct summary_job *job)
{
    atomic_store_explicit(&job->stop, true, memory_order_relaxed);
}

bool summary_job_stopped(const struct summary_job *job)
{
    return atomic_load_explicit(&job->stop, memory_order_relaxed);
}
