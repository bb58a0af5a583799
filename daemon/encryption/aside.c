#include "daemon/encryption/aside.h"

#include "daemon/base/detached.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

/* What the thread knows. It and the struct aside have a reference each. */
struct aside_work {
    pthread_mutex_t lock; /* guards the next four */
    pthread_cond_t ended_cond;
    struct aside_watch *watch; /* NULL: nobody waits */
    bool ended;
    unsigned references;
    struct aside_call call;
    void *job; /* the thread's until it has ended; then whose it is `watch` says */
};

/* The event loop's handles: they outlive the struct aside while they close. */
struct aside_watch {
    uv_async_t async;
    uv_timer_t timer;
    unsigned handles;
    struct aside *owner;
    void *ctx;
};

static void work_unref(struct aside_work *w)
{
    bool last;

    pthread_mutex_lock(&w->lock);
    last = --w->references == 0;
    pthread_mutex_unlock(&w->lock);
    if (!last)
        return;
    pthread_cond_destroy(&w->ended_cond);
    pthread_mutex_destroy(&w->lock);
    free(w);
}

static void *thread_main(void *arg)
{
    struct aside_work *w = arg;
    bool left;

    w->call.run_cb(w->job);
    pthread_mutex_lock(&w->lock);
    left = !w->watch;
    w->ended = true;
    if (w->watch)
        uv_async_send(&w->watch->async); /* locked: it is not closed meanwhile */
    pthread_cond_signal(&w->ended_cond);
    pthread_mutex_unlock(&w->lock);
    if (left)
        w->call.free_cb(w->job);
    work_unref(w);
    return NULL;
}

static void closed_cb(uv_handle_t *handle)
{
    struct aside_watch *watch = handle->data;

    if (--watch->handles == 0)
        free(watch);
}

static void watch_close(struct aside_watch *watch)
{
    uv_close((uv_handle_t *)&watch->async, closed_cb);
    uv_close((uv_handle_t *)&watch->timer, closed_cb);
}

/* status: of a call that has not returned. */
static void end(struct aside *a, int status)
{
    struct aside_watch *watch = a->watch;
    struct aside_work *w = a->work;
    void *ctx = watch->ctx;
    bool ended;

    pthread_mutex_lock(&w->lock);
    ended = w->ended;
    w->watch = NULL;
    pthread_mutex_unlock(&w->lock);
    a->watch = NULL;
    watch_close(watch);
    if (!ended) {
        w->call.ended_cb(ctx, NULL, status);
        return;
    }
    a->work = NULL;
    w->call.ended_cb(ctx, w->job, 0);
    w->call.free_cb(w->job);
    work_unref(w);
}

static void async_cb(uv_async_t *async)
{
    struct aside_watch *watch = async->data;

    end(watch->owner, 0);
}

static void timer_cb(uv_timer_t *timer)
{
    struct aside_watch *watch = timer->data;

    end(watch->owner, -ETIMEDOUT);
}

static struct aside_watch *watch_new(uv_loop_t *loop, struct aside *a, void *ctx)
{
    struct aside_watch *watch = calloc(1, sizeof(*watch));

    if (!watch)
        return NULL;
    watch->owner = a;
    watch->ctx = ctx;
    watch->async.data = watch->timer.data = watch;
    if (uv_async_init(loop, &watch->async, async_cb) < 0) {
        free(watch);
        return NULL;
    }
    (void)uv_timer_init(loop, &watch->timer); /* can't fail */
    watch->handles = 2;
    return watch;
}

static struct aside_work *work_new(const struct aside_call *call, void *job)
{
    struct aside_work *w = calloc(1, sizeof(*w));

    if (!w)
        return NULL;
    w->lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    w->ended_cond = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    w->references = 2;
    w->call = *call;
    w->job = job;
    return w;
}

static bool hangs(struct aside *a)
{
    bool ended;

    if (!a->work)
        return false;
    pthread_mutex_lock(&a->work->lock);
    ended = a->work->ended;
    pthread_mutex_unlock(&a->work->lock);
    if (!ended)
        return true;
    work_unref(a->work);
    a->work = NULL;
    return false;
}

int aside_start(struct aside *a, uv_loop_t *loop, const struct aside_call *call, void *ctx,
                void *job, uint64_t timeout_ms)
{
    struct aside_work *w;
    int rc = -ENOMEM;

    assert(!a->watch);
    if (hangs(a))
        return -EBUSY;
    w = work_new(call, job);
    a->watch = w ? watch_new(loop, a, ctx) : NULL;
    if (a->watch) {
        w->watch = a->watch;
        rc = detached_start(0, thread_main, w) == 0 ? 0 : -EAGAIN;
    }
    if (rc == 0) {
        a->work = w;
        (void)uv_timer_start(&a->watch->timer, timer_cb, timeout_ms, 0);
        return 0;
    }
    if (a->watch)
        watch_close(a->watch);
    a->watch = NULL;
    if (w) {
        w->references = 1;
        work_unref(w);
    }
    return rc;
}

void aside_wait(struct aside *a, uint64_t ms)
{
    struct timespec until;
    bool ended;
    int rc = 0;

    if (!a->watch)
        return;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)(ms / 1000);
    until.tv_nsec += (long)(ms % 1000) * 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    pthread_mutex_lock(&a->work->lock);
    while (!a->work->ended && rc == 0)
        rc = pthread_cond_clockwait(&a->work->ended_cond, &a->work->lock, CLOCK_MONOTONIC, &until);
    ended = a->work->ended;
    pthread_mutex_unlock(&a->work->lock);
    if (ended)
        end(a, 0);
}

void aside_stop(struct aside *a)
{
    if (a->watch)
        end(a, -ECANCELED);
    if (a->work)
        work_unref(a->work);
    a->work = NULL;
}
