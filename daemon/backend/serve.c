/* Requests in threads. */
#include "daemon/backend/ucmbackend.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

/* The daemon has no more requests under way than the depth, so the ring never overflows. */
#define RING 2048u

struct serve {
    struct ucm_backend *b;
    void (*handle_cb)(void *ctx, struct ucm_backend *b, struct ucm_backend_request *r,
                      struct ucm_backend_result *result);
    void *ctx;
    pthread_mutex_t lock;
    pthread_cond_t more;
    struct ucm_backend_request *ring[RING];
    unsigned at, n;
    bool stop;
};

static uint64_t clock_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* NULL: it stops. */
static struct ucm_backend_request *ring_take(struct serve *s)
{
    struct ucm_backend_request *r = NULL;

    pthread_mutex_lock(&s->lock);
    while (s->n == 0 && !s->stop)
        pthread_cond_wait(&s->more, &s->lock);
    if (!s->stop) {
        r = s->ring[s->at];
        s->at = (s->at + 1) % RING;
        s->n--;
    }
    pthread_mutex_unlock(&s->lock);
    return r;
}

static bool ring_put(struct serve *s, struct ucm_backend_request *r)
{
    bool room;

    pthread_mutex_lock(&s->lock);
    room = s->n < RING;
    if (room) {
        s->ring[(s->at + s->n++) % RING] = r;
        pthread_cond_signal(&s->more);
    }
    pthread_mutex_unlock(&s->lock);
    return room;
}

static void *thread_main(void *arg)
{
    struct serve *s = arg;
    struct ucm_backend_request *r;

    while ((r = ring_take(s)) != NULL) {
        struct ucm_backend_result result = {.status = WIRE_TIMEOUT};

        if (clock_ms() < r->until_ms) {
            result.status = WIRE_OK;
            s->handle_cb(s->ctx, s->b, r, &result);
        }
        if (ucm_backend_answer(s->b, r, &result) < 0 || ucm_backend_flush(s->b) < 0)
            break;
    }
    return NULL;
}

/* Until the daemon is gone. */
static int requests_take(struct serve *s)
{
    struct pollfd p = {.fd = ucm_backend_fd(s->b), .events = POLLIN};
    struct ucm_backend_request *r;
    int rc;

    for (;;) {
        rc = ucm_backend_next(s->b, &r);
        if (rc == -EAGAIN)
            (void)poll(&p, 1, -1);
        else if (rc < 0)
            return rc;
        else if (!ring_put(s, r))
            return -EPROTO;
    }
}

static void serve_end(struct serve *s, pthread_t *threads, unsigned n)
{
    pthread_mutex_lock(&s->lock);
    s->stop = true;
    pthread_cond_broadcast(&s->more);
    pthread_mutex_unlock(&s->lock);
    for (unsigned i = 0; i < n; i++)
        pthread_join(threads[i], NULL);
    for (; s->n > 0; s->n--) {
        struct ucm_backend_result gone = {.status = WIRE_FAILED};

        (void)ucm_backend_answer(s->b, s->ring[s->at], &gone); /* frees it */
        s->at = (s->at + 1) % RING;
    }
}

int ucm_backend_serve(const struct ucm_backend_about *about, unsigned threads,
                      void (*handle_cb)(void *ctx, struct ucm_backend *b,
                                        struct ucm_backend_request *r,
                                        struct ucm_backend_result *result),
                      void *ctx)
{
    struct serve *s = calloc(1, sizeof(*s));
    pthread_t *started = calloc(threads, sizeof(*started));
    unsigned n = 0;
    int rc = s && started ? ucm_backend_open(about, &s->b) : -ENOMEM;

    if (rc < 0)
        goto out;
    s->handle_cb = handle_cb;
    s->ctx = ctx;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->more, NULL);
    while (n < threads && pthread_create(&started[n], NULL, thread_main, s) == 0)
        n++;
    rc = n > 0 ? requests_take(s) : -EAGAIN;
    serve_end(s, started, n);
    ucm_backend_close(s->b);
    pthread_cond_destroy(&s->more);
    pthread_mutex_destroy(&s->lock);
    if (rc == -EPIPE)
        rc = 0; /* the daemon has ended */
out:
    free(started);
    free(s);
    return rc;
}
