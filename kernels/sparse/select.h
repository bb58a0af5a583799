/* Scores of many blocks, and the choice among them. docs/design/retrieval.md has the definitions.
 * As in sparse.h, nothing here allocates, locks or keeps state. The caller brings memory.
 *
 * A list is an array of scores, one for each block, from which a choice is made. There is one for
 * each KV head, or one for all of them. */
#ifndef UCM_KERNELS_SELECT_H
#define UCM_KERNELS_SELECT_H

#include "kernels/sparse/sparse.h"

#include <stddef.h>

/* Over the rows and query heads of one KV head. */
enum ucm_score_reduce {
    UCM_REDUCE_MAX = 0,
    UCM_REDUCE_MEAN = 1,
    UCM_REDUCE_SOFTMAX = 2, /* the sum of each head's softmax over the blocks */
};

/* Over the KV heads. */
enum ucm_score_heads {
    UCM_HEADS_EACH = 0, /* a list for each KV head */
    UCM_HEADS_SUM = 1,
    UCM_HEADS_MAX = 2,
};

#define UCM_SCORE_ROWS_MAX 64
#define UCM_SCORE_GROUP_MAX 1024 /* query heads of one KV head */
#define UCM_SCORE_BLOCKS_MAX (1u << 20)

struct ucm_score_spec {
    uint32_t metric;  /* enum ucm_score_metric */
    uint32_t reduce;  /* enum ucm_score_reduce */
    uint32_t heads;   /* enum ucm_score_heads */
    uint32_t rows;    /* queries: the last so many tokens */
    uint32_t q_heads; /* a row; a multiple of the KV heads */
    float beta;       /* UCM_REDUCE_SOFTMAX: what scores are scaled by; 0: see ucm_score_beta */
};

/* What scores of such summaries are scaled by before they are weighed. That is `given`, or if that
 * is 0, 1 / sqrt(head_dim). It is 1 for stats and tokens with rest, whose scores are scaled
 * already. */
float ucm_score_beta(const struct ucm_summary_spec *summary, float given);

/* 0; or -EINVAL, and why says which field is wrong. */
int ucm_score_check(const struct ucm_summary_plan *plan, const struct ucm_score_spec *spec,
                    char why[UCM_SPARSE_WHY]);

uint32_t ucm_score_lists(const struct ucm_summary_plan *plan, const struct ucm_score_spec *spec);

/* Where the summaries of one layer lie, each aligned to 4. Block b's is at at[b] + offset, or if
 * `at` is NULL, at base + offset + b * stride. A block whose at[b] is NULL has none and scores
 * +inf. */
struct ucm_score_blocks {
    const void *const *at;
    const void *base;
    uint64_t offset, stride;
    uint32_t n; /* up to UCM_SCORE_BLOCKS_MAX */
};

/* Bytes of scratch memory that scoring n blocks needs; softmax keeps each head's scores there. */
size_t ucm_score_scratch_bytes(const struct ucm_summary_plan *plan,
                               const struct ucm_score_spec *spec, uint32_t n);

/* One layer's scores. Everything that it points to belongs to the caller, and must stay until the
 * job's last step has run. */
struct ucm_score_job {
    const struct ucm_summary_plan *plan;
    struct ucm_score_spec spec; /* beta is filled in */
    struct ucm_score_blocks blocks;
    float *scores; /* [ucm_score_lists][n] */

    const struct ucm_score_ops *ops; /* of this host's instruction set */
    float *queries;                  /* [kv_heads][group], query_floats each */
    float *raw;                      /* softmax: a list for each of them, raw_floats each */
    uint32_t group, query_floats;    /* group: rows x query heads of one KV head */
    size_t raw_floats;
};

/* q: [rows][q_heads][head_dim], read during the call. scratch: aligned to 64. A spec that
 * ucm_score_check accepts. */
void ucm_score_begin(struct ucm_score_job *job, const struct ucm_summary_plan *plan,
                     const struct ucm_score_spec *spec, const struct ucm_score_blocks *blocks,
                     const float *q, void *scratch, float *scores);

/* A job is 1 step, with softmax 3. A step has so many units of work. Ranges [first, end) of them
 * may run in any order, and on any number of threads at once. A step begins when the one before has
 * ended. Scores don't depend on the ranges. */
