/* Requests in threads. Whichever has nothing else to do receives: if all are busy, the next free
 * one finds the next request without a wakeup; a single request is received by the thread that
 * handles it. */
#include "daemon/backend/ucmbackend.h"

#include "proto/clock.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

/* A thread's stack: with the default, many threads would exceed a process's limit. */
#define STACK_BYTES (1u << 20)

struct serve {
    struct ucm_backend *b;
    void (*handle_cb)(void *ctx, struct ucm_backend *b, struct ucm_backend_request *r,
                      struct ucm_backend_result *result);
    void *ctx;
    pthread_mutex_t receive; /* its owner receives; guards rc */
    int rc;                  /* why it ends; 0 */
};

/* Waits for it. NULL: there is none any more. */
static struct ucm_backend_request *request_take(struct serve *s)
{
    struct ucm_backend_request *r = NULL;

    pthread_mutex_lock(&s->receive);
    if (s->rc == 0)
        s->rc = ucm_backend_wait(s->b, &r);
    pthread_mutex_unlock(&s->receive);
    return r;
}

static void *thread_main(void *arg)
{
    struct serve *s = arg;
    struct ucm_backend_request *r;

    while ((r = request_take(s)) != NULL) {
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

int ucm_backend_serve(const struct ucm_backend_about *about, unsigned threads,
                      void (*handle_cb)(void *ctx, struct ucm_backend *b,
                                        struct ucm_backend_request *r,
                                        struct ucm_backend_result *result),
                      void *ctx)
{
    struct serve s = {.handle_cb = handle_cb, .ctx = ctx};
    pthread_t *started = calloc(threads, sizeof(*started));
    pthread_attr_t attr;
    unsigned n = 0;
    int rc = started ? ucm_backend_open(about, &s.b) : -ENOMEM;

    if (rc < 0) {
        free(started);
        return rc;
    }
    pthread_mutex_init(&s.receive, NULL);
    (void)pthread_attr_init(&attr); /* neither fails here */
    (void)pthread_attr_setstacksize(&attr, STACK_BYTES);
    while (n < threads && pthread_create(&started[n], &attr, thread_main, &s) == 0)
        n++;
    (void)pthread_attr_destroy(&attr);
    for (unsigned i = 0; i < n; i++)
        pthread_join(started[i], NULL);
    rc = n > 0 ? s.rc : -EAGAIN;
    ucm_backend_close(s.b);
    pthread_mutex_destroy(&s.receive);
    free(started);
    return rc == -EPIPE ? 0 : rc; /* the daemon has ended */
}
