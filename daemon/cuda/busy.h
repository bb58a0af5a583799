/* Do other processes' kernels run on a GPU now? What the planner believes, and for how long.
 *
 * Two sources:
 * - A probe: empty kernels one after another. An idle GPU runs each in microseconds, a shared GPU
 *   only after the others' turn. A probe says something only while nothing of ours is under way,
 *   and BUSY_QUIET_NS after our last kernel. It may fall into a moment's pause of the others, so
 *   several clear probes in a row are needed before they count as gone.
 * - Our own copy kernels: two in a row that took much longer than due ran alongside others' (one
 *   may be the host's fault). A kernel in time shows nothing.
 * The driver's utilisation is no source: it is up to a second old and counts our own kernels.
 * Pure computation. Any thread. */
#ifndef UCMD_CUDA_BUSY_H
#define UCMD_CUDA_BUSY_H

#include <stdbool.h>
#include <stdint.h>

#define BUSY_KEEP_NS 200000000ull      /* how long the answer "others run" is valid, */
#define BUSY_KEEP_IDLE_NS 50000000ull  /* the answer "nobody", */
#define BUSY_KEEP_DOUBT_NS 10000000ull /* and "others" after a clear probe */
#define BUSY_CLEAR 4u                  /* clear probes in a row until others count as gone */
#define BUSY_QUIET_NS 100000ull        /* from our last kernel's end to a probe */
#define BUSY_PROBES 16u                /* kernels of a probe: 8 us each on an idle GPU, seldom 25 */
/* So many kernels that took so long show others. */
#define BUSY_PROBES_SLOW 2u
#define BUSY_PROBE_SLOW_NS 60000ull
#define BUSY_PROBES_LATE 4u
#define BUSY_PROBE_LATE_NS 25000ull
/* A kernel that waits longer waits for a whole time slice, 2 ms, of processes that always have a
 * kernel ready; its own wait reveals them. Among kernels of 50 us, each awaited by its host, one
 * takes 0.2 to 0.35 ms; so may the first after a copy agent's, as the GPU has to change
 * contexts. */
#define BUSY_PROBE_TURN_NS 700000ull

struct busy {
    bool others;
    bool pauses;       /* the others leave pauses: their host waits for their kernels */
    unsigned slow;     /* launches of ours in a row */
    unsigned clear;    /* clear probes in a row since others were seen */
    uint64_t until_ns; /* `others` is valid until then */
    uint64_t ended_ns; /* our last kernel */
};

bool busy_due(const struct busy *b, uint64_t now_ns); /* is a probe due? */
/* The earliest time of a probe, once nothing of ours is under way. */
uint64_t busy_quiet_ns(const struct busy *b);
/* Do n kernels of a probe, which took so long, show others? */
bool busy_probes_show(const uint64_t *took_ns, unsigned n);
/* No probe could be made: extends what is believed. */
void busy_unknown(struct busy *b, uint64_t now_ns);
/* waited_ns: the longest of the probe's kernels. */
void busy_probed(struct busy *b, uint64_t now_ns, bool others, uint64_t waited_ns);
/* A copy kernel of ours ended. It took took_ns where due_ns were due; 0: too short to be
 * measured. */
void busy_launch(struct busy *b, uint64_t now_ns, double took_ns, double due_ns);

#endif
