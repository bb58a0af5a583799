/* One pass of garbage collection over a root: adds up bytes by age and tenant, finds which files
 * go, and removes them. gc.h says why so; gc.c says when.
 *
 * Threads: the event loop. */
#ifndef UCMD_GC_PASS_H
#define UCMD_GC_PASS_H

#include "daemon/gc/ages.h"
#include "daemon/gc/gc.h"
#include "daemon/gc/parts.h"
#include "daemon/gc/quota.h"
#include "daemon/gc/sweep.h"

/* The sweeps of a pass:
 * - GC_ADD: adds up bytes by age, removes old temporary files
 * - GC_HIGHEST: removes the highest parts of blocks
 * - GC_OTHERS: removes their other parts */
enum gc_phase { GC_ADD, GC_HIGHEST, GC_OTHERS };

struct gc_pass {
    enum gc_phase phase;
    bool for_full, has_others, tenants_much;
    uint64_t now_ns, began_ms;
    uint32_t cut;     /* files of this cell and above go */
    uint64_t target;  /* bytes that the root is brought to */
    uint64_t pending; /* bytes of files that are being removed */
    uint64_t used_bytes, used_files;
    uint64_t removed, removed_bytes;
    int partly; /* why a directory or a file was left as it is; 0: none was */
    struct {
        uint64_t bytes;
        uint32_t files;
    } buckets[BLOCK_FILE_BUCKETS]; /* as last seen */
    struct gc_ages ages;
};

/* Embedded in its owner. All zero before its first pass, but for config and ended_cb. */
struct gc_walk {
    const struct gc_config *config;
    /* 0: the pass is over, perhaps with what pass.partly says; else -errno. Perhaps from inside
     * gc_walk_begin. */
    void (*ended_cb)(struct gc_walk *w, int status);
    bool stopped;
    struct gc_pass pass;
    struct gc_sweep sweep;
    /* Kept from pass to pass: they only become more complete. */
    struct gc_parts parts;
    struct gc_quota quota;
};

void gc_walk_begin(struct gc_walk *w, uint64_t now_ns, bool for_full);
/* Ends a pass, if there is one: ended_cb runs with -ECANCELED when nothing is under way any
 * more. */
void gc_walk_stop(struct gc_walk *w);
bool gc_walk_busy(const struct gc_walk *w);
void gc_walk_free(struct gc_walk *w);

#endif
