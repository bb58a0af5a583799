/* The module's interface. */
#include "daemon/cache/move.h"
#include "daemon/features.h"
#include "daemon/retrieval/copier.h"
#include "daemon/retrieval/summary.h"

#include <errno.h>

/* Sequences take up to this fraction of limits.frame_memory, so that requests find some. */
#define SEQUENCES_FRACTION 2

static int open_cb(struct requests *rq)
{
    uint64_t arena = arena_bytes_configured(rq->modules.arena);
    struct limits *l = rq->modules.limits;
    struct retrieval *of = retrieval_of(rq);
    int rc;

    limits_set(l, LIMIT_SEQUENCES, rq->modules.config->max_frame_memory / SEQUENCES_FRACTION);
    limits_set(l, LIMIT_SUMMARIES, arena / TENANT_HELD_FRACTION);
    limits_set(l, LIMIT_BUILDS, DERIVED_BUILDS_MAX);
    limits_set(l, LIMIT_BUILDS_WAITING, SUMMARY_PUBLISHED_MAX);
    of->rq = rq;
    list_init(&of->users);
    derived_init(rq);
    rc = summaries_init(rq);
    if (rc == 0)
        rc = summary_pool_new(rq->modules.loop, rq->modules.config->cpu_threads, &of->pool);
    if (rc == 0)
        cache_copier_attach(rq->modules.cache, copier_copy, of->pool);
    return rc;
}

static uint32_t active_cb(const struct requests *rq)
{
    return (uint32_t)limits_used(rq->modules.limits, LIMIT_BUILDS);
}

static void close_cb(struct requests *rq)
{
    summaries_close(rq);
    derived_close(rq);
    cache_copier_attach(rq->modules.cache, NULL, NULL); /* which outlives the pool */
    summary_pool_free(retrieval_of(rq)->pool);
}

static int session_open_cb(struct session *s)
{
    struct session_retrieval *of = session_retrieval(s);

    table_init(&of->sequences, SESSION_MAX_SEQUENCES);
    list_init(&of->spaces);
    of->user = user_ref(s->rq, &s->peer);
    return of->user ? 0 : -ENOMEM;
}

static void session_close_cb(struct session *s)
{
    spaces_close_all(s);
    table_close(&session_retrieval(s)->sequences);
    user_unref(session_retrieval(s)->user);
}

const struct feature retrieval_feature = {.requests_bytes = sizeof(struct retrieval),
                                          .session_bytes = sizeof(struct session_retrieval),
                                          .open_cb = open_cb,
                                          .drain_cb = summaries_drop,
                                          .stop_cb = derived_stop,
                                          .active_cb = active_cb,
                                          .close_cb = close_cb,
                                          .session_open_cb = session_open_cb,
                                          .session_end_cb = sequences_close_all,
                                          .session_close_cb = session_close_cb};
