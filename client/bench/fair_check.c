#include "client/bench/fair.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

int fair_check_fill(struct player *p)
{
    p->loaded_once = calloc(p->blocks, sizeof *p->loaded_once);
    if (!p->loaded_once)
        return bench_fail(BENCH_FAILED, "memory ran out");
    for (uint32_t i = 0; i < p->blocks; i++)
        rig_fill(&p->rig, i, p->keys + (size_t)i * RIG_KEY_BYTES);
    return rig_push(&p->rig) < 0 ? bench_rig_fail(&p->rig, -1) : 0;
}

/* Adds to *blocks those that were loaded, and to *differ the bytes of them that are wrong. */
static int compare(struct player *p, uint64_t *blocks, uint64_t *differ)
{
    if (rig_pull(&p->rig) < 0)
        return bench_rig_fail(&p->rig, -1);
    for (uint32_t i = 0; i < p->blocks; i++)
        if (p->loaded_once[i]) {
            *differ += rig_differ(&p->rig, i, p->keys + (size_t)i * RIG_KEY_BYTES);
            ++*blocks;
        }
    return 0;
}

int fair_check(struct fair_bench *b, struct player *const *players, unsigned n)
{
    uint64_t blocks = 0, differ = 0;
    char name[96];
    int rc = 0;

    for (unsigned i = 0; i < n; i++) {
        struct player *p = players[i];

        memset(p->loaded_once, 0, p->blocks * sizeof *p->loaded_once);
        rig_poison(&p->rig);
        if (rig_push(&p->rig) < 0)
            return bench_rig_fail(&p->rig, -1);
    }
    if (fair_run(b, players, n) < 0)
        return BENCH_FAILED;
    for (unsigned i = 0; rc == 0 && i < n; i++)
        rc = compare(players[i], &blocks, &differ);
    snprintf(name, sizeof name, "%u tenants: blocks compared", n);
    report_number(&b->report, name, (double)blocks);
    if (rc == 0 && (differ > 0 || blocks == 0))
        rc = bench_fail(BENCH_FAILED, "%" PRIu64 " bytes of %" PRIu64 " loaded blocks are wrong",
                        differ, blocks);
    return rc;
}
