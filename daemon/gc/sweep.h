/* One walk over the buckets of a root: lists each, asks its owner about each file, copies those
 * that are to go to the next root if there is one, and removes them. The only walk there is:
 * garbage collection, demotion and purges use it.
 *
 * Promises:
 * - One bucket's listing in memory at a time; one LIST, or GC_REMOVALS files under way.
 * - At most GC_STEP files are looked at before the event loop has its turn.
 * - Copies hold at most GC_COPY_BYTES of memory and take about GC_COPY_BYTES_PER_MS.
 * - A copy is a whole file with the header and checksum that it had; readers verify it as always.
 * - A file that can't be copied goes all the same: a root must not fill up because another fails.
 * - A file that is gone already counts as removed. A bucket that can't be listed is left out.
 * - done_cb runs once, when nothing is under way any more, never from inside start.
 *
 * Threads: the event loop. */
#ifndef UCMD_GC_SWEEP_H
#define UCMD_GC_SWEEP_H

#include "daemon/shared/root.h"

#define GC_REMOVALS 16u
#define GC_STEP 4096u
#define GC_TRIES 4u     /* of a LIST, with a growing pause before each but the first */
#define GC_UNLISTED 3u  /* buckets in a row that can't be listed end the sweep, */
#define GC_LEFT_OUT 16u /* and so many in all */
#define GC_PAUSE_MS 500u
#define GC_WAIT_MS 100u       /* of an operation that the root can not queue */
#define GC_FAILURES 16u       /* removals in a row that fail end the sweep */
#define GC_DEADLINE_MS 60000u /* of one operation: a bucket may be large, and nobody waits */
#define GC_COPY_BYTES (64u << 20)
#define GC_COPY_BYTES_PER_MS (256u << 10)
#define GC_COPY_TRIES 50u /* of one operation of a copy, GC_WAIT_MS apart */

/* Submits what t->op says, in the background class. As shared_root_submit. */
int gc_submit(struct shared_root *r, struct shared_task *t,
              void (*released_cb)(struct shared_task *t));

struct gc_sweep;
struct gc_sweep_ops {
    /* A bucket was listed, or does not exist. */
    void (*listed_cb)(struct gc_sweep *s, const struct shared_listing *l);
    /* Is the file to go? */
    bool (*wanted_cb)(struct gc_sweep *s, const struct shared_file *file);
    /* A wanted file is gone: 0; or it stays: -errno. */
    void (*removed_cb)(struct gc_sweep *s, const struct shared_file *file, int status);
    /* 0; the failure that ended the sweep (given_up) or the last one; -ECANCELED after stop. */
    void (*done_cb)(struct gc_sweep *s, int status);
};

/* One file on its way: FIND, READ, WRITE for its copy, then REMOVE. */
struct gc_removal {
    struct shared_task task;
    struct gc_sweep *sweep;
    uint32_t file; /* of the listing */
    enum { GC_FREE, GC_WAITS, GC_BUSY } state;
    enum shared_verb verb; /* the operation that waits or is under way */
    unsigned tries;
    void *copy; /* the payload; NULL: no copy is made */
};

/* Embedded in its owner; zeroes before the first start. */
struct gc_sweep {
    const struct gc_sweep_ops *ops;
    struct shared_root *root, *next; /* next: where copies go; NULL: no copies */
    bool sync;                       /* a copy is on stable storage before its file goes */
    struct shared_task list;
    struct shared_listing listing;
    bool listed, active, stopped, given_up;
    unsigned bucket, tries, unlisted, left_out, failures, busy;
    uint32_t at; /* file of the listing */
    int status;
    uint64_t copy_bytes, copy_free_ms; /* memory held; when the pace allows another copy */
    struct deadline pause;
    struct gc_removal removals[GC_REMOVALS];
};

void gc_sweep_init(struct gc_sweep *s, struct shared_root *root, struct shared_root *next,
                   bool sync, const struct gc_sweep_ops *ops);
/* done_cb will run. */
void gc_sweep_start(struct gc_sweep *s);
/* Cancels what it can; done_cb runs with -ECANCELED when the rest has ended, from inside when there
 * is none. Harmless when the sweep is not active. */
void gc_sweep_stop(struct gc_sweep *s);

#endif
