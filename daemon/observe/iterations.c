#include "daemon/observe/iterations.h"

#include "proto/histogram.h"

static void before_poll_cb(uv_prepare_t *before_poll)
{
    struct iterations *t = before_poll->data;
    uint64_t now_ns = uv_hrtime(), slept_ns = uv_metrics_idle_time(before_poll->loop);
    uint64_t took_ns = now_ns - t->at_ns, of_it_ns = slept_ns - t->slept_ns;

    histogram_add(t->histogram, took_ns > of_it_ns ? took_ns - of_it_ns : 0, 1);
    t->at_ns = now_ns;
    t->slept_ns = slept_ns;
}

int iterations_begin(struct iterations *t, uv_loop_t *loop, struct histogram *histogram)
{
    int rc = uv_loop_configure(loop, UV_METRICS_IDLE_TIME);

    if (rc == 0)
        rc = uv_prepare_init(loop, &t->before_poll);
    if (rc < 0)
        return rc;
    t->histogram = histogram;
    t->at_ns = uv_hrtime();
    t->slept_ns = 0;
    t->before_poll.data = t;
    rc = uv_prepare_start(&t->before_poll, before_poll_cb);
    uv_unref((uv_handle_t *)&t->before_poll);
    return rc;
}

void iterations_end(struct iterations *t)
{
    uv_close((uv_handle_t *)&t->before_poll, NULL);
}
