/* What a request waits for, as traces record it. Tracing is a feature (daemon/trace): while it is
 * on it sets requests.trace_cb, which gives some calls a struct traced that stays with the request.
 * A request that is not traced has NULL: a step of it costs a comparison. */
#ifndef UCMD_REQUEST_SPANS_H
#define UCMD_REQUEST_SPANS_H

#include <stdint.h>

/* X(NAME, "name") */
#define SPANS(X)                                                                                   \
    X(QUEUE, "queue")                 /* its turn among the frames that came */                    \
    X(LOOKUP, "lookup")               /* finding keys in the index */                              \
    X(SHARED_LOOKUP, "shared lookup") /* asking the roots which keys exist */                      \
    X(READ_TURN, "read turn")         /* a large transfer, while small ones read */                \
    X(SLOT_WAIT, "slot wait")         /* for a slot, or for the device's queue */                  \
    X(NVME_READ, "NVMe read")                                                                      \
    X(SHARED_READ, "shared read")                                                                  \
    X(COPY, "copy")                   /* at the device, with its queue and the worker's event */   \
    X(DURABLE, "durable")             /* a dump, until it is on stable storage */                  \
    X(BACK_PRESSURE, "back-pressure") /* a dump, until write-back has caught up */                 \
    X(ANSWER, "answer")               /* packing and queueing it */

enum span_kind {
#define X(NAME, text) SPAN_##NAME,
    SPANS(X)
#undef X
        SPAN_KINDS
};

/* One more or one less of what may overlap with itself; or, of what does not, whether it is
 * there. */
enum span_change { SPAN_MORE, SPAN_LESS, SPAN_ON, SPAN_OFF };

/* What is kept of a traced request: the first member of its tracer's. */
struct traced {
    void (*span_cb)(struct traced *t, enum span_kind kind, enum span_change change);
    void (*end_cb)(struct traced *t, uint32_t code); /* of the answer; frees it */
    uint64_t bytes;                                  /* the outcome: what moved, */
    uint32_t ok;                                     /* and keys that were found or moved */
};

static inline void trace_span(struct traced *t, enum span_kind kind, enum span_change change)
{
    t->span_cb(t, kind, change);
}

#endif
