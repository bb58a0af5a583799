/* Lanes by tenant; each has a FIFO and at most one thread that works on it. `due` lists the lanes
 * that wait for a thread, in turns. What is closed goes to `done`, and the event loop gives back
 * its limits. */
#include "daemon/base/reaper.h"

#include "daemon/base/closer.h"
#include "daemon/base/detached.h"
#include "daemon/base/list.h"
#include "daemon/base/log.h"
#include "daemon/base/rights.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

struct job {
    struct list link;
    struct limit_owner *owner;
    int fd;
    bool refused;
};

struct lane {
    struct list jobs;
    struct list link; /* in `due` */
    bool busy;        /* a thread closes one of it */
};

/* What threads know. The event loop and each thread have a reference. */
struct reaper_shared {
    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t work_cond, end_cond;
    struct list due, closing, done; /* lanes; jobs; jobs */
    struct lane lanes[REAPER_LANES];
    struct reaper *reaper; /* NULL: the owner is gone, and is not notified */
    unsigned threads;
    unsigned idle;  /* threads that wait, or begin */
    unsigned n_due; /* lanes in `due` */
    bool quit;
    bool left; /* the last thread frees this */
};

struct reaper {
    uv_async_t async;
    struct reaper_shared *shared;
    uint32_t waiting, refused; /* of `waiting` */
    bool closed;               /* its handle */
};

