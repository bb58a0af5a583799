/* What gc.c and gc_pass.c share. Thread: the loop. */
#ifndef UCMD_SHARE_GC_INTERNAL_H
#define UCMD_SHARE_GC_INTERNAL_H

#include "daemon/share/gc.h"
#include "daemon/share/gc_ages.h"
#include "daemon/share/gc_parts.h"
#include "daemon/share/gc_sweep.h"

/* The sweeps of a pass:
 * - GC_ADD: adds up bytes by age, removes old temporary files
 * - GC_HIGHEST: removes the highest parts of blocks
 * - GC_OTHERS: removes their other parts */
enum gc_phase { GC_ADD, GC_HIGHEST, GC_OTHERS };

struct gc_pass {
    enum gc_phase phase;
    bool for_full, has_others;
    uint64_t now_ns, began_ms;
    uint32_t cut;     /* files of this cell and above go */
    uint64_t target;  /* bytes that the root is brought to */
    uint64_t pending; /* bytes of files that are being removed */
    uint64_t used_bytes, used_files;
    uint64_t removed, removed_bytes;
    int partly; /* why a folder or a file was left as it is; 0: none was */
    struct {
        uint64_t bytes;
        uint32_t files;
    } buckets[BLOCK_FILE_BUCKETS]; /* as last seen */
    struct gc_ages ages;
};

/* What a pass asks of the root before and after its sweeps, one after the other. */
enum gc_step {
    GC_STEP_IDLE,
    GC_STEP_READ,  /* read the marker: its time, and what the root held */
    GC_STEP_CLOCK, /* ask for the server's time */
    GC_STEP_CLAIM, /* touch the marker */
    GC_STEP_SWEEP,
    GC_STEP_UNMARK, /* remove the marker, ... */
    GC_STEP_MARK    /* ... write it anew */
};

#define GC_MARKER_BYTES 16u

struct gc {
    struct gc_config config;
    struct gc_usage usage;
    bool stopped, forced, full, failing, incomplete;
    uint64_t full_ms;     /* by uv_now: when gc_full was called */
    uint64_t clock_ms;    /* by uv_now: when the server was asked for its time */
    uint64_t marked_ns;   /* the marker's time; 0: unknown */
    struct deadline next; /* of the next pass, or of the present step's next try */
    enum gc_step step;
    struct share_task task;
    bool under_way;
    unsigned tries;
    uint8_t marker[GC_MARKER_BYTES];
    struct gc_parts parts; /* kept from pass to pass: it only becomes more complete */
    struct gc_pass pass;
    struct gc_sweep sweep;
};

/* Begins the sweeps. gc_pass_ended will run, never from inside. */
void gc_pass_begin(struct gc *gc, uint64_t now_ns, bool for_full);
void gc_pass_ended(struct gc *gc, int status);

bool gc_is_marker(const char *name);

#endif
