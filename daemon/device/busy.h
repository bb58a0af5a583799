/* Do other processes' kernels run on a GPU now? What is believed, and for how long.
 *
 * Two witnesses. A probe: empty kernels one after another, which an idle GPU runs in microseconds
 * and a shared one only when the others' have had their turn; it tells something only when nothing
 * of ours is under way, and when our own kernels have left the others time to begin. It may fall
 * into a moment's pause of the others: that they are gone is believed only after several. And our
 * own copy kernels: two in a row that took much longer than is due were beside others' (one may be
 * the host's doing). One in time shows nothing: short kernels wait for ours without holding them
 * up. The driver's utilisation is no witness: it is up to a second old and counts our own kernels.
 * Pure computation. Any thread. */
#ifndef UCMD_DEVICE_BUSY_H
#define UCMD_DEVICE_BUSY_H

#include <stdbool.h>
#include <stdint.h>

#define BUSY_KEEP_NS 200000000ull      /* how long others, once seen, are believed in */
#define BUSY_KEEP_IDLE_NS 50000000ull  /* and how long it is believed that there are none, */
#define BUSY_KEEP_DOUBT_NS 10000000ull /* or that others have gone, until that is certain */
#define BUSY_CLEAR 4u                  /* probes in a row that must find nobody for that */
#define BUSY_QUIET_NS 100000ull        /* from our last kernel's end to a probe */
#define BUSY_PROBES 16u                /* kernels of a probe: 8 us each on an idle GPU, seldom 25 */
#define BUSY_PROBE_SLOW_NS 60000ull
#define BUSY_PROBES_SLOW 2u /* so many show others; one may be the host's doing */
/* One that comes between a chain's short kernels waits for no more than one of them. */
#define BUSY_PROBE_LATE_NS 25000ull
#define BUSY_PROBES_LATE 4u
/* One that is not done by then waits for a whole turn of others who always have a kernel ready,
 * which is 2 ms, and shows them by itself. Among kernels of 50 us, each waited for by its host, one
 * takes 0.2 to 0.35 ms; and so may the first after a companion's, whose context the GPU has to
 * leave. */
#define BUSY_PROBE_TURN_NS 700000ull

struct busy {
    bool others;
    bool pauses;       /* the others leave some: their host waits for their kernels */
    unsigned slow;     /* launches of ours in a row */
    unsigned clear;    /* probes in a row that found nobody, since others were seen */
    uint64_t until_ns; /* others is believed until then */
    uint64_t ended_ns; /* our last kernel */
};

/* Is a probe due? */
bool busy_due(const struct busy *b, uint64_t now_ns);
/* From when on may one be sent, once nothing of ours is under way? */
uint64_t busy_quiet_ns(const struct busy *b);
/* Do n kernels of a probe, which took so long, show others? */
bool busy_probes_show(const uint64_t *took_ns, unsigned n);
/* No probe could be made: what was believed is believed on. */
void busy_unknown(struct busy *b, uint64_t now_ns);
/* waited_ns: the longest of the probe's kernels. */
void busy_probed(struct busy *b, uint64_t now_ns, bool others, uint64_t waited_ns);
/* A copy kernel of ours ended, which took so long while so long was due; 0: it was too short to
 * tell. */
void busy_launch(struct busy *b, uint64_t now_ns, double took_ns, double due_ns);

#endif
