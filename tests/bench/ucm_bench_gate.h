/* gate: a dozen ratios, each of what ucmd takes to what the machine takes for the like of it, in turn
 * within one run. ucm_bench_gate.c decides; ucm_bench_gate_cases.c measures. */
#ifndef UCM_TESTS_BENCH_GATE_H
#define UCM_TESTS_BENCH_GATE_H

#include "tests/bench/ucm_bench.h"
#include "tests/bench/ucm_bench_baseline.h"
#include "tests/bench/ucm_bench_daemon.h"

struct gate_rig {
    struct rig rig;
    struct copy copy;
    uint8_t *keys, *fresh;
    uint32_t n; /* blocks */
    bool open;
};

/* What the cases share. */
struct gate_bench {
    const struct args *args;
    char folder[200], memory_folder[220], nvme_folder[220];
    struct daemon memory, disk; /* without and with an NVMe tier */
    struct gate_rig large, small, dumps_large, dumps_small, on_disk;
    struct echo echo_one, echo_many;
    struct reader reader;
    bool reading;
    uint64_t run;
    uint32_t round;
    uint32_t *tokens;
    uint8_t *hashed;
};

/* Each runs once and gives the seconds that it took. 0, or an exit status with a sentence on standard
 * error. */
struct gate_case {
    const char *name, *against;
    int (*own_cb)(struct gate_bench *b, double *seconds);
    int (*base_cb)(struct gate_bench *b, double *seconds);
};

#define GATE_CASES 12
extern const struct gate_case gate_cases[GATE_CASES];

/* Starts the daemons and stores what is loaded. 0 or an exit status; close it in either case. */
int gate_open(struct gate_bench *b, const struct args *a);
void gate_close(struct gate_bench *b);

#endif
