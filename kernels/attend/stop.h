/* Attention in rounds that ends when enough is covered: PSA's rule, an estimate, a certificate.
 *
 * The blocks of a list are attended in the order of their scores, `every` at a time. After each
 * round the *share* is the attended weight, divided by the sum of it and of what is left. Left are
 * the list's remaining blocks, and those *beyond* it: the sequence's blocks that are in no list.
 * The rules assume different weights for these:
 * - psa: each as much as the lightest block of the list so far. It trusts the order: one light
 *   block that came early ends the list, whatever is left. The window does not count, since it was
 *   not chosen.
 * - estimated: what the block's score of `stats` or of `tokens` with rest says.
 * - certified: tokens * e^(scale * the block's `box` score), which is the most it can weigh.
 * A list ends when the least share of its query heads has reached eps. Blocks are read for all its
 * query heads, so none can stop alone. The lists of other KV heads go on or end by themselves. One
 * list for all KV heads ends when all of them may.
 *
 * The *certificate* is reported whenever bounds are given, whatever the rule. It is never above the
 * true share. Keys are exact, the box is rounded outward, and weights of what is left are rounded
 * up. The attended sum's own error (ucm_attend_slack) is subtracted. NaN never favours stopping. An
 * estimate or a bound that is NaN or +inf says nothing, so the share is 0 while that block is left.
 * It is also 0 if the attended sum is NaN. If nothing is left and nothing lies beyond, it is 1. */
#ifndef UCM_KERNELS_ATTEND_STOP_H
#define UCM_KERNELS_ATTEND_STOP_H

#include "kernels/attend/arith.h"
#include "kernels/attend/attend.h"

/* ---- what is left: struct ucm_left of arith.h ---- */

/* What is left while these n blocks are left, from the logarithms of their weights. -inf weighs
 * nothing; +inf and NaN are unknown. At most 2^20 blocks. */
struct ucm_left ucm_left_of(const float *log_weight, uint32_t n);
/* Takes away one of them. */
void ucm_left_take(struct ucm_left *left, float log_weight);

/* The logarithm of what a block of that many tokens weighs at most, from a `box` score, rounded
 * up. */
float ucm_left_bound(const struct ucm_attend_plan *plan, float box_score, uint32_t tokens);

/* sum * e^top, divided by the sum of itself and n lefts, rounded down. slack: top + ln(sum) may be
 * too large by this much. */
float ucm_left_share(float top, float sum, float slack, const struct ucm_left *left, uint32_t n);

/* ---- rounds ---- */

enum ucm_stop_rule {
    UCM_STOP_NEVER = 0, /* the whole list */
    UCM_STOP_PSA = 1,
    UCM_STOP_ESTIMATED = 2,
    UCM_STOP_CERTIFIED = 3,
};

struct ucm_stop_spec {
    uint32_t rule;  /* enum ucm_stop_rule */
    uint32_t every; /* blocks of a round */
    float eps;      /* 0 to 1 */
};

/* One list, for `heads` KV heads from `first` on: their rows are [heads][group]. */
struct ucm_stop_list {
    uint32_t first, heads;
    const float *query; /* [heads][query_floats] of ucm_attend_query */
    struct ucm_attend_memory memory;
    const int32_t *blocks; /* in the order of attention, all of them whole */
    uint32_t n;
    uint32_t beyond; /* how many of the sequence's blocks are neither here nor in the window */
    const float *estimate; /* [rows][pitch]: logarithms of weights; needed by `estimated` */
    const float
        *bound; /* [rows][pitch]: of ucm_left_bound; needed by `certified`; NULL: no certificate */
    uint32_t pitch;
    const struct ucm_left *estimate_beyond, *bound_beyond; /* [rows]; needed if beyond > 0 */
};

struct ucm_stop_report {
    uint32_t blocks, rounds; /* attended */
    float
        share; /* the least of the rows, as the rule has it; `never`: 0, or 1 if nothing is left */
    float certificate; /* the least of the rows; 0: nothing is certain */
};

/* What a row remembers from round to round. */
struct ucm_stop_row {
    float lightest, abs_sum;
    struct ucm_left estimate, bound;
};

/* Attends the list's blocks until the rule stops it, and adds them to the states [heads]. These
 * have begun, and may hold the window already. For a certificate they must have been measured from
 * the begin. rows: scratch, [heads][group]. -EINVAL: what the rule needs is not there; -ENOENT: as
 * ucm_attend_add. The result is that of the attended blocks, bit for bit. */
int ucm_attend_rounds(const struct ucm_attend_plan *plan, const struct ucm_stop_spec *stop,
                      const struct ucm_stop_list *list, struct ucm_attend_state *states,
                      struct ucm_stop_row *rows, struct ucm_stop_report *report);

#endif
