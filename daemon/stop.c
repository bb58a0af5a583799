/* How the daemon ends: in order, and all the same where a disk or a mounted directory does not
 * answer. */
#include "daemon/arena/arena.h"
#include "daemon/base/log.h"
#include "daemon/base/reaper.h"
#include "daemon/cache/cache.h"
#include "daemon/device/device.h"
#include "daemon/encryption/encryption.h"
#include "daemon/front/front.h"
#include "daemon/modules.h"
#include "daemon/observe/observe.h"
#include "daemon/request/request.h"
#include "daemon/shared/shared.h"
#include "daemon/snapshot/snapshot.h"

#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#define STOP_TICK_MS 10

static void unrecorded_tell(struct server *s)
{
    uint64_t bytes;
    uint32_t n = cache_ns_unrecorded(s->cache, &bytes);

    if (bytes == 0)
        return;
    log_error("server", "namespaces-not-recorded",
              "namespaces=%u bytes=%" PRIu64
              ": the next start does not find what the tier has of them",
              n, bytes);
    if (s->exit_status == 0)
        s->exit_status = 1;
}

/* In a signal's handler: what can't be called there is not. */
static void sync_late_cb(int number)
{
    static const char text[] =
        "ucmd: error: a disk does not answer: what was written last may not be found again\n";
    struct pollfd err = {.fd = STDERR_FILENO, .events = POLLOUT};

    (void)number;
    log_flush();
    /* A reader that stopped is not waited for. */
    if (poll(&err, 1, 0) != 1 || write(STDERR_FILENO, text, sizeof(text) - 1) < 0)
        _exit(2); /* nobody to tell */
    _exit(1);
}

/* The exit status says when the last writes may not be found again. */
static void tier_stop(struct server *s)
{
    if (!s->tier)
        return;
    unrecorded_tell(s);
    (void)signal(SIGALRM, sync_late_cb);
    (void)alarm((unsigned)(s->config.drain_ms / 1000) + 1); /* a disk may hang, too */
    if (s->tier_ops->sync(s->tier) != 0) {
        log_error("server", "sync-failed", "%s", "what was written last may not be found again");
        if (s->exit_status == 0)
            s->exit_status = 1;
    }
    (void)alarm((unsigned)(s->config.drain_ms / 1000) + 1); /* the same for what closing writes */
    s->tier_ops->close(s->tier);
    (void)alarm(0);
}

static uint32_t server_shared_busy(const struct server *s)
{
    return s->shared ? shared_busy(s->shared) : 0;
}

static void modules_free(struct server *s)
{
    s->state = STOPPED;
    observe_free(s->observe);
    front_free(s->front);
    requests_free(s->requests);
    s->requests = NULL;
    tier_stop(s);
    shared_close(s->shared);
    encryption_close(s->encryption);
    device_set_free(s->devices);
    cache_free(s->cache);
    arena_free(s->arena);
    snapshot_close(s->snapshot);
    deadlines_close(&s->deadlines);
    notify_close(&s->notify);
    reaper_stop(s->reaper);
    signals_close(&s->signals);
    uv_close((uv_handle_t *)&s->stop_timer, NULL);
    iterations_end(&s->iterations);
}

/* Nobody uses the modules any more. After a device failed there is no snapshot: it may have written
 * where it should not. */
static void stop_last(struct server *s)
{
    if (s->snapshot && s->exit_status == 0 && snapshot_start(s->snapshot) == 0) {
        s->state = SNAPSHOT;
        s->stop_at_ms = uv_now(&s->loop) + s->config.drain_ms;
        return;
    }
    uv_timer_stop(&s->stop_timer);
    modules_free(s);
}

static void snapshot_tick(struct server *s, bool late)
{
    if (late)
        snapshot_cut(s->snapshot);
    if (!snapshot_ready(s->snapshot))
        return;
    snapshot_finish(s->snapshot);
    uv_timer_stop(&s->stop_timer);
    modules_free(s);
}

static void stop_tick_cb(uv_timer_t *timer)
{
    struct server *s = timer->data;
    bool late = uv_now(&s->loop) >= s->stop_at_ms;

    /* Waits for write-back too: the next start finds what was written. */
    if (s->state == DRAINING &&
        ((requests_active(s->requests) == 0 && cache_written(s->cache)) || late)) {
        if (requests_active(s->requests) > 0)
            log_warn("server", "drain-cut", "requests=%u", requests_active(s->requests));
        requests_stop_all(s->requests);
        cache_stop_writing(s->cache);
        snapshot_load_stop(s->snapshot);
        if (s->shared)
            shared_stop(s->shared);
        s->state = DROPPING;
        /* As long again for copies under way; then the daemon exits even if one never ends. */
        s->stop_at_ms = uv_now(&s->loop) + s->config.drain_ms + 1000;
        return;
    }
    if (s->state == SNAPSHOT)
        snapshot_tick(s, late);
    if (s->state != DROPPING)
        return;
    if (requests_active(s->requests) == 0)
        front_drop_all(s->front);
    /* Builds outlive the sessions that asked for them. */
    if (requests_active(s->requests) == 0 && requests_sessions(s->requests) == 0 &&
        cache_tier_busy(s->cache) == 0 && cache_moves(s->cache) == 0) {
        if (server_shared_busy(s) == 0)
            stop_last(s);
        else if (late)
            shared_give_up(s->shared);
    } else if (late) {
        log_error("server", "stop-forced", "requests=%u sessions=%u tier=%u relocations=%u",
                  requests_active(s->requests), requests_sessions(s->requests),
                  cache_tier_busy(s->cache), cache_moves(s->cache));
        log_flush();
        _exit(s->exit_status ? s->exit_status : 1);
    }
}

void server_stop(struct server *s, int exit_status)
{
    if (s->state != SERVING)
        return;
    s->state = DRAINING;
    s->exit_status = exit_status;
    notify_stopping();
    log_info("server", "stopping", "requests=%u", requests_active(s->requests));
    front_stop(s->front);
    requests_drain(s->requests);
    cache_ns_records_last(s->cache);
    observe_publish(s->observe);
    s->stop_at_ms = uv_now(&s->loop) + s->config.drain_ms;
    if (uv_timer_start(&s->stop_timer, stop_tick_cb, 0, STOP_TICK_MS) != 0)
        abort(); /* libuv: only for a closing handle */
}
