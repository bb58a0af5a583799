/* copy: shared by its files. copy.c has the command and measures by strategy and fragment,
 * copy_report.c has the tables of that and the aims, copy_cases.c the single cases:
 * latency, one load after another, NVMe, two GPUs; copy_encoding.c encoded blocks. All of them play the worker of
 * copy_worker.c. */
#ifndef UCM_BENCH_COPY_H
#define UCM_BENCH_COPY_H

#include "client/bench/baseline.h"
#include "client/bench/bench.h"
#include "client/bench/daemon.h"
#include "client/bench/disk.h"
#include "client/bench/gpu_work.h"
#include "client/bench/stream.h"

#define COPY_TOTAL (256ull << 20) /* of a region, and what its loads come from */
#define COPY_SPREAD 4             /* fragments of one block lie 4 apart from the next's */
#define COPY_GPU_BYTES (1ull << 30)
#define COPY_REQUEST_BYTES (32ull << 20)
#define COPY_SETTLE_MS 400 /* until the driver's utilisation tells of a worker */
#define COPY_WITH_RING "+ring"

/* A figure in one direction, and what the worker kept of its speed meanwhile. */
struct copy_rate {
    double rate, ratio, keeps;
};

/* One strategy with one fragment. */
struct copy_row {
    uint64_t fragment;
    struct copy_rate idle[2], busy[2]; /* load, dump */
    double busy_keeps;                 /* in the worse direction */
    double both, both_ratio;
    double chain_p50, chain_p99; /* ratios to alone */
};

struct copy_bench {
    const struct args *args;
    struct report report;
    struct daemon daemon;
    struct echo echo;
    struct gpu gpu; /* memory of the worker for the baselines */
    struct gpu_work work;
    struct gpu_dma dma;
    const char *strategy; /* as --strategies names it: copy.strategy, or that and "+ring" */
    bool ring;            /* this process has a copy agent */
    uint64_t run;
    double multiplied;           /* a second, by the worker alone */
    double chain_p50, chain_p99; /* us, alone */
    struct copy_row rows[16];    /* of the last strategy */
    /* of the last one without a copy agent; fragment 0: there was none */
    struct copy_row alone[16];
    unsigned n_rows;
    int run_ms;
    char error[320];
};

/* "auto+ring": the strategy auto, and a copy agent; staged is nothing without one. */
void copy_strategy_set(struct copy_bench *b, const char *name);
/* Starts the daemon with b->strategy; `more` is a setting besides, or NULL. The bench functions
 * return 0, or an exit code after a sentence. */
int copy_daemon_start(struct copy_bench *b, const char *const *more);
/* rc: of what was done with it, returned unless 0. */
int copy_daemon_stop(struct copy_bench *b, int rc);
int copy_rig_open(struct copy_bench *b, struct rig *rig, uint64_t fragment, int ordinal);
/* A stream over `part` of 2 halves of the region, or all of it (part 2), in requests of so many
 * bytes. */
struct stream copy_stream(struct copy_bench *b, struct rig *rig, bool load, unsigned part,
                          uint64_t request_bytes);
int copy_stream_run(struct copy_bench *b, struct stream *s, unsigned n, double *rate);

/* A direction: 0 loads, 1 dumps. */
int copy_measure(struct copy_bench *b, struct rig *rig, unsigned d, struct copy_rate *out);
/* Both alongside the matrices. */
int copy_measure_busy(struct copy_bench *b, struct rig *rig, struct copy_row *row);

/* copy_report.c */
void copy_report_head(const struct copy_bench *b);
/* Reports a row of b->strategy. */
void copy_report_row(struct copy_bench *b, const struct copy_row *r);
/* The worst of b->rows and b->alone. */
void copy_report_aims(struct copy_bench *b);

/* copy_encoding.c; names: a list that it cuts up. */
int copy_encodings(struct copy_bench *b, char *names);

/* copy_cases.c */
int copy_one_after_another(struct copy_bench *b);
int copy_latency(struct copy_bench *b);
int copy_two_gpus(struct copy_bench *b);
int copy_from_nvme(struct copy_bench *b, const char *directory);

#endif
