/* The interface of mappings, mapping.close among it: the end of a mapping stops what still works on
 * it. */
#include "daemon/mapping/mapping.h"

#include <stdlib.h>

/* ---- the end of a mapping ---- */

/* Nobody finds it any more. Its references end when the requests that use it have. */
static void mapping_end(struct mapping *w)
{
    w->closing = true;
    table_remove(&session_mappings(w->s)->all, w->number);
    w->requests++;
    ref_requests_stop(w->s, w, NULL);
    mapping_unref(w);
}

static bool session_end_cb(struct session *s)
{
    uint32_t number, ended = 0;

    session_mappings(s)->ending = true;
    while (ended < 16 && (number = table_next(&session_mappings(s)->all, 0)) != 0) {
        mapping_end(table_get(&session_mappings(s)->all, number));
        ended++;
    }
    session_mappings(s)->ending = false;
    if (table_count(&session_mappings(s)->all) > 0)
        (void)cache_wait_for(s->rq->modules.cache, &s->retry, WAIT_TURN);
    return session_mappings(s)->n == 0;
}

static void close_stop_cb(struct request *r)
{
    (void)r; /* it ends soon */
}

int method_mapping_close(struct call *call)
{
    struct mapping *w = call_mapping(call, call->params.mapping.mapping);

    if (!w)
        return -call->error.code;
    call->gives_back = true;
    w->close = request_new(call, sizeof(*w->close), 0, 0, close_stop_cb);
    if (!w->close)
        return -call->error.code;
    mapping_end(w);
    return 0;
}

/* ---- of the daemon ---- */

static void changed_cb(void *ctx)
{
    mapping_slots_changed(&mappings_at(ctx)->relocations);
}

static int open_cb(struct requests *rq)
{
    struct mappings *ws = mappings_at(rq);

    ws->rq = rq;
    list_init(&ws->all);
    list_init(&ws->tenants);
    list_init(&ws->refs);
    list_init(&ws->sweeper.link);
    ws->sweeper.retry_cb = refs_sweep_cb;
    refs_init(rq);
    if (!rq->modules.arena)
        return 0;
    ws->relocations = (struct relocations){.cache = rq->modules.cache,
                                           .arena = rq->modules.arena,
                                           .index = rq->modules.index,
                                           .metrics = rq->modules.metrics};
    relocations_open(&ws->relocations);
    grant_watch(rq->modules.arena, &(struct grant_watcher){mapping_revoke_cb, changed_cb, rq});
    return 0;
}

static void close_cb(struct requests *rq)
{
    cache_retry_cancel(&mappings_at(rq)->sweeper);
    if (mappings_at(rq)->relocations.arena) {
        grant_watch(rq->modules.arena, NULL);
        relocations_close(&mappings_at(rq)->relocations);
    }
    free(mappings_at(rq)->slabs);
}

static int session_open_cb(struct session *s)
{
    table_init(&session_mappings(s)->all, SESSION_MAX_MAPPINGS);
    return 0;
}

static void session_close_cb(struct session *s)
{
    table_close(&session_mappings(s)->all);
}

static void observe_cb(struct requests *rq, struct exposition *x)
{
    const struct arena *a = rq->modules.arena;

    x->metrics.mapping_bytes = grant_bytes(a, NULL) + grant_kept_bytes(a, NULL);
    x->metrics.mapping_bytes_configured = grant_budget(a);
}

const struct feature mappings_feature = {.requests_bytes = sizeof(struct mappings),
                                         .session_bytes = sizeof(struct session_mappings),
                                         .open_cb = open_cb,
                                         .observe_cb = observe_cb,
                                         .reload_cb = mappings_reload,
                                         .close_cb = close_cb,
                                         .session_open_cb = session_open_cb,
                                         .session_end_cb = session_end_cb,
                                         .session_close_cb = session_close_cb};
