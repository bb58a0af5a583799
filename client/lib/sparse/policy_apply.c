/* What follows from a policy: the summary, score, schedule and choice that the other calls take,
 * and the budget that moves from step to step. */
#include "client/lib/sparse/policy.h"

#include "kernels/sparse/budget.h"

#include <math.h>
#include <string.h>

/* The slowest pairs have the highest numbers. */
static uint32_t keep_pairs(uint32_t pairs, double share, uint8_t keep[64])
{
    uint32_t kept = (uint32_t)lround(pairs * share);

    memset(keep, 0, 64);
    kept = kept > 0 ? kept : 1;
    for (uint32_t i = pairs - kept; i < pairs; i++)
        keep[i / 8] |= (uint8_t)(1u << i % 8);
    return (pairs + 7) / 8;
}

/* MLA's rotated channels get their share of the bits, and at least one. */
static uint32_t rope_bits(const struct ucm_policy *p, const struct ucm_sparse_shape *shape)
{
    uint32_t bits = p->rope_bits;

    if (shape->rope_dim == 0 || shape->head_dim == 0)
        return 0;
    if (bits == 0)
        bits = (uint32_t)((uint64_t)p->bits * shape->rope_dim / shape->head_dim);
    return bits > 0 ? bits : 1;
}

int ucm_policy_summary(const struct ucm_policy *policy, const struct ucm_sparse_shape *shape,
                       uint8_t keep[64], struct ucm_sparse_summary *out)
{
    struct ucm_sparse_summary d;
    int r = ucm_policy_check(policy);

    if (r)
        return r;
    if (!shape || !keep || !out)
        return client_fail(UCM_EINVALID, "shape, keep or out is NULL");
    d = (struct ucm_sparse_summary){.method = policy->summary, .shape = *shape};
    switch (policy->summary) {
    case UCM_SPARSE_MEAN:
        d.kind = policy->kind;
        break;
    case UCM_SPARSE_SUBMEAN:
        d.run = policy->run;
        d.pairs = policy->pairs;
        if (policy->keep < 1 && shape->head_dim <= 1024) {
            d.keep_bytes = keep_pairs(shape->head_dim / 2, policy->keep, keep);
            d.keep = keep;
        }
        break;
    case UCM_SPARSE_HASH:
        d.bits = policy->bits;
        d.rope_bits = rope_bits(policy, shape);
        d.seed = policy->seed;
        break;
    case UCM_SPARSE_TOKENS:
        d.chosen = policy->chosen;
        d.rest = policy->rest;
        break;
    default:
        break;
    }
    r = ucm_sparse_summary_bytes(&d, NULL);
    if (r == 0)
        *out = d;
    return r;
}

int ucm_policy_score(const struct ucm_policy *policy, uint32_t q_heads,
                     struct ucm_sparse_score *out)
{
    int r = ucm_policy_check(policy);

    if (r)
        return r;
    if (!out)
        return client_fail(UCM_EINVALID, "out is NULL");
    *out = (struct ucm_sparse_score){
        .metric = policy->metric,
        .reduce = policy->reduce,
        .heads = policy->heads,
        .rows = policy->rows,
        .q_heads = q_heads,
        .beta = (float)policy->beta,
    };
    return 0;
}

int ucm_policy_schedule(const struct ucm_policy *policy, const char *model, uint32_t layers,
                        struct ucm_sparse_schedule *out)
{
    struct ucm_sparse_schedule s;
    uint32_t first, last;
    int r = ucm_policy_check(policy);

    if (r)
        return r;
    if (!out)
        return client_fail(UCM_EINVALID, "out is NULL");
    r = model ? ucm_sparse_schedule_for_model(model, layers, &s)
              : ucm_sparse_schedule_defaults(layers, &s);
    if (r)
        return r;
    first = policy->dense_first < layers ? policy->dense_first : layers;
    last = policy->dense_last < layers - first ? layers - policy->dense_last : first;
    for (uint32_t l = 0; l < layers; l++)
        s.mode[l] = (uint8_t)(l < first || l >= last             ? UCM_SPARSE_LAYER_DENSE
                              : (l - first) % policy->reuse == 0 ? UCM_SPARSE_LAYER_SELECT
                                                                 : UCM_SPARSE_LAYER_REUSE);
    s.dense_below = policy->dense_below;
    s.retrieval_stride = policy->retrieval_stride;
    s.lag = policy->lag;
    s.rows = policy->rows;
    if (policy->beta > 0)
        s.beta = (float)policy->beta;
    *out = s;
    return 0;
}

