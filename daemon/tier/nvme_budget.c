/* How much write-behind may do in one turn of the loop. Requests wait while a turn lasts, and a
 * load of a block in DRAM waits for two turns: for its request, and for the end of its copy. */
#include "daemon/tier/nvme.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

/* Parts of the writes that one turn begins: as many as one write has at most, or several writes of
 * few. Each part's header is a page to be filled and hashed. */
#define BUDGET_PARTS NVME_MERGE_IOS

struct nvme_budget {
    uv_idle_t
        idle; /* runs for a turn in which there is something to do, or the budget begins again */
    struct tier *tier;
    unsigned parts; /* of the writes begun in this turn */
    bool pump, gathered;
};

static void idle_cb(uv_idle_t *idle);

static void idle_start(struct nvme_budget *n)
{
    int rc = uv_idle_start(&n->idle, idle_cb); /* nothing is done if it runs already */

    assert(rc == 0); /* refuses a missing callback only */
    (void)rc;
}

static void idle_cb(uv_idle_t *idle)
{
    struct nvme_budget *n = idle->data;
    struct tier *t = n->tier;
    bool gathered = n->gathered, pump = n->pump;

    uv_idle_stop(idle);
    n->parts = 0;
    n->gathered = n->pump = false;
    nvme_hold(t);
    if (gathered)
        idle_start(n);
    else
        checksum_flush(&t->checksums);
    if (pump)
        nvme_pump_writes(t);
    nvme_release(t);
}

bool nvme_budget_left(struct tier *t)
{
    if (t->budget->parts >= BUDGET_PARTS)
        nvme_budget_pump_later(t);
    return t->budget->parts < BUDGET_PARTS;
}

void nvme_budget_spend(struct tier *t, unsigned parts)
{
    t->budget->parts += parts;
    idle_start(t->budget);
}

void nvme_budget_pump_later(struct tier *t)
{
    t->budget->pump = true;
    idle_start(t->budget);
}

void nvme_budget_checksum_later(struct tier *t)
{
    t->budget->gathered = true;
    idle_start(t->budget);
}

int nvme_budget_open(struct tier *t)
{
    struct nvme_budget *n = calloc(1, sizeof(*n));

    if (!n)
        return -ENOMEM;
    (void)uv_idle_init(t->loop, &n->idle); /* can't fail */
    n->idle.data = n;
    n->tier = t;
    t->budget = n;
    return 0;
}

static void closed_cb(uv_handle_t *handle)
{
    free(handle->data);
}

void nvme_budget_close(struct tier *t)
{
    uv_close((uv_handle_t *)&t->budget->idle, closed_cb);
}
