/* select: shared by its files. select.c has the command, the cases and the report;
 * a device of the table there measures a case: select_cpu.c on this host's CPU,
 * select_gpu.c on its first GPU. */
#ifndef UCM_BENCH_SELECT_H
#define UCM_BENCH_SELECT_H

#include "client/bench/figure.h"
#include "kernels/sparse/select.h"

#define SELECT_WHY 200

/* One layer's selection is measured, over `layers` of them in turn, as a decoding step goes through
 * them: so that digests come from memory and not from a cache. */
struct select_case {
    const char *name; /* of the method, with its parameters */
    struct ucm_digest_plan plan;
    struct ucm_score_spec score;
    struct ucm_choose_spec choose;
    uint32_t blocks, layers;
    unsigned threads, rounds;
};

/* A layer, in milliseconds. */
struct select_result {
    struct samples select; /* queries to chosen blocks */
    struct samples score;  /* of it, to the scores; none where they are not apart */
    struct samples read;   /* reading as many bytes as the digests have */
};

struct select_device {
    const char *name;
    const char *read_name; /* the baseline's */
    double most_ms;        /* the aim for select at 8,192 blocks of 8 KV heads x 128 */
    double least_of_read;  /* the same, of the baseline's speed; 0: none */
    bool threads;          /* whether cases differ by threads */
    /* 0, or -errno and a sentence. Results are empty before. */
    int (*measure)(const struct select_case *c, struct select_result *out, char why[SELECT_WHY]);
};

int select_measure_cpu(const struct select_case *c, struct select_result *out,
                       char why[SELECT_WHY]);
int select_measure_gpu(const struct select_case *c, struct select_result *out,
                       char why[SELECT_WHY]);

/* Random queries [rows][q_heads][head_dim], and digests with ordinary scales. */
void select_fill_queries(const struct select_case *c, float *q);
void select_fill_digest(const struct ucm_digest_plan *plan, uint64_t seed, uint8_t *digest);

#endif
