/* Memory whose use here has ended, and that a process of a client may still have open or mapped:
 * its pages take the host's memory in the daemon's name until nobody has.
 *
 * Promises: free_cb runs once, on the event loop, when no other process has the memory; at once if
 * none has it now. kept_cb runs once before, when one has had it for LOAN_KEPT_MS. A client that
 * keeps it costs one system call a second.
 *
 * Thread: the event loop only. */
#ifndef UCMD_MAPPING_LOAN_H
#define UCMD_MAPPING_LOAN_H

#include "daemon/base/deadline.h"

/* A worker that unmaps when its connection ends is some ms behind. */
#define LOAN_KEPT_MS 1000u

struct loan;

struct loan_calls {
    void (*free_cb)(struct loan *l);
    void (*kept_cb)(struct loan *l); /* may be NULL */
};

/* Embedded in its owner; zero-initialised is "not waiting". */
struct loan {
    struct deadline again;
    struct deadlines *deadlines;
    int fd;
    uint32_t wait_ms;
    const struct loan_calls *calls;
    void *ctx;
};

/* fd: from memfd_share, and given to others by memfd_grant only; it stays the caller's. deadlines
 * may be NULL: then nobody is waited for. */
void loan_end(struct loan *l, struct deadlines *deadlines, int fd, const struct loan_calls *calls,
              void *ctx);
void loan_cancel(struct loan *l); /* harmless when not waiting */

static inline bool loan_waits(const struct loan *l)
{
    return deadline_armed(&l->again);
}

#endif
