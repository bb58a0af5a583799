#include "daemon/base/signals.h"

#include <assert.h>
#include <errno.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

static const int numbers[] = {SIGTERM, SIGINT, SIGHUP};

static void poll_cb(uv_poll_t *poll, int status, int events)
{
    struct signals *s = poll->data;
    struct signalfd_siginfo info;

    (void)status;
    (void)events;
    if (read(s->fd, &info, sizeof(info)) == sizeof(info)) /* one at a time: the poll comes again */
        s->signal_cb(s->ctx, (int)info.ssi_signo);
}

int signals_start(struct signals *s, uv_loop_t *loop, void (*signal_cb)(void *ctx, int number),
                  void *ctx)
{
    sigset_t set;
    int rc;

    sigemptyset(&set);
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
        sigaddset(&set, numbers[i]);
        if (signal(numbers[i], SIG_DFL) == SIG_ERR) /* an ignored one would not be queued */
            return -errno;
    }
    rc = pthread_sigmask(SIG_BLOCK, &set, NULL);
    if (rc != 0)
        return -rc;
    s->fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (s->fd < 0)
        return -errno;
    s->signal_cb = signal_cb;
    s->ctx = ctx;
    rc = uv_poll_init(loop, &s->poll, s->fd);
    s->poll.data = s;
    return rc == 0 ? uv_poll_start(&s->poll, UV_READABLE, poll_cb) : rc;
}

static void closed_cb(uv_handle_t *handle)
{
    struct signals *s = handle->data;
    int rc = close(s->fd);

    assert(rc == 0);
    (void)rc;
}

void signals_close(struct signals *s)
{
    uv_close((uv_handle_t *)&s->poll, closed_cb);
}
