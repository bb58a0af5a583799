/* The door of windows, window.close among it: the end of a window stops what still works on it. */
#include "daemon/window/window.h"

#include <stdlib.h>

/* ---- the end of a window ---- */

/* Nobody finds it any more. Its pins end when the requests that use it have. */
static void window_end(struct window *w)
{
    w->closing = true;
    table_remove(&session_windows(w->s)->all, w->number);
    w->requests++;
    pin_requests_stop(w->s, w, NULL);
    window_unref(w);
}

static bool session_end_cb(struct session *s)
{
    uint32_t number, ended = 0;

    session_windows(s)->ending = true;
    while (ended < 16 && (number = table_next(&session_windows(s)->all, 0)) != 0) {
        window_end(table_get(&session_windows(s)->all, number));
        ended++;
    }
    session_windows(s)->ending = false;
    if (table_count(&session_windows(s)->all) > 0)
        (void)cache_wait_for(s->rq->modules.cache, &s->retry, WAIT_TURN);
    return session_windows(s)->n == 0;
}

static void close_stop_cb(struct request *r)
{
    (void)r; /* it ends soon */
}

int method_window_close(struct call *call)
{
    struct window *w = call_window(call, call->params.window.window);

    if (!w)
        return -call->error.code;
    call->gives_back = true;
    w->close = request_new(call, sizeof(*w->close), 0, 0, close_stop_cb);
    if (!w->close)
        return -call->error.code;
    window_end(w);
    return 0;
}

/* ---- of the daemon ---- */

static void changed_cb(void *ctx)
{
    window_slots_changed(&windows_at(ctx)->relocations);
}

static int open_cb(struct requests *rq)
{
    struct windows *ws = windows_at(rq);

    ws->rq = rq;
    list_init(&ws->all);
    list_init(&ws->tenants);
    list_init(&ws->pins);
    list_init(&ws->sweeper.link);
    ws->sweeper.retry_cb = pins_sweep_cb;
    pins_init(rq);
    if (!rq->modules.arena)
        return 0;
    ws->relocations = (struct relocations){.cache = rq->modules.cache,
                                           .arena = rq->modules.arena,
                                           .index = rq->modules.index,
                                           .metrics = rq->modules.metrics};
    relocations_open(&ws->relocations);
    grant_watch(rq->modules.arena, &(struct grant_watcher){window_revoke_cb, changed_cb, rq});
    return 0;
}

static void close_cb(struct requests *rq)
{
    cache_retry_cancel(&windows_at(rq)->sweeper);
    if (windows_at(rq)->relocations.arena) {
        grant_watch(rq->modules.arena, NULL);
        relocations_close(&windows_at(rq)->relocations);
    }
    free(windows_at(rq)->slabs);
}

static int session_open_cb(struct session *s)
{
    table_init(&session_windows(s)->all, SESSION_MAX_WINDOWS);
    return 0;
}

static void session_close_cb(struct session *s)
{
    table_close(&session_windows(s)->all);
}

static void observe_cb(struct requests *rq, struct exposition *x)
{
    const struct arena *a = rq->modules.arena;

    x->metrics.window_bytes = grant_bytes(a, NULL) + grant_kept_bytes(a, NULL);
    x->metrics.window_bytes_configured = grant_budget(a);
}

const struct feature windows_feature = {.requests_bytes = sizeof(struct windows),
                                        .session_bytes = sizeof(struct session_windows),
                                        .open_cb = open_cb,
                                        .observe_cb = observe_cb,
                                        .reload_cb = windows_reload,
                                        .close_cb = close_cb,
                                        .session_open_cb = session_open_cb,
                                        .session_end_cb = session_end_cb,
                                        .session_close_cb = session_close_cb};
