#include "daemon/cuda/busy.h"

#define SLOW 1.8 /* both directions at once, ours alone: 1.5 */
#define SLOW_LAUNCHES 2u

bool busy_due(const struct busy *b, uint64_t now_ns)
{
    return now_ns >= b->until_ns;
}

uint64_t busy_quiet_ns(const struct busy *b)
{
    return b->ended_ns + BUSY_QUIET_NS;
}

bool busy_probes_show(const uint64_t *took_ns, unsigned n)
{
    unsigned slow = 0, late = 0;

    for (unsigned i = 0; i < n; i++) {
        if (took_ns[i] >= BUSY_PROBE_TURN_NS)
            return true;
        slow += took_ns[i] > BUSY_PROBE_SLOW_NS;
        late += took_ns[i] > BUSY_PROBE_LATE_NS;
    }
    return slow >= BUSY_PROBES_SLOW || late >= BUSY_PROBES_LATE;
}

void busy_probed(struct busy *b, uint64_t now_ns, bool others, uint64_t waited_ns)
{
    b->slow = 0;
    if (others) {
        b->others = true;
        b->pauses = waited_ns < BUSY_PROBE_TURN_NS;
        b->clear = 0;
        b->until_ns = now_ns + BUSY_KEEP_NS;
    } else if (b->others && ++b->clear < BUSY_CLEAR) {
        b->until_ns = now_ns + BUSY_KEEP_DOUBT_NS;
    } else {
        b->others = b->pauses = false;
        b->clear = 0;
        b->until_ns = now_ns + BUSY_KEEP_IDLE_NS;
    }
}

void busy_unknown(struct busy *b, uint64_t now_ns)
{
    b->until_ns = now_ns + BUSY_KEEP_NS;
}

void busy_launch(struct busy *b, uint64_t now_ns, double took_ns, double due_ns)
{
    b->ended_ns = now_ns;
    if (due_ns <= 0)
        return;
    b->slow = took_ns > SLOW * due_ns ? b->slow + 1 : 0;
    if (b->slow < SLOW_LAUNCHES)
        return;
    b->others = true;
    b->clear = 0;
    b->until_ns = now_ns + BUSY_KEEP_NS;
}
