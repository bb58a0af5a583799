/* systemd: readiness, socket activation, the watchdog. Does nothing without systemd.
 * Thread: the event loop only. */
#ifndef UCMD_NOTIFY_H
#define UCMD_NOTIFY_H

#include <stdbool.h>
#include <uv.h>

struct notify {
    uv_timer_t timer;
    bool timing;
    /* Called before each watchdog message: whether work under way made progress since the last
     * call. Without progress no message is sent, and systemd restarts the daemon. */
    bool (*progress_cb)(void *ctx);
    void *ctx;
};

/* The listening socket given by socket activation, or -1; -EINVAL when more than one was given. */
int notify_listen_fd(void);
int notify_init(struct notify *n, uv_loop_t *loop, bool (*progress_cb)(void *ctx), void *ctx);
void notify_close(struct notify *n); /* on the event loop: run it once more */
void notify_ready(const char *status);
void notify_reloading(void);
void notify_stopping(void);

#endif
