/* Do other processes' kernels run on a GPU now? What is believed, and for how long.
 *
 * Three witnesses. Our own copy kernels: beside others' they take much longer than is due; one slow
 * launch may be the host's doing, two in a row are not. The driver's utilisation: up to a second
 * old, and it counts our own kernels; its "idle" is believed, its "busy" is not. Then a probe
 * decides: empty kernels, which an idle GPU runs in microseconds and a shared one only in its turn.
 * It costs the others a turn of microseconds, five times a second while copies could use the SMs.
 * Pure computation. Any thread. */
#ifndef UCMD_DEVICE_BUSY_H
#define UCMD_DEVICE_BUSY_H

#include <stdbool.h>
#include <stdint.h>

#define BUSY_KEEP_NS 200000000ull /* how long a judgement holds */
#define BUSY_PROBES 4u            /* kernels of a probe, one after another */
#define BUSY_PROBE_NS 30000ull    /* and how long each may take on an idle GPU */

struct busy {
    bool others;
    unsigned slow;     /* launches of ours in a row */
    uint64_t until_ns; /* others is believed until then */
};

/* Is a new judgement due? */
bool busy_due(const struct busy *b, uint64_t now_ns);
/* The judgement: the driver told of kernels, and if so, the probe did not run as on an idle GPU. */
void busy_judge(struct busy *b, uint64_t now_ns, bool others);
/* A copy kernel of ours took so long, while so long was due. */
void busy_launch(struct busy *b, uint64_t now_ns, double took_ns, double due_ns);

#endif
