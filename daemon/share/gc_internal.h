/* What the files of a root's garbage collection share. Thread: the loop. */
#ifndef UCMD_SHARE_GC_INTERNAL_H
#define UCMD_SHARE_GC_INTERNAL_H

#include "daemon/share/gc.h"
#include "daemon/share/gc_ages.h"
#include "daemon/share/gc_demote.h"
#include "daemon/share/gc_parts.h"

/* ADD: bytes by age. LOOK: those of the class that the cut falls into once more, closer. HIGHEST,
 * OTHERS: files go. */
enum gc_phase { GC_ADD, GC_LOOK, GC_HIGHEST, GC_OTHERS };

struct gc_pass {
    enum gc_phase phase;
    bool for_full, has_others;
    uint64_t now_ns, began_ms;
    struct gc_ages ages;
    uint64_t cut_ns;  /* files of this age go */
    uint64_t need;    /* what the youngest class that goes is to give */
    uint64_t target;  /* bytes that the root is brought to */
    uint64_t pending; /* of files that are being removed */
    uint64_t used_bytes, used_files;
    uint64_t removed, removed_bytes;
    int partly; /* why a folder or a file was left as it is; 0: none was */
    struct {
        uint64_t bytes;
        uint32_t files;
    } buckets[BLOCK_FILE_BUCKETS]; /* as last seen */
};

/* What is asked of the root before and after the sweeps, one after the other. */
enum gc_step {
    GC_STEP_IDLE,
    GC_STEP_READ,  /* the marker: what did the root hold? */
    GC_STEP_CLOCK, /* the server's time */
    GC_STEP_LAST,  /* the marker's bucket: when was the last pass? */
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
    unsigned blind;       /* times in a row that the marker's folder could not be listed */
    uint64_t full_ms;     /* by uv_now: since when */
    uint64_t clock_ms;    /* by uv_now: when the server's time was asked for */
    uint64_t last_ns;     /* the marker's time; 0: there is none */
    struct deadline next; /* pass, or the present step's next try */
    enum gc_step step;
    struct share_task task;
    bool under_way;
    unsigned tries;
    uint8_t marker[GC_MARKER_BYTES];
    struct gc_parts parts; /* outlives passes: it is only more complete for it */
    struct gc_pass pass;
    struct gc_sweep sweep;
    struct gc_demote demote;
};

/* The sweeps: begins the first; at the end of the last, or with the failure of one, gc_pass_ended
 * runs, never from inside. */
int gc_pass_begin(struct gc *gc, uint64_t now_ns, bool for_full);
void gc_pass_stop(struct gc *gc);
void gc_pass_ended(struct gc *gc, int status);

bool gc_is_marker(const char *name);

#endif
