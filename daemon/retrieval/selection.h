/* A selection: for each row (one layer of one sequence) the blocks' scores, and the best of them
 * for each list. Rows are worked on in groups, so that scratch memory stays small; of a group, all
 * threads share each step.
 *
 * Promise: reads the summaries that the rows name and the memory that the caller gave, writes only
 * the latter, and allocates nothing.
 * Thread: the event loop; between submit and done_cb the pool's. */
#ifndef UCMD_RETRIEVAL_SELECTION_H
#define UCMD_RETRIEVAL_SELECTION_H

#include "daemon/retrieval/pool.h"
#include "kernels/sparse/select.h"

#include <stddef.h>

enum select_dtype { SELECT_F32 = 0, SELECT_F16 = 1, SELECT_BF16 = 2 };

struct select_row {
    const void *const *summaries; /* of its blocks; NULL for one that has none */
    uint64_t offset;              /* of the layer in a block's summaries */
    /* The selection's own. */
    struct ucm_score_job score;
    float *q, *scores;
    void *scratch;
    uint32_t pieces; /* of the rows of the group up to this one */
};

struct select_list {
    uint32_t cap;   /* in: chosen blocks that fit */
    uint32_t first; /* in: where they begin in index and chosen */
    uint32_t n;     /* out: chosen blocks */
};

struct selection {
    struct summary_job job; /* job.done_cb is the caller's */
    const struct ucm_summary_plan *plan;
    struct ucm_score_spec score;
    struct ucm_choose_spec choose;
    enum select_dtype q_dtype;
    const void *q; /* [n_rows][rows][q_heads][head_dim] */
    uint32_t n_rows;
    const uint32_t *blocks; /* of each row */
    struct select_row *rows;
    struct select_list *lists; /* n_rows * selection_lists() */
    uint32_t *index;
    float *chosen; /* scores of index, or NULL */
    /* out: the first element of q that is not finite; UINT64_MAX: all are, and lists are filled
     * in. */
    _Atomic uint64_t bad;
    /* The selection's own. */
    uint32_t first, end; /* the group */
    uint32_t phase, chunk;
    uint32_t long_row, long_list; /* whose choice is under way by `choosing` */
    struct ucm_choose_job choosing;
    /* memory: at least 4 bytes for each block of a row and list */
    uint8_t *memory, *threads_memory, *long_memory;
    size_t thread_bytes;
};

static inline uint32_t selection_lists(const struct selection *s)
{
    return ucm_score_lists(s->plan, &s->score);
}

/* Bytes that it needs to work; plan, specs, n_rows and blocks are filled in. */
size_t selection_bytes(const struct selection *s, unsigned threads);
/* memory: aligned to 64. */
void selection_submit(struct summary_pool *pool, struct summary_queue *queue, struct selection *s,
                      void *memory);

#endif
