/* The signals TERM, INT and HUP as events of the event loop.
 *
 * All threads block them, the caller's and those that it starts afterwards, so that none of them
 * is interrupted, and a signal that comes before the event loop runs waits for it.
 *
 * Thread: the event loop only; signals_start before any other thread. */
#ifndef UCMD_BASE_SIGNALS_H
#define UCMD_BASE_SIGNALS_H

#include <uv.h>

struct signals {
    uv_poll_t poll;
    int fd;
    void (*signal_cb)(void *ctx, int number);
    void *ctx;
};

/* Reports each on the event loop, also those that the parent ignored. 0; or -errno. */
int signals_start(struct signals *s, uv_loop_t *loop, void (*signal_cb)(void *ctx, int number),
                  void *ctx);
/* After signals_start. Closes a handle on the event loop. */
void signals_close(struct signals *s);

#endif
