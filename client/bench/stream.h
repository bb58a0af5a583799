/* A worker's stream of loads or dumps, without a gap: as soon as one request is done the next is
 * sent. Blocks of the region are taken in random order; a dump's keys are new ones each time, and
 * dropped again as soon as they are stored. With one request in flight only the time from its begin
 * to its end counts. Rigs whose namespaces are of one model share what was stored (`run` tells runs
 * apart).
 *
 * Threads: streams of one call run on a thread each; a rig may have several of them. */
#ifndef UCM_BENCH_STREAM_H
#define UCM_BENCH_STREAM_H

#include "client/bench/rig.h"

#include <pthread.h>
#include <stdbool.h>

#define STREAM_IN_FLIGHT 8

struct stream {
    struct rig *rig;
    bool load;
    uint64_t run;           /* names the keys */
    uint32_t first, blocks; /* of the region: what it moves */
    uint32_t batch;         /* blocks of one request */
    uint32_t in_flight;     /* at most STREAM_IN_FLIGHT, and batch * in_flight <= blocks */
    int warm_ms, run_ms;
    /* Out. */
    uint64_t bytes, requests, begin_ns, end_ns; /* of what ended in run_ms */
    int status;                                 /* 0, or negative enum ucm_status */
    char error[320];
    /* Its own. */
    pthread_t thread;
    uint32_t *order; /* of its blocks */
    uint8_t *keys;   /* in_flight batches of a dump's; a load's: of all blocks */
    uint32_t next, dumped;
    uint64_t waited_ns; /* with one in flight: of those that count */
    struct stream_slot {
        struct ucm_task *task;
        uint64_t sent_ns;
        const uint8_t *keys;
    } slots[STREAM_IN_FLIGHT];
};

/* Dumps what a load stream of the same run, first and blocks will load. 0 or -1 with s->error. */
int stream_store(struct stream *s);
/* Runs them side by side. 0, or -1 with the error of one in `error`. */
int streams_run(struct stream *s, unsigned n, char error[320]);
/* Bytes a second of streams that ran side by side. */
double streams_rate(const struct stream *s, unsigned n);

#endif
