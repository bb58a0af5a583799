/* Shared by the files that begin prefetches. */
#ifndef UCMD_REQUEST_PREFETCH_H
#define UCMD_REQUEST_PREFETCH_H

#include "daemon/request/transfer.h"

struct prefetch {
    struct transfer w;
    bool marks; /* what it brings is marked, to count what came of it */
    struct transfer_look look;
};
/* Begins with one part, part 0, and looks nothing up yet. NULL with call->error. */
struct prefetch *prefetch_new(struct call *call, const struct view *v, uint32_t n_keys,
                              uint64_t priority, uint64_t timeout_ms);

#endif