static uint32_t larger(uint32_t blocks, uint32_t tokens, uint32_t block_tokens)
{
    uint32_t other = tokens / block_tokens + (tokens % block_tokens > 0);

    return blocks > other ? blocks : other;
}

/* The budget's rule, for a policy with a budget. least: in blocks. 0 or -UCM_EINVALID. */
static int budget_rule(const struct ucm_policy *p, const struct ucm_policy_budget *budget,
                       struct ucm_budget_rule *out)
{
    int r = ucm_policy_check(p);

    if (r)
        return r;
    if (!budget)
        return client_fail(UCM_EINVALID, "budget is NULL");
    if (p->goal == 0)
        return client_fail(UCM_EINVALID, "the policy has no goal, and so no budget");
    *out = (struct ucm_budget_rule){
        .goal = (float)p->goal,
        .grow = (uint32_t)lround(p->grow * UCM_BUDGET_UNIT),
        .shrink = (uint32_t)lround(p->shrink * UCM_BUDGET_UNIT),
        .patience = p->patience,
        .first = p->budget_tokens,
        .least = budget->least,
    };
    return 0;
}

int ucm_policy_budget_begin(const struct ucm_policy *policy, uint32_t block_tokens, uint32_t blocks,
                            struct ucm_policy_budget *budget)
{
    struct ucm_budget_rule rule;
    struct ucm_budget b;
    int r = budget_rule(policy, budget, &rule);

    if (r)
        return r;
    if (block_tokens < 1 || block_tokens > 1024)
        return client_fail(UCM_EINVALID, "block_tokens is %u; 1 to 1024 are allowed", block_tokens);
    rule.least = larger(policy->min_blocks, policy->min_tokens, block_tokens);
    ucm_budget_begin(&b, &rule, block_tokens, blocks);
    *budget = (struct ucm_policy_budget){b.blocks, b.calm, rule.least};
    return 0;
}

int ucm_policy_budget_next(const struct ucm_policy *policy, uint32_t blocks, float share,
                           struct ucm_policy_budget *budget)
{
    struct ucm_budget_rule rule;
    struct ucm_budget b;
    int r = budget_rule(policy, budget, &rule);

    if (r)
        return r;
    b = (struct ucm_budget){budget->blocks, budget->calm};
    ucm_budget_next(&b, &rule, blocks, share);
    budget->blocks = b.blocks;
    budget->calm = b.calm;
    return 0;
}

int ucm_policy_choose(const struct ucm_policy *policy, uint32_t block_tokens, uint32_t blocks,
                      const struct ucm_policy_budget *budget, struct ucm_sparse_choose *out)
{
    struct ucm_sparse_choose c;
    uint64_t tokens;
    int r = ucm_policy_check(policy);

    if (r)
        return r;
    if (!out)
        return client_fail(UCM_EINVALID, "out is NULL");
    if (block_tokens < 1 || block_tokens > 1024 || blocks > UCM_SEQUENCE_BLOCKS_MAX)
        return client_fail(UCM_EINVALID,
                           "block_tokens is %u, 1 to 1024 are allowed; blocks is %u, at most %u",
                           block_tokens, blocks, UCM_SEQUENCE_BLOCKS_MAX);
    if ((budget != NULL) != (policy->goal > 0))
        return client_fail(UCM_EINVALID, policy->goal > 0
                                             ? "the policy has a goal: give the layer's budget"
                                             : "the policy has no goal, and so no budget");
    c = (struct ucm_sparse_choose){
        .policy = policy->choice == UCM_SPARSE_CHOICE_MASS ? UCM_SPARSE_MASS : UCM_SPARSE_TOPK,
        .topk_tokens = policy->topk_tokens,
        .min_blocks = larger(policy->min_blocks, policy->min_tokens, block_tokens),
        .sink_blocks = larger(policy->sink_blocks, policy->sink_tokens, block_tokens),
        .recent_blocks = larger(policy->recent_blocks, policy->recent_tokens, block_tokens),
        .limit = policy->limit,
        .sparse_ratio = policy->sparse_ratio,
        .eps = policy->eps,
        .beta_m = 1, /* scores are logarithms of mass where it counts */
    };
    if (policy->choice >=
        UCM_SPARSE_CHOICE_PSA) { /* it orders all blocks; rounds take the first of them */
        c.sparse_ratio = 1;
        c.topk_tokens = 0;
    }
    if (budget) {
        tokens = (uint64_t)(budget->blocks < blocks ? budget->blocks : blocks) * block_tokens;
        c.sparse_ratio = 0;
        c.topk_tokens = (uint32_t)tokens;
    }
    *out = c;
    return 0;
}
