/* A file that is about to go from one root is copied to the next, unless it is there already. What
 * can't be copied goes all the same: a root must not fill up because another one is not well.
 *
 * Promise: at most GC_COPY_BYTES of memory and GC_REMOVALS copies under way; about
 * GC_COPY_BYTES_PER_MS on average. A copy is a whole file, with the header and checksum that it
 * had; who reads it compares them as always. Threads: the loop. */
#ifndef UCMD_SHARE_GC_DEMOTE_H
#define UCMD_SHARE_GC_DEMOTE_H

#include "daemon/share/gc_sweep.h"

#define GC_COPY_BYTES (64u << 20)
#define GC_COPY_BYTES_PER_MS (256u << 10)
#define GC_COPY_TRIES                                                                              \
    50u /* of a write that the next root has no time for, GC_PAUSE_MS / 5 apart                    \
         */

struct gc_demote;
struct gc_copy {
    struct share_task task;
    struct gc_demote *demote;
    void *data;
    uint64_t bytes;
    unsigned tries;
    struct deadline retry;
    bool active, under_way;
};

struct gc_demote {
    struct gc_sweep *sweep;
    struct share_root *to;
    uint64_t memory_bytes, free_at_ms, files;
    bool stopped, sync;
    struct gc_copy copies[GC_REMOVALS]; /* one a slot of the sweep */
};

/* sync: a copy is on stable storage before it counts. */
void gc_demote_init(struct gc_demote *d, struct gc_sweep *sweep, struct share_root *to, bool sync);
/* For gc_sweep_ops.before_cb. */
int gc_demote_begin(struct gc_demote *d, unsigned slot, const struct share_file *file,
                    const char *name);
/* After gc_sweep_stop: takes back what it can; each slot is resumed when its copy has ended. */
void gc_demote_stop(struct gc_demote *d);

#endif
