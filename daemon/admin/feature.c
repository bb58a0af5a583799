/* The interface of what operators do. */
#include "daemon/admin/admin.h"

#include <stdlib.h>

static int admin_open(struct requests *rq)
{
    uv_idle_init(rq->modules.loop, &admin_of(rq)->sweep_iteration); /* never fails */
    sweeps_init(rq);
    return 0;
}

static void iteration_closed_cb(uv_handle_t *iteration)
{
    free(LIST_ENTRY(iteration, struct admin, sweep_iteration));
}

static void admin_close(struct requests *rq)
{
    struct admin *a = admin_of(rq);

    audits_close(rq);
    rq->ext[FEATURE_ADMIN] = NULL; /* iteration_closed_cb frees it */
    uv_close((uv_handle_t *)&a->sweep_iteration, iteration_closed_cb);
}

const struct feature admin_feature = {
    .requests_bytes = sizeof(struct admin), .open_cb = admin_open, .close_cb = admin_close};
