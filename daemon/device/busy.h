/* Do other processes' kernels run on a GPU now? What is believed, and for how long.
 *
 * Two witnesses. A probe: empty kernels one after another, which an idle GPU runs in microseconds
 * and a shared one only when the others' have had their turn; it tells something only when nothing
 * of ours is under way, and when our own kernels have left the others time to begin. And our own
 * copy kernels: two in a row that took much longer than is due were beside others' (one may be the
 * host's doing). One in time shows nothing: short kernels wait for ours without holding them up.
 * The driver's utilisation is no witness: it is up to a second old and counts our own kernels. Pure
 * computation. Any thread. */
#ifndef UCMD_DEVICE_BUSY_H
#define UCMD_DEVICE_BUSY_H

#include <stdbool.h>
#include <stdint.h>

#define BUSY_KEEP_NS 200000000ull     /* how long others, once seen, are believed in */
#define BUSY_KEEP_IDLE_NS 50000000ull /* and how long it is believed that there are none */
#define BUSY_QUIET_NS 100000ull       /* from our last kernel's end to a probe */
#define BUSY_PROBES 8u                /* kernels of a probe */
#define BUSY_PROBE_SLOW_NS                                                                         \
    60000ull                        /* 8 us on an idle GPU, seldom 40; beside others 190 and more  \
                                     */
#define BUSY_PROBES_SLOW 2u         /* so many show others; one may be the host's doing */
#define BUSY_PROBE_END_NS 150000ull /* one that is not done by then shows others by itself */

struct busy {
    bool others;
    unsigned slow;     /* launches of ours in a row */
    uint64_t until_ns; /* others is believed until then */
    uint64_t ended_ns; /* our last kernel */
};

/* Is a probe due? */
bool busy_due(const struct busy *b, uint64_t now_ns);
/* From when on may one be sent, once nothing of ours is under way? */
uint64_t busy_quiet_ns(const struct busy *b);
void busy_probed(struct busy *b, uint64_t now_ns, bool others);
/* A copy kernel of ours ended, which took so long while so long was due; 0: it was too short to
 * tell. */
void busy_launch(struct busy *b, uint64_t now_ns, double took_ns, double due_ns);

#endif
