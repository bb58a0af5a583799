/* What root.c (queue, deadlines) and root_health.c (breakers, checks, figures) owe each other. */
#ifndef UCMD_SHARE_ROOT_INTERNAL_H
#define UCMD_SHARE_ROOT_INTERNAL_H

#include "daemon/share/root.h"

/* ---- root.c ---- */

/* Ends with -EHOSTDOWN what waits, of all classes. */
void root_flush(struct share_root *r);
/* 0 or -ENOMEM. */
int root_task_arm(struct share_task *t, uint64_t at_ms);
/* Gives it to the backend at once, whatever waits. */
void root_begin(struct share_root *r, struct share_task *t);

/* ---- root_health.c ---- */

void root_health_init(struct share_root *r);
/* What an answer, or a deadline that passed (-ETIMEDOUT), says about the root. */
void root_judge(struct share_root *r, const struct share_task *t, int status);
/* It ended well or badly; for the figures. */
void root_count(struct share_root *r, const struct share_task *t, int status);
/* May a WRITE be accepted now? It then is the trial, should there be need of one. */
bool root_write_try(struct share_root *r);
/* The breaker is open: see to it that a check will come. */
void root_check_plan(struct share_root *r);
void root_check_stop(struct share_root *r);

#endif
