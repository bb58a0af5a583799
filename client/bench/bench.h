/* ucm-bench: what ucmd does on this machine, next to what the machine can do.
 *
 * - commands.c: the table of commands; <command>.c: each of them
 * - rig.h: the worker that they play
 * - pattern.h: its bytes
 * - workload.h: its requests
 * - baseline.h: the machine's own figures
 * - figure.h: the report
 *
 * A round measures baseline and daemon in turn; figures are medians over the rounds. */
#ifndef UCM_BENCH_BENCH_H
#define UCM_BENCH_BENCH_H

#include "client/bench/figure.h"
#include "client/bench/rig.h"
#include "client/ctl/program.h"

#define BENCH_FAILED PROGRAM_EXIT_FAILED
#define BENCH_NO_DAEMON 3
#define BENCH_DIFFERING 4

/* Sizes on a command line, kept well under what sums could pass. */
#define BENCH_MAX_BYTES (UINT64_C(1) << 40)

/* Options that every command which moves blocks has. */
#define BENCH_COPY_OPTIONS                                                                          \
    {"block-bytes", ARG_SIZE, "SIZE", "bytes of a block", "1MiB", 64, 1u << 30},                    \
        {"fragment", ARG_SIZE, "SIZE", "bytes of a block that lie together", "64KiB", 8, 1u << 28}, \
        {"total", ARG_SIZE, "SIZE", "bytes a round moves", "256MiB", 4096, BENCH_MAX_BYTES},        \
        {"batch", ARG_NUMBER, "N", "blocks of one request", "32", 1, 16384},                        \
        {"in-flight", ARG_NUMBER, "N", "requests under way at once", "4", 1, 64},                   \
    {                                                                                               \
        "rounds", ARG_NUMBER, "N", "rounds", "7", 1, 1000                                           \
    }

/* A rig's failure: its sentence, and the exit code for its status. */
int bench_rig_fail(const struct rig *rig, int status);

/* Fills in what every command's options say of the connection, and the sizes when the command has
 * BENCH_COPY_OPTIONS. */
void bench_rig_options(const struct args *a, struct rig_options *out);

/* Different keys for each (run, round, index): 32 bytes each. run: random for each start. */
uint64_t bench_run_id(void);
void bench_keys(uint64_t run, uint32_t round, uint32_t n, uint8_t *keys);

extern const struct program bench_program;

int bench_replay(const struct args *a);
int bench_record(const struct args *a);
int bench_serve(const struct args *a);
int bench_lookup(const struct args *a);
int bench_load(const struct args *a);
int bench_dump(const struct args *a);
int bench_tier(const struct args *a);
int bench_copy(const struct args *a);

#endif
