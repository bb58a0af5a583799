/* Capacity of one shared root, kept by every host that has it, at the same time and without locks.
 *
 * A pass asks the server for its time, lists all buckets and adds up bytes by age; when that is
 * more than the root may hold it finds the age beyond which files go to bring it to `low` percent,
 * lists again and removes them. Nothing is written down that a next pass would rely on, so a host
 * that dies in a pass leaves nothing to repair, and hosts that run at once find the same age, of
 * which a file that another one removed is simply not part any more.
 *
 * Of a block's parts the highest goes first, in a sweep before that of the others, because it is
 * the one that is looked for; and the others count as an eighth younger than they are, so that a
 * cut that falls between the times of one block's parts takes the highest alone: what stays is
 * asked for by nobody and goes with a later pass. Times of one block that are further apart than
 * that end in a promise that a read finds empty: a miss.
 *
 * When somebody last began or ended a pass is the time of a block file of no namespace, the marker,
 * which also says what the root held then. It saves work and nothing else: hosts that find it young
 * leave the pass to the other, unless the root holds more than they allow.
 *
 * Threads: the loop. */
#ifndef UCMD_SHARE_GC_H
#define UCMD_SHARE_GC_H

#include "daemon/share/gc_sweep.h"

struct gc;

#define GC_TEMP_AGE_NS (3600ull * 1000000000u) /* a temporary file this old is a dead writer's */
#define GC_FULL_PAUSE_MS 60000u                /* between passes because the server was full */

struct gc_config {
    struct share_root *root; /* of one that is read-only nothing but the marker is read */
    struct share_root *next; /* cold files are copied there before they go; NULL: they just go */
    bool sync;               /* what is copied is on stable storage before it goes */
    unsigned low;            /* percent of the root's capacity, or of what is used */
    uint64_t collect_ms;     /* from pass to pass */
    uint64_t first_ms;       /* until the first one, about; 0: seconds */
};

/* Passes begin by themselves. 0 or -ENOMEM. */
int gc_new(const struct gc_config *config, struct gc **out);
/* No pass begins any more; that under way ends. */
void gc_stop(struct gc *gc);
bool gc_busy(const struct gc *gc); /* operations are under way */
/* Not busy. NULL-safe. */
void gc_free(struct gc *gc);

/* The server had no room for a write: the root is brought to `low` percent of what is on it. Call
 * it for every such write. */
void gc_full(struct gc *gc);
/* A pass begins now, whoever ran one when. 0; -EALREADY; -EROFS; -ECANCELED after gc_stop. */
int gc_run(struct gc *gc);

struct gc_usage {
    bool known;
    uint64_t bytes, files;
};
/* As of the last pass that this host ran or knows of. */
struct gc_usage gc_usage(const struct gc *gc);

#endif
