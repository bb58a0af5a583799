/* Tracing: what chosen requests waited for, or which keys are asked for; for one reader.
 *
 * Off, which is the default, it holds no memory. On, there is one ring of fixed size. A record that
 * does not fit is dropped and counted, and the next one that fits says how many were lost before
 * it. Nothing waits for the reader.
 *
 * A request that may be chosen gets a struct traced, whose spans grow as the request moves on. What
 * overlaps of one kind is one span with a count: 500 reads side by side are one span of 500. At its
 * end it is decided whether the request is chosen, and its record is written.
 * Times are CLOCK_MONOTONIC nanoseconds. Thread: the event loop only. */
#ifndef UCMD_TRACE_TRACE_H
#define UCMD_TRACE_TRACE_H

#include "daemon/request/spans.h"
#include "proto/messages.h"

#include <stddef.h>

#define TRACE_RING_MIN (UINT32_C(1) << 16)
#define TRACE_RING_DEFAULT (UINT32_C(4) << 20)

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

/* A record: in the ring, with what its views name after it; and as the reader gets it, views into
 * what stands after it. */
struct trace_record {
    uint32_t ring_bytes; /* of all of it */
    uint32_t code, ok;   /* enum ucm_wire_error; keys that were found or moved */
    uint32_t n_spans;
    struct trace_about about;
    uint64_t number, lost; /* lost: records between the one before and this */
    uint64_t end_ns, bytes;
    uint64_t block_bytes; /* keys */
    uint32_t block_tokens;
    bool per_key; /* keys: a lookup of keys that are no chain */
    const struct trace_span *spans;
    struct proto_bin keys;
};

/* 0 or -ENOMEM. It must be off. */
int trace_start(struct trace *t, const struct trace_choice *choice);
/* Stops writing; records in the ring stay readable. */
void trace_end_writing(struct trace *t);
/* Off: frees the ring. Harmless when off. */
void trace_stop(struct trace *t);

/* Takes the oldest record, for free(), if it has at most `room` bytes in the ring. 0; *out NULL:
 * there is none. -ENOMEM. */
int trace_take(struct trace *t, size_t room, struct trace_record **out);
/* Bytes of the oldest record, 0: there is none. */
size_t trace_next_bytes(const struct trace *t);

/* ---- keys ---- */

/* Writes a record of keys, of a lookup or a dump, if chosen: its about, keys, block_bytes,
 * block_tokens and each. */
void trace_keys(struct trace *t, struct trace_record *record);

/* ---- spans ---- */

/* NULL: not to be chosen, or no memory. Spans that are open when it ends end then. */
struct traced *trace_begin(struct trace *t, const struct trace_about *about);

#endif
