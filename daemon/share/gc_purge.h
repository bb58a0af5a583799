/* All files of a namespace go from several roots, side by side: an operator's purge.
 *
 * Promise: done_cb runs once, with the number of files that were removed and the worst that any
 * root answered; at the latest when no root has got on for GC_PURGE_STALL_MS, so a server that
 * hangs does not leave an operator without an answer. A root that is down or refuses is told of,
 * and the others are swept all the same. What is removed is what was there when its bucket was
 * looked at: hosts that still write the namespace may write behind the sweep, and a file that is
 * being written has no namespace in its name yet. Threads: the loop. */
#ifndef UCMD_SHARE_GC_PURGE_H
#define UCMD_SHARE_GC_PURGE_H

#include "daemon/share/gc_sweep.h"

#define GC_PURGE_STALL_MS 90000u /* more than one operation may take */

/* Sweeps the roots, 1 to SHARE_MAX_ROOTS of them, of one loop. `under_way` has the purge in it
 * until the last of its operations has ended: then nothing of it is left. 0: p->done_cb will run;
 * -ENOMEM. p->op is the room's own. */
int gc_purge(struct share_root *const *roots, uint32_t n, struct list *under_way,
             struct share_purge *p);
/* done_cb runs no more. Harmless when it has run. */
void gc_purge_cancel(struct share_purge *p);
/* Of all that are under way: they are ended, done_cb runs with -ECANCELED. */
void gc_purges_stop(struct list *under_way);

#endif