static void reaper_shared_free(struct reaper_shared *s)
{
    pthread_cond_destroy(&s->end_cond);
    pthread_cond_destroy(&s->work_cond);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

/* ---- threads; called with the lock ---- */

static void *thread_main(void *arg);

static int thread_start(struct reaper_shared *s)
{
    int rc = detached_start(DETACHED_STACK_BYTES, thread_main, s);

    s->threads += rc == 0;
    s->idle += rc == 0;
    return rc;
}

static void lane_due(struct reaper_shared *s, struct lane *lane)
{
    if (lane->busy || list_empty(&lane->jobs) || !list_empty(&lane->link))
        return;
    list_push_back(&s->due, &lane->link);
    s->n_due++;
}

static struct lane *lane_next(struct reaper_shared *s)
{
    struct list *node = list_pop_front(&s->due);

    if (!node)
        return NULL;
    s->n_due--;
    return LIST_ENTRY(node, struct lane, link);
}

/* A thread for each lane that is due, as long as there may be more: any of those that close may do
 * so for ever. */
static void threads_suit(struct reaper_shared *s)
{
    if (s->n_due > s->idle && thread_start(s) != 0)
        log_warn("reaper", "no-thread", "threads=%u", s->threads); /* it waits for another one */
    if (s->n_due > 0)
        pthread_cond_signal(&s->work_cond);
}

static void lane_serve(struct reaper_shared *s, struct lane *lane, struct closer *closer)
{
    struct job *job = LIST_ENTRY(list_pop_front(&lane->jobs), struct job, link);

    lane->busy = true;
    list_push_back(&s->closing, &job->link);
    threads_suit(s);
    pthread_mutex_unlock(&s->lock);
    closer_close(closer, job->fd);
    pthread_mutex_lock(&s->lock);
    list_remove(&job->link);
    lane->busy = false;
    lane_due(s, lane);
    if (!s->reaper) { /* reaper_free has given back what it counted */
        free(job);
        return;
    }
    list_push_back(&s->done, &job->link);
    if (!s->reaper->closed)
        uv_async_send(&s->reaper->async);
}

static void *thread_main(void *arg)
{
    struct reaper_shared *s = arg;
    struct closer closer;
    bool last;

    closer_init(&closer);
    pthread_mutex_lock(&s->lock);
    s->idle--;
    for (;;) {
        struct lane *lane = lane_next(s);

        if (lane) {
            lane_serve(s, lane, &closer);
        } else if (s->quit) {
            break;
        } else {
            s->idle++;
            pthread_cond_wait(&s->work_cond, &s->lock);
            s->idle--;
        }
    }
    s->threads--;
    pthread_cond_signal(&s->end_cond);
    last = s->left && s->threads == 0;
    pthread_mutex_unlock(&s->lock);
    closer_end(&closer);
    if (last)
        reaper_shared_free(s);
    return NULL;
}

/* ---- the event loop ---- */

static void job_end(struct reaper *r, struct job *job)
{
    if (job->owner && !job->refused)
        limit_give(job->owner, LIMIT_DESCRIPTORS, 1);
    if (job->owner)
        limit_owner_unref(job->owner);
    r->refused -= job->refused;
    r->waiting--;
}

static void done_end(struct reaper *r, struct list *done)
{
    struct list *node;

    while ((node = list_pop_front(done)) != NULL) {
        job_end(r, LIST_ENTRY(node, struct job, link));
        free(LIST_ENTRY(node, struct job, link));
    }
}

static void async_cb(uv_async_t *async)
{
    struct reaper *r = async->data;
    struct list done;

    list_init(&done);
    pthread_mutex_lock(&r->shared->lock);
    list_splice_front(&done, &r->shared->done);
    pthread_mutex_unlock(&r->shared->lock);
    done_end(r, &done);
}

static struct reaper_shared *reaper_shared_new(void)
{
    struct reaper_shared *s = calloc(1, sizeof(*s));

    if (!s)
        return NULL;
    s->lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    s->work_cond = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    s->end_cond = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    list_init(&s->due);
    list_init(&s->closing);
    list_init(&s->done);
    for (unsigned i = 0; i < REAPER_LANES; i++) {
        list_init(&s->lanes[i].jobs);
        list_init(&s->lanes[i].link);
    }
    return s;
}

int reaper_new(uv_loop_t *loop, struct reaper **out)
{
    struct reaper *r = calloc(1, sizeof(*r));
    int rc;

    if (!r)
        return -ENOMEM;
    r->shared = reaper_shared_new();
    if (!r->shared) {
        free(r);
        return -ENOMEM;
    }
    r->shared->reaper = r;
    rc = uv_async_init(loop, &r->async, async_cb);
    if (rc == 0) {
        pthread_mutex_lock(&r->shared->lock);
        rc = thread_start(r->shared); /* the first one: without any nothing would be closed */
        pthread_mutex_unlock(&r->shared->lock);
    }
    if (rc != 0) {
        /* The event loop of a daemon that does not start is not run, nor freed. */
        reaper_shared_free(r->shared);
        return rc;
    }
    r->async.data = r;
    uv_unref((uv_handle_t *)&r->async);
    *out = r;
    return 0;
}

static void job_begin(struct reaper *r, int fd, struct limit_owner *owner, bool refused)
{
    struct reaper_shared *s = r->shared;
    struct lane *lane = &s->lanes[owner ? limit_number(owner) % REAPER_LANES : 0];
    struct job *job = malloc(sizeof(*job));

    if (!job) { /* the lesser evil: it may wait, but mostly does not */
        close(fd);
        if (owner && !refused)
            limit_give(owner, LIMIT_DESCRIPTORS, 1);
        return;
    }
    job->fd = fd;
    job->owner = owner ? limit_owner_ref(owner) : NULL;
    job->refused = refused;
    r->refused += refused;
    r->waiting++;
    pthread_mutex_lock(&s->lock);
    list_push_back(&lane->jobs, &job->link);
    lane_due(s, lane);
    threads_suit(s);
    pthread_mutex_unlock(&s->lock);
}

void reaper_close(struct reaper *r, int fd, struct limit_owner *owner)
{
    job_begin(r, fd, owner, false);
}

void reaper_close_socket(struct reaper *r, int fd, struct limit_owner *owner)
{
    if (!rights_end(fd)) {
        reaper_close(r, fd, owner);
        return;
    }
    close(fd);
    limit_give(owner, LIMIT_DESCRIPTORS, 1);
}

void reaper_close_refused(struct reaper *r, int fd, struct limit_owner *owner)
{
    job_begin(r, fd, owner, true);
}

uint32_t reaper_waiting(const struct reaper *r)
{
    return r->waiting;
}

uint32_t reaper_refused(const struct reaper *r)
{
    return r->refused;
}

void reaper_stop(struct reaper *r)
{
    pthread_mutex_lock(&r->shared->lock);
    r->closed = true;
    pthread_mutex_unlock(&r->shared->lock);
    uv_close((uv_handle_t *)&r->async, NULL);
}

/* Waits until all threads have ended; false: some still close. */
static bool threads_await(struct reaper_shared *s)
{
    struct timespec until;
    int rc = 0;

    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += REAPER_STOP_MS / 1000;
    while (s->threads > 0 && rc == 0)
        rc = pthread_cond_clockwait(&s->end_cond, &s->lock, CLOCK_MONOTONIC, &until);
    return s->threads == 0;
}

/* What hangs, and what waits behind it: the process ends, and its descriptors with it. */
static void give_up(struct reaper *r, struct reaper_shared *s)
{
    struct list *node;

    for (unsigned i = 0; i < REAPER_LANES; i++)
        while ((node = list_pop_front(&s->lanes[i].jobs)) != NULL)
            list_push_back(&s->done, node);
    while (lane_next(s)) {
        /* nothing is left in it */
    }
    while ((node = list_pop_front(&s->closing)) != NULL)
        job_end(r, LIST_ENTRY(node, struct job, link)); /* its thread frees it */
}

void reaper_free(struct reaper *r)
{
    struct reaper_shared *s = r ? r->shared : NULL;
    bool ended;

    if (!r)
        return;
    pthread_mutex_lock(&s->lock);
    s->quit = true;
    pthread_cond_broadcast(&s->work_cond);
    ended = threads_await(s);
    if (!ended)
        give_up(r, s);
    done_end(r, &s->done);
    s->left = !ended;
    s->reaper = NULL;
    pthread_mutex_unlock(&s->lock);
    if (ended)
        reaper_shared_free(s);
    free(r);
}
