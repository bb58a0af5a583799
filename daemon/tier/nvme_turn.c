/* What the tier does in the next turn of the loop, and how much: a request waits while a turn
 * lasts, and a load of a block in DRAM waits for two turns: for its request, and for the end of its
 * copy. */
#include "daemon/tier/nvme.h"

#include <assert.h>

/* Parts of the writes that one turn begins: as many as one write has at most, or several writes of
 * few. Each part's header is a page to be filled and hashed. */
#define BUDGET_PARTS NVME_MERGE_IOS

static void idle_cb(uv_idle_t *idle)
{
    struct tier *t = idle->data;
    unsigned due = t->turn.due;

    uv_idle_stop(idle);
    t->turn.due = t->turn.parts = t->turn.drops = 0;
    nvme_hold(t);
    if (due & NVME_TURN_GATHERED)
        nvme_turn_want(t, 0); /* the first turn without a push flushes */
    else
        checksum_flush(&t->checksums);
    if (due & NVME_TURN_MOVE)
        nvme_move_go_on(t);
    if (due & (NVME_TURN_MOVE | NVME_TURN_WRITES))
        nvme_pump_writes(t);
    if (due & NVME_TURN_RECOVERY)
        nvme_recover_go_on(t);
    if (due & NVME_TURN_CHECKPOINT)
        nvme_checkpoint_go_on(t);
    nvme_release(t);
}

void nvme_turn_want(struct tier *t, unsigned what)
{
    int rc = uv_idle_start(&t->turn.idle, idle_cb); /* nothing is done if it runs already */

    assert(rc == 0); /* refuses a missing callback only */
    (void)rc;
    t->turn.due |= what;
}

bool nvme_turn_may_write(struct tier *t)
{
    if (t->turn.parts >= BUDGET_PARTS)
        nvme_turn_want(t, NVME_TURN_WRITES);
    return t->turn.parts < BUDGET_PARTS;
}

void nvme_turn_spend(struct tier *t, unsigned parts)
{
    t->turn.parts += parts;
    nvme_turn_want(t, 0);
}

void nvme_turn_dropped(struct tier *t, uint64_t records)
{
    t->turn.drops += (unsigned)records;
    t->metrics->nvme_reclaimed_blocks += records;
    nvme_turn_want(t, 0);
}
