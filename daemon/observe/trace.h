/* Tracing: what chosen requests waited for, or which keys are asked for; for one reader.
 *
 * Off, which is the default, it holds no memory, and a step of a request costs a comparison with
 * NULL. On, there is one ring of fixed size. A record that does not fit is dropped and counted, and
 * the next one that fits says how many were lost before it. Nothing waits for the reader.
 *
 * A request that may be chosen gets a struct trace_request, whose spans grow as the request moves
 * on: trace_more when something begins, trace_less when it ends. What overlaps of one kind is one
 * span with a count: 500 reads side by side are one span of 500. trace_end decides whether the
 * request is chosen and writes its record.
 * Times are CLOCK_MONOTONIC nanoseconds. Thread: the loop only. */
#ifndef UCMD_OBSERVE_TRACE_H
#define UCMD_OBSERVE_TRACE_H

#include "proto/messages.h"

#include <stddef.h>

#define TRACE_RING_MIN (UINT32_C(1) << 16)
#define TRACE_RING_DEFAULT (UINT32_C(4) << 20)

/* X(NAME, "name") */
#define TRACE_SPANS(X)                                                                             \
    X(QUEUE, "queue")                 /* its turn among the frames that the loop found */          \
    X(LOOKUP, "lookup")               /* finding keys in the index */                              \
    X(SHARED_LOOKUP, "shared lookup") /* asking the roots which keys exist */                      \
    X(READ_TURN, "read turn")         /* a large transfer, while small ones read */                \
    X(SLOT_WAIT, "slot wait")         /* for a slot, or for the device's queue */                  \
    X(NVME_READ, "NVMe read")                                                                      \
    X(SHARED_READ, "shared read")                                                                  \
    X(COPY, "copy")                   /* at the device, with its queue and the worker's event */   \
    X(DURABLE, "durable")             /* a dump, until it is on stable storage */                  \
    X(BACK_PRESSURE, "back-pressure") /* a dump, until write-behind has caught up */               \
    X(ANSWER, "answer")               /* packing and queueing it */

enum trace_kind {
#define X(NAME, text) TRACE_##NAME,
    TRACE_SPANS(X)
#undef X
        TRACE_KINDS
};

/* "NVMe read" for TRACE_NVME_READ. */
const char *trace_kind_name(enum trace_kind kind);

/* A record holds so many spans; further ones extend the last of their kind. */
#define TRACE_MAX_SPANS 40

struct trace_span {
    uint64_t start_ns, end_ns;
    uint32_t n; /* how many of the kind it stands for */
    uint8_t kind;
};

/* Which requests are written: those that meet all that is set. */
struct trace_choice {
    bool keys;          /* instead of spans: the keys that are looked up and dumped */
    uint64_t slower_ns; /* at least so long from arrival to answer */
    uint32_t sample;    /* one in so many; 0 and 1: each */
    uint32_t bytes;     /* of the ring; 0: TRACE_RING_DEFAULT */
    uint8_t request_n;  /* its request id begins with these bytes */
    uint16_t tenant_n;  /* it is of this tenant */
    char request[UCM_MAX_REQUEST_BYTES];
    char tenant[UCM_MAX_NAME_BYTES];
};

/* What is known of a request when it arrives. Views; copied as far as needed. */
struct trace_about {
    uint64_t arrived_ns, began_ns;
    struct proto_str request, tenant;
    enum ucm_method method;
    uint32_t uid, pid, ns, part, n_keys;
};

struct trace {
    uint8_t *ring;             /* NULL: off, and nothing to read */
    uint64_t size, put, taken; /* bytes; put and taken only grow */
    bool writing;              /* false: ended, what is in the ring may still be read */
    uint32_t run;              /* counts trace_start */
    uint32_t seen;             /* candidates, for the sample */
    uint64_t start_ns;
    uint64_t records, lost, lost_now; /* lost_now: since the last record that was written */
    struct trace_choice choice;
};

struct trace_request;

/* A record as the reader gets it. Views into memory that trace_take returns. */
struct trace_record {
    struct trace_about about;
    uint64_t number, lost; /* lost: records between the one before and this */
    uint64_t end_ns, bytes;
    uint32_t code, ok; /* enum ucm_wire_error; keys that were found or moved */
    uint32_t n_spans;
    uint64_t block_bytes; /* keys */
    uint32_t block_tokens;
    bool each; /* keys: a lookup of keys that are no chain */
    const struct trace_span *spans;
    struct proto_bin keys;
};

uint64_t trace_now(void);
/* 0 or -ENOMEM. It must be off. */
int trace_start(struct trace *t, const struct trace_choice *choice);
/* Writes no more; what is in the ring stays readable. */
void trace_end_writing(struct trace *t);
/* Off: frees the ring. Harmless when off. */
void trace_stop(struct trace *t);

static inline bool trace_writing(const struct trace *t)
{
    return t->writing;
}

/* Takes the oldest record, if it has at most `room` bytes in the ring. Returns false when there is
 * none. *memory is for free(); *record points into it. -ENOMEM. */
int trace_take(struct trace *t, size_t room, void **memory, struct trace_record *record,
               bool *taken);
/* Bytes of the oldest record, 0: there is none. */
size_t trace_next_bytes(const struct trace *t);

/* ---- keys ---- */

/* Writes the keys of a lookup or a dump, if chosen. */
void trace_keys(struct trace *t, const struct trace_about *about, struct proto_bin keys,
                uint32_t key_bytes, uint64_t block_bytes, uint32_t block_tokens, bool each);

/* ---- spans ---- */

/* NULL: not to be chosen, or no memory. */
struct trace_request *trace_begin(struct trace *t, const struct trace_about *about);
/* Notes the outcome, for trace_end. */
void trace_outcome(struct trace_request *r, uint32_t ok, uint64_t bytes);
/* Spans that are open end now. Frees r. code: of the answer. */
void trace_end(struct trace *t, struct trace_request *r, uint32_t code);

void trace_span_more(struct trace_request *r, enum trace_kind kind);
void trace_span_less(struct trace_request *r, enum trace_kind kind);
void trace_span_set(struct trace_request *r, enum trace_kind kind, bool on);

/* Requests that are not traced have NULL. */
static inline void trace_more(struct trace_request *r, enum trace_kind kind)
{
    if (r)
        trace_span_more(r, kind);
}

static inline void trace_less(struct trace_request *r, enum trace_kind kind)
{
    if (r)
        trace_span_less(r, kind);
}

/* For what does not overlap with itself: harmless when it is so already. */
static inline void trace_set(struct trace_request *r, enum trace_kind kind, bool on)
{
    if (r)
        trace_span_set(r, kind, on);
}

#endif
