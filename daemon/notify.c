#include "daemon/notify.h"

#include "daemon/base/log.h"
#include "proto/clock.h"

#include <errno.h>
#include <systemd/sd-daemon.h>

int notify_listen_fd(void)
{
    int n = sd_listen_fds(1);

    if (n > 1)
        return -EINVAL;
    return n == 1 ? SD_LISTEN_FDS_START : -1;
}

/* rc: of sd_notify. */
static void note_failure(int rc)
{
    if (rc < 0)
        log_warn("notify", "failed", "errno=%d", -rc);
}

static void watchdog_cb(uv_timer_t *timer)
{
    struct notify *n = timer->data;

    if (n->progress_cb(n->ctx))
        note_failure(sd_notify(0, "WATCHDOG=1"));
    else
        log_error("notify", "watchdog-starves", "reason=\"%s\"", "storage makes no progress");
}

int notify_init(struct notify *n, uv_loop_t *loop, bool (*progress_cb)(void *ctx), void *ctx)
{
    uint64_t usec = 0;
    int rc = sd_watchdog_enabled(0, &usec);

    *n = (struct notify){.progress_cb = progress_cb, .ctx = ctx};
    if (rc < 0)
        log_warn("notify", "no-watchdog", "errno=%d", -rc);
    if (rc <= 0)
        return 0;
    rc = uv_timer_init(loop, &n->timer);
    if (rc != 0)
        return rc;
    n->timer.data = n;
    n->timing = true;
    return uv_timer_start(&n->timer, watchdog_cb, usec / 2000, usec / 2000);
}

void notify_close(struct notify *n)
{
    if (n->timing)
        uv_close((uv_handle_t *)&n->timer, NULL);
    n->timing = false;
}

void notify_ready(const char *status)
{
    note_failure(sd_notifyf(0, "READY=1\nSTATUS=%s", status));
}

void notify_reloading(void)
{
    note_failure(
        sd_notifyf(0, "RELOADING=1\nMONOTONIC_USEC=%llu", (unsigned long long)clock_ns() / 1000));
}

void notify_stopping(void)
{
    note_failure(sd_notify(0, "STOPPING=1\nSTATUS=Draining requests"));
}