uint32_t ucm_score_steps(const struct ucm_score_job *job);
uint32_t ucm_score_units(const struct ucm_score_job *job, uint32_t step);
void ucm_score_run(const struct ucm_score_job *job, uint32_t step, uint32_t first, uint32_t end);

/* All steps, on this thread. */
void ucm_score_all(const struct ucm_score_job *job);

/* GSA's scores, which need no summaries: half a point for each use, and .1 to 1 by the position. */
void ucm_score_history(const uint32_t *uses, uint32_t n, float *scores);

enum ucm_choose_policy {
    UCM_CHOOSE_TOPK = 0,
    UCM_CHOOSE_MASS = 1,
};

/* ucm_choose_defaults sets the defaults, which are those of ESA and GSA. */
struct ucm_choose_spec {
    uint32_t policy;        /* enum ucm_choose_policy */
    uint32_t block_tokens;  /* for topk_tokens */
    uint32_t topk_tokens;   /* top k: in place of sparse_ratio, if not 0 */
    uint32_t min_blocks;    /* top k: at least so many */
    uint32_t sink_blocks;   /* first blocks, always in */
    uint32_t recent_blocks; /* last blocks, always in */
    uint32_t limit;         /* at most so many, with windows and poisoned ones; 0: no bound */
    float beta;             /* mass: what scores are scaled by */
    double sparse_ratio;    /* top k: of the blocks */
    double eps;             /* mass: the share to cover */
};

/* What a choice is made from, and where it goes. */
struct ucm_choose_list {
    const float *scores;
    uint32_t n; /* scores */
    uint32_t *index;
    float *chosen; /* may be NULL */
    uint32_t room; /* of index and chosen */
};

void ucm_choose_defaults(struct ucm_choose_spec *spec);
/* 0; or -EINVAL, and why says which field is wrong. With mass, a beta of 0 is wrong, too. */
int ucm_choose_check(const struct ucm_choose_spec *spec, char why[UCM_SPARSE_WHY]);
/* For scores of such summaries: fills in block_tokens, and beta by ucm_score_beta. Then it
 * checks. */
int ucm_choose_for(const struct ucm_summary_spec *summary, struct ucm_choose_spec *spec,
                   char why[UCM_SPARSE_WHY]);

/* Blocks of a list of n that may be chosen, however many are poisoned: n, or the limit. */
uint32_t ucm_choose_limit(const struct ucm_choose_spec *spec, uint32_t n);
/* How many blocks the answer for a list of n has at most, without poisoned ones; within the
 * limit. */
uint32_t ucm_choose_room(const struct ucm_choose_spec *spec, uint32_t n);
size_t ucm_choose_scratch_bytes(const struct ucm_choose_spec *spec, uint32_t n);

/* The same choice from a long list, shared by threads. */
struct ucm_choose_job {
    const struct ucm_choose_spec *spec;
    struct ucm_choose_list list;

    const struct ucm_score_ops *ops;
    struct choose_sums *sums;
    struct ucm_choose_chunk *chunks;
    uint32_t *keys, *weights;   /* by block */
    uint32_t begin, end, units; /* between the windows; in chunks */
    uint32_t step, prefix, cut; /* of keys */
    uint32_t need_count, put;   /* put: where the last window goes */
    uint64_t need_mass;
    float top;
};

size_t ucm_choose_job_bytes(const struct ucm_choose_spec *spec, uint32_t n, uint32_t chunk);
/* Returns the units of each step, one for `chunk` blocks. They may run in any order and on any
 * number of threads at once. Then ucm_choose_next begins the next step. It returns false after the
 * last step, and *n is how many were chosen. The job and scratch, which is aligned to 64, must stay
 * until then. */
uint32_t ucm_choose_begin(struct ucm_choose_job *job, const struct ucm_choose_spec *spec,
                          const struct ucm_choose_list *list, uint32_t chunk, void *scratch);
void ucm_choose_run(struct ucm_choose_job *job, uint32_t unit);
bool ucm_choose_next(struct ucm_choose_job *job, uint32_t *n);

/* Writes the chosen blocks, ascending, into index[room], and their scores into chosen (unless
 * NULL). Returns how many. Poisoned blocks (+inf) are chosen before all others, up to room and the
 * limit. */
uint32_t ucm_choose(const struct ucm_choose_spec *spec, const float *scores, uint32_t n,
                    void *scratch, uint32_t *index, float *chosen, uint32_t room);

#endif
