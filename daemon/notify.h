/* systemd: readiness, the socket that it may have opened for us, and the watchdog. Does nothing
 * where there is no systemd. Thread: the loop only. */
#ifndef UCMD_NOTIFY_H
#define UCMD_NOTIFY_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

struct notify {
    uv_timer_t timer;
    bool timing;
    /* Whether work that was under way went on since the last call; asked before each feeding. */
    bool (*progress_cb)(void *ctx);
    void *ctx;
};

/* The listening socket given by socket activation, or -1; -EINVAL when more than one was given. */
int notify_listen_fd(void);
int notify_init(struct notify *n, uv_loop_t *loop, bool (*progress_cb)(void *ctx), void *ctx);
void notify_close(struct notify *n); /* on the loop: run it once more */
void notify_ready(const char *status);
void notify_reloading(void);
void notify_stopping(void);

#endif
