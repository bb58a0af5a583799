/* Shared by the files of this module only. */
#ifndef UCMD_SNAPSHOT_INTERNAL_H
#define UCMD_SNAPSHOT_INTERNAL_H

#include "daemon/arena/arena.h"
#include "daemon/cache/extend.h"
#include "daemon/cache/span.h"
#include "daemon/index/policy.h"
#include "daemon/snapshot/format.h"
#include "daemon/snapshot/snapshot.h"
#include "daemon/snapshot/sum.h"

#include <uv.h>

#define MODULE "snapshot"

struct snapshot {
    struct persist *persist;
    struct snapshot_modules modules;
    bool warm;                    /* the run before left one */
    bool loading;                 /* that */
    struct snapshot_load *load;   /* while loading; later what a stop left unloaded */
    struct snapshot_write *write; /* while it is written, at the stop */
};

/* Calls `each` for every part that was not loaded because the load was stopped, hottest first. Its
 * bytes are where they were. ns is its namespace; part->ns is the number in the old snapshot. */
void snapshot_unloaded(struct snapshot *s,
                       void (*each)(void *ctx, struct ns *ns, const struct snapshot_part *part),
                       void *ctx);
/* Frees what is known of these. */
void snapshot_forget(struct snapshot *s);

#endif
