/* Scores of many blocks, and the choice among them. docs/retrieval.md, "Selection", has the
 * definitions. As in sparse.h nothing here allocates, locks or keeps state: the caller brings memory.
 *
 * A list is one array of scores, one a block, that a choice is made from: one a KV head, or one for
 * all of them. */
#ifndef UCM_KERNELS_SELECT_H
#define UCM_KERNELS_SELECT_H

#include "kernels/sparse/sparse.h"

#include <stddef.h>

enum ucm_score_reduce { /* over the rows and query heads of one KV head */
                        UCM_REDUCE_MAX = 0,
                        UCM_REDUCE_MEAN = 1,
                        UCM_REDUCE_SOFTMAX = 2, /* the sum of each head's softmax over the blocks */
};

enum ucm_score_heads {                     /* over the KV heads */
                       UCM_HEADS_EACH = 0, /* a list for each KV head */
                       UCM_HEADS_SUM = 1,
                       UCM_HEADS_MAX = 2,
};

#define UCM_SCORE_ROWS_MAX 64
#define UCM_SCORE_BLOCKS_MAX (1u << 20)

struct ucm_score_spec {
    uint32_t metric;  /* enum ucm_score_metric */
    uint32_t reduce;  /* enum ucm_score_reduce */
    uint32_t heads;   /* enum ucm_score_heads */
    uint32_t rows;    /* queries: the last so many tokens */
    uint32_t q_heads; /* a row; a multiple of the KV heads */
    float beta; /* UCM_REDUCE_SOFTMAX: what scores are scaled by; 0: 1 / sqrt(head_dim), stats 1 */
};

/* 0; or -EINVAL, and why says which field is wrong. */
int ucm_score_check(const struct ucm_digest_plan *plan, const struct ucm_score_spec *spec,
                    char why[UCM_SPARSE_WHY]);

uint32_t ucm_score_lists(const struct ucm_digest_plan *plan, const struct ucm_score_spec *spec);

/* Bytes of scratch memory that ucm_score needs for n blocks. */
size_t ucm_score_scratch_bytes(const struct ucm_digest_plan *plan,
                               const struct ucm_score_spec *spec, uint32_t n);

/* Digest b lies at digests[b] + offset (offset: the layer's in the digest's slot); digests[b] NULL:
 * the block has none and scores +inf. q: [rows][q_heads][head_dim]. scratch aligned to 64.
 * scores: [ucm_score_lists][n]. */
void ucm_score(const struct ucm_digest_plan *plan, const struct ucm_score_spec *spec,
               const float *q, const void *const *digests, size_t offset, uint32_t n, void *scratch,
               float *scores);

/* The same in steps, so that threads can share them: prepare once; then ranges [first, end) of
 * blocks, in any order and at the same time; then finish once. */
void ucm_score_prepare(const struct ucm_digest_plan *plan, const struct ucm_score_spec *spec,
                       const float *q, uint32_t n, void *scratch);
void ucm_score_range(const struct ucm_digest_plan *plan, const struct ucm_score_spec *spec,
                     const void *const *digests, size_t offset, uint32_t n, uint32_t first,
                     uint32_t end, void *scratch, float *scores);
void ucm_score_finish(const struct ucm_digest_plan *plan, const struct ucm_score_spec *spec,
                      uint32_t n, void *scratch, float *scores);

/* GSA's scores without digests: half the share of uses, plus a ramp over the positions. */
void ucm_score_history(const uint32_t *uses, uint32_t n, float *scores);

enum ucm_choose_policy {
    UCM_CHOOSE_TOPK = 0,
    UCM_CHOOSE_MASS = 1,
};

/* Defaults: ucm_choose_defaults. The seeds' names. */
struct ucm_choose_spec {
    uint32_t policy;          /* enum ucm_choose_policy */
    uint32_t block_tokens;    /* for topk_tokens */
    uint32_t topk_tokens;     /* top k: in place of sparse_ratio, if not 0 */
    uint32_t min_blocks;      /* top k: at least so many */
    uint32_t init_window_sz;  /* first blocks, always in */
    uint32_t local_window_sz; /* last blocks, always in */
    uint32_t k_max;           /* mass: at most so many; 0: no bound */
    float beta;               /* mass: what scores are scaled by; stats: 1 */
    double sparse_ratio;      /* top k: of the blocks */
    double eps;               /* mass: the share to cover */
};

void ucm_choose_defaults(struct ucm_choose_spec *spec);
int ucm_choose_check(const struct ucm_choose_spec *spec, char why[UCM_SPARSE_WHY]);

/* Room that the answer for a list of n blocks needs, poisoned blocks aside. */
uint32_t ucm_choose_room(const struct ucm_choose_spec *spec, uint32_t n);
size_t ucm_choose_scratch_bytes(const struct ucm_choose_spec *spec, uint32_t n);

/* Writes the chosen blocks, ascending, into index[room], and their scores into chosen (unless NULL).
 * Returns how many. Poisoned blocks (+inf) are in before all others, up to room. */
uint32_t ucm_choose(const struct ucm_choose_spec *spec, const float *scores, uint32_t n,
                    void *scratch, uint32_t *index, float *chosen, uint32_t room);

#endif
