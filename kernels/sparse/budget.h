/* How many blocks a layer of a request attends in the next step, by what the last one was measured
 * to cover. This is plain C that CUDA compiles, too. Integers decide, so a GPU that moves its
 * budgets on between steps and a host that replays them agree.
 *
 * The measured share is that of the layer's least covered KV head. It is the attended weight,
 * divided by the sum of it and the estimated weight of what was left (kernels/attend/stop.h).
 * Merging the attended parts gives these. A step that covers less than the goal gets more blocks at
 * once. After `patience` steps in a row that cover it, the budget falls by a little. So within a
 * few steps it follows a query that attends elsewhere, and it does not fall because one query was
 * easy. */
#ifndef UCM_KERNELS_SPARSE_BUDGET_H
#define UCM_KERNELS_SPARSE_BUDGET_H

#include <stdint.h>

#ifdef __CUDACC__
#define UCM_BUDGET_CALL static __host__ __device__ inline
#else
#define UCM_BUDGET_CALL static inline
#endif

#define UCM_BUDGET_UNIT 1024u        /* grow and shrink are in parts of it */
#define UCM_BUDGET_LENGTH (1u << 17) /* tokens that the rule's `first` is for */

struct ucm_budget_rule {
    float goal;            /* share to cover */
    uint32_t grow, shrink; /* of the budget, in 1/1024 of it, and at least a block */
    uint32_t patience;     /* steps */
    uint32_t first;        /* tokens that a request of 2^17 tokens begins with */
    uint32_t least;        /* blocks */
};

/* The state of one layer of one request; 8 bytes, plain data. */
struct ucm_budget {
    uint32_t blocks;
    uint32_t calm; /* steps in a row that covered the goal, since the last change */
};

UCM_BUDGET_CALL uint32_t ucm_budget_clamp(uint64_t blocks, uint32_t least, uint32_t n)
{
    if (blocks < least)
        blocks = least;
    return blocks < n ? (uint32_t)blocks : n;
}

/* The root of x, rounded down. */
UCM_BUDGET_CALL uint32_t ucm_budget_root(uint64_t x)
{
    uint64_t root = 0;

    for (uint64_t bit = UINT64_C(1) << 31; bit > 0; bit >>= 1)
        if ((root | bit) * (root | bit) <= x)
            root |= bit;
    return (uint32_t)root;
}

/* n: complete blocks of the request. The budget grows with the root of the length: twice as long
 * a context needs more, but not twice as much. */
UCM_BUDGET_CALL void ucm_budget_begin(struct ucm_budget *b, const struct ucm_budget_rule *rule,
                                      uint32_t block_tokens, uint32_t n)
{
    uint64_t tokens = (uint64_t)n * block_tokens, first = rule->first;
    uint64_t begin = ucm_budget_root(first * first / UCM_BUDGET_LENGTH * tokens);

    b->blocks = ucm_budget_clamp((begin + block_tokens - 1) / block_tokens, rule->least, n);
    b->calm = 0;
}

/* After a step in which a budget of b->blocks covered `share`. A NaN counts as nothing covered. */
UCM_BUDGET_CALL void ucm_budget_next(struct ucm_budget *b, const struct ucm_budget_rule *rule,
                                     uint32_t n, float share)
{
    uint64_t blocks = b->blocks, change;

    if (!(share >= rule->goal)) {
        change = blocks * rule->grow / UCM_BUDGET_UNIT;
        blocks += change > 0 ? change : 1;
        b->calm = 0;
    } else if (++b->calm >= rule->patience) {
        change = blocks * rule->shrink / UCM_BUDGET_UNIT;
        change = change > 0 ? change : 1;
        blocks -= change < blocks ? change : blocks;
        b->calm = 0;
    }
    b->blocks = ucm_budget_clamp(blocks, rule->least, n);
}

#endif
