/* What root.c (queues, deadlines) and root_health.c (breakers, checks, counters) share. */
#ifndef UCMD_SHARE_ROOT_INTERNAL_H
#define UCMD_SHARE_ROOT_INTERNAL_H

#include "daemon/share/root.h"

/* ---- root.c ---- */

/* Ends all waiting tasks with -EHOSTDOWN. */
void root_flush(struct share_root *r);
void root_task_arm(struct share_task *t, uint64_t at_ms);
/* Starts the task on the backend, whatever waits. */
void root_begin(struct share_root *r, struct share_task *t);

/* ---- root_health.c ---- */

void root_health_init(struct share_root *r);
/* Counts the end of a task, and feeds the breakers with it; -ETIMEDOUT: its deadline passed. */
void root_status_note(struct share_root *r, const struct share_task *t, int status);
/* May a WRITE be accepted now? If the breaker of writes is open, this write is its trial. */
bool root_write_try(struct share_root *r);
/* The breaker is open: a check will run when its pause ends. */
void root_check_plan(struct share_root *r);
void root_check_stop(struct share_root *r);

#endif
