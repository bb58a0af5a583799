/* One way through the buckets of a root: lists each, asks its owner about each file, and removes
 * those that are to go. What garbage collection and purges have in common.
 *
 * Promise: one bucket's listing in memory at a time; one LIST or GC_REMOVALS operations under way;
 * at most GC_STEP files looked at before the loop has its turn. done_cb once, when nothing is under
 * way any more, never from inside start. A file that is gone already counts as removed. A bucket
 * that can't be listed is left out. Threads: the loop. */
#ifndef UCMD_SHARE_GC_SWEEP_H
#define UCMD_SHARE_GC_SWEEP_H

#include "daemon/share/root.h"

#define GC_REMOVALS 16u
#define GC_STEP 4096u
#define GC_TRIES 4u     /* of a LIST, a pause before each but the first, growing from GC_PAUSE_MS */
#define GC_UNLISTED 3u  /* buckets that can't be listed, one after the other, until it gives up, */
#define GC_LEFT_OUT 16u /* or so many in all */
#define GC_PAUSE_MS 500u
#define GC_FAILURES 16u /* removals that fail one after the other until a sweep gives up */

/* Of one operation: a bucket may be large, and nobody waits for it. */
#define GC_DEADLINE_MS 60000u

/* Submits what t->op says behind everything else that wants the root. As share_root_submit. */
int gc_submit(struct share_root *r, struct share_task *t,
              void (*released_cb)(struct share_task *t));

struct gc_sweep;
struct gc_sweep_ops {
    /* A bucket was listed, or was found empty. May be NULL. */
    void (*listed_cb)(struct gc_sweep *s, const struct share_listing *l);
    /* Is it to go? */
    bool (*wanted_cb)(struct gc_sweep *s, const struct share_file *file, const char *name);
    /* It was wanted and is gone: 0, or stays: -errno. */
    void (*removed_cb)(struct gc_sweep *s, const struct share_file *file, const char *name,
                       int status);
    /* 0, or the failure that ended it (given_up) or that was met last; -ECANCELED after stop. */
    void (*done_cb)(struct gc_sweep *s, int status);
    /* May be NULL. Something is done about the file before it is removed: 0: gc_sweep_resume will
     * be called with the slot, never from inside; -EAGAIN: later; else it is removed at once. */
    int (*before_cb)(struct gc_sweep *s, unsigned slot, const struct share_file *file,
                     const char *name);
};

struct gc_removal {
    struct share_task task;
    struct gc_sweep *sweep;
    uint32_t file;
    enum { GC_SLOT_FREE, GC_SLOT_BEFORE, GC_SLOT_WAITS, GC_SLOT_BUSY } state;
};

/* Embedded in its owner; zeroes before the first start. */
struct gc_sweep {
    const struct gc_sweep_ops *ops;
    struct share_root *root;
    struct share_task list;
    struct share_listing listing;
    bool listing_under_way, listed, active, stopped, given_up;
    unsigned bucket, tries, unlisted, left_out, failures, busy;
    uint32_t next; /* file of the listing */
    int status;
    struct deadline pause;
    struct gc_removal slots[GC_REMOVALS];
};

void gc_sweep_init(struct gc_sweep *s, struct share_root *root, const struct gc_sweep_ops *ops);
/* 0: done_cb will run; -ENOMEM. */
int gc_sweep_start(struct gc_sweep *s);
/* Takes back what it can; done_cb runs with -ECANCELED when the rest has ended, from inside when
 * there is none. What before_cb began is its owner's to end, which resumes each slot. Harmless when
 * it is not active. */
void gc_sweep_stop(struct gc_sweep *s);
void gc_sweep_resume(struct gc_sweep *s, unsigned slot);

#endif
