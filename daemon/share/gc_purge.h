/* Removes all files of a namespace from several roots, side by side: an operator's purge.
 *
 * Promises:
 * - done_cb runs once, with the number of files removed and the first failure of any root; at the
 *   latest when no root has made progress for GC_PURGE_STALL_MS, so a server that hangs does not
 *   leave an operator without an answer.
 * - A root that is down or refuses is reported, and the others are swept all the same.
 * - What a bucket held when it was listed is removed. Hosts that still write the namespace may write
 *   behind the sweep, and a file that is being written has no namespace in its name yet.
 *
 * Threads: the loop. */
#ifndef UCMD_SHARE_GC_PURGE_H
#define UCMD_SHARE_GC_PURGE_H

#include "daemon/share/gc_sweep.h"

#define GC_PURGE_STALL_MS 90000u /* more than one operation may take */

/* Sweeps 1 to SHARE_MAX_ROOTS roots of one loop. The purge stays in `under_way` until the last of
 * its operations has ended. 0: p->done_cb will run; -ENOMEM. p->op is this room's own. */
int gc_purge(struct share_root *const *roots, uint32_t n, struct list *under_way,
             struct share_purge *p);
/* done_cb will not run. Harmless when it has run. */
void gc_purge_cancel(struct share_purge *p);
/* Ends all purges: done_cb runs with -ECANCELED. */
void gc_purges_stop(struct list *under_way);

#endif
