/* Keeps one shared root within its capacity. Every host that has the root runs this, at the same
 * time and without locks.
 *
 * A pass asks the server for its time, lists all buckets and adds up bytes by age. If the root has
 * more than it may, the pass determines the files whose removal brings it to `low` percent
 * (ages.h). It lists all buckets again and removes them. No pass relies on anything that an earlier
 * one wrote: a host that dies in a pass leaves nothing to repair. Hosts that run at once find the
 * same files; a file that another host removed counts as removed.
 *
 * A block's highest part goes first, in a sweep before that of its other parts, because hosts look
 * for the highest part. The parts of one block have different times, so the others count as an
 * eighth younger: a cut that falls between their times takes the highest part alone. Nobody looks
 * for the others, and a later pass removes them. If the times are further apart than that, a host
 * may find a block whose other part is gone: a miss.
 *
 * The marker is a block file of no namespace. Its time says when a host last began or ended a pass,
 * its payload what the root held then; a pass touches it while it goes on. Hosts that find it young
 * leave the pass to that host, unless the root holds more than they allow. The marker saves work
 * and nothing else.
 *
 * Threads: the event loop. */
#ifndef UCMD_GC_GC_H
#define UCMD_GC_GC_H

#include "daemon/shared/root.h"

struct gc;

#define GC_TEMP_AGE_NS (3600ull * 1000000000u) /* the writer of a temporary file this old is dead */
#define GC_FULL_PAUSE_MS 60000u                /* between passes because the server was full */

struct gc_config {
    struct shared_root *root; /* if it is read-only, only its marker is read */
    struct shared_root *next; /* files are copied there before they go; NULL: no copies */
    bool sync;                /* a copy is on stable storage before its file goes */
    unsigned low;        /* percent of the capacity, or of what is used when the server is full */
    uint64_t collect_ms; /* from pass to pass */
    uint64_t first_ms; /* about how long until the first pass; 0: up to 10 s, and a look at once */
};

/* Passes begin by themselves. 0 or -ENOMEM. */
int gc_new(const struct gc_config *config, struct gc **out);
/* No further pass begins; a pass under way ends. */
void gc_stop(struct gc *gc);
bool gc_busy(const struct gc *gc); /* operations are under way */
/* Not while busy. NULL-safe. */
void gc_free(struct gc *gc);

/* For each write that the server had no space for: a pass will bring the root to `low` percent of
 * what is on it. */
void gc_full(struct gc *gc);
/* Begins a pass now, whatever the marker says. 0; -EALREADY; -EROFS; -ECANCELED after gc_stop. */
int gc_run(struct gc *gc);

/* Tenants' quotas, which passes keep from the next one on: quota.h. */
void gc_quotas(struct gc *gc, shared_quota_fn quota_cb, void *ctx);

struct gc_usage {
    bool known;
    uint64_t bytes, files;
};
/* As of the last pass that this host ran or read of. */
struct gc_usage gc_usage(const struct gc *gc);

#endif
