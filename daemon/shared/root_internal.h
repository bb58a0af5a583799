/* What root.c (queues, deadlines, checks) has of root_health.c (breakers, counters). */
#ifndef UCMD_SHARED_ROOT_INTERNAL_H
#define UCMD_SHARED_ROOT_INTERNAL_H

#include "daemon/shared/root.h"

void root_health_init(struct shared_root *r);
/* Counts the end of a task, and feeds the breakers with it; -ETIMEDOUT: its deadline passed. True:
 * the root goes down. */
bool root_status_note(struct shared_root *r, const struct shared_task *t, int status);
/* May a WRITE be accepted now? If the breaker of writes is open, this write is its trial. */
bool root_write_try(struct shared_root *r);

#endif
